"""The state of a flow: where its lanes stand and what they belong to, as the same flat dict that other states are.

``flow``  (text, JSON): [[lane, outputs, ended, cursor], …]
``known`` (text): which lanes those are, "index/count"
``parts`` (text, JSON): of flows of several sources, what each was
``epoch_outputs``: how many outputs the last epoch had that was gone through
``changes`` (text, JSON): what was allowed to change, or was changed in a mix, since the run began
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midepoch import state as states
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.flow.changing import Of
from midepoch.flow.lanes import LaneAt, Place
from midepoch.flow.matching import CHECKED, Matched, describe, mismatch
from midepoch.flow.open import check_cursor, start
from midepoch.flow.spec import Spec
from midepoch.order import Cut
from midepoch.pipeline import Pipeline

_MOST_LANES = 1 << 16
_KEPT = 16
"""Changes that are kept in the state: the last ones."""


@dataclass(frozen=True)
class Restored:
    """What a state of a flow says: where to go on, as what, and what is recorded in it."""

    place: Place
    spec: Spec
    lanes: int
    epoch_outputs: int
    changes: tuple[str, ...]
    worker: tuple[int, int, int] | None
    global_seed: int | None


def identity(spec: Spec, lanes: int) -> dict[str, Any]:
    """The fields by which a state knows what it belongs to."""
    if isinstance(spec.base, Pipeline):
        return {**states.identity(spec.base), "lanes": lanes, "pipeline": spec.text, "arguments": spec.arguments}
    return {
        "data": spec.digest,
        "rows": sum(leaf.rows for leaf in spec.leaves),
        "selection": "",
        "scope": "none",
        "seed": None,
        "window": None,
        "lanes": lanes,
        "aligned": False,
        "pipeline": spec.text,
        "arguments": spec.arguments,
        "parts": json.dumps(describe(spec), separators=(",", ":")),
    }


def save(
    belongs: Mapping[str, Any], place: Place, epoch_outputs: int, changes: Sequence[str], global_seed: int | None = None
) -> dict[str, Any]:
    """The state of a flow (by its ``identity``) at a place."""
    lanes = [[lane, at.outputs, int(at.ended), at.cursor] for lane, at in sorted(place.lanes.items())]
    return {
        states.KEY: states.VERSION,
        "epoch": place.epoch,
        "position": place.position,
        **belongs,
        "flow": json.dumps(lanes, separators=(",", ":")),
        "known": f"{place.known.index}/{place.known.count}",
        "epoch_outputs": epoch_outputs,
        "changes": json.dumps(list(changes)[-_KEPT:]) if changes else "",
        **({} if global_seed is None else {"global_seed": global_seed}),
    }


def load(state: Any, spec: Spec, allow: Collection[str] = ()) -> Restored:
    """Read and check a state, or the list of those of all ranks. Raises, and changes nothing, if it does not fit."""
    states.check_allow(allow)
    several = list(state) if isinstance(state, (list, tuple)) else [state]
    if not several:
        raise StateError("a list of the states of all ranks is empty.")
    found = [states.parse(one) for one in several]
    first = found[0]
    if first["lanes"] > _MOST_LANES:
        raise StateError(f"the state is damaged: 'lanes' is {first['lanes']}.")
    _check_alike(found)
    current = identity(spec, first["lanes"])
    changes = states.changes_in(first["changes"])
    matched = Matched(allow, changes)
    if isinstance(spec.base, Pipeline):
        if first["parts"] or not first["flow"]:
            raise mismatch("pipeline", first["pipeline"], current["pipeline"])
        described = {name: first[name] for name in ("data", *CHECKED)}
    else:
        if not first["parts"]:
            raise mismatch("pipeline", first["pipeline"], current["pipeline"])
        described = _json(first["parts"], dict, "parts")
    adopted, convert = matched.match(spec, described, "")
    places = [_place(one) for one in found]
    merged = _merged(places, first["lanes"], spec)
    if matched.mixed and len({(place.epoch, place.ended) for place in places}) > 1:
        raise states.apart(
            "parts",
            "some ranks were through with the epoch when these states were saved, others were not: a mix can only be "
            "changed where all are. Nothing was changed.",
        )
    lanes = {}
    for lane, at in merged.lanes.items():
        cursor = convert(at.cursor, 0, Of(merged.epoch, Cut(lane, first["lanes"])))
        check_cursor(adopted, cursor)
        # A lane may have something left in another mix; an epoch that was over in all lanes stays so.
        lanes[lane] = replace(at, cursor=cursor, ended=at.ended and (merged.ended or not matched.mixed))
    worker = (first["worker"], first["workers"], first["shards"]) if first["workers"] else None
    return Restored(
        replace(merged, lanes=lanes),
        adopted,
        first["lanes"],
        max(one["epoch_outputs"] for one in found),
        tuple(changes[-_KEPT:]),
        worker,
        first["global_seed"],
    )


def _json(text: str, kind: type, name: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise StateError(f"the state is damaged: {name!r} is {text!r:.40}.")
    return found


def _place(found: Mapping[str, Any]) -> Place:
    lanes: dict[int, LaneAt] = {}
    for entry in _json(found["flow"], list, "flow"):
        if not (isinstance(entry, list) and len(entry) == 4 and all(map(_is_count, entry[:3])) and entry[2] in (0, 1)):
            raise StateError(f"the state is damaged: 'flow' has {entry!r:.60}.")
        if entry[0] >= found["lanes"] or entry[0] in lanes:
            raise StateError(f"the state is damaged: lane {entry[0]} of {found['lanes']}.")
        lanes[entry[0]] = LaneAt(entry[1], bool(entry[2]), entry[3])
    index, _, count = found["known"].partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise StateError(f"the state is damaged: 'known' is {found['known']!r:.40}.")
    known = Cut(int(index), int(count))
    if not lanes and found["position"]:
        raise StateError(f"the state is damaged: position {found['position']} of no lane.")
    if lanes and set(lanes) != set(known.positions(0, found["lanes"]).tolist()):
        raise StateError("the state is damaged: it does not have the lanes that it says it has.")
    return Place(found["epoch"], lanes, known, found["position"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _check_alike(found: Sequence[Mapping[str, Any]]) -> None:
    free = {"epoch", "position", "flow", "known", "worker", "round", "batch", "epoch_outputs", *states.OF_ONE_RANK}
    for rank, one in enumerate(found):
        for name in sorted(found[0].keys() - free):
            if one.get(name) != found[0][name]:
                raise states.apart(
                    name,
                    f"the list holds states of different runs or steps: {name} is {found[0][name]!r} on rank 0 and "
                    f"{one.get(name)!r} on rank {rank}. Nothing was changed.",
                )


def _merged(places: Sequence[Place], lanes: int, spec: Spec) -> Place:
    """The lanes that all ranks together know of. They must have been at the same step."""
    epoch = min(place.epoch for place in places)
    if len(places) == 1 or not any(place.begun for place in places):
        if any(place.epoch != epoch for place in places):
            raise _steps_apart(places)
        return places[0]
    # Ranks that were through with the epoch before others (ends="uneven") stand at the beginning of the next.
    behind = [place for place in places if place.epoch == epoch and place.begun]
    through = [place for place in places if place.epoch == epoch + 1 and not place.begun]
    if len(behind) + len(through) < len(places):
        raise _steps_apart(places)
    found: dict[int, LaneAt] = {}
    for place in behind:
        for lane, at in place.lanes.items():
            before = found.get(lane, at)
            if before.outputs != at.outputs:
                raise _steps_apart(places)
            found[lane] = before if before.ended else at  # one of the ranks may know that it is the end
    running = {place.position for place in behind if not any(at.ended for at in place.lanes.values())}
    if len(running) > 1:
        raise _steps_apart(places)
    missing = [lane for lane in range(lanes) if lane not in found]
    if missing and not through:
        raise states.apart(
            "flow", f"of {lanes} lanes the states know {len(found)} only: the list must have those of all ranks."
        )
    over = LaneAt(0, True, start(spec))
    position = max(place.position for place in behind)
    return Place(epoch, {**found, **dict.fromkeys(missing, over)}, Cut(), position)


def _steps_apart(places: Sequence[Place]) -> CheckpointMismatchError:
    at = [f"rank {rank}: epoch {place.epoch}, position {place.position}" for rank, place in enumerate(places)]
    return states.apart(
        "position",
        f"the ranks were not at the same step when these were saved ({'; '.join(at[:4])}{'; …' * (len(at) > 4)}): "
        "rows would be lost or repeated. Nothing was changed. Save all ranks behind the same batch.",
    )
