"""Resuming with a changed mix: sources continue at their positions, and outputs in progress are completed as before.

A stage after a mix may have delivered only a part of the results of some outputs: tokens of a document, rows of a
window. The mix stays unchanged on resume until those outputs are repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.order.mixing import MixOrder, spans
from midepoch.pipeline.cursor import At
from midepoch.pipeline.mixed import old_order
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.open import start
from midepoch.pipeline.passes import FIRST, place_of
from midepoch.pipeline.stage_specs import Local, Slice, StageSpec
from midepoch.transforms.packing import PackSpec


@dataclass(frozen=True)
class LaneContext:
    """The epoch and the lane of a cursor. ``inside``: the flow is a part of another."""

    epoch: int
    lane: Shard
    inside: bool = False


Convert = Callable[[At, int | None, LaneContext], At]
"""Function from a saved cursor to one of the current flow.

The second argument is the number of next outputs that must stay the same, because their results were delivered in part.
It is None if unknown.
"""


@dataclass(frozen=True)
class Found:
    """A part of a mix: the number of the saved part it corresponds to, if any, and the conversion of its cursor."""

    spec: Node
    old: int | None
    convert: Convert


class SourceRemoved(Exception):  # noqa: N818  (never leaves this package)
    """The source of the outputs in progress has been removed: there is nothing to complete."""


def needed(stage: StageSpec, skip: int, need: int | None) -> int | None:
    """Return the number of outputs before a stage that must stay the same, so that ``need`` of its own do."""
    if isinstance(stage, Slice):
        return need
    if isinstance(stage, PackSpec):
        skip = stage.delivered(skip)[0]
    if need == 0 and not skip:
        return 0
    if need is None or need > 1:
        return None
    if isinstance(stage, PackSpec) and stage.strategy == "concat":
        return 1 if need == 0 else None
    if isinstance(stage, PackSpec):
        return stage.window
    return 1 if isinstance(stage, Local) and not stage.grouped else stage.size


def changed_mix(
    base: Mix,
    found: Sequence[Found],
    weights: Any,
    changed: bool,
    at: At,
    need: int | None,
    of: LaneContext,
    where: str,
) -> At:
    """Return the cursor of a mix with previous weights as one of the current mix."""
    count = len(weights) if isinstance(weights, list) else -1
    whole = isinstance(at, list) and len(at) in (3, 4) and isinstance(at[2], list) and len(at[2]) == count
    if not whole or not are_weights(weights) or not all(isinstance(one, int) and one >= 0 for one in at[:2]):
        return at  # not a cursor of a mix: refused by the check that follows
    position, schedule_version, each, *old = at
    coming = _coming(base, weights, position, schedule_version, old, need, of)
    entries = [entry_of(one, each, coming, of) for one in found]
    if not changed:
        return [position, schedule_version, entries, *old]
    same = [one.old for one in found] == list(range(count))
    if same and need is not None and old and position + need <= old[0][0] > position:
        return [position, schedule_version, entries, *old]  # what comes after the outputs in progress has changed
    if need == 0 and not (old and position < old[0][0]):
        return [0, schedule_version + 1, entries]
    if coming is not None and need is not None and not old and (need == 1 or not of.inside):
        now = {one.old: number for number, one in enumerate(found) if one.old is not None}
        gone = [number for number in coming if number not in now]
        if not gone:
            kept = [[weight, now.get(number, -1)] for number, weight in enumerate(weights)]
            return [position, schedule_version, entries, [position + need, kept]]
        if need == 1:
            raise SourceRemoved
    raise refused(weights, list(base.weights), where)


def refused(before: Any, now: Any, where: str) -> CheckpointMismatchError:
    """Return the error for a mix that was changed while outputs are in progress that cannot be completed."""
    return CheckpointMismatchError(
        f"{where}weights",
        before,
        now,
        "the mix was changed while stages after it had delivered only a part of their results, which would change. "
        "Continue with the previous mix for some steps, or shuffle and batch before mixing",
    )


def _coming(
    base: Mix,
    weights: list[float],
    position: int,
    schedule_version: int,
    old: Sequence[At],
    need: int | None,
    of: LaneContext,
) -> dict[int, int] | None:
    """Return the number of the next outputs from each part, by its saved number, or None if unknown."""
    if not need:
        return None if need is None else {}
    if old and position < old[0][0]:
        if position + need > old[0][0]:
            return None
        mapping = [number for _, number in old[0][1]]
        sources = old_order(old[0], base.seed, of.epoch, of.lane.index, schedule_version).sources(
            position, position + need
        )
        return dict(Counter(mapping[source] for source in sources.tolist()))
    schedule = MixOrder(spans(weights), base.seed, of.epoch, of.lane.index, schedule_version)
    return dict(Counter(schedule.sources(position, position + need).tolist()))


def entry_of(one: Found, each: Sequence[At], coming: dict[int, int] | None, of: LaneContext) -> At:
    """Return the entry of a part in the cursor of the current mix. ``coming``: next outputs by saved number."""
    entry = [0, FIRST, start(one.spec)] if one.old is None else each[one.old]
    if one.old is not None and isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int):
        need = None if coming is None else coming.get(one.old, 0)
        inner = LaneContext(*place_of(entry[0], entry[1], of.epoch, of.lane), inside=True)
        entry = [entry[0], entry[1], one.convert(entry[2], need, inner)]
    return entry


def are_weights(weights: Sequence[Any]) -> bool:
    """Return True for weights of a mix."""
    return any(weights) and all(isinstance(weight, (int, float)) and 0 <= weight < 1e300 for weight in weights)
