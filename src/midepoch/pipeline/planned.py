"""Batches by a budget of tokens over the positions of an epoch, window by window, from a cursor on.

The batches of an epoch are numbered in the order of delivery. The cursor counts them, and says where the window in
progress began. What is not known in batches any more (the budget has changed, or rows are excluded in the middle of a
window) is known in rows: ``PlannedEpoch.in_rows`` converts a cursor, and a window begins with the rows that are left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from midepoch.errors import CheckpointMismatchError, ColumnError
from midepoch.order import EpochOrder, Order, SourceLayout
from midepoch.order.bijection import derive
from midepoch.order.budget import Batches, Budget, TooLongError, in_words
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import LaneCursor, WindowAt

Int64Array = npt.NDArray[np.int64]

_KEPT = 4
"""Windows that are kept: those being read, and those of batches that were made ahead."""


class Lengths(Protocol):
    """The length of each row of a source."""

    def of(self, rows: Int64Array) -> Int64Array: ...


@dataclass(frozen=True, eq=False)
class GivenLengths:
    """Lengths that the user gave, one for each row of the dataset before the shuffle."""

    values: Int64Array

    def of(self, rows: Int64Array) -> Int64Array:
        return self.values[rows]


@dataclass(frozen=True, eq=False)
class FilledLengths:
    """Lengths of a source with rows that cannot be read, which have none.

    They count as ``typical``. Otherwise they would come together, and a batch would be empty on one rank.
    """

    lengths: Lengths
    typical: int

    def of(self, rows: Int64Array) -> Int64Array:
        found = self.lengths.of(rows)
        return np.where(found == 0, self.typical, found)


@dataclass(frozen=True, eq=False)
class Planning:
    """A budget, and the lengths by which rows are put together.

    ``mean``: of the lengths. ``by_source``: they are of rows of the source, else of rows of the dataset before the
    shuffle.
    """

    budget: Budget
    lengths: Lengths
    mean: float
    by_source: bool = True

    @property
    def typical_rows(self) -> int:
        """About the number of rows of a batch."""
        return max(1, int(self.budget.tokens / max(1.0, self.mean)))


class PlannedWindow(NamedTuple):
    """The batches of a window, in the order of delivery.

    ``before``, ``after``: batches of the epoch before its first one, and up to its end. ``positions``: of the epoch,
    and ``rows`` at them; batch k of the window has those from ``bounds[k]`` to ``bounds[k + 1]``.
    """

    before: int
    after: int
    start: int
    stop: int
    positions: Int64Array
    rows: Int64Array
    bounds: list[int]
    checksum: int


class PlannedEpoch:
    """The batches of an epoch from a window on, planned when they are needed. Threads may share it.

    ``excluded``: positions that are in no batch, beside those that were done when the first window began.
    """

    def __init__(
        self,
        order: Order,
        layout: SourceLayout,
        planning: Planning,
        epoch: int,
        at: WindowAt,
        excluded: Intervals = EMPTY,
    ) -> None:
        self._lock = threading.RLock()
        self._order, self._layout, self.planning, self.epoch = order, layout, planning, epoch
        self._at_epoch: EpochOrder | None = None
        self._rows, self._at = len(order), at
        self.excluded = excluded
        self._left_out = at.rows.done.union(excluded)
        self._found: list[tuple[int, int]] = [(at.first, at.rows.taken)]  # windows: batches before, and first position
        self._kept: OrderedDict[int, PlannedWindow] = OrderedDict()
        self._recent: PlannedWindow | None = None  # most calls are for the same window: 0.5 µs, and 2 µs without
        self.total: int | None = at.first if at.rows.taken >= self._rows else None
        """Batches of the epoch, once all windows are planned."""

    def window_of(self, batch: int) -> PlannedWindow | None:
        """Return the window of a batch, or None if the epoch has fewer."""
        recent = self._recent
        if recent is not None and recent.before <= batch < recent.after:
            return recent
        with self._lock:
            while self.total is None and self._found[-1][0] <= batch:
                self._window(len(self._found) - 1)
            if self.total is not None and batch >= self.total:
                return None
            self._recent = window = self._window(self._number(batch))
            return window

    def _number(self, batch: int) -> int:
        """Return the number of the last window that does not begin after a batch. Recent ones are found first."""
        number = len(self._found) - 1
        while number > 0 and self._found[number][0] > batch:
            number -= 1
        return number

    def count(self, report: Callable[[int, int], None] | None = None) -> int:
        """Return the number of batches of the epoch. It plans all windows."""
        while self.total is None:
            with self._lock:
                self._window(len(self._found) - 1)
            if report is not None:
                report(min(self._found[-1][1], self._rows), self._rows)
        return self.total

    def positions(self, batch: int) -> Int64Array:
        """Return the positions of a batch."""
        return self.places(batch)[0]

    def places(self, batch: int) -> tuple[Int64Array, Int64Array]:
        """Return the positions of a batch, and the rows at them."""
        window = self.window_of(batch)
        assert window is not None
        number = batch - window.before
        own = slice(window.bounds[number], window.bounds[number + 1])
        return window.positions[own], window.rows[own]

    def batch_of(self, position: int) -> int | None:
        """Return the batch that has a position, or None if it was done before the first window here."""
        number = 0
        while (window := self._window(number)).stop <= position:
            number += 1
        found = np.flatnonzero(window.positions == position)
        return window.before + int(np.searchsorted(window.bounds, found[0], side="right")) - 1 if len(found) else None

    def cursor(self, lane: LaneCursor, batches: int) -> LaneCursor:
        """Return the cursor of a lane after a number of batches of the epoch."""
        window = self._recent
        if window is None or not window.before < batches < window.after:
            self.window_of(max(0, batches - 1))  # some before it were not asked for
            with self._lock:
                first, start = self._found[number := self._number(batches)]
                if first == batches:
                    return lane.moved(batches, WindowAt(self._at.rows.moved(start), first))
                window = self._window(number)
        rows = self._at.rows.moved(window.start)
        return lane.moved(batches, WindowAt(rows, window.before, window.checksum))

    def in_rows(self, lane: LaneCursor) -> LaneCursor:
        """Return the cursor of a lane as one that counts rows: the exact rows that are delivered, or excluded."""
        first, start = self._found[self._number(lane.taken)]
        rows = self._at.rows.moved(start)
        delivered = [*range(first, lane.taken), *lane.ahead.positions().tolist()]
        return LaneCursor(
            start,
            None,
            rows.excluded.union(self._positions(lane.excluded.positions().tolist())),
            rows.ahead.union(self._positions(delivered)),
        )

    def _positions(self, batches: list[int]) -> Intervals:
        return self.rows_in(Intervals.from_positions(batches))

    def rows_in(self, batches: Intervals) -> Intervals:
        """Return the positions of the rows of some batches."""
        found = []
        for first, stop in zip(batches.starts.tolist(), batches.stops.tolist(), strict=True):
            while first < stop and (window := self.window_of(first)) is not None:
                last = min(stop, window.after)
                found.append(
                    window.positions[window.bounds[first - window.before] : window.bounds[last - window.before]]
                )
                first = last
        return Intervals.from_positions(np.concatenate(found)) if found else EMPTY

    def rows_before(self, batches: int) -> int:
        """Return the number of rows of the epoch in the batches before."""
        self.window_of(max(0, batches - 1))
        first, start = self._found[number := self._number(batches)]
        if first == batches:
            return min(start, self._rows)
        window = self._window(number)
        return window.stop - (window.bounds[-1] - window.bounds[batches - first])

    def _window(self, number: int) -> PlannedWindow:
        if number in self._kept:
            return self._kept[number]
        first, start = self._found[number]
        window = self._planned(first, start)
        if not number and self._at.checksum not in (0, window.checksum):
            raise changed_lengths(self.planning.budget)
        self._kept[number] = window
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        if number == len(self._found) - 1:
            if window.stop >= self._rows:
                self.total = window.after
            self._found.append((window.after, window.stop))
        return window

    def _planned(self, first: int, start: int) -> PlannedWindow:
        planning, budget = self.planning, self.planning.budget
        stop = start + budget.window
        if self._rows - stop < budget.window // 2:  # the last window may be longer, so that none is very short
            stop = self._rows
        places = np.arange(stop - start, dtype=np.int64)
        if self._left_out:
            places = places[~self._left_out.contains(places + start)]
        chosen = self._epoch_order().chosen(places + start)
        lengths = planning.lengths.of(self._order.selection.source_rows(chosen) if planning.by_source else chosen)
        shuffle = self._order.shuffle
        key = None if shuffle is None else derive(shuffle.seed, self.epoch, "batches", start)
        try:
            batches = budget.split(lengths, key)
        except TooLongError as problem:
            raise too_long(problem.length, budget, f"row {int(chosen[problem.place])} of the dataset") from None
        positions, rows = places[batches.places] + start, chosen[batches.places]
        checksum = Batches(places[batches.places], batches.bounds).checksum
        return PlannedWindow(
            first, first + len(batches), start, stop, positions, rows, batches.bounds.tolist(), checksum
        )

    def _epoch_order(self) -> EpochOrder:
        if self._at_epoch is None:
            self._at_epoch = self._order.at(self.epoch, self._layout)
        return self._at_epoch


def window_at(lane: LaneCursor) -> WindowAt:
    """Return where the window in progress of a lane of batches by tokens began."""
    return lane.at if isinstance(lane.at, WindowAt) else WindowAt()


def too_long(length: int, budget: Budget, what: str) -> ColumnError:
    """Return the error for a row that is longer than a batch."""
    return ColumnError(
        f"{what} has {length:,} tokens ({budget.length}), more than the {budget.tokens:,} of a batch. Raise "
        "max_tokens, or shorten or filter such rows first, as with tokenize(…, truncation=True, max_length=…)."
    )


def changed_lengths(budget: Budget) -> CheckpointMismatchError:
    """Return the error for a window whose batches are not those of the state."""
    return CheckpointMismatchError(
        "batches",
        f"{budget.words}, of other rows",
        f"{budget.words}, of these",
        "the lengths of rows, or a function given as length= or balance=, have changed since it was saved, in the "
        "middle of a window of batches by max_tokens: rows would be lost or repeated",
    )


def changed_budget(text: str, budget: Budget) -> CheckpointMismatchError:
    """Return the error for a state in the middle of a window of other batches, which cannot be formed here."""
    return CheckpointMismatchError(
        "batches",
        in_words(text),
        budget.words,
        "the state is in the middle of a window of batches by max_tokens, whose lengths were counted differently: pass "
        "the same length= and the same functions. max_tokens, bucket_window and pad_to_multiple_of may change",
    )
