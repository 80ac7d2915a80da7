"""Steps of batches by a budget of tokens: step g of S ranks has the batches g·S to (g+1)·S of the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from midepoch._internal.progress import shown
from midepoch.audit.records import UNKNOWN
from midepoch.errors import WorldError
from midepoch.loader.options import Options
from midepoch.loader.plans import Asked, Int64Array, Plan, StepPlan
from midepoch.order import Shard
from midepoch.order.budget import dealt
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
    """

    def __init__(self, leaf: Leaf, options: Options, cursor: Cursor) -> None:
        assert options.planning is not None
        self.epoch, self._ranks, self._last_batch = cursor.epoch, leaf.shard.count, options.last_batch
        self.rows, self._start, self.begin = leaf.rows, cursor.position, cursor
        self._steps = cursor.steps if options.counts(cursor) else None
        self._typical = options.planning.typical_rows
        self._epoch = PlannedEpoch.at(leaf, options.planning, cursor)

    @property
    def end(self) -> int | None:
        """The number of batches of the epoch, or None if it is not known yet."""
        return None if (total := self._epoch.total) is None else self._end(total)

    def _end(self, total: int) -> int:
        if self._last_batch != "drop":
            return total
        return self._start + (total - self._start) // self._ranks * self._ranks

    def count(self) -> int:
        """Return the number of batches of the epoch, for all ranks. It plans the complete epoch."""
        if self._epoch.total is None and self.rows >= _SHOWN_ROWS:
            with shown("counting batches", "rows") as report:
                return self._end(self._epoch.count(report))
        return self._end(self._epoch.count())

    def has(self, step: int) -> bool:
        first = self._start + step * self._ranks
        last = first + self._ranks - 1 if self._last_batch == "drop" else first
        return self._epoch.window_of(last) is not None

    def has_after(self, position: int) -> bool:
        """Return True if there is a step after a number of batches of the epoch."""
        return self.has(-(-(position - self._start) // self._ranks))

    def has_for(self, step: int, shard: Shard) -> bool:
        if self._last_batch != "uneven":
            return self.has(step)
        return self._own(step, shard) is not None

    def _own(self, step: int, shard: Shard) -> int | None:
        """Return the batch of a rank, if there is one: of every step that which is its index modulo the ranks."""
        first = self._start + step * self._ranks
        number = first + (shard.index - first) % self._ranks
        return None if self._epoch.window_of(number) is None else number

    def share(self, shard: Shard) -> int:
        self.count()
        assert self._epoch.total is not None
        left = self._end(self._epoch.total) - self._start
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
                parts.append(self._epoch.places(self._start + step * self._ranks))
                padding = len(parts[-1][0])
            else:
                parts.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
        positions, rows = (np.concatenate(some) for some in zip(*parts, strict=True))
        ends = [0, *accumulate(len(some) for some, _ in parts)]
        return Asked(positions, ends, len(positions) - padding if self._last_batch == "pad" else None, rows)

    def _is_short(self, step: int) -> bool:
        """Return True if the rows of a step are dealt again, because there are fewer batches than ranks."""
        last = self._start + (step + 1) * self._ranks - 1
        return self._last_batch is None and self._epoch.window_of(last) is None

    def _dealt(self, step: int, shard: Shard) -> tuple[Int64Array, Int64Array]:
        first = self._start + step * self._ranks
        total = self._epoch.count()
        batches = [self._epoch.places(number) for number in range(first, total)]
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
        window = self._epoch.window_of(self._start + step * self._ranks)
        return self.rows if window is None else window.start

    def place(self, step: int) -> str:
        window = self._epoch.window_of(self._start + step * self._ranks)
        return "no position" if window is None else f"positions {window.start:,} to {window.stop - 1:,}"

    def cursor(self, step: int) -> Cursor:
        after = self._start + (step + 1) * self._ranks
        if self._epoch.window_of(after - 1) is None:
            after = self._epoch.count()
        return self._counted(self._epoch.cursor(after), step + 1)

    @property
    def end_cursor(self) -> Cursor:
        after = self.count()
        return self._counted(self._epoch.cursor(after), -(-(after - self._start) // self._ranks))

    def _counted(self, cursor: Cursor, steps: int) -> Cursor:
        return cursor if self._steps is None else cursor._replace(steps=self._steps + steps)

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last step has no row, where batches are counted quickly."""
        if self._last_batch is not None or ranks == 1 or (self._epoch.total is None and self.rows > _COUNTED_ROWS):
            return 0
        total = self._epoch.count()
        last = total - (total - self._start) % ranks
        rows = sum(len(self._epoch.positions(number)) for number in range(last, total))
        return max(0, ranks - rows) if rows else 0

    def known(self, rows: int) -> int:
        if self._epoch.total is None and self.rows > rows:
            return UNKNOWN
        return self.count()

    def rows_before(self, batches: int) -> int:
        """Return the number of rows of the epoch in the batches before one."""
        return self._epoch.rows_before(batches)


def make_plan(spec: PipelineSpec, options: Options, cursor: Cursor) -> StepPlan:
    """Return the steps of a rank from a cursor on."""
    return Plan.make(spec, options, cursor) if options.planning is None else TokenPlan(spec.leaf, options, cursor)
