"""Batches, the plan of a loader's options, and the part of a pass that is acknowledged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from midepoch._internal.progress import Timings
from midepoch.loader.options import Options
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.order.schedule import OPEN, Schedule
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes, Share, StepOutputs
from midepoch.pipeline.plans import Plan, StepPlan, TokenPlan
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.format import Leased
from midepoch.transforms.provenance import DocumentTable

Int64Array = npt.NDArray[np.int64]


class PhaseSizes:
    """The size of the next batch from some lanes.

    It follows from the outputs so far, not from the number of steps: every epoch begins with the first phase. Lanes may
    be at different phases, if ranks with leases went at their own pace. Then the first of these phases is completed.
    """

    def __init__(self, schedule: Schedule, lanes: Lanes) -> None:
        self._lanes, self._shards = lanes, lanes.share.shard.count
        groups = lanes.share.lanes.count
        ranks, count = groups * self._shards, groups * len(lanes.numbers)
        self._sizes = [(phase.global_batch_size or 0) // ranks for phase in schedule.plan]
        self._ends = np.array([schedule.lengths(Shard(lane, count))[0] for lane in lanes.numbers], np.int64)
        self._last: tuple[int, int, int, list[bool] | None] = (0, 0, 0, None)

    def next(self) -> tuple[int, int]:
        """Return the size of the next batch, and the outputs of its phase that are left and not done.

        They are counted again only when the batch might be the last of its phase, or another lane has ended: that
        takes a tenth of the time of a batch.
        """
        size, left, total, live = self._last
        now = int(self._lanes.outputs.sum())
        if live == self._lanes.live and (left := left - (now - total)) >= size * self._shards:
            return size, left
        size, left = self._count()
        self._last = size, left, now, list(self._lanes.live)
        return size, left

    def _count(self) -> tuple[int, int]:
        live = np.flatnonzero(self._lanes.live)
        outputs = self._lanes.outputs[live]
        ended = (self._ends[live] <= outputs[:, None]).sum(axis=1)
        for phase in range(int(ended.min(initial=len(self._sizes))), len(self._sizes)):
            ends = self._ends[live, phase]
            if ends[0] >= OPEN:
                return self._sizes[phase], OPEN
            if left := int(np.maximum(ends - outputs, 0).sum()) - self._done(live, outputs, ends):
                return self._sizes[phase], left
        return self._sizes[-1], OPEN

    def _done(self, live: Int64Array, outputs: Int64Array, ends: Int64Array) -> int:
        """Return the number of outputs up to the ends that are done."""
        done = self._lanes.done
        if done is None:
            return 0
        return sum(done[lane].count(*some) for lane, *some in np.stack([live, outputs, ends], axis=1).tolist())


class MadeBatch(NamedTuple):
    """A batch. ``value`` is presented (or collated). ``empty``: it has no row left.

    ``step``: its number in the plan, or the outputs of lanes that it is made of, or the cursor after it.
    """

    value: Any
    step: int | Cursor | StepOutputs
    rows: int = 0
    skipped: int = 0
    empty: bool = False
    timings: Timings | None = None
    """The time that a worker has spent since its last report."""
    traced: DocumentTable | None = None
    """The provenance of the rows without padding, if positions do not give it."""


class BatchSource(Protocol):
    """The batches of one rank from a cursor to the end of the epoch, in order. Used by one thread at a time."""

    def next(self) -> MadeBatch | None:
        """Return the next batch, or None at the end. Raises the errors of making it."""

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""


def make_plan(spec: PipelineSpec, options: Options, cursor: Cursor) -> Plan | TokenPlan:
    """Return the steps of all ranks from a cursor on."""
    if options.planning is None:
        size = options.batch_size if options.sizes is None else options.sizes
        done = spec.undelivered(cursor.epoch, cursor.lane)
        return Plan.of(cursor, spec.rows, size, spec.shard.count, options.last_batch, done)
    excluded = spec.excluded_positions(cursor.epoch)
    return TokenPlan.of(spec.leaf, options.planning, cursor, options.last_batch, excluded)


def batches_of(spec: PipelineSpec, options: Options, outputs: int, first_step: int = 0) -> int:
    """Return the number of batches of a rank in an epoch, given the number of outputs of all ranks.

    ``first_step``: the step of the run at which the epoch begins, for batch sizes that change.
    """
    size = options.batch_size if options.sizes is None else options.sizes
    plan = Plan.of(Cursor.start(0, first_step), outputs, size, spec.shard.count, options.last_batch)
    return plan.share(spec.shard)


Units = Mapping[int, Intervals]
"""Numbers of outputs, by lane."""


class Frontier(NamedTuple):
    """The progress of acknowledgements. ``oldest``: the first step that is not in ``acked``.

    ``at``: the cursor after it or, if ``over`` (nothing is out), that after the step before. ``complete``: the pass has
    no more steps, and nothing is out.
    """

    acked: Intervals
    oldest: int
    at: Any
    over: bool
    complete: bool


class LeasedSteps:
    """The acknowledged part of a pass, in the units of a state: steps of a plan."""

    def __init__(self, plan: StepPlan, start: Cursor, shard: Shard) -> None:
        self._plan, self._start, self._shard = plan, start, shard

    def add(self, steps: Mapping[int, Any], *, recorded: bool) -> Units:
        """Add acknowledged steps, with their places. Return their outputs by lane, or as lane 0 their turns.

        ``recorded``: False if the latter are not needed. Adding a step twice does no harm.
        """
        return {0: self._turns(Intervals.from_positions(steps))} if recorded else {}

    def _turns(self, steps: Intervals) -> Intervals:
        return Intervals.of(self._plan.turns(steps.starts), self._plan.turns(steps.stops))

    def saved(self, frontier: Frontier, *, alone: bool) -> tuple[Cursor, Leased | None]:
        """Return the cursor of a state, and what one of several ranks adds to it. ``alone``: this is the only rank."""
        plan, oldest, later = self._plan, frontier.oldest, frontier.acked.from_(frontier.oldest)
        cursor = plan.cursor(oldest - 1)
        steps = self._start.steps + len(frontier.acked)
        if not alone:
            # At the end there may be one more step, with nothing for this rank.
            (turn,) = plan.turns(np.array([oldest + frontier.complete])).tolist()
            return cursor._replace(steps=steps), Leased(self._shard, turn, self._turns(later))
        if not later:
            return cursor._replace(steps=steps), None
        runs = zip(later.starts.tolist(), later.stops.tolist(), strict=True)
        ahead = EMPTY.union(*(plan.units(first, stop) for first, stop in runs))
        lane = cursor.lane if cursor.begun else plan.first_lane
        lane = replace(lane, ahead=lane.ahead.union(ahead))
        return Cursor.at_row(cursor.epoch, lane, steps, cursor.first), None


class LeasedLanes:
    """The acknowledged part of a pass in lanes: outputs. Its methods are documented on ``LeasedSteps``."""

    def __init__(self, start: Cursor, shard: Shard, share: Share) -> None:
        self._start, self._shard, self._share = start, shard, share
        self._outputs: dict[int, Intervals] = {}

    def add(self, steps: Mapping[int, Any], *, recorded: bool) -> Units:  # noqa: ARG002
        found: dict[int, tuple[list[int], list[int]]] = {}
        for outputs in steps.values():
            assert isinstance(outputs, StepOutputs)
            for lane, first, stop in outputs.own_outputs():
                starts, stops = found.setdefault(lane, ([], []))
                starts.append(first)
                stops.append(stop)
        units = {lane: Intervals.of(*edges) for lane, edges in found.items()}
        for lane, some in units.items():
            while True:  # a signal handler may add some meanwhile
                before = self._outputs.get(lane, EMPTY)
                after = before.union(some)
                if self._outputs.get(lane, EMPTY) is before:
                    self._outputs[lane] = after
                    break
        return units

    def saved(self, frontier: Frontier, *, alone: bool) -> tuple[Cursor, Leased | None]:
        cursor = lane_cursor(frontier)._replace(steps=self._start.steps + len(frontier.acked))
        is_shared = self._share.shard.count > 1
        own = None if alone else Leased(self._shard, outputs=dict(self._outputs) if is_shared else {})
        if is_shared or not cursor.lanes:
            return cursor, own if cursor.lanes else None
        lanes = {
            number: replace(lane, ahead=lane.ahead.union(self._outputs.get(number, EMPTY)).from_(lane.taken))
            for number, lane in cursor.lanes.items()
        }
        return cursor._replace(lanes=lanes), own


Taken = LeasedSteps | LeasedLanes


def lane_cursor(frontier: Frontier) -> Cursor:
    """Return the cursor of lanes before the oldest step that is not acknowledged."""
    at = frontier.at
    if isinstance(at, StepOutputs):
        at = at.cursor() if frontier.over else at.cursor(0)
    assert isinstance(at, Cursor)
    return at
