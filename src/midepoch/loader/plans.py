"""Plans and batches, shared by all sources of batches: the steps of one rank in one epoch, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from midepoch._internal.timings import Timings
from midepoch.loader.options import Options
from midepoch.order import Shard, epoch_end
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.order.numbers import StepNumbers, steps_filled
from midepoch.order.sizes import BatchSizes
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms.provenance import DocumentTable

Int64Array = npt.NDArray[np.int64]


class Made(NamedTuple):
    """A batch, and the cursor after it. ``value`` is presented (or collated). ``empty``: it has no row left."""

    value: Any
    cursor: Cursor | StepOutputs
    rows: int = 0
    skipped: int = 0
    empty: bool = False
    timings: Timings | None = None
    """The time that a worker has spent since its last report."""
    traced: DocumentTable | None = None
    """The provenance of the rows without padding, if positions do not give it."""


class BatchSource(Protocol):
    """The batches of one rank from a cursor to the end of the epoch, in order. Used by one thread at a time."""

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""


class Asked(NamedTuple):
    """Positions of the rows of several steps. Step i has those from ``ends[i]`` to ``ends[i + 1]``.

    ``genuine``: number of positions before the padding, or None if nothing is padded. ``rows``: at the positions, if
    they are known already.
    """

    positions: Int64Array
    ends: list[int]
    genuine: int | None
    rows: Int64Array | None = None


class StepPlan(Protocol):
    """The global batches from a cursor of an epoch on. Step 0 is the first of them."""

    @property
    def epoch(self) -> int: ...

    @property
    def rows(self) -> int:
        """Rows from which padding is taken."""

    @property
    def end(self) -> int | None:
        """The place after the last step, or None if it is not known yet."""

    def has(self, step: int) -> bool:
        """Return True if there is such a step, for some rank."""

    def has_for(self, step: int, shard: Shard) -> bool:
        """Return True if there is such a step, with a batch for this rank."""

    def share(self, shard: Shard) -> int:
        """Return the number of batches of one rank: all, unless the last one has no row for it."""

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        """Return the positions of a rank for several steps, which ascend by the same number."""

    def batch_rows(self, shard: Shard) -> int:
        """Return the approximate number of rows of a batch of a rank."""

    def first_position(self, step: int) -> int:
        """Return a position such that all rows of this and later steps are after it."""

    def place(self, step: int) -> str:
        """Return where the rows of a step are, in words."""

    def cursor(self, step: int) -> Cursor:
        """Return the cursor after a step."""

    @property
    def end_cursor(self) -> Cursor:
        """The cursor after the last step."""

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last step has no row, as far as it is known."""

    def known(self, rows: int) -> int:
        """Return the position at the end, if it is known or can be counted by at most so many rows, else 2**62."""


class EpochPlan(StepPlan, Protocol):
    """All steps from a cursor on, whose acknowledged part can be saved."""

    @property
    def done(self) -> Intervals:
        """Positions, or batches, after the start that are not delivered."""

    def turns(self, steps: Int64Array) -> Int64Array:
        """Return what comes before each step, of all that is delivered: positions that remain, or batches."""

    def cursor_with(self, start: Cursor, steps: int, done: Intervals, *, alone: bool) -> Cursor:
        """Return the cursor after a number of steps from ``start`` on, with more that is not to be delivered.

        ``alone``: no other rank adds what it has acknowledged.
        """


@dataclass(frozen=True)
class Plan:
    """Global batches of rows: batch g is the positions [start + g·B, start + (g+1)·B).

    ``padded``: the last one is as large as the others, with padding after the end of the epoch. ``sizes``: the batch
    sizes of a rank, if they change: then B is that of the step. ``first_step``: number of the first step in the run, if
    steps are counted.

    ``done``: positions after the start that are not delivered. Then ``start``, ``end``, ``bounds`` and ``reach`` count
    only the positions that remain. Methods that return positions or cursors return those of the epoch.
    """

    epoch: int
    start: int
    end: int
    global_batch: int
    padded: bool = False
    sizes: BatchSizes | None = None
    first_step: int | None = None
    done: Intervals = EMPTY
    recorded: Intervals | None = None
    """Those of them that cursors contain. Other ones follow from rows that are excluded. None: all."""

    @staticmethod
    def make(spec: PipelineSpec, options: Options, cursor: Cursor, rows: int | None = None) -> Plan:
        """Return the plan of a rank from a cursor on. ``rows``: of the epoch, by default those of the pipeline."""
        ranks, sizes, ends = spec.shard.count, options.sizes, options.last_batch
        rows = spec.rows if rows is None else rows
        if sizes is None:
            done = spec.done_after(cursor)
            plan = Plan.of(cursor.epoch, cursor.position, rows, options.batch_size * ranks, ends, done)
            if spec.excluded:
                plan = replace(plan, recorded=cursor.done)
            if not options.counts(cursor):
                return plan
            return replace(plan, first_step=cursor.steps + (plan.start - cursor.position) // plan.global_batch)
        start, rows, done = spec.done_after(cursor).left(cursor.position, rows)
        of_all = BatchSizes(sizes.steps, tuple(size * ranks for size in sizes.sizes))
        first = cursor.steps + steps_filled(of_all, cursor.steps, start - cursor.position)
        plan = Plan(cursor.epoch, start, rows, of_all.at(first), ends == "pad", of_all, first, done, cursor.done)
        whole = len(plan) if plan.bounds(len(plan))[0] == plan.end else max(0, len(plan) - 1)
        return replace(plan, end=plan.bounds(whole)[0]) if ends == "drop" else plan

    @staticmethod
    def of(
        epoch: int, position: int, rows: int, global_batch: int, last_batch: str | None, done: Intervals = EMPTY
    ) -> Plan:
        start, rows, done = done.left(position, rows)
        end = epoch_end(start, rows, global_batch, last_batch == "drop")
        return Plan(epoch, start, end, global_batch, last_batch == "pad", done=done)

    @property
    def rows(self) -> int:
        return self.end if self.done is EMPTY else self.done.remaining(self.end)

    @cached_property
    def numbers(self) -> StepNumbers:
        """The numbers of the steps, where some positions are done."""
        sizes = BatchSizes((0,), (self.global_batch,)) if self.sizes is None else self.sizes
        first = self.start // self.global_batch if self.first_step is None else self.first_step
        return StepNumbers.of(self.done, self.start, first, sizes)

    def __len__(self) -> int:
        if self.sizes is None or self.end <= self.start:
            return max(0, -(-(self.end - self.start) // self.global_batch))
        if self.done is not EMPTY:
            return self.numbers.count(self.end)
        stop = self._base + self.end - self.start
        steps = self.sizes.step_at(stop)
        return steps + (self.sizes.before(steps) < stop) - (self.first_step or 0)

    @property
    def _base(self) -> int:
        """Rows of the steps of the run before the first one here, by the schedule."""
        assert self.sizes is not None
        return self.sizes.before(self.first_step or 0)

    def _first(self, step: int) -> int:
        """Return the position at which a step begins, also after the end of the epoch."""
        if self.sizes is None:
            return self.start + step * self.global_batch
        if self.done is not EMPTY:
            return self.numbers.begin(step)
        return self.start + self.sizes.before((self.first_step or 0) + step) - self._base

    def has(self, step: int) -> bool:
        return self._first(step) < self.end

    def has_for(self, step: int, shard: Shard) -> bool:
        return self.has(step) and bool(len(shard.positions(self._first(step), self.reach(step))))

    def bounds(self, step: int) -> tuple[int, int]:
        return self._first(step), min(self._first(step + 1), self.end)

    def cursor(self, step: int) -> Cursor:
        if self.done is not EMPTY:
            return self._cursor_amid_done(step + 1)
        steps = 0 if self.first_step is None else self.first_step + step + 1
        return Cursor(self.epoch, min(self._first(step + 1), self.end), steps=steps)

    def _cursor_amid_done(self, steps: int) -> Cursor:
        """Return the cursor after a number of steps, and after the positions that follow them and are done."""
        position = self.done.remaining(min(self._first(steps), self.end))
        number = 0 if self.first_step is None else self.numbers.number(steps)
        recorded = self.done if self.recorded is None else self.recorded
        return Cursor(self.epoch, position, steps=number, done=recorded.from_(position))

    @property
    def end_cursor(self) -> Cursor:
        if self.done is not EMPTY:
            return self._cursor_amid_done(len(self))
        return Cursor(self.epoch, self.end, steps=0 if self.first_step is None else self.first_step + len(self))

    def reach(self, step: int) -> int:
        """Return the position at which a batch ends, including its padding."""
        return self._first(step + 1) if self.padded else self.bounds(step)[1]

    def share(self, shard: Shard) -> int:
        steps = len(self)
        return steps - (steps > 0 and not self.has_for(steps - 1, shard))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        if len(steps) == 1 or steps[1] == steps[0] + 1:
            begin = self._first(steps[0])
            positions, before = shard.positions(begin, self.reach(steps[-1])), shard.before(begin)
            ends = [0, *(shard.before(self.reach(each)) - before for each in steps)]
        else:
            parts = [shard.positions(self._first(each), self.reach(each)) for each in steps]
            positions, ends = np.concatenate(parts), np.cumsum([0, *map(len, parts)]).tolist()
        if self.done is not EMPTY:
            return self._ask_amid_done(positions, ends)
        if not self.padded:
            return Asked(positions, ends, None)
        return Asked(positions % self.end, ends, int(np.searchsorted(positions, self.end)))

    def _ask_amid_done(self, numbers: Int64Array, ends: list[int]) -> Asked:
        """Return the positions with these numbers among those that remain. Padding is the same as after a resume."""
        positions = self.done.remaining(numbers)
        if not self.padded:
            return Asked(positions, ends, None)
        padding = numbers >= self.end
        positions[padding] = (numbers[padding] - self.end) % self.rows
        return Asked(positions, ends, int(np.searchsorted(numbers, self.end)))

    def between(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range of positions from a step to another."""
        last = min(self._first(stop), self.end) - 1
        return self.done.remaining(self._first(first)), self.done.remaining(last) + 1

    def batch_rows(self, shard: Shard) -> int:
        return -(-self.global_batch // shard.count)

    def first_position(self, step: int) -> int:
        return self._first(step) if self.done is EMPTY else self.done.remaining(self._first(step))

    def place(self, step: int) -> str:
        first, stop = self.bounds(step)
        if self.done is not EMPTY:
            first, stop = self.done.remaining(first), self.done.remaining(stop - 1) + 1
        return f"positions {first:,} to {stop - 1:,}"

    def turns(self, steps: Int64Array) -> Int64Array:
        if self.sizes is None:
            return np.minimum(self.start + steps * self.global_batch, self.end)
        return np.array([min(self._first(step), self.end) for step in steps.tolist()], dtype=np.int64)

    def cursor_with(self, start: Cursor, steps: int, done: Intervals, *, alone: bool) -> Cursor:  # noqa: ARG002
        cursor = self.cursor(steps - 1) if steps else start
        return cursor._replace(done=cursor.done.union(done)) if done else cursor

    def known(self, rows: int) -> int:  # noqa: ARG002
        return self.rows

    def left_out(self, ranks: int) -> int:
        return 0 if self.padded or not len(self) else max(0, ranks - (self.end - self.bounds(len(self) - 1)[0]))


def batches_of(spec: PipelineSpec, options: Options, outputs: int, first_step: int = 0) -> int:
    """Return the number of batches of a rank in an epoch, given the number of outputs of all ranks.

    ``first_step``: the step of the run at which the epoch begins, for batch sizes that change.
    """
    return Plan.make(spec, options, Cursor(steps=first_step), outputs).share(spec.shard)
