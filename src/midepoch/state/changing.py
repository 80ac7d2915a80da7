"""Mixes and schedules that change, at a resume or during a run: sources continue at their positions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.order.schedule import OPEN, Schedule
from midepoch.order.turns import MixOrder, spans
from midepoch.pipeline.cursor import At, Cursor
from midepoch.pipeline.mixed import ENDED, FIRST, old_order, place_of
from midepoch.pipeline.node import Learned, Local, Mix, Node, Slice, StageSpec
from midepoch.pipeline.reach import start, up_to_done
from midepoch.pipeline.scheduled import EVENTS, Setting, is_held, setting
from midepoch.pipeline.spec import PipelineSpec
from midepoch.pipeline.stages import Packing
from midepoch.state.format import unreadable
from midepoch.transforms.packing import PackSpec


def saved_mix(base: Mix, saved: Mapping[str, Any]) -> Mix | None:
    """Return the mix by a schedule that a state describes, as far as its draws depend on it. None if it is damaged."""
    names, text, parts = saved.get("names"), saved.get("schedule"), saved.get("parts")
    if not isinstance(names, list) or not isinstance(text, str) or not isinstance(parts, list):
        return None
    if not names or len(names) != len(parts) or not all(isinstance(name, str) for name in names):
        return None
    try:
        schedule = Schedule.from_dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    if not set(schedule.names) <= set(names):
        return None
    weights = tuple(float(schedule.plan[0].weights.get(name, 0)) for name in names)
    learned = learned_in(saved, len(names))
    return replace(base, names=tuple(names), weights=weights, schedule=schedule, learned=learned)


def learned_in(saved: Mapping[str, Any], parts: int) -> Learned | None:
    """Return the weights that were set during the run from the description of a mix."""
    learned = saved.get("learned")
    if learned is None:
        return None
    match learned:
        case [int(epoch), int(phase), list(weights)] if len(weights) == parts and are_weights(weights):
            return Learned(epoch, phase, tuple(map(float, weights)))
        case _:
            raise unreadable(f"the weights of its mix are {learned!r:.60}")


def learned_with(schedule: Schedule, before: Mix) -> Learned | None:
    """Return the weights that were set during the run, unless a changed schedule has others for their phase."""
    learned = before.learned
    if learned is None or before.schedule is None or learned.phase >= len(schedule.plan):
        return None
    old, new = before.schedule.plan[learned.phase], schedule.plan[learned.phase]
    same = (old.name, old.weights, old.final_weights) == (new.name, new.weights, new.final_weights)
    return learned if same else None


def changed_schedule(
    base: Mix, before: Mix, found: Sequence[Found], at: At, need: int | None, of: LaneContext, where: str
) -> At:
    """Return the cursor of a mix by a previous schedule as one of the current mix.

    Nothing changes if the current draws are the same: then only later phases differ. Otherwise the current weights
    apply from here on, or from the end of the outputs in progress.
    """
    if not _fits(at, len(before.names)):
        return at  # not a cursor of such a mix: refused by the check that follows
    position, number, each, clock, *held = at
    entries = [entry_of(one, each, {} if need == 0 else None, of) for one in found]
    kept = [one.old for one in found] == list(range(len(before.names)))
    if kept and (before.schedule, before.learned) == (base.schedule, base.learned):
        return [position, number, entries, clock, *held]
    old, new = _setting(before, each, at, of), _setting(base, entries, at, of)
    segment = _segment(base, clock, of)
    if held and position < held[0][0]:
        if kept and (need == 0 or (need is not None and position + need <= held[0][0])):
            return [position, number, entries, clock, *held]
        raise refused("the weights before a change", "another change", where)
    if kept and old == new and number >> EVENTS == segment:
        return [position, number, entries, clock]
    if not held and number >> EVENTS != _segment(before, clock, of):  # the next draw begins another segment anyway
        return [0, (segment or 0) << EVENTS, entries, clock]
    if need == 0 or segment is None or old is None:
        events = (number + 1) % (1 << EVENTS)
        return [0, ((segment or 0) << EVENTS) + events, entries, clock]
    inside = need == 1 or (need is not None and old.rows is not None and position + need <= old.rows)
    if kept and inside and need is not None:
        rows = -1 if old.rows is None else old.rows
        return [position, number, entries, clock, [position + need, list(old.weights), rows]]
    raise refused("the schedule", "another schedule", where)


def _setting(mix: Mix, entries: Sequence[At], at: At, of: LaneContext) -> Setting | None:
    assert mix.schedule is not None
    spent = [entry[0] >= (mix.most_passes(number) or ENDED) for number, entry in enumerate(entries)]
    return setting(mix, mix.schedule.segments(mix.names, of.lane), of.epoch, at[3], at[0], spent)


def _segment(mix: Mix, clock: int, of: LaneContext) -> int | None:
    assert mix.schedule is not None
    return mix.schedule.segments(mix.names, of.lane).at(clock)


def _fits(at: At, parts: int) -> bool:
    whole = isinstance(at, list) and len(at) in (4, 5) and isinstance(at[2], list) and len(at[2]) == parts
    return (
        whole
        and all(isinstance(one, int) and 0 <= one < OPEN for one in (at[0], at[1], at[3]))
        and all(isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int) for entry in at[2])
        and (len(at) == 4 or is_held(at[4], parts))
    )


def with_weights(
    spec: PipelineSpec, cursor: Cursor, phase: int, weights: tuple[float, ...]
) -> tuple[PipelineSpec, Cursor]:
    """Return the pipeline with these weights, and the cursor from which they apply, or when outputs in progress end.

    Raises ValueError if outputs in progress cannot be completed with the weights before.
    """
    before = spec.node.base
    assert isinstance(before, Mix)
    mix = replace(before, learned=Learned(cursor.epoch, phase, weights))
    found = [Found(part, number, lambda at, *_: at) for number, part in enumerate(mix.parts)]

    def convert(at: At, need: int | None, of: LaneContext) -> At:
        if mix.schedule is None:
            return changed_mix(mix, found, list(before.current), True, at, need, of, "")
        return changed_schedule(mix, before, found, at, need, of, "")

    node = Node(mix, spec.node.stages)
    new = replace(spec, node=node)
    bundles = spec.bundles_here(shared=False) if cursor.has_done else None
    lanes = {}
    try:
        for number, lane in cursor.lanes.items():
            of, at = LaneContext(cursor.epoch, Shard(number, spec.lanes)), lane.at
            if bundles is not None and lane.done:
                made = up_to_done(spec.node, bundles, Packing(), cursor.epoch, of.lane, lane)
                need = _drawn(spec.node, at, made.at(made.count))
                lanes[number] = replace(lane, at=_with_base(spec.node, at, convert(_base(spec.node, at), need, of)))
            else:
                lanes[number] = replace(lane, at=through(node, at, 0, of, convert))
    except CheckpointMismatchError:
        raise ValueError(
            f"set_weights: steps after the mix ({spec.node.text}) are in the middle of rows that they have drawn with "
            "earlier weights. Call it some steps later, or shuffle and batch the sources before they are mixed."
        ) from None
    return new, cursor._replace(lanes=lanes)


def _drawn(node: Node, now: At, then: At) -> int | None:
    """Return the outputs of the mix that are drawn up to a later cursor, with those of groups in progress there."""
    need: int | None = 0
    for stage in reversed(node.remembering):
        need, then = needed(stage, then[1], need), then[0]
    now = _base(node, now)
    same = now[1] == then[1] and len(now) == len(then)
    return int(then[0] - now[0] + need) if same and need is not None else None


def _base(node: Node, at: At) -> At:
    """Return the cursor of the mix in the cursor of its stages."""
    for _ in node.remembering:
        at = at[0]
    return at


def _with_base(node: Node, at: At, base: At) -> At:
    """Return the cursor of stages with another cursor of the mix."""
    counts = []
    for _ in node.remembering:
        counts.append(at[1])
        at = at[0]
    for count in reversed(counts):
        base = [base, count]
    return base


def phase_at(spec: PipelineSpec, cursor: Cursor) -> int:
    """Return the number of the phase of a schedule at a cursor: that of the lane that is last. 0 without a schedule."""
    mix = spec.node.base
    if not isinstance(mix, Mix) or mix.schedule is None:
        return 0
    found = []
    for number, lane in cursor.lanes.items():
        segments = mix.schedule.segments(mix.names, Shard(number, spec.lanes))
        at = lane.at
        for _ in spec.node.remembering:
            at = at[0]
        segment = segments.at(at[3])
        found.append(segments.phases[-1 if segment is None else segment])
    return min(found, default=0)


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


def through(spec: Node, at: At, need: int | None, of: LaneContext, convert: Convert) -> At:
    """Convert the part of a cursor below the stages of a flow."""
    skips, asked = [], need
    for stage in reversed(spec.remembering):
        if not (isinstance(at, list) and len(at) == 2 and isinstance(at[1], int)):
            return at  # refused by the check that follows
        need = needed(stage, at[1], need)
        skips.append(at[1])
        at = at[0]
    try:
        at = convert(at, need, of)
    except SourceRemoved:
        if asked != 0:
            raise
        at, skips = convert(at, 0, of), [0] * len(skips)
    for skip in reversed(skips):
        at = [at, skip]
    return at


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
