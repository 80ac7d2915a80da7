"""The number of outputs of an epoch: computed, or estimated from the progress of the lanes."""

from __future__ import annotations

from collections.abc import Sequence

from midepoch.order.schedule import Schedule
from midepoch.pipeline.cursor import At, Cursor
from midepoch.pipeline.leaf import Leaf, is_one_to_one
from midepoch.pipeline.node import Concat, Mix, Node
from midepoch.pipeline.stage_specs import DELIVERED_BITS, Local, Slice, Window
from midepoch.transforms.packing import PackSpec


def known_length(node: Node) -> int | None:
    """Return the number of outputs of an epoch, or None if it cannot be computed."""
    if node.stages:
        if isinstance(node.stages[-1], PackSpec) and node.stages[-1].schedule is not None:
            return _scheduled_length(node, node.stages[-1].schedule)
        stage, before = node.stages[-1], known_length(node.before)
        if before is None or isinstance(stage, Window):
            return before
        if isinstance(stage, Slice):
            return stage.count_of(before)
        skips = isinstance(stage, Local) and any(getattr(step, "on_error", "raise") == "skip" for step in stage.steps)
        return before if isinstance(stage, Local) and all(map(is_one_to_one, stage.steps)) and not skips else None
    base = node.base
    if isinstance(base, Leaf):
        return base.rows if base.one_to_one and not base.can_skip else None
    if isinstance(base, Mix) and base.schedule is not None:
        return _scheduled_length(node, base.schedule) if base.schedule.unit == "rows" else None
    parts = [known_length(part) for part in base.parts]
    if isinstance(base, Mix) or None in parts:
        return None
    counts = [part for part in parts if part is not None]
    return sum(counts) if isinstance(base, Concat) else min(counts)


def _scheduled_length(node: Node, schedule: Schedule) -> int | None:
    """Return the outputs of all phases, or None if a phase has no end, or sources may have all of their passes."""
    return None if schedule.max_passes or not node.follows_schedule else schedule.plan[-1].outputs


def estimated_length(spec: Node, cursor: Cursor, lanes: int) -> float | None:
    """Estimate the outputs of an epoch by those so far. Return None if there are none yet, or if it never ends."""
    if (known := known_length(spec)) is not None:
        return known
    if not cursor.lanes:
        return None
    cursors, outputs = [lane.at for lane in cursor.lanes.values()], cursor.position
    if cursor.lanes_ended:
        return outputs * lanes / len(cursors)
    return _estimate(spec, cursors, outputs, lanes)


def _estimate(spec: Node, cursors: Sequence[At], outputs: float, lanes: int) -> float | None:
    """Estimate from the cursors of some of the lanes, which have delivered ``outputs`` so far."""
    part = len(cursors) / lanes
    if spec.stages:
        before = spec.before
        if len(before.remembering) == len(spec.remembering):
            return _estimate(before, cursors, outputs, lanes)
        inner = [at[0] for at in cursors]
        if isinstance(stage := spec.stages[-1], Slice):
            whole = _estimate(before, inner, sum(at[1] for at in cursors), lanes)
            return None if whole is None and stage.stop is None else stage.count_of(whole)
        if not isinstance(spec.stages[-1], PackSpec) or spec.stages[-1].strategy != "concat":
            # Of groups in progress, whose rows are not counted either.
            outputs -= sum(at[1] % (1 << DELIVERED_BITS) for at in cursors)
        seen = _seen(before, inner, lanes)
        whole = _estimate(before, inner, seen, lanes) if not isinstance(before.base, Leaf) else before.base.rows
        return whole * outputs / seen if seen and whole is not None else None
    base = spec.base
    if isinstance(base, Leaf):
        seen = _seen(spec, cursors, lanes)
        return base.rows * outputs / seen if seen else None
    if isinstance(base, Concat):
        total, seen = sum(leaf.rows for leaf in spec.leaves), _seen(spec, cursors, lanes)
        return total * outputs / seen if seen else None
    if not isinstance(base, Mix):
        estimates = [_estimate(one, [at[n] for at in cursors], outputs, lanes) for n, one in enumerate(base.parts)]
        return min((each for each in estimates if each is not None), default=None)
    if base.stop == "never":
        return None if base.schedule is None else base.schedule.plan[-1].outputs
    lengths = []
    active = [(number, one) for number, one in enumerate(base.parts) if base.counts[number]]
    for number, one in active:
        share = base.counts[number] / sum(base.counts)
        entries = [at[2][number] for at in cursors]
        if any(entry[0] for entry in entries):  # iterated at least once: about as often as so far
            runs = sum(entry[0] for entry in entries) / len(entries)
            length: float | None = outputs * share / part / max(runs, 1.0)
        else:
            length = _estimate(one, [entry[2] for entry in entries], outputs * share, lanes)
        if length is not None:
            lengths.append(length / share)
    if len(lengths) < len(active):
        return None
    return min(lengths) if base.stop == "first" else max(lengths)


def _seen(spec: Node, cursors: Sequence[At], lanes: int) -> float:
    """Return the number of rows (of a mix: outputs) consumed so far."""
    for _ in spec.remembering:
        cursors = [at[0] for at in cursors]
    base = spec.base
    if isinstance(base, Leaf):
        return float(sum(at[0] for at in cursors))
    if isinstance(base, Mix):
        return float(sum(at[0] if base.schedule is None else at[3] for at in cursors))
    if isinstance(base, Concat):
        return sum(
            sum(leaf.rows for part in base.parts[: at[0]] for leaf in part.leaves) / lanes
            + _seen(base.parts[at[0]], [at[1]], lanes)
            for at in cursors
        )
    return _seen(base.parts[0], [at[0] for at in cursors], lanes)
