"""The lanes of a flow, interleaved: the next output is that of the lane with the fewest outputs so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.order.schedule import Schedule
from midepoch.pipeline.chunk import Bunches, Items, Pulled, Puller, at_mark, joined
from midepoch.pipeline.cursor import Cursor, FlowAt, LaneCursor, below
from midepoch.pipeline.leaf import Leaf, is_one_to_one
from midepoch.pipeline.node import Concat, Local, Mix, Node, Slice, Window
from midepoch.pipeline.reach import open_flow, start
from midepoch.pipeline.rows import Bundles
from midepoch.pipeline.stages import Packing
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


def is_endless(node: Node) -> bool:
    """Return True if an epoch has no end: of a mix that is never over, not cut, and has no schedule."""
    if isinstance(node.base, Leaf):
        return False
    if isinstance(node.base, Mix) and node.base.stop == "never" and node.base.schedule is None:
        return not any(isinstance(stage, Slice) and stage.stop is not None for stage in node.stages)
    return any(map(is_endless, node.base.parts))


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


def _estimate(spec: Node, cursors: Sequence[Any], outputs: float, lanes: int) -> float | None:
    """Estimate from the cursors of some of the lanes, which have delivered ``outputs`` so far."""
    part = len(cursors) / lanes
    if spec.stages:
        before = spec.before
        if len(before.remembering) == len(spec.remembering):
            return _estimate(before, cursors, outputs, lanes)
        inner, delivered = [at.before for at in cursors], sum(at.delivered for at in cursors)
        if isinstance(stage := spec.stages[-1], Slice):
            whole = _estimate(before, inner, delivered, lanes)
            return None if whole is None and stage.stop is None else stage.count_of(whole)
        if not isinstance(spec.stages[-1], PackSpec) or spec.stages[-1].strategy != "concat":
            outputs -= delivered  # of groups in progress, whose rows are not counted either
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
        parts = enumerate(base.parts)
        estimates = [_estimate(one, [at.parts[n] for at in cursors], outputs, lanes) for n, one in parts]
        return min((each for each in estimates if each is not None), default=None)
    if base.stop == "never":
        return None if base.schedule is None else base.schedule.plan[-1].outputs
    lengths = []
    active = [(number, one) for number, one in enumerate(base.parts) if base.counts[number]]
    for number, one in active:
        share = base.counts[number] / sum(base.counts)
        entries = [at.parts[number] for at in cursors]
        if any(entry.run for entry in entries):  # iterated at least once: about as often as so far
            runs = sum(entry.run for entry in entries) / len(entries)
            length: float | None = outputs * share / part / max(runs, 1.0)
        else:
            length = _estimate(one, [entry.at for entry in entries], outputs * share, lanes)
        if length is not None:
            lengths.append(length / share)
    if len(lengths) < len(active):
        return None
    return min(lengths) if base.stop == "first" else max(lengths)


def _seen(spec: Node, cursors: Sequence[Any], lanes: int) -> float:
    """Return the number of rows (of a mix: outputs) consumed so far."""
    base, cursors = spec.base, [below(at) for at in cursors]
    if isinstance(base, Leaf):
        return float(sum(at.row for at in cursors))
    if isinstance(base, Mix):
        return float(sum(at.position if at.clock is None else at.clock for at in cursors))
    if isinstance(base, Concat):
        return sum(
            sum(leaf.rows for part in base.parts[: at.number] for leaf in part.leaves) / lanes
            + _seen(base.parts[at.number], [at.at], lanes)
            for at in cursors
        )
    return _seen(base.parts[0], [at.parts[0] for at in cursors], lanes)


Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """The outputs of a process: those of its lanes or, if several processes share them, every ``shard.count``-th."""

    lanes: Shard
    shard: Shard

    @staticmethod
    def of(lanes: int, process: Shard) -> Share:
        """Return the share of a process. If lanes alternate: outputs equal to its index modulo the process count."""
        groups = gcd(lanes, process.count)
        inner = Shard(process.index // groups, process.count // groups)
        return Share(Shard(process.index % groups, groups), inner)


class Lanes:
    """The lanes of one process, from a cursor on."""

    def __init__(
        self, spec: Node, lanes: int, share: Share, bundles: Bundles, cursor: Cursor, *, traced: bool = False
    ) -> None:
        self.share, self._start = share, cursor
        self.packing = Packing(traced=traced)
        self.numbers = share.lanes.positions(0, lanes).tolist()
        fresh = LaneCursor(0, start(spec))
        self._lanes = [cursor.lanes.get(lane, fresh) for lane in self.numbers]
        self.outputs = np.array([lane.taken for lane in self._lanes], dtype=np.int64)
        self.live = [not lane.ended for lane in self._lanes]
        self.done = [lane.done for lane in self._lanes] if any(lane.done for lane in self._lanes) else None
        """For each lane the numbers of outputs that are dropped, or None if there are none."""
        self.spares = any(lane.spared for lane in self._lanes)
        """True if batches by tokens may have excluded rows, which take part in forming them, and no others."""
        self.intakes = [
            Puller(
                open_flow(spec, bundles, self.packing, cursor.epoch, Shard(number, lanes), lane.at, lane.spared),
                lane.at,
            )
            for number, lane in zip(self.numbers, self._lanes, strict=True)
        ]

    def take(self, count: int, most: int | None = None) -> StepOutputs | None:
        """Return the next ``count`` outputs of this process, fewer at the end, or None if no process has any left.

        Outputs of the same lanes for other processes are computed, too, and discarded, as are those that are done.
        ``most``: the limit for all of these processes together.
        """
        wanted, before, kept = count * self.share.shard.count, self.outputs.copy(), 0
        wanted = wanted if most is None else min(wanted, most)
        taken: list[tuple[int, Pulled]] = []
        while wanted and any(self.live):
            for lane, quota in self._deal(wanted):
                pulled = self.intakes[lane].take(quota)
                if pulled.count < quota:
                    self.live[lane] = False
                if pulled.count:
                    taken.append((lane, pulled))
                first = int(self.outputs[lane])
                dropped = 0 if self.done is None else self.done[lane].count(first, first + pulled.count)
                self.outputs[lane] += pulled.count
                wanted -= pulled.count - dropped
                kept += pulled.count - dropped
        return StepOutputs(self, self._start, before, taken) if kept else None

    def skip_done(self) -> None:
        """Take and drop outputs that are done, up to the next one that is not."""
        while self.done is not None and any(self.live):
            live = np.flatnonzero(self.live)
            lane = int(live[np.argmin(self.outputs[live])])
            first = int(self.outputs[lane])
            if (count := self.done[lane].after(first) - first) < 1:
                break
            pulled = self.intakes[lane].take(count if len(live) == 1 else 1)
            self.live[lane] = pulled.count > 0
            self.outputs[lane] += pulled.count

    def lane(self, place: int, outputs: int, at: FlowAt, *, ended: bool) -> LaneCursor:
        """Return the cursor of a lane after a number of outputs. ``place``: its place among those of this process."""
        return self._lanes[place].moved(outputs, at, ended=ended)

    def cursor(self) -> Cursor:
        """Return the cursor after all outputs that were taken."""
        after = zip(self.numbers, self.outputs.tolist(), self.intakes, self.live, strict=True)
        return Cursor(
            self._start.epoch,
            {
                number: self.lane(place, outputs, intake.cursor, ended=not live)
                for place, (number, outputs, intake, live) in enumerate(after)
            },
            self._start.steps,
            self._start.first,
        )

    def _deal(self, count: int) -> list[tuple[int, int]]:
        """Return the number of the next outputs from each lane that has not ended, if all of them have enough."""
        if len(self.live) == 1:
            return [(0, count)]
        live = np.flatnonzero(self.live)
        had = self.outputs[live]
        order = np.argsort(had, kind="stable")  # lanes are in order: of equals the first comes first
        rising = had[order]
        # Fill the lanes with the fewest outputs first, like water, up to ``level`` outputs each.
        needed = rising * np.arange(1, len(rising) + 1) - np.cumsum(rising)
        filled = int(np.searchsorted(needed, count, side="right"))
        level, over = divmod(count + int(rising[:filled].sum()), filled)
        quotas = np.zeros(len(live), dtype=np.int64)
        quotas[order[:filled]] = level - rising[:filled]
        quotas[np.sort(order[:filled])[:over]] += 1
        return [(int(lane), int(quota)) for lane, quota in zip(live, quotas, strict=True) if quota]


class StepOutputs:
    """Outputs that were taken from the lanes together, and the cursor after each of them."""

    def __init__(self, lanes: Lanes, start: Cursor, before: Int64Array, taken: list[tuple[int, Pulled]]) -> None:
        self._start, self._before, self._taken = start, before, taken
        self.steps = 0
        """Steps since the run began, up to these outputs."""
        self._share, self._numbers, self._live, self._lane = lanes.share, lanes.numbers, list(lanes.live), lanes.lane
        self.marks = [intake.mark() for intake in lanes.intakes]
        """Where each lane is after all of the outputs: a cursor, or a chunk and how many of its outputs come before."""
        self.after = lanes.outputs.tolist()
        """The outputs of each lane after them."""
        self._done = lanes.done
        self.total = sum(some.count for _, some in taken) if lanes.done is None else len(self._kept)
        """Outputs of all processes that share these lanes, without those that are dropped."""

    @property
    def ended(self) -> bool:
        """True if nothing is left in the lanes after them, as far as it is known."""
        return not any(self._live)

    @cached_property
    def _lane_of(self) -> Int64Array:
        """The lane of each output, in the order of delivery."""
        lanes = np.concatenate([np.full(some.count, lane) for lane, some in self._taken])
        return lanes if self._order is None else lanes[self._order]

    @cached_property
    def _order(self) -> Int64Array | None:
        """The order of delivery, or None if it is the order in which they were taken."""
        if len({lane for lane, _ in self._taken}) == 1:
            return None
        lanes = [np.full(some.count, lane) for lane, some in self._taken]
        return np.lexsort((np.concatenate(lanes), np.concatenate(self._numbers_taken())))

    def _numbers_taken(self) -> list[Int64Array]:
        """Return the numbers of the outputs in their lanes, in the order in which they were taken."""
        had, numbers = self._before.tolist(), []
        for lane, some in self._taken:
            numbers.append(np.arange(had[lane], had[lane] + some.count))
            had[lane] += some.count
        return numbers

    @cached_property
    def _kept(self) -> Int64Array:
        """Places of the outputs that are not dropped, in the order of delivery."""
        assert self._done is not None
        taken = zip(self._taken, self._numbers_taken(), strict=True)
        kept = ~np.concatenate([self._done[lane].contains(numbers) for (lane, _), numbers in taken])
        return np.flatnonzero(kept if self._order is None else kept[self._order])

    @property
    def row_count(self) -> int:
        """The rows of all processes that share these lanes, without those of dropped outputs."""
        items = joined([pulled.items() for _, pulled in self._taken])
        if self._done is not None:
            items = items.keep(self._kept if self._order is None else self._order[self._kept])
        return items.row_count if isinstance(items, Bunches) else len(items)

    @property
    def some(self) -> Items:
        """Return the first of the outputs of all processes that share these lanes."""
        if self._done is None:
            return self._taken[0][1].items().slice(0, 1)
        first = self._kept[:1]
        return joined([pulled.items() for _, pulled in self._taken]).keep(
            first if self._order is None else self._order[first]
        )

    @cached_property
    def items(self) -> Items:
        """Return the outputs of this process, possibly none."""
        items = joined([pulled.items() for _, pulled in self._taken])
        shard, order = self._share.shard, self._order
        if self._done is not None:
            order = self._kept if order is None else order[self._kept]
        if shard.count > 1:
            own = np.arange(shard.index, self.total, shard.count)
            order = own if order is None else order[own]
        return items if order is None else items.keep(order)

    def own_outputs(self) -> list[tuple[int, int, int]]:
        """Return the outputs of this process as ranges: a lane, its first output, and the one after the last."""
        if self._done is None and self._share.shard.count == 1:
            counts: dict[int, int] = {}
            for lane, some in self._taken:
                counts[lane] = counts.get(lane, 0) + some.count
            had = self._before.tolist()
            return [(self._numbers[lane], had[lane], had[lane] + count) for lane, count in counts.items()]
        numbers = np.concatenate(self._numbers_taken())
        numbers = numbers if self._order is None else numbers[self._order]
        lanes, shard = self._lane_of, self._share.shard
        if self._done is not None:
            numbers, lanes = numbers[self._kept], lanes[self._kept]
        numbers, lanes = numbers[shard.index :: shard.count], lanes[shard.index :: shard.count]
        return [(self._numbers[a], b, b + 1) for a, b in zip(lanes.tolist(), numbers.tolist(), strict=True)]

    def cursor(self, own: int | None = None) -> Cursor:
        """Return the cursor after the first ``own`` outputs of this process, or after all.

        If processes share the lanes, it includes the outputs of the others up to the same turn, and is equal on all of
        them.
        """
        count = self.total if own is None else min(self.total, own * self._share.shard.count)
        complete = count == self.total
        if self._done is not None and not complete:  # with those that are dropped before the last of them
            count = int(self._kept[count - 1]) + 1 if count else 0
        elif self._done is not None:
            count = len(self._lane_of)
        taken = np.bincount(self._lane_of[:count], minlength=len(self._before)).tolist()
        cursors = {}
        for lane, number in enumerate(self._numbers):
            pulls, left = [pulled for at, pulled in self._taken if at == lane], taken[lane]
            cursor = pulls[0].at(0) if pulls else at_mark(self.marks[lane])
            for pulled in pulls:
                if left:
                    cursor, left = pulled.at(min(left, pulled.count)), max(0, left - pulled.count)
            outputs = int(self._before[lane]) + taken[lane]
            ended = not self._live[lane] and taken[lane] == sum(pulled.count for pulled in pulls)
            cursors[number] = self._lane(lane, outputs, cursor, ended=ended)
        steps = self.steps if complete else max(0, self.steps - 1)
        return Cursor(self._start.epoch, cursors, steps, self._start.first)
