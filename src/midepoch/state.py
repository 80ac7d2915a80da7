"""The versioned state: a flat, JSON-able dict that says what it belongs to.

Rules of evolution: a new field gets a default in ``_DEFAULTS``; the type or meaning of a field never changes; every
released version keeps a fixture under ``tests/fixtures`` and is accepted for ever.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from midepoch.checks import LARGEST
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Cut, Order, Selection, Shuffle
from midepoch.order.shuffle import SCOPES
from midepoch.pipeline import Pipeline

VERSION = 1
KEY = "midepoch"

CAUSES = {
    "data": "the files' contents are not those of the run that saved it (moved or renamed files would be accepted)",
    "rows": "another split, slice, take, skip or select than when it was saved",
    "selection": "another split, slice, take, skip or select than when it was saved",
    "scope": "shuffle() was added, left out or given another scope",
    "aligned": "the files are mapped now and were fetched when it was saved, or the other way round",
    "seed": "shuffle() was given another seed",
    "window": "shuffle() was given another window",
    "pipeline": "a map or another step was added, left out, moved, or given other parameters that move rows",
    "arguments": "a filter was given another expression, or a function other fn_kwargs",
}


OF_ONE_RANK = ("global_seed", "arguments")
"""Fields in which ranks of one run may differ: they were seeded, or their functions told, which rank they are."""


class Cursor(NamedTuple):
    """The only thing that advances: an epoch, and how many of its rows all shards together have consumed."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Resumed:
    """What a state says: where to go on, and what to take over from the run that saved it."""

    cursor: Cursor
    shuffle: Shuffle | None
    lanes: int
    worker: tuple[int, int, int] | None = None  # (worker, workers, shards) of a state kept by one worker
    round: int = 0
    batch: int = 0
    shard: tuple[int, int] | None = None  # (shard, shards) of a state that is not global
    changes: tuple[str, ...] = ()  # what was allowed to differ, here and at resumes before
    global_seed: int | None = None


def adopt(resumed: Resumed, pipeline: Pipeline) -> Pipeline:
    """The pipeline with what it takes over from the run that saved the state: how it shuffles, and the lanes."""
    order = replace(pipeline.order, lanes=resumed.lanes, shuffle=resumed.shuffle)
    seed = pipeline.global_seed if resumed.global_seed is None else resumed.global_seed
    return replace(pipeline, order=order, seed_agreed=True, lanes_kept=True, changes=resumed.changes, global_seed=seed)


def taken_over(pipeline: Pipeline, saved: Mapping[str, Any], allow: Collection[str] = ()) -> Pipeline:
    """The pipeline with those settings of its shuffle that were not given to it, as a state has them.

    Defaults depend on how the data is reached and on the size of the cache, which may both change between runs.
    """
    shuffle, scope = pipeline.order.shuffle, saved["scope"]
    if shuffle is None or scope not in SCOPES or (scope != shuffle.scope and "scope" not in pipeline.defaults):
        return pipeline
    window, seed = shuffle.window, shuffle.seed
    if scope == "window" and "window" in pipeline.defaults and saved["window"]:
        window = saved["window"]
    if pipeline.seed_drawn and "seed" not in allow and isinstance(saved["seed"], int):
        seed = saved["seed"]
    order = replace(pipeline.order, shuffle=Shuffle(seed, scope, window, saved["aligned"]))
    return replace(pipeline, order=order)


def identity(pipeline: Pipeline) -> dict[str, Any]:
    """The fields by which a state knows what it belongs to."""
    shuffle = pipeline.order.shuffle
    return {
        "data": pipeline.source.fingerprint,
        "rows": pipeline.rows,
        "selection": pipeline.order.selection.text,
        "scope": shuffle.scope if shuffle else "none",
        "seed": shuffle.seed if shuffle else None,
        "window": shuffle.window if shuffle and shuffle.scope == "window" else None,
        "lanes": pipeline.order.lanes,
        "aligned": bool(shuffle and shuffle.aligned),
        "pipeline": pipeline.text,
        **({"arguments": pipeline.arguments} if pipeline.arguments else {}),
        **({"changes": json.dumps(pipeline.changes)} if pipeline.changes else {}),
    }


def comparable(saved: Any, here: Any, allow: Collection[str]) -> bool:
    """Return whether arguments can be compared: not with those of other steps, nor with a state that has none."""
    return bool(saved) and bool(here) and "pipeline" not in allow


def check_allow(allow: Collection[str]) -> None:
    """Raise ValueError for names of fields that cannot be allowed to differ."""
    unknown = [allow] if isinstance(allow, str) else [name for name in allow if name not in CAUSES]
    if unknown:
        raise ValueError(f"allow takes a list of names out of {', '.join(sorted(CAUSES))}, got {allow!r}")


def changes_in(text: str) -> list[str]:
    """What a state records of what was changed."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise StateError(f"the state is damaged: 'changes' is {text!r:.40}.")
    return [str(one) for one in found]


def order_of(belongs: Mapping[str, Any], selection: Selection) -> Order:
    """The order that an ``identity`` (or a state) tells of, over the rows that were selected."""
    if belongs["scope"] == "none":
        return Order(selection, None, belongs["lanes"])
    window = {} if belongs["window"] is None else {"window": belongs["window"]}
    shuffle = Shuffle(belongs["seed"], belongs["scope"], aligned=belongs.get("aligned", False), **window)
    return Order(selection, shuffle, belongs["lanes"])


def save(belongs: Mapping[str, Any], cursor: Cursor, global_seed: int | None = None) -> dict[str, Any]:
    """The state of a pipeline (by its ``identity``) at a cursor."""
    drawn = {} if global_seed is None else {"global_seed": global_seed}
    return {KEY: VERSION, "epoch": cursor.epoch, "position": cursor.position, **belongs, **drawn}


def check(state: Any) -> None:
    """Raise StateError unless this is a state that can be read, whatever it belongs to."""
    parse(state)


def one_of(state: Any, cut: Cut) -> Any:
    """A state, or out of a list with one of each rank the one to load here. The ranks must stand at the same place."""
    if not isinstance(state, (list, tuple)):
        return state
    if not state:
        raise StateError("a list of the states of all ranks is empty.")
    found = [parse(one) for one in state]
    skipping = all(one["shard"] is not None for one in found)  # then each rank has a place of its own
    places = {(one["epoch"], one["position"]) for one in found}
    if len(places) > 1 and not skipping and not _one_place(found):
        at = [f"rank {rank}: epoch {one['epoch']}, position {one['position']}" for rank, one in enumerate(found)]
        raise apart(
            "position",
            f"the ranks were not at the same step when these states were saved ({'; '.join(at[:4])}"
            f"{'; …' * (len(at) > 4)}): rows would be lost or repeated. Nothing was changed. Save all ranks behind the "
            "same batch; the state of one rank alone restores every rank.",
        )
    free = {"epoch", "position", "worker", "round", "batch", *OF_ONE_RANK, *(("shard",) if skipping else ())}
    for rank, one in enumerate(found):
        for name in _TYPES.keys() - free:
            if one[name] != found[0][name]:
                raise apart(
                    name,
                    f"the list holds states of different runs: {name} is {found[0][name]!r} on rank 0 and "
                    f"{one[name]!r} on rank {rank}. Nothing was changed.",
                )
    if skipping:
        return next((one for one in state if one["shard"] == cut.index), state[0])
    return state[max(range(len(found)), key=lambda rank: (found[rank]["epoch"], found[rank]["position"]))]


def check_worker(saved: tuple[int, int, int] | None, here: tuple[int, int, int] | None) -> None:
    """Raise CheckpointMismatchError for the state of another DataLoader worker, or of one where none is."""
    if saved != here:
        raise CheckpointMismatchError(
            "worker",
            saved and f"worker {saved[0]} of {saved[1]}, {saved[2]} shards",
            here and f"worker {here[0]} of {here[1]}, {here[2]} shards",
            "StatefulDataLoader keeps a state of each worker, which fits the same num_workers and number of shards "
            "only; ds.loader(…) resumes with any",
        )


def apart(field: str, text: str) -> CheckpointMismatchError:
    """Ranks that differ among themselves, not from what is here."""
    problem = CheckpointMismatchError(text)
    problem.field = field
    return problem


def _one_place(found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether states differ only in whether they stand at the end of an epoch or the beginning of the next."""
    ends = {
        (one["epoch"] + 1, 0) if one["position"] == one["rows"] else (one["epoch"], one["position"]) for one in found
    }
    return len(ends) == 1


def load(state: Any, pipeline: Pipeline, allow: Collection[str] = ()) -> Resumed:
    """Read and check a state; raises StateError or CheckpointMismatchError, and changes nothing.

    Fields that are ``allow``ed to differ do not raise: they are recorded.
    """
    check_allow(allow)
    found = parse(one_of(state, pipeline.cut))
    pipeline = taken_over(pipeline, found, allow)
    current = identity(pipeline)
    changes = changes_in(found["changes"])
    for name in ("data", "rows", "selection", "scope", "aligned", "seed", "window", "pipeline", "arguments"):
        if name == "arguments" and not comparable(found[name], current.get(name), allow):
            continue
        if found[name] != current[name]:
            if name not in allow:
                raise CheckpointMismatchError(name, found[name], current[name], CAUSES[name])
            changes.append(f"{name}: {found[name]!r} became {current[name]!r}"[:200])
    if found["flow"]:
        raise CheckpointMismatchError("pipeline", "rows in lanes", "rows at positions", CAUSES["pipeline"])
    if found["position"] > found["rows"]:
        raise StateError(f"the state is damaged: position {found['position']} of {found['rows']} rows.")
    worker = (found["worker"], found["workers"], found["shards"]) if found["workers"] else None
    shard = (found["shard"], found["shards"]) if found["shard"] is not None else None
    here = (pipeline.cut.index, pipeline.cut.count)
    if shard is not None and shard != here:
        raise CheckpointMismatchError(
            "shard",
            f"shard {shard[0]} of {shard[1]}",
            f"shard {here[0]} of {here[1]}",
            'with on_error="skip" shards that hand out rows one by one skip different ones, so each must keep a state '
            "of its own; ds.loader(…) keeps one for all",
        )
    if found["position"] > pipeline.rows:
        raise CheckpointMismatchError("rows", found["rows"], pipeline.rows, f"position {found['position']} lies behind")
    cursor = Cursor(found["epoch"], found["position"])
    place = (found["round"], found["batch"], shard)
    return Resumed(
        cursor, pipeline.order.shuffle, found["lanes"], worker, *place, tuple(changes[-16:]), found["global_seed"]
    )


def load_global(state: Any, pipeline: Pipeline, allow: Collection[str] = ()) -> Resumed:
    """As ``load``, of a state that is one for all ranks and workers."""
    resumed = load(state, pipeline, allow)
    if resumed.worker is not None:
        worker = f"worker {resumed.worker[0]} of {resumed.worker[1]}"
        raise CheckpointMismatchError("worker", worker, None, "a state of one DataLoader worker")
    if resumed.shard is not None:
        shard = f"shard {resumed.shard[0]} of {resumed.shard[1]}"
        cause = 'a state of rows handed out one by one under on_error="skip", where each shard has a place of its own'
        raise CheckpointMismatchError("shard", shard, None, cause)
    return resumed


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
}
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
}
_MOST_LANES = 2**31


def parse(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dict as state_dict() returns it, got {type(state).__name__}.")
    version = state.get(KEY)
    if isinstance(version, bool) or not isinstance(version, int):
        raise StateError(
            f"this is not a state of midepoch: it has no whole number under {KEY!r}. "
            f"It has: {', '.join(map(str, list(state)[:8])) or 'nothing'}. "
            "Pass what state_dict() returned, not what it was saved in."
        )
    if version < 1:
        raise StateError(f"the state is damaged: {KEY!r} is {version}.")
    if version > VERSION:
        raise StateError(
            f"the state is of version {version}, this midepoch reads up to {VERSION}: upgrade midepoch to resume it."
        )
    found = {**_DEFAULTS, **state}
    for name, types in _TYPES.items():
        value = found.get(name, ...)
        if (isinstance(value, bool) and types != (bool,)) or not isinstance(value, types):
            what = "is missing" if value is ... else f"is {value!r:.40}"
            raise StateError(f"the state is damaged: {name!r} {what}, expected {types[0].__name__}.")
        if isinstance(value, int) and not 0 <= value < (2**64 if name.endswith("seed") else LARGEST):
            raise StateError(f"the state is damaged: {name!r} is {value}.")
    if not 1 <= found["lanes"] < _MOST_LANES:
        raise StateError(f"the state is damaged: 'lanes' is {found['lanes']}.")
    return found
