"""Batches by a budget of tokens over the positions of an epoch, window by window, from a cursor on.

The batches of an epoch are numbered in the order of delivery. The cursor counts them, and says where the window in
progress begins and how many of its batches are delivered. If the budget changed in the middle of a window, the rest of
its rows is split again: the cursor has one leg for each budget.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from midepoch.errors import CheckpointMismatchError, ColumnError
from midepoch.order import EpochOrder, Layout, Order
from midepoch.order.budget import Batches, Budget, TooLongError, in_words
from midepoch.order.intervals import Intervals
from midepoch.order.keys import derive
from midepoch.pipeline.cursor import Cursor, PlannedAt
from midepoch.pipeline.leaf import Leaf

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


class Window(NamedTuple):
    """The batches of a window, in the order of delivery.

    ``before``, ``after``: batches of the epoch before its first one, and up to its end. ``positions``: of the epoch,
    and ``rows`` at them; batch k of the window has those from ``bounds[k]`` to ``bounds[k + 1]``. ``done``: how many of
    its batches were delivered before. ``legs``: those of earlier budgets.
    """

    before: int
    after: int
    start: int
    stop: int
    positions: Int64Array
    rows: Int64Array
    bounds: list[int]
    done: int
    legs: tuple[tuple[str, int, int], ...]
    checksum: int


class PlannedEpoch:
    """The batches of an epoch from a cursor on, planned when they are needed. Threads may share it."""

    def __init__(self, order: Order, layout: Layout, planning: Planning, epoch: int, first: int, at: PlannedAt) -> None:
        self._lock = threading.RLock()
        self._order, self._layout, self._at_epoch = order, layout, cast("EpochOrder | None", None)
        self._planning, self.epoch, self._budget = planning, epoch, planning.budget
        self._rows = len(order)
        self._found: list[tuple[int, PlannedAt]] = [(first, at)]  # beginnings of windows: batches before, and cursor
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._recent: Window | None = None  # most calls are for the same window: 0.5 µs, and 2 µs without
        self.total: int | None = first if at.start >= self._rows else None
        """Batches of the epoch, once all windows are planned."""

    @staticmethod
    def at(leaf: Leaf, planning: Planning, cursor: Cursor) -> PlannedEpoch:
        """Return the batches from a cursor on."""
        at = cursor.planned or PlannedAt(0)
        return PlannedEpoch(leaf.order, leaf.source.layout, planning, cursor.epoch, cursor.position, at)

    def window_of(self, batch: int) -> Window | None:
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
                report(min(self._found[-1][1].start, self._rows), self._rows)
        return self.total

    def positions(self, batch: int) -> Int64Array:
        """Return the positions of a batch."""
        return self.places(batch)[0]

    def places(self, batch: int) -> tuple[Int64Array, Int64Array]:
        """Return the positions of a batch, and the rows at them."""
        window = self.window_of(batch)
        assert window is not None
        number = batch - window.before + window.done
        own = slice(window.bounds[number], window.bounds[number + 1])
        return window.positions[own], window.rows[own]

    def batch_of(self, position: int) -> int | None:
        """Return the batch that has a position, or None if it was delivered before the first one here."""
        number = 0
        while (window := self._window(number)).stop <= position:
            number += 1
        found = np.flatnonzero(window.positions == position)
        batch = int(np.searchsorted(window.bounds, found[0], side="right")) - 1 if len(found) else -1
        return None if batch < window.done else window.before + batch - window.done

    def cursor(self, batches: int) -> Cursor:
        """Return the cursor after a number of batches of the epoch."""
        window = self._recent
        if window is None or not window.before < batches < window.after:
            with self._lock:
                number = self._number(batches)
                first, at = self._found[number]
                if first == batches:
                    return Cursor(self.epoch, batches, planned=at)
                window = self._window(number)
        done = window.done + batches - window.before
        return Cursor(
            self.epoch,
            batches,
            planned=PlannedAt(window.start, (*window.legs, (self._budget.text, done, window.checksum))),
        )

    def cursor_amid_done(self, batches: int, done: Intervals, *, named: bool = False) -> Cursor:
        """Return the cursor after a number of batches, with later ones that are done and the budget that forms them.

        ``named``: with the budget in any case.
        """
        self.window_of(max(0, batches - 1))  # some before it were not asked for
        cursor, window = self.cursor(batches), self.window_of(batches) if done or named else None
        if window is None:
            return cursor
        leg = (self._budget.text, window.done + batches - window.before, window.checksum)
        return cursor._replace(planned=PlannedAt(window.start, (*window.legs, leg)), done=done)

    def rows_before(self, batches: int) -> int:
        """Return the number of rows of the epoch in the batches before."""
        at = self.cursor(batches).planned
        assert at is not None
        if not at.legs:
            return min(at.start, self._rows)
        window = self._window(self._number(batches))
        return window.stop - (window.bounds[-1] - window.bounds[at.legs[-1][1]])

    def _window(self, number: int) -> Window:
        if number in self._kept:
            return self._kept[number]
        first, at = self._found[number]
        window = self._planned(first, at)
        self._kept[number] = window
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        if number == len(self._found) - 1:
            if window.stop >= self._rows:
                self.total = window.after
            self._found.append((window.after, PlannedAt(window.stop)))
        return window

    def _planned(self, first: int, at: PlannedAt) -> Window:
        budgets = [(self._earlier(text), done, checksum) for text, done, checksum in at.legs]
        window = (budgets[0][0] if budgets else self._budget).window
        stop = at.start + window
        if self._rows - stop < window // 2:  # the last window may be longer, so that none is very short
            stop = self._rows
        places = np.arange(stop - at.start, dtype=np.int64)
        chosen = self._epoch_order().chosen(places + at.start)
        by_source = self._planning.by_source
        lengths = self._planning.lengths.of(self._order.selection.source_rows(chosen) if by_source else chosen)
        shuffle = self._order.shuffle
        key = None if shuffle is None else derive(shuffle.seed, self.epoch, "batches", at.start)
        legs: list[tuple[str, int, int]] = []
        done, expected = 0, None
        if budgets and budgets[-1][0] is self._budget:
            _, done, expected = budgets.pop()
        for budget, delivered, checksum in budgets:
            split = self._split(budget, lengths, places, key, at.start)
            if split.checksum != checksum or delivered > len(split):
                raise changed_lengths(budget)
            legs.append((budget.text, delivered, checksum))
            places = np.sort(split.places[split.bounds[delivered] :])
        batches = self._split(self._budget, lengths, places, key, at.start)
        checksum = batches.checksum
        if done > len(batches) or (expected is not None and checksum != expected):
            raise changed_lengths(self._budget)
        after, positions, rows = first + len(batches) - done, batches.places + at.start, chosen[batches.places]
        bounds = batches.bounds.tolist()
        return Window(first, after, at.start, stop, positions, rows, bounds, done, tuple(legs), checksum)

    def _split(self, budget: Budget, lengths: Int64Array, places: Int64Array, key: Any, start: int) -> Batches:
        """Return the batches of some rows of a window, as places in the window."""
        try:
            found = budget.split(lengths[places], key)
        except TooLongError as problem:
            position = np.array([start + int(places[problem.place])])
            row = int(self._epoch_order().chosen(position)[0])
            raise too_long(problem.length, budget, f"row {row} of the dataset") from None
        return Batches(places[found.places], found.bounds)

    def _earlier(self, text: str) -> Budget:
        budget = self._budget.earlier(text)
        if budget is None:
            raise changed_budget(text, self._budget)
        return budget

    def _epoch_order(self) -> EpochOrder:
        if self._at_epoch is None:
            self._at_epoch = self._order.at(self.epoch, self._layout)
        return self._at_epoch


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
