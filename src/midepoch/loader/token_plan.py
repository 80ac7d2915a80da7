"""Steps of batches by a budget of tokens: step g of S ranks has the batches g·S to (g+1)·S of the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from midepoch._internal.progress import shown
from midepoch.audit.records import UNKNOWN
from midepoch.errors import WorldError
from midepoch.loader.options import Options
from midepoch.loader.plans import Asked, EpochPlan, Int64Array, Plan
from midepoch.order import Shard
from midepoch.order.budget import dealt
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.order.numbers import StepNumbers
from midepoch.order.sizes import BatchSizes
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.planned import PlannedEpoch
from midepoch.pipeline.spec import PipelineSpec

_SHOWN_ROWS = 10_000_000
"""Rows of an epoch from which on counting its batches takes seconds."""
_COUNTED_ROWS = 1_000_000
"""Rows up to which the batches are counted when a pass begins, to know its last step: 0.3 s. For more rows, an error
about it comes with that step.
"""


class TokenPlan:
    """The steps of all ranks from a cursor on.

    The last step may have fewer batches than ranks. ``last_batch`` decides: "drop" omits it, "pad" gives marked copies
    to the other ranks, "uneven" nothing. None deals its rows to all ranks, in smaller batches.

    Batches that are done are not delivered: private methods count those that remain.
    """

    def __init__(self, leaf: Leaf, options: Options, cursor: Cursor) -> None:
        assert options.planning is not None
        self.epoch, self._ranks, self._last_batch = cursor.epoch, leaf.shard.count, options.last_batch
        start = cursor.done.after(cursor.position)
        self.rows, self._start, self.begin = leaf.rows, start, cursor
        self.done = cursor.done.from_(start)
        self._steps = cursor.steps if options.counts(cursor) else None
        if self._steps is not None:
            self._steps += (start - cursor.position) // self._ranks
        self._typical = options.planning.typical_rows
        self._epoch = PlannedEpoch.at(leaf, options.planning, cursor)

    @property
    def end(self) -> int | None:
        """The number of batches of the epoch, or None if it is not known yet."""
        return None if (total := self._epoch.total) is None else self._batch(self._end(total))

    def _end(self, total: int) -> int:
        """Return the number of batches to deliver, of all that the epoch has."""
        left = self.done.before(total)
        if self._last_batch != "drop":
            return left
        return self._start + max(0, left - self._start) // self._ranks * self._ranks

    def _batch(self, number: int) -> int:
        """Return the batch with a number among those that remain."""
        return number if self.done is EMPTY else self.done.remaining(number)

    def _has(self, number: int) -> bool:
        return self._epoch.window_of(self._batch(number)) is not None

    def count(self) -> int:
        """Return the number of batches of the epoch, for all ranks. It plans the complete epoch."""
        if self._epoch.total is None and self.rows >= _SHOWN_ROWS:
            with shown("counting batches", "rows") as report:
                return self._batch(self._end(self._epoch.count(report)))
        return self._batch(self._end(self._epoch.count()))

    def has(self, step: int) -> bool:
        first = self._start + step * self._ranks
        last = first + self._ranks - 1 if self._last_batch == "drop" else first
        return self._has(last)

    def has_after(self, position: int) -> bool:
        """Return True if there is a step after a number of batches of the epoch."""
        return self.has(-(-(self.done.before(position) - self._start) // self._ranks))

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
        self.count()
        assert self._epoch.total is not None
        left = max(0, self._end(self._epoch.total) - self._start)
        steps = -(-left // self._ranks)
        return steps - (steps > 0 and not self.has_for(steps - 1, shard))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        parts: list[tuple[Int64Array, Int64Array]] = []
        padding = 0
        for step in steps:
            if self._is_short(step):
                parts.append(self._dealt(step, shard))
            elif (own := self._own(step, shard)) is not None:
                parts.append(self._epoch.places(own))
            elif self._last_batch == "pad":
                parts.append(self._epoch.places(self._batch(self._start + step * self._ranks)))
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
        total = self._end(self._epoch.count())
        batches = [self._epoch.places(self._batch(number)) for number in range(first, total)]
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
        window = self._epoch.window_of(self._batch(self._start + step * self._ranks))
        return self.rows if window is None else window.start

    def place(self, step: int) -> str:
        window = self._epoch.window_of(self._batch(self._start + step * self._ranks))
        return "no position" if window is None else f"positions {window.start:,} to {window.stop - 1:,}"

    def cursor(self, step: int) -> Cursor:
        after = self._start + (step + 1) * self._ranks
        if not self._has(after - 1):
            after = self._end(self._epoch.count())
        return self._cursor(after, step + 1)

    @property
    def end_cursor(self) -> Cursor:
        after = self.done.before(self.count())
        return self._cursor(after, -(-(after - self._start) // self._ranks))

    def _cursor(self, after: int, steps: int) -> Cursor:
        """Return the cursor after a number of the batches that remain, and of steps."""
        batch = self._batch(after)
        if self.done is EMPTY:
            cursor = self._epoch.cursor(batch)
        else:
            cursor = self._epoch.cursor_amid_done(batch, self.done.from_(batch))
        return cursor if self._steps is None else cursor._replace(steps=self._number(steps))

    def between(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range of batches from a step to another."""
        last = self._start + stop * self._ranks - 1
        last = last if self._has(last) else self._end(self._epoch.count()) - 1
        return self._batch(self._start + first * self._ranks), self._batch(last) + 1

    def beginning(self, done: Intervals) -> Cursor:
        """Return the cursor at which the plan begins, with other batches that are done."""
        return self._epoch.cursor_amid_done(self.begin.position, done)._replace(steps=self.begin.steps)

    def _number(self, steps: int) -> int:
        """Return the number in the run of a step."""
        assert self._steps is not None
        return self._steps + steps if self.done is EMPTY else self.numbers.number(steps)

    @cached_property
    def numbers(self) -> StepNumbers:
        """The numbers of the steps, where some batches are done."""
        first = self._start // self._ranks if self._steps is None else self._steps
        return StepNumbers.of(self.done, self._start, first, BatchSizes((0,), (self._ranks,)))

    def turns(self, steps: Int64Array) -> Int64Array:
        return np.array([self._turn(step) for step in steps.tolist()], dtype=np.int64)

    def _turn(self, step: int) -> int:
        after = self._start + step * self._ranks
        return after if not step or self._has(after - 1) else self._end(self._epoch.count())

    def cursor_with(self, start: Cursor, steps: int, done: Intervals, *, alone: bool) -> Cursor:
        cursor = self.cursor(steps - 1) if steps else start
        if alone and not done:
            return cursor
        batch = self._batch(self._turn(steps))
        named = self._epoch.cursor_amid_done(batch, cursor.done.union(done), named=True)
        return named._replace(steps=cursor.steps)

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last step has no row, where batches are counted quickly."""
        if self._last_batch is not None or ranks == 1 or (self._epoch.total is None and self.rows > _COUNTED_ROWS):
            return 0
        total = self._end(self._epoch.count())
        last = total - (total - self._start) % ranks
        rows = sum(len(self._epoch.positions(self._batch(number))) for number in range(last, total))
        return max(0, ranks - rows) if rows else 0

    def known(self, rows: int) -> int:
        if self._epoch.total is None and self.rows > rows:
            return UNKNOWN
        return self.count()

    def rows_before(self, batches: int) -> int:
        """Return the number of rows of the epoch in the batches before one."""
        return self._epoch.rows_before(batches)


def make_plan(spec: PipelineSpec, options: Options, cursor: Cursor) -> EpochPlan:
    """Return the steps of a rank from a cursor on."""
    return Plan.make(spec, options, cursor) if options.planning is None else TokenPlan(spec.leaf, options, cursor)
