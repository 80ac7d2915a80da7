"""The versioned state: a flat, JSON-able dict that says what it belongs to.

Rules of evolution: a new field gets a default in ``_MIGRATIONS``; the type or meaning of a field never changes; every
released version keeps a fixture under ``tests/fixtures`` and is accepted for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from midepoch.checks import LARGEST
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Cut
from midepoch.pipeline import Pipeline

VERSION = 1
KEY = "midepoch"

_CAUSES = {
    "data": "the files' contents are not those of the run that saved it (moved or renamed files would be accepted)",
    "rows": "another split, slice, take, skip or select than when it was saved",
    "selection": "another split, slice, take, skip or select than when it was saved",
    "scope": "shuffle() was added, left out or given another scope",
    "aligned": "the files are mapped now and were fetched when it was saved, or the other way round",
    "seed": "shuffle() was given another seed",
    "window": "shuffle() was given another window",
    "pipeline": "a map was added, left out, or changed between batched and not",
}


class Cursor(NamedTuple):
    """The only thing that advances: an epoch, and how many of its rows all shards together have consumed."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Resumed:
    """What a state says: where to go on, and what to take over from the run that saved it."""

    cursor: Cursor
    seed: int | None
    lanes: int
    worker: tuple[int, int, int] | None = None  # (worker, workers, shards) of a state kept by one worker
    round: int = 0
    batch: int = 0
    shard: tuple[int, int] | None = None  # (shard, shards) of a state that is not global


def adopt(resumed: Resumed, pipeline: Pipeline) -> Pipeline:
    """The pipeline with what it takes over from the run that saved the state: a drawn seed, and the lanes."""
    order = replace(pipeline.order, lanes=resumed.lanes)
    if order.shuffle is not None and resumed.seed is not None:
        order = replace(order, shuffle=replace(order.shuffle, seed=resumed.seed))
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
    }


def save(belongs: Mapping[str, Any], cursor: Cursor) -> dict[str, Any]:
    """The state of a pipeline (by its ``identity``) at a cursor."""
    return {KEY: VERSION, "epoch": cursor.epoch, "position": cursor.position, **belongs}


def check(state: Any) -> None:
    """Raise StateError unless this is a state that can be read, whatever it belongs to."""
    _parse(state)


def one_of(state: Any, cut: Cut) -> Any:
    """A state, or out of a list with one of each rank the one to load here. The ranks must stand at the same place."""
    if not isinstance(state, (list, tuple)):
        return state
    if not state:
        raise StateError("a list of the states of all ranks is empty.")
    found = [_parse(one) for one in state]
    own = [one["shard"] is not None for one in found]
    if any(own):
        mine = [one for one in state if isinstance(one, Mapping) and one.get("shard") == cut.index]
        return mine[0] if mine else state[0]
    for number, one in enumerate(found):
        for name in ("epoch", "position"):
            if one[name] != found[0][name]:
                first, other = (
                    f"rank {i}: epoch {at['epoch']}, position {at['position']}"
                    for i, at in ((0, found[0]), (number, one))
                )
                cause = (
                    "the ranks were not at the same step when they were saved, so that rows would be lost or repeated. "
                    "Save all of them behind the same batch; the state of one rank alone restores every rank"
                )
                raise CheckpointMismatchError(name, first, other, cause)
        for name in _TYPES:
            if name not in ("worker", "round", "batch") and one[name] != found[0][name]:
                cause = f"the list holds states of different runs: this is rank 0 against rank {number}"
                raise CheckpointMismatchError(name, found[0][name], one[name], cause)
    return state[0]


def load(state: Any, pipeline: Pipeline) -> Resumed:
    """Read and check a state; raises StateError or CheckpointMismatchError, and changes nothing."""
    found = _parse(one_of(state, pipeline.cut))
    current = identity(pipeline)
    for name in ("data", "rows", "selection", "scope", "aligned", "seed", "window", "pipeline"):
        if name == "seed" and pipeline.seed_drawn and found["scope"] == current["scope"]:
            continue
        if found[name] != current[name]:
            raise CheckpointMismatchError(name, found[name], current[name], _CAUSES[name])
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
    cursor = Cursor(found["epoch"], found["position"])
    return Resumed(cursor, found["seed"], found["lanes"], worker, found["round"], found["batch"], shard)


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
}
_DEFAULTS = {"worker": 0, "workers": 0, "shards": 1, "round": 0, "batch": 0, "shard": None, "aligned": False}
_MOST_LANES = 2**31


def _parse(state: Any) -> dict[str, Any]:
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
        if isinstance(value, int) and not 0 <= value < (2**64 if name == "seed" else LARGEST):
            raise StateError(f"the state is damaged: {name!r} is {value}.")
    if not 1 <= found["lanes"] < _MOST_LANES:
        raise StateError(f"the state is damaged: 'lanes' is {found['lanes']}.")
    return found
