"""Plans: the steps of all ranks from a cursor on, where positions can be computed.

A *plan* numbers its steps from 0. It counts the units that are left to deliver: with batches of 4 rows on one rank, and
positions 2 to 5 excluded, step 0 has the positions 0, 1, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.progress import shown
from midepoch.errors import WorldError
from midepoch.order import Shard, epoch_end
from midepoch.order.budget import BatchSizes, dealt
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.planned import PlannedEpoch, Planning, window_at

Int64Array = npt.NDArray[np.int64]

UNKNOWN = 2**62
"""The end of an epoch that is not known before it is reached."""
_SHOWN_ROWS = 10_000_000
"""Rows of an epoch from which on counting its batches takes seconds."""
_COUNTED_ROWS = 1_000_000
"""Rows up to which the batches are counted when a pass begins, to know its last step: 0.3 s. For more rows, an error
about it comes with that step.
"""


class PlanStep(NamedTuple):
    """A step of a plan that is delivered."""

    plan: StepPlan
    step: int

    def cursor(self) -> Cursor:
        """Return the cursor after it."""
        return self.plan.cursor(self.step)


Delivered = Cursor | PlanStep | StepOutputs
"""A cursor, or a step after which it is computed when it is needed."""


def resolved(delivered: Delivered) -> Cursor:
    """Return a cursor, computed if necessary."""
    return delivered if isinstance(delivered, Cursor) else delivered.cursor()


class Asked(NamedTuple):
    """Positions of the rows of several steps. Step i has those from ``ends[i]`` to ``ends[i + 1]``.

    ``genuine``: number of positions before the padding, or None if nothing is padded. ``rows``: at the positions, if
    they are known already.
    """

    positions: Int64Array
    ends: list[int]
    genuine: int | None
    rows: Int64Array | None = None


@dataclass(frozen=True)
class Plan:
    """Global batches of rows. Its numbers ``start`` and ``end`` count the positions that remain, without ``done``.

    Of every step, the first position goes to rank 0, the second to rank 1. So the rest of an epoch is dealt in the same
    way by a plan that begins at any of its steps, also if rows before it were excluded: a rank that has nothing left in
    one plan has nothing left in the other. For that, ``start`` is a multiple of the ranks, and positions before the
    first that is delivered count as done.

    ``lane``: the cursor at which it begins. ``first_step``: steps of the run before it. ``padded``: the last batch is
    as large as the others, with padding after the end of the epoch. ``sizes``: the global batch sizes by step, if they
    change. Methods that return positions or cursors return those of the epoch.
    """

    epoch: int
    lane: LaneCursor
    first_step: int
    start: int
    end: int
    global_batch: int
    padded: bool = False
    sizes: BatchSizes | None = None
    done: Intervals = EMPTY
    epoch_steps: int = 0
    """Steps of the run before the epoch."""

    @staticmethod
    def of(
        cursor: Cursor, rows: int, size: int | BatchSizes, ranks: int, last_batch: str | None, done: Intervals = EMPTY
    ) -> Plan:
        """Return the plan of ``rows`` rows from a cursor on, in batches of ``size`` for each rank."""
        start, left, done = done.left(cursor.lane.taken, rows)
        if aside := start % ranks:
            start, left, done = start - aside, left - aside, Intervals.of(start - aside, start).union(done)
        begin, ends = (cursor.epoch, cursor.lane, cursor.steps, start), last_batch == "pad"
        if isinstance(size, int):
            batch = size * ranks
            end = epoch_end(start, left, batch, last_batch == "drop")
            return Plan(*begin, end, batch, ends, None, done, cursor.first)
        sizes = BatchSizes(size.steps, tuple(one * ranks for one in size.sizes))
        plan = Plan(*begin, left, sizes.at(cursor.steps), ends, sizes, done, cursor.first)
        if last_batch != "drop" or plan._first(len(plan)) == left:
            return plan
        return replace(plan, end=plan._first(max(0, len(plan) - 1)))

    @property
    def rows(self) -> int:
        return self.done.remaining(self.end)

    @property
    def first_lane(self) -> LaneCursor:
        """The cursor of its only lane at the start."""
        return self.lane

    def __len__(self) -> int:
        if self.end <= self.start:
            return 0
        if self.sizes is None:
            return -(-(self.end - self.start) // self.global_batch)
        stop = self.sizes.before(self.first_step) + self.end - self.start
        steps = self.sizes.step_at(stop)
        return steps + (self.sizes.before(steps) < stop) - self.first_step

    def count_known(self) -> bool:
        """Return True if the number of steps is known without work."""
        return True

    def _first(self, step: int) -> int:
        """Return the number at which a step begins, also after the end of the epoch."""
        if self.sizes is None:
            return self.start + step * self.global_batch
        return self.start + self.sizes.before(self.first_step + step) - self.sizes.before(self.first_step)

    def has(self, step: int) -> bool:
        """Return True if there is such a step, for some rank."""
        return self._first(step) < self.end

    def has_for(self, step: int, shard: Shard) -> bool:
        """Return True if there is such a step, with a batch for this rank."""
        return self.has(step) and bool(len(shard.positions(self._first(step), self._reach(step))))

    def _bounds(self, step: int) -> tuple[int, int]:
        return self._first(step), min(self._first(step + 1), self.end)

    def cursor(self, step: int) -> Cursor:
        """Return the cursor after a step. Step -1 is before the first."""
        return self._cursor(step + 1) if step >= 0 else self._cursor_at(self.lane, 0)

    def _cursor(self, steps: int) -> Cursor:
        """Return the cursor after a number of steps, and after the positions that follow them and are done."""
        position = self.done.remaining(min(self._first(steps), self.end))
        return self._cursor_at(self.lane.moved(position), steps)

    def _cursor_at(self, lane: LaneCursor, steps: int) -> Cursor:
        return Cursor.at_row(self.epoch, lane, self.first_step + steps, self.epoch_steps)

    @property
    def end_cursor(self) -> Cursor:
        """The cursor after the last step."""
        return self._cursor(len(self))

    def _reach(self, step: int) -> int:
        """Return the number at which a batch ends, including its padding."""
        return self._first(step + 1) if self.padded else self._bounds(step)[1]

    def share(self, shard: Shard) -> int:
        """Return the number of batches of one rank: all, unless the last one has no row for it."""
        steps = len(self)
        return steps - (steps > 0 and not self.has_for(steps - 1, shard))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        """Return the positions of a rank for several steps, which ascend by the same number."""
        if len(steps) == 1 or steps[1] == steps[0] + 1:
            begin = self._first(steps[0])
            numbers, before = shard.positions(begin, self._reach(steps[-1])), shard.before(begin)
            ends = [0, *(shard.before(self._reach(each)) - before for each in steps)]
        else:
            parts = [shard.positions(self._first(each), self._reach(each)) for each in steps]
            numbers, ends = np.concatenate(parts), np.cumsum([0, *map(len, parts)]).tolist()
        if not self.padded:
            return Asked(self.done.remaining(numbers) if self.done else numbers, ends, None)
        if not self.done:
            return Asked(numbers % self.end, ends, int(np.searchsorted(numbers, self.end)))
        positions, padding = self.done.remaining(numbers), numbers >= self.end
        positions[padding] = (numbers[padding] - self.end) % self.rows  # the same as after a resume
        return Asked(positions, ends, int(np.searchsorted(numbers, self.end)))

    @property
    def padding(self) -> int:
        """Rows by which the last batch is filled."""
        return self._reach(len(self) - 1) - self.end if len(self) else 0

    def batch_rows(self, shard: Shard) -> int:
        """Return the approximate number of rows of a batch of a rank."""
        return -(-self.global_batch // shard.count)

    def first_position(self, step: int) -> int:
        """Return a position such that all rows of this and later steps are after it."""
        return self.done.remaining(self._first(step))

    def place(self, step: int) -> str:
        """Return where the rows of a step are, in words."""
        first, stop = self._bounds(step)
        return f"positions {self.done.remaining(first):,} to {self.done.remaining(stop - 1):,}"

    def turns(self, steps: Int64Array) -> Int64Array:
        """Return the units of all ranks before each step, of those that are left to deliver."""
        if self.sizes is None:
            return np.minimum(self.start + steps * self.global_batch, self.end)
        return np.array([min(self._first(step), self.end) for step in steps.tolist()], dtype=np.int64)

    def units(self, first: int, stop: int) -> Intervals:
        """Return the units of all ranks in steps ``first`` to ``stop``."""
        low, high = self._first(first), min(self._first(stop), self.end)
        if high <= low:
            return EMPTY
        return Intervals.of(self.done.remaining(low), self.done.remaining(high - 1) + 1).minus(self.done)

    def known(self, rows: int) -> int:  # noqa: ARG002
        """Return the unit at the end, if it is known or can be counted by at most so many rows, else UNKNOWN."""
        return self.rows

    def rows_before(self, units: int) -> int:
        """Return the rows of the epoch before a unit."""
        return units

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last step has no row, as far as it is known."""
        return 0 if self.padded or not len(self) else max(0, ranks - (self.end - self._bounds(len(self) - 1)[0]))


class TokenPlan:
    """Batches by a budget of tokens: step g of S ranks has the batches g·S to (g+1)·S that remain of the epoch.

    The last step may have fewer batches than ranks. ``last_batch`` decides: "drop" omits it, "pad" gives marked copies
    to the other ranks, "uneven" nothing. None deals its rows to all ranks, in smaller batches.

    ``begin``: its cursor. ``typical``: rows of a batch. Batches that are done are not delivered: private methods count
    those that remain. Public ones are documented on ``Plan``.
    """

    def __init__(
        self, batches: PlannedEpoch, cursor: Cursor, rows: int, ranks: int, last_batch: str | None, typical: int = 1
    ) -> None:
        self.epoch, self._ranks, self._last_batch = cursor.epoch, ranks, last_batch
        self.rows, self.begin, self.batches, self._typical = rows, cursor, batches, typical
        self._start = cursor.lane.done.after(cursor.lane.taken)
        self.done = cursor.lane.done.from_(self._start)
        self._lane = replace(cursor.lane, at=window_at(cursor.lane))

    @staticmethod
    def of(leaf: Leaf, planning: Planning, cursor: Cursor, last_batch: str | None, excluded: Intervals) -> TokenPlan:
        """Return the plan of a leaf from a cursor on. ``excluded``: positions of excluded rows."""
        at = window_at(cursor.lane)
        batches = PlannedEpoch(leaf.order, leaf.source.layout, planning, cursor.epoch, at, excluded)
        return TokenPlan(batches, cursor, leaf.rows, leaf.shard.count, last_batch, planning.typical_rows)

    @property
    def _total(self) -> int | None:
        """The number of batches to deliver, of those that the epoch has, if it is known."""
        if (total := self.batches.total) is None:
            return None
        left = self.done.before(total)
        if self._last_batch != "drop":
            return left
        return self._start + max(0, left - self._start) // self._ranks * self._ranks

    @property
    def first_lane(self) -> LaneCursor:
        return self._lane

    def count_known(self) -> bool:
        return self.batches.total is not None

    def _batch(self, number: int) -> int:
        """Return the batch with a number among those that remain."""
        return number if self.done is EMPTY else self.done.remaining(number)

    def _has(self, number: int) -> bool:
        return self.batches.window_of(self._batch(number)) is not None

    def _count(self) -> int:
        """Return the number of batches to deliver. It plans the complete epoch."""
        if self.batches.total is None and self.rows >= _SHOWN_ROWS:
            with shown("counting batches", "rows") as report:
                self.batches.count(report)
        self.batches.count()
        assert self._total is not None
        return self._total

    def count(self) -> int:
        """Return the number of the epoch's batches up to its end. It plans the complete epoch."""
        return self._batch(self._count())

    def __len__(self) -> int:
        return -(-max(0, self._count() - self._start) // self._ranks)

    def has(self, step: int) -> bool:
        first = self._start + step * self._ranks
        return self._has(first + self._ranks - 1 if self._last_batch == "drop" else first)

    def has_after(self, batches: int) -> bool:
        """Return True if there is a step after a number of batches of the epoch."""
        return self.has(-(-(self.done.before(batches) - self._start) // self._ranks))

    def has_for(self, step: int, shard: Shard) -> bool:
        if self._last_batch != "uneven":
            return self.has(step)
        return self._own(step, shard) is not None

    def _own(self, step: int, shard: Shard) -> int | None:
        """Return the batch of a rank, if there is one: of every step that which is its index modulo the ranks."""
        first = self._start + step * self._ranks
        number = first + (shard.index - first) % self._ranks
        return self._batch(number) if self._has(number) else None

    def share(self, shard: Shard) -> int:
        steps = len(self)
        return steps - (steps > 0 and not self.has_for(steps - 1, shard))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        parts: list[tuple[Int64Array, Int64Array]] = []
        padding = 0
        for step in steps:
            if self._is_short(step):
                parts.append(self._dealt(step, shard))
            elif (own := self._own(step, shard)) is not None:
                parts.append(self.batches.places(own))
            elif self._last_batch == "pad":
                parts.append(self.batches.places(self._batch(self._start + step * self._ranks)))
                padding = len(parts[-1][0])
            else:
                parts.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
        positions, rows = (np.concatenate(some) for some in zip(*parts, strict=True))
        ends = [0, *accumulate(len(some) for some, _ in parts)]
        return Asked(positions, ends, len(positions) - padding if self._last_batch == "pad" else None, rows)

    def _is_short(self, step: int) -> bool:
        """Return True if the rows of a step are dealt again, because there are fewer batches than ranks."""
        return self._last_batch is None and not self._has(self._start + (step + 1) * self._ranks - 1)

    def _dealt(self, step: int, shard: Shard) -> tuple[Int64Array, Int64Array]:
        first = self._start + step * self._ranks
        batches = [self.batches.places(self._batch(number)) for number in range(first, self._count())]
        sizes = np.array([len(each) for each, _ in batches])
        if (rows := int(sizes.sum())) < self._ranks:
            raise WorldError(
                f"the last step of epoch {self.epoch} has {rows} row{'s' * (rows != 1)} left for "
                f"{self._ranks} ranks: those without a batch would take one step less, and the others would wait for "
                'them. Choose the last batch: loader(…, last_batch="drop") omits the last step if it has no batch for '
                'every rank, last_batch="pad" fills it with marked rows, last_batch="uneven" is for loops in which no '
                "rank waits for another."
            )
        number, begin, end = dealt(sizes, self._ranks)[shard.index]
        positions, of_positions = batches[number]
        return positions[begin:end], of_positions[begin:end]

    def batch_rows(self, shard: Shard) -> int:  # noqa: ARG002
        return self._typical

    def first_position(self, step: int) -> int:
        window = self.batches.window_of(self._batch(self._start + step * self._ranks))
        return self.rows if window is None else window.start

    def place(self, step: int) -> str:
        window = self.batches.window_of(self._batch(self._start + step * self._ranks))
        return "no position" if window is None else f"positions {window.start:,} to {window.stop - 1:,}"

    def _after(self, steps: int) -> int:
        """Return the batches before a step, of those that remain."""
        after = self._start + steps * self._ranks
        return after if not steps or self._has(after - 1) else self._count()

    def cursor(self, step: int) -> Cursor:
        return self._cursor(step + 1) if step >= 0 else self._cursor_at(self._lane, 0)

    def _cursor(self, steps: int) -> Cursor:
        lane = self.batches.cursor(self._lane, self._batch(self._after(steps)))
        return self._cursor_at(lane, steps)

    def _cursor_at(self, lane: LaneCursor, steps: int) -> Cursor:
        return Cursor.at_row(self.epoch, lane, self.begin.steps + steps, self.begin.first)

    @property
    def end_cursor(self) -> Cursor:
        return self._cursor(len(self))

    def turns(self, steps: Int64Array) -> Int64Array:
        return np.array([self._after(step) for step in steps.tolist()], dtype=np.int64)

    def units(self, first: int, stop: int) -> Intervals:
        low, high = self._after(first), self._after(stop)
        return EMPTY if high <= low else Intervals.of(self._batch(low), self._batch(high - 1) + 1).minus(self.done)

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last step has no row, where batches are counted quickly."""
        if self._last_batch is not None or ranks == 1 or not (self.count_known() or self.rows <= _COUNTED_ROWS):
            return 0
        total = self._count()
        last = total - (total - self._start) % ranks
        rows = sum(len(self.batches.positions(self._batch(number))) for number in range(last, total))
        return max(0, ranks - rows) if rows else 0

    def known(self, rows: int) -> int:
        return self.count() if self.count_known() or self.rows <= rows else UNKNOWN

    def rows_before(self, units: int) -> int:
        return self.batches.rows_before(units)


class RemainingSteps:
    """The steps of a plan without those that are acknowledged. Step i is the i-th that remains."""

    def __init__(self, plan: Any, acked: Intervals) -> None:
        self.whole, self.acked = plan, acked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # before it is set, while it is unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)

    def _step(self, number: int) -> int:
        """Return the number in the plan of a step that remains."""
        return self.acked.remaining(number) if number >= 0 else number

    def has(self, step: int) -> bool:
        return bool(self.whole.has(self._step(step)))

    def has_for(self, step: int, shard: Shard) -> bool:
        return bool(self.whole.has_for(self._step(step), shard))

    def share(self, shard: Shard) -> int:
        return self.acked.before(int(self.whole.share(shard)))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        parts = [self.whole.ask(run, shard) for run in _runs([self._step(step) for step in steps])]
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        offsets = [0, *accumulate(len(part.positions) for part in parts)]
        ends = [0, *(offset + end for part, offset in zip(parts, offsets, strict=False) for end in part.ends[1:])]
        genuine = None if parts[-1].genuine is None else offsets[-2] + parts[-1].genuine  # padding is in the last step
        known = [part.rows for part in parts if part.rows is not None]
        rows = np.concatenate(known) if len(known) == len(parts) else None
        return Asked(np.concatenate([part.positions for part in parts]), ends, genuine, rows)

    def first_position(self, step: int) -> int:
        return int(self.whole.first_position(self._step(step)))

    def place(self, step: int) -> str:
        return str(self.whole.place(self._step(step)))

    def cursor(self, step: int) -> Cursor:
        return self.whole.cursor(self._step(step))  # type: ignore[no-any-return]


def _runs(steps: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive steps."""
    run: list[int] = []
    for step in steps:
        if run and step != run[-1] + 1:
            yield run
            run = []
        run.append(step)
    yield run


StepPlan = Plan | TokenPlan | RemainingSteps
