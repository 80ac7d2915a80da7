"""Weights of a mix that are set during a run, at a cursor."""

from __future__ import annotations

from dataclasses import replace

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.pipeline.cursor import At, Cursor
from midepoch.pipeline.node import Learned, Mix, Node
from midepoch.pipeline.reach import up_to_done
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.changing import Found, LaneContext, changed_mix, needed
from midepoch.state.matching import through
from midepoch.state.rescheduled import changed_schedule


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
                made = up_to_done(spec.node, bundles, cursor.epoch, of.lane, lane)
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
