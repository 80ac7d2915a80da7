"""The format of a state: a flat, versioned, JSON-able dict with the identity of its pipeline.

Rules of evolution: a new field gets a default in ``_DEFAULTS``; the type or meaning of a field never changes; every
released version keeps a fixture under ``tests/fixtures`` and is always accepted.

Additional fields of pipelines whose positions cannot be computed:

- ``flow`` (text, JSON): [[lane, outputs, ended, cursor], …]
- ``known`` (text): the lanes in ``flow``, "index/count"
- ``parts`` (text, JSON): the description of each of several sources
- ``epoch_outputs``: outputs of the last epoch that was iterated to its end
- ``changes`` (text, JSON): fields allowed to differ, and changes of a mix, since the run began

Additional fields of loaders:

- ``planned`` (text, JSON): [position at which the window in progress begins, [[budget, batches delivered], …]]. Then
  ``position`` counts batches
- ``steps``: steps since the run began, where something depends on their number
- ``done`` (text): positions (or batches) at and after ``position`` that are not delivered (``Intervals.encode``); in
  lanes JSON, {lane: its outputs}
- ``excluded`` (text, JSON): {number of a source: its rows before the shuffle that are not delivered}
- ``leased`` (text, JSON): what one of several ranks has acknowledged (``midepoch.state.leased``)
- ``dropped``: of ``position``, in lanes, what was done before
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from midepoch._internal.checks import LARGEST
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Order, Selection, Shuffle, Weighted
from midepoch.pipeline.open import is_count

VERSION = 1
KEY = "midepoch"

CAUSES = {
    "data": "the contents of the files have changed since it was saved (moved or renamed files would be accepted); of "
    "from_map_style: the length, the class, the indices of a Subset or fingerprint=",
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
    unknown = [allow] if isinstance(allow, str) else [name for name in allow if name not in CAUSES]
    if unknown:
        raise ValueError(f"allow takes a list of names from {', '.join(sorted(CAUSES))}, got {allow!r}")


def json_in(text: str, kind: type, name: str) -> Any:
    """Return the JSON of a field. Raise StateError unless it is a list, or a dict, as ``kind`` says."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise StateError(f"the state is damaged: {name!r} is {text!r:.40}.")
    return value


def changes_in(text: str) -> list[str]:
    """Return the changes recorded in a state."""
    return [str(one) for one in json_in(text or "[]", list, "changes")]


def flow_in(text: str) -> list[Any]:
    """Return the lanes in the field ``flow``: [lane, outputs, 1 if it has ended, its cursor] for each."""
    entries: list[Any] = json_in(text, list, "flow")
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) == 4 and all(map(is_count, entry[:3])) and entry[2] in (0, 1)):
            raise StateError(f"the state is damaged: 'flow' has {entry!r:.60}.")
    return entries


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


_TYPES: dict[str, tuple[type, ...]] = {
    "epoch": (int,),
    "position": (int,),
    "data": (str,),
    "rows": (int,),
    "selection": (str,),
    "scope": (str,),
    "seed": (int, type(None)),
    "window": (int, type(None)),
    "lanes": (int,),
    "pipeline": (str,),
    "worker": (int,),
    "workers": (int,),
    "shards": (int,),
    "round": (int,),
    "batch": (int,),
    "shard": (int, type(None)),
    "aligned": (bool,),
    "flow": (str,),
    "known": (str,),
    "parts": (str,),
    "changes": (str,),
    "epoch_outputs": (int,),
    "global_seed": (int, type(None)),
    "arguments": (str,),
    "groups": (int,),
    "planned": (str,),
    "steps": (int,),
    "weights": (str,),
    "done": (str,),
    "excluded": (str,),
    "leased": (str,),
    "dropped": (int,),
}
FIELDS = frozenset(_TYPES)
_DEFAULTS = {
    "worker": 0,
    "workers": 0,
    "shards": 1,
    "round": 0,
    "batch": 0,
    "shard": None,
    "aligned": False,
    "flow": "",
    "known": "0/1",
    "parts": "",
    "changes": "",
    "epoch_outputs": 0,
    "global_seed": None,
    "arguments": "",
    "groups": 0,
    "planned": "",
    "steps": 0,
    "weights": "",
    "done": "",
    "excluded": "",
    "leased": "",
    "dropped": 0,
}
_MOST_LANES = 2**31


def parse(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError(f"expected a state dict as returned by state_dict(), got {state!r:.60}.")
    version = state.get(KEY)
    if isinstance(version, bool) or not isinstance(version, int):
        raise StateError(
            f"this is not a state of midepoch: it has no integer under {KEY!r}, but: "
            f"{', '.join(map(str, list(state)[:8])) or 'nothing'}. Pass the dict that state_dict() returned, not the "
            "one that contains it."
        )
    if version < 1:
        raise StateError(f"the state is damaged: {KEY!r} is {version}.")
    if version > VERSION:
        raise StateError(
            f"the state has version {version}, but this midepoch reads only versions up to {VERSION}. Upgrade "
            "midepoch to resume from it."
        )
    fields = {**_DEFAULTS, **state}
    for name, types in _TYPES.items():
        value = fields.get(name, ...)
        if (isinstance(value, bool) and types != (bool,)) or not isinstance(value, types):
            what = "is missing" if value is ... else f"is {value!r:.40}"
            raise StateError(f"the state is damaged: {name!r} {what}, expected {types[0].__name__}.")
        if isinstance(value, int) and not 0 <= value < (2**64 if name.endswith("seed") else LARGEST):
            raise StateError(f"the state is damaged: {name!r} is {value}.")
    if not 1 <= fields["lanes"] < _MOST_LANES:
        raise StateError(f"the state is damaged: 'lanes' is {fields['lanes']}.")
    return fields
