"""The format of a state: a flat, versioned, JSON-able dict that says what it belongs to.

Rules of evolution: a new field gets a default in ``_DEFAULTS``; the type or meaning of a field never changes; every
released version keeps a fixture under ``tests/fixtures`` and is accepted forever.

Pipelines whose positions cannot be computed have these fields beside the others:

``flow``  (text, JSON): [[lane, outputs, ended, cursor], …]
``known`` (text): which lanes those are, "index/count"
``parts`` (text, JSON): of several sources, what each was
``epoch_outputs``: how many outputs the last epoch had that was iterated to its end
``changes`` (text, JSON): what was allowed to change, or was changed in a mix, since the run began
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from midepoch._internal.checks import LARGEST
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Order, Selection, Shuffle

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


def check(state: Any) -> None:
    """Raise StateError unless this is a state that can be read, whatever it belongs to."""
    parse(state)


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
