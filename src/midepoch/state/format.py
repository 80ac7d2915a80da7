"""The format of a state: a versioned, JSON-able dict with the identity of its pipeline and its cursor.

After three batches of 64 rows of a shuffled dataset it is::

    {"midepoch": 1, "epoch": 0, "position": 192, "steps": 3, "first": 0, "unit": "rows", "cursor": [[0, 192]],
     "data": "…", "rows": 100000, "selection": "0:100000", "scope": "rows", "seed": 42, …, "more": []}

- ``cursor``: a list for each lane: its number, the units it has taken, where it is in its stages, later units that are
  excluded, and that were delivered ahead (``Intervals.encode``), 1 if it has ended, and spared rows. Empty ends of the
  list are omitted.
- ``unit``: "rows" or, if positions cannot be computed, "outputs".
- ``position``: the sum of what is taken.
- ``steps``: global batches since the run began; ``first``: those before this epoch.
- ``parts``: the description of each of several sources, as a list of [name, value] pairs.
- ``more``: fields that few states have, as [name, value] pairs:

  - ``budget``: that of batches by tokens; then units are such batches
  - ``changes``: fields allowed to differ, and changes of a mix, since the run began
  - ``excluded``: for each source its rows before the shuffle that are not delivered
  - ``groups``, ``epoch_outputs``, ``global_seed``
  - ``leased``: what one of several ranks has acknowledged (``midepoch.state.saved``)
  - ``branches``: those of the run in which it was saved, as the ledger names them, with commas

- ``worker``, ``workers``, ``shards``, ``round``, ``batch``, ``shard``: of a state that fits one process only.

The keys are the same before and after the first batch, and values are numbers, texts or lists. Frameworks that save and
load a state key by key (torch's distributed checkpoints) thus load all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from midepoch._internal.values import LARGEST
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Order, Selection, Shard, Shuffle, Weighted
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor, WindowAt, flow_cursor, is_count, listed

VERSION = 1
KEY = "midepoch"

CAUSES = {
    "data": "the contents of the files have changed since it was saved (moved or renamed files would be accepted), "
    "or it is the state of another loader; of from_map_style: the length, the class, the indices of a Subset or "
    "fingerprint=",
    "rows": "the split, slice, take, skip, select or num_samples has changed since it was saved",
    "selection": "the split, slice, take, skip or select has changed since it was saved",
    "scope": "shuffle() or weighted() was added, removed or given another scope",
    "aligned": "the files are mapped now and were fetched when it was saved, or vice versa",
    "weights": "weighted() or balanced() was given other weights",
    "seed": "shuffle() or weighted() was given another seed",
    "window": "shuffle() was given another window",
    "pipeline": "a map or another step was added, removed, moved, or given other parameters that move rows",
    "arguments": "a filter was given another expression, or a function other fn_kwargs",
}


OF_ONE_RANK = ("global_seed", "arguments")
"""Fields in which ranks of one run may differ: each rank may be seeded, or parametrize its functions, differently."""


def comparable(saved: Any, here: Any, allow: Collection[str]) -> bool:
    """Return True if arguments can be compared: not with those of other steps, nor with a state that has none."""
    return bool(saved) and bool(here) and "pipeline" not in allow


def check_allow(allow: Collection[str]) -> None:
    """Raise ValueError for names of fields that cannot be allowed to differ."""
    listed = isinstance(allow, Collection) and not isinstance(allow, str)
    unknown = [name for name in allow if name not in CAUSES] if listed else [allow]
    if unknown:
        raise ValueError(f"allow takes a list of names from {', '.join(sorted(CAUSES))}, got {allow!r}")


def order_of(belongs: Mapping[str, Any], selection: Selection, weights: Any = None) -> Order:
    """Return the order that an identity (or a state) describes, over the selected rows with these weights."""
    if belongs.get("weights"):
        if weights is None:
            raise StateError(f"rows were drawn by {belongs['weights']}, which are not stored here.")
        replacement = belongs["scope"] == "weighted"
        drawn = Weighted(weights, belongs["seed"], belongs["rows"], replacement)
        return Order(selection, drawn, belongs["lanes"])
    if belongs["scope"] == "none":
        return Order(selection, None, belongs["lanes"])
    window = {} if belongs["window"] is None else {"window": belongs["window"]}
    shuffle = Shuffle(belongs["seed"], belongs["scope"], aligned=belongs.get("aligned", False), **window)
    return Order(selection, shuffle, belongs["lanes"])


def check(state: Any) -> None:
    """Raise StateError unless this is a readable state of any pipeline."""
    parse(state)


def check_worker(saved: tuple[int, int, int] | None, here: tuple[int, int, int] | None) -> None:
    """Raise CheckpointMismatchError if one state is of another DataLoader worker, or only one is of a worker."""
    if saved != here:
        raise CheckpointMismatchError(
            "worker",
            saved and f"worker {saved[0]} of {saved[1]}, {saved[2]} shards",
            here and f"worker {here[0]} of {here[1]}, {here[2]} shards",
            "StatefulDataLoader keeps a state for each worker, which fits only the same num_workers and number of "
            "shards; ds.loader(…) resumes with any",
        )


def apart(field: str, text: str) -> CheckpointMismatchError:
    """Return the error for ranks that differ from each other, not from this process."""
    problem = CheckpointMismatchError(text)
    problem.field = field
    return problem


_REQUIRED: Any = ...
_FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "epoch": ((int,), _REQUIRED),
    "position": ((int,), _REQUIRED),
    "steps": ((int,), 0),
    "unit": ((str,), _REQUIRED),
    "first": ((int,), 0),
    "cursor": ((list,), _REQUIRED),
    "data": ((str,), _REQUIRED),
    "rows": ((int,), _REQUIRED),
    "selection": ((str,), _REQUIRED),
    "scope": ((str,), _REQUIRED),
    "seed": ((int, type(None)), _REQUIRED),
    "window": ((int, type(None)), _REQUIRED),
    "aligned": ((bool,), False),
    "weights": ((str,), ""),
    "lanes": ((int,), _REQUIRED),
    "pipeline": ((str,), _REQUIRED),
    "arguments": ((str,), ""),
    "parts": ((list,), []),
    "more": ((list,), []),
    "budget": ((str,), ""),
    "changes": ((list,), []),
    "excluded": ((list,), []),
    "groups": ((int,), 0),
    "epoch_outputs": ((int,), 0),
    "global_seed": ((int, type(None)), None),
    "leased": ((list,), []),
    "branches": ((str,), ""),
    "worker": ((int,), 0),
    "workers": ((int,), 0),
    "shards": ((int,), 1),
    "round": ((int,), 0),
    "batch": ((int,), 0),
    "shard": ((int, type(None)), None),
}
"""The types of each field, and its value if a state has none."""
FIELDS = frozenset(_FIELDS) - {"more"}
IN_MORE = ("budget", "changes", "excluded", "groups", "epoch_outputs", "global_seed", "leased", "branches")
"""Fields that few states have."""
_MOST_LANES = 1 << 16
_DEEPEST = 100
"""Levels of a description: one for each mix in a mix."""


@dataclass(frozen=True)
class Leased:
    """The part of a pass that one of several ranks has acknowledged.

    ``turn``, ``turns``: of the units that the pass delivers, numbered over all ranks, its own ones before ``turn`` and
    those at ``turns``. ``outputs``: of lanes that it shares with other ranks, the outputs that it has acknowledged.
    """

    shard: Shard
    turn: int = 0
    turns: Intervals = EMPTY
    outputs: Mapping[int, Intervals] | None = None

    @property
    def is_new(self) -> bool:
        """True if nothing is acknowledged."""
        return not self.turn and not self.turns and not self.outputs

    def to_json(self) -> list[Any]:
        """Return the field of a state."""
        fields: list[Any] = [["rank", self.shard.index], ["ranks", self.shard.count]]
        if self.outputs is not None:
            outputs = [[lane, some.encode()] for lane, some in sorted(self.outputs.items()) if some]
            return [*fields, ["outputs", outputs]]
        return [*fields, ["turn", self.turn], ["turns", self.turns.encode()]]


@dataclass(frozen=True)
class Saved:
    """A state that was read: its fields, with defaults, and its cursor, whose stages are not checked yet."""

    fields: Mapping[str, Any]
    cursor: Cursor
    leased: Leased | None
    raw: Mapping[str, Any]
    """As it was given."""

    @property
    def context_rank(self) -> int:
        """The rank of context parallelism, if leases were out: the first one keeps the book of a sequence."""
        found = _pairs(self.fields["leased"], "leased").get("context_rank", 0)
        return found if is_count(found) else 0

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def in_lanes(self) -> bool:
        """True if positions cannot be computed."""
        return bool(self.fields["unit"] == "outputs")

    @property
    def rows_before(self) -> int:
        """The position or, of batches by tokens, that at which their window begins."""
        at = self.cursor.lane.at
        return at.rows.taken if isinstance(at, WindowAt) else self.cursor.position


def brief(value: Any) -> str:
    """Return a value for a message, however deep or long it is."""
    try:
        return f"{value!r:.60}"
    except (RecursionError, ValueError):
        return "too deep"


def unreadable(problem: str) -> StateError:
    """Return the error of a state that cannot be read."""
    return StateError(f"the state is damaged: {problem}. Load an earlier checkpoint.")


def damaged(name: str, value: Any) -> StateError:
    """Return the error for a field that is not as it was saved."""
    return unreadable(f"{name!r} is {brief(value)}")


def _pairs(value: Any, name: str) -> dict[Any, Any]:
    """Return a list of [name, value] pairs as a dict."""
    if not (isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)):
        raise damaged(name, value)
    if not all(isinstance(key, (str, int)) for key, _ in value) or len({key for key, _ in value}) < len(value):
        raise damaged(name, value)
    return dict(value)


def parts_to_json(described: Mapping[str, Any]) -> list[Any]:
    """Return the description of a pipeline as pairs."""
    return [[name, _part_to_json(name, value)] for name, value in described.items()]


def _part_to_json(name: str, value: Any) -> Any:
    if name == "parts":
        return [parts_to_json(part) for part in value]
    return list(value) if isinstance(value, (list, tuple)) else value


def parts_from_json(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return the description of a pipeline. Raises StateError if it is none."""
    found = _pairs(value, "parts")
    if not all(isinstance(name, str) for name in found):
        raise damaged("parts", value)
    if "parts" in found:
        if not isinstance(found["parts"], list) or depth > _DEEPEST:
            raise damaged("parts", found["parts"])
        found["parts"] = [parts_from_json(part, depth + 1) for part in found["parts"]]
    return found


def lane_to_json(lane: LaneCursor) -> list[Any]:
    """Return the cursor of a lane as a list, without what is empty at its end."""
    at = lane.at
    if at is None and not (lane.excluded or lane.ahead or lane.ended or lane.spared):
        return [lane.taken]
    if isinstance(at, WindowAt):
        at = [lane_to_json(at.rows), at.first, at.checksum]
    elif at is not None:
        at = listed(at)
    spared = [[key, rows.encode()] for key, rows in lane.spared.items() if rows]
    found = [lane.taken, at, lane.excluded.encode(), lane.ahead.encode(), int(lane.ended), spared]
    while len(found) > 1 and not found[-1]:
        found.pop()
    return found


def lane_from_json(value: Any, unit: str) -> LaneCursor:
    """Return the cursor of a lane. The cursor of its stages is checked with their pipeline."""
    if not isinstance(value, list) or not 1 <= len(value) <= 6 or not is_count(value[0]):
        raise damaged("cursor", value)
    defaults: list[Any] = [0, None, "", "", 0, []]
    taken, at, excluded, ahead, ended, spared = value + defaults[len(value) :]
    if not (isinstance(excluded, str) and isinstance(ahead, str) and ended in (0, 1)):
        raise damaged("cursor", value)
    if unit == "rows" and at is not None:
        if not (isinstance(at, list) and len(at) == 3 and is_count(at[1]) and is_count(at[2]) and at[1] <= taken):
            raise damaged("cursor", value)
        at = WindowAt(lane_from_json(at[0], ""), at[1], at[2])
    elif at is not None:
        try:
            at = flow_cursor(at)
        except ValueError:
            raise damaged("cursor", value) from None
    rows = _pairs(spared, "cursor")
    if not all(isinstance(text, str) for text in rows.values()):
        raise damaged("cursor", value)
    sets = [Intervals.decode(text).from_(taken) for text in (excluded, ahead)]
    kept = {str(key): Intervals.decode(text) for key, text in rows.items()}
    return LaneCursor(taken, at, sets[0], sets[1], bool(ended), kept)


def cursor_to_json(cursor: Cursor) -> list[Any]:
    """Return the lanes of a cursor as lists."""
    return [[number, *lane_to_json(lane)] for number, lane in sorted(cursor.lanes.items())]


def cursor_from_json(value: Any, unit: str, lanes: int) -> dict[int, LaneCursor]:
    """Return the lanes of a cursor."""
    found: dict[int, LaneCursor] = {}
    for entry in value:
        if not isinstance(entry, list) or not entry or not is_count(entry[0]):
            raise damaged("cursor", value)
        if entry[0] >= (1 if unit == "rows" else lanes) or entry[0] in found:
            raise unreadable(f"lane {entry[0]} of {lanes}")
        found[entry[0]] = lane_from_json(entry[1:], unit)
    return found


def excluded_from_json(value: Any, sources: int) -> tuple[Intervals, ...]:
    """Return the excluded rows of each source, or nothing if there are none."""
    found = [EMPTY] * sources
    for number, text in _pairs(value, "excluded").items():
        if not (isinstance(text, str) and is_count(number) and number < sources):
            raise damaged("excluded", value)
        found[number] = Intervals.decode(text)
    return tuple(found) if value else ()


_OF_TORCHDATA = {"_index_sampler_state", "_snapshot", "_sampler_iter_state"}


def parse(state: Any) -> Saved:
    """Return a state that was read. Raises StateError unless it is one."""
    if isinstance(state, Saved):
        return state
    if not isinstance(state, Mapping):
        remedy = "Pass what state_dict() returned."
        if isinstance(state, (str, bytes, PathLike)):
            remedy = "Read it first: json.loads(text), or use PipelineCheckpoint for a folder of checkpoints."
        raise StateError(f"expected a state dict as returned by state_dict(), got {brief(state)}. {remedy}")
    version = state.get(KEY)
    if version is None and _OF_TORCHDATA.intersection(state):
        raise StateError(
            "this is a state of torchdata's StatefulDataLoader. Load it there, with the dataset in it, and change to "
            "this loader between two epochs."
        )
    if type(version) is not int:
        if version is not None:
            raise StateError(
                f"{KEY!r} is {version!r} of type {type(version).__name__}, not an int: the state was converted. Save "
                "it as JSON, or pickle it."
            )
        if state and all(isinstance(each, Mapping) and KEY in each for each in state.values()):
            first, *others = state
            if not others:
                raise StateError(f"the state is in a dict under {first!r}: pass state[{first!r}].")
            if all(str(name).rpartition("_")[2].isdigit() for name in state):
                raise StateError("these are the states of several ranks. Pass a list: list(states.values()).")
            raise StateError(
                f"these are several states, under {', '.join(map(repr, list(state)[:8]))}. Pass one of them: "
                f"state[{first!r}]. Those of several ranks are passed as a list: list(states.values())."
            )
        raise StateError(
            f"this is not a state of midepoch: it has no integer under {KEY!r}, but: "
            f"{', '.join(map(str, list(state)[:8])) or 'nothing'}. Pass the dict that state_dict() returned, not the "
            "one that contains it."
        )
    if version < 1:
        raise unreadable(f"{KEY!r} is {version}")
    if version > VERSION:
        raise StateError(
            f"the state has version {version}, but this midepoch reads only versions up to {VERSION}. Upgrade "
            "midepoch to resume from it."
        )
    more = _pairs(state.get("more", []), "more")
    if unknown := more.keys() & (FIELDS - set(IN_MORE)):
        raise unreadable(f"'more' has {min(unknown)!r}")
    fields = {**{name: default for name, (_, default) in _FIELDS.items()}, **state, **more}
    for name, (types, _) in _FIELDS.items():
        value = fields[name]
        if (isinstance(value, bool) and types != (bool,)) or not isinstance(value, types):
            what = "is missing" if value is _REQUIRED else f"is {brief(value)}"
            raise unreadable(f"{name!r} {what}, expected {types[0].__name__}")
        if isinstance(value, int) and not 0 <= value < (2**64 if name.endswith("seed") else LARGEST):
            raise unreadable(f"{name!r} is {value}")
    if not 1 <= fields["lanes"] <= _MOST_LANES or fields["unit"] not in ("rows", "outputs"):
        raise unreadable(f"'lanes' is {fields['lanes']}, 'unit' is {brief(fields['unit'])}")
    lanes = cursor_from_json(fields["cursor"], fields["unit"], fields["lanes"])
    if fields["first"] > fields["steps"]:
        raise damaged("first", fields["first"])
    cursor = Cursor(fields["epoch"], lanes, fields["steps"], fields["first"])
    if cursor.position != fields["position"]:
        raise unreadable(
            f"'position' is {fields['position']}, and its lanes have taken {cursor.position}. To "
            "edit a state, change both"
        )
    return Saved(fields, cursor, _leased(fields["leased"]), state)


def _leased(given: Any) -> Leased | None:
    fields = _pairs(given, "leased")
    if not fields or (set(fields) == {"context_rank"} and is_count(fields["context_rank"])):
        return None
    try:
        shard, outputs, turn = Shard(fields["rank"], fields["ranks"]), fields.get("outputs"), fields.get("turn", 0)
        if outputs is not None:
            texts = _pairs(outputs, "leased")
            return Leased(shard, outputs={int(lane): Intervals.decode(text) for lane, text in texts.items()})
        if is_count(turn):
            return Leased(shard, turn, Intervals.decode(fields["turns"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise damaged("leased", given)
