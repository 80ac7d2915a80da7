"""Mixes and schedules that change, at a resume or during a run: sources continue at their positions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.order.schedule import Schedule
from midepoch.order.turns import MixOrder, spans
from midepoch.pipeline.cursor import Cursor, FlowAt, HeldWeights, LaneCursor, MixAt, PartAt, StageAt, are_weights, below
from midepoch.pipeline.mixed import ENDED, place_of
from midepoch.pipeline.node import Learned, Local, Mix, Node, Slice, StageSpec
from midepoch.pipeline.reach import start, up_to_done
from midepoch.pipeline.scheduled import Setting, setting
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
    base: Mix, before: Mix, found: Sequence[Found], at: FlowAt, need: int | None, of: LaneContext, where: str
) -> FlowAt:
    """Return the cursor of a mix by a previous schedule as one of the current mix.

    Nothing changes if the current draws are the same: then only later phases differ. Otherwise the current weights
    apply from here on, or from the end of the outputs in progress.
    """
    if not isinstance(at, MixAt) or at.clock is None or len(at.parts) != len(before.names):
        return at  # not a cursor of such a mix: refused by the check that follows
    same = replace(at, parts=tuple(entry_of(one, at.parts, {} if need == 0 else None, of) for one in found))
    kept, position, held = [one.old for one in found] == list(range(len(before.names))), at.position, at.held
    if kept and (before.schedule, before.learned) == (base.schedule, base.learned):
        return same
    _check_past_phases(before, base, at.clock, of, where)
    old, new = _setting(before, at, of), _setting(base, same, of)
    segment = _segment(base, at.clock, of)
    if held is not None and position < held.until:
        if kept and (need == 0 or (need is not None and position + need <= held.until)):
            return same
        raise refused("the weights before a change", "another change", where)
    if kept and old == new and at.segment == segment:
        return replace(same, held=None)
    fresh = replace(same, position=0, change=0, segment=segment or 0, held=None)
    if held is None and at.segment != _segment(before, at.clock, of):  # the next draw begins another segment anyway
        return fresh
    if need == 0 or segment is None or old is None:
        return replace(fresh, change=at.change + 1)
    inside = need == 1 or (need is not None and old.rows is not None and position + need <= old.rows)
    if kept and inside and need is not None:
        return replace(same, held=HeldWeights(position + need, old.weights, (), -1 if old.rows is None else old.rows))
    raise refused("the schedule", "another schedule", where)


def _check_past_phases(before: Mix, now: Mix, clock: int, of: LaneContext, where: str) -> None:
    """Raise CheckpointMismatchError if phases before a position end elsewhere, or had other sequences or batches."""
    assert before.schedule is not None
    assert now.schedule is not None
    segments, segment = before.schedule.segments(before.names, of.lane), _segment(before, clock, of)
    past = len(before.schedule.plan) - 1 if segment is None else segments.phases[segment]
    for number, old in enumerate(before.schedule.plan[:past]):
        new = now.schedule.plan[number] if number < len(now.schedule.plan) else None
        shape = None if new is None else (new.stop, new.sequence_length, new.global_batch_size)
        if shape != (old.stop, old.sequence_length, old.global_batch_size):
            raise CheckpointMismatchError(
                f"{where}schedule",
                f"phase {old.name!r} up to {old.stop:,}",
                "no such phase" if new is None else f"phase {new.name!r} up to {new.stop:,}",
                "the length, sequence length and batch size of phases that are over cannot change. Change the phase in "
                "progress, or later ones",
            )


def _setting(mix: Mix, at: MixAt, of: LaneContext) -> Setting | None:
    assert mix.schedule is not None
    spent = [part.run >= (mix.most_passes(number) or ENDED) for number, part in enumerate(at.parts)]
    return setting(mix, mix.schedule.segments(mix.names, of.lane), of.epoch, at.clock or 0, at.position, spent)


def _segment(mix: Mix, clock: int, of: LaneContext) -> int | None:
    assert mix.schedule is not None
    return mix.schedule.segments(mix.names, of.lane).at(clock)


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

    def convert(at: FlowAt, need: int | None, of: LaneContext) -> FlowAt:
        if mix.schedule is None:
            return changed_mix(mix, found, list(before.current), True, at, need, of, "")
        return changed_schedule(mix, before, found, at, need, of, "")

    node = Node(mix, spec.node.stages)
    new = replace(spec, node=node)

    def after(lane: LaneCursor, of: LaneContext) -> FlowAt:
        if not lane.done:
            with suppress(CheckpointMismatchError):  # as after a filter, which draws any number for a window: count it
                return through(node, lane.at, 0, of, convert)
        bundles = spec.bundles_here(shared=False)
        made = up_to_done(spec.node, bundles, Packing(), of.epoch, of.lane, lane, None if lane.done else ())
        need = _drawn(spec.node, lane.at, made.at(made.count))
        return with_below(lane.at, convert(below(lane.at), need, of))

    lanes = {}
    try:
        for number, lane in cursor.lanes.items():
            of = LaneContext(cursor.epoch, Shard(number, spec.lanes))
            lanes[number] = replace(lane, at=after(lane, of))
    except CheckpointMismatchError:
        raise ValueError(
            f"set_weights: rows that the mix ({spec.node.text}) has drawn with earlier weights are not used up: by "
            "steps after the mix, or by leases that were acknowledged ahead, up to another phase. Call it some steps "
            "later, or shuffle and batch the sources before they are mixed."
        ) from None
    return new, cursor._replace(lanes=lanes)


def _drawn(node: Node, now: FlowAt, then: FlowAt) -> int | None:
    """Return the outputs of the mix that are drawn up to a later cursor, with those of groups in progress there."""
    need: int | None = 0
    for stage in reversed(node.remembering):
        assert isinstance(then, StageAt)
        need, then = needed(stage, then.delivered, need), then.before
    first, last = below(now), then
    assert isinstance(first, MixAt)
    assert isinstance(last, MixAt)
    same = (first.segment, first.change, first.held is None) == (last.segment, last.change, last.held is None)
    return last.position - first.position + need if same and need is not None else None


def with_below(at: FlowAt, base: FlowAt) -> FlowAt:
    """Return the cursor of stages with another cursor below them."""
    return replace(at, before=with_below(at.before, base)) if isinstance(at, StageAt) else base


def phase_at(spec: PipelineSpec, cursor: Cursor) -> int:
    """Return the number of the phase of a schedule at a cursor: that of the lane that is last. 0 without a schedule."""
    mix = spec.node.base
    if not isinstance(mix, Mix) or mix.schedule is None:
        return 0
    found = []
    for number, lane in cursor.lanes.items():
        segments = mix.schedule.segments(mix.names, Shard(number, spec.lanes))
        segment = segments.at(below(lane.at).clock)
        found.append(segments.phases[-1 if segment is None else segment])
    return min(found, default=0)


@dataclass(frozen=True)
class LaneContext:
    """The epoch and the lane of a cursor. ``inside``: the flow is a part of another."""

    epoch: int
    lane: Shard
    inside: bool = False


Convert = Callable[[FlowAt, int | None, LaneContext], FlowAt]
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


def through(spec: Node, at: FlowAt, need: int | None, of: LaneContext, convert: Convert) -> FlowAt:
    """Convert the part of a cursor below the stages of a flow."""
    base, asked = at, need
    for stage in reversed(spec.remembering):
        if not isinstance(base, StageAt):
            return at  # refused by the check that follows
        need, base = needed(stage, base.delivered, need), base.before
    try:
        return with_below(at, convert(base, need, of))
    except SourceRemoved:
        if asked != 0:
            raise
        return with_below(_undelivered(at), convert(base, 0, of))


def _undelivered(at: FlowAt) -> FlowAt:
    """Return the cursor of stages at the beginnings of their groups."""
    return replace(at, before=_undelivered(at.before), delivered=0) if isinstance(at, StageAt) else at


def needed(stage: StageSpec, skip: int, need: int | None) -> int | None:
    """Return the number of outputs before a stage that must stay the same, so that ``need`` of its own do."""
    if isinstance(stage, Slice):
        return need
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
    at: FlowAt,
    need: int | None,
    of: LaneContext,
    where: str,
) -> FlowAt:
    """Return the cursor of a mix with previous weights as one of the current mix."""
    count = len(weights) if isinstance(weights, list) and are_weights(weights) else -1
    if not isinstance(at, MixAt) or len(at.parts) != count:
        return at  # not a cursor of a mix: refused by the check that follows
    position, held = at.position, at.held
    coming = _coming(base, weights, at, need, of)
    same = replace(at, parts=tuple(entry_of(one, at.parts, coming, of) for one in found))
    if not changed:
        return same
    kept = [one.old for one in found] == list(range(count))
    if kept and need is not None and held is not None and position + need <= held.until > position:
        return same  # what comes after the outputs in progress has changed
    if need == 0 and not (held is not None and position < held.until):
        return replace(same, position=0, change=at.change + 1, held=None)
    if coming is not None and need is not None and held is None and (need == 1 or not of.inside):
        now = {one.old: number for number, one in enumerate(found) if one.old is not None}
        gone = [number for number in coming if number not in now]
        if not gone:
            numbers = tuple(now.get(number, -1) for number in range(count))
            return replace(same, held=HeldWeights(position + need, tuple(weights), numbers))
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


def _coming(base: Mix, weights: list[float], at: MixAt, need: int | None, of: LaneContext) -> dict[int, int] | None:
    """Return the number of the next outputs from each part, by its saved number, or None if unknown."""
    if not need:
        return None if need is None else {}
    held = at.held if at.held is not None and at.position < at.held.until else None
    if held is not None and at.position + need > held.until:
        return None
    counts = spans(weights if held is None else held.weights)
    order = MixOrder(counts, base.seed, of.epoch, of.lane.index, at.change)
    sources = order.sources(at.position, at.position + need).tolist()
    return dict(Counter(sources if held is None else (held.parts[source] for source in sources)))


def entry_of(one: Found, parts: Sequence[PartAt], coming: dict[int, int] | None, of: LaneContext) -> PartAt:
    """Return the cursor of a part of the current mix. ``coming``: next outputs by saved number."""
    if one.old is None:
        return PartAt(at=start(one.spec))
    part, need = parts[one.old], None if coming is None else coming.get(one.old, 0)
    inner = LaneContext(*place_of(part.run, part.stage, of.epoch, of.lane), inside=True)
    return replace(part, at=one.convert(part.at, need, inner))
