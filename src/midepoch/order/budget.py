"""Batches: sizes that change with the steps of a run, and budgets of tokens.

Which rows of a window go together is a function of their lengths and a key.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from midepoch._native import best_fit
from midepoch.order.bijection import Bijection


@dataclass(frozen=True)
class BatchSizes:
    """A batch size from each of some steps on. Steps are counted from 0 over the whole run.

    >>> sizes = BatchSizes.of({0: 4, 10: 8})
    >>> sizes.at(9), sizes.at(10), sizes.before(12), sizes.step_at(56)
    (4, 8, 56, 12)
    """

    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(given: Any) -> BatchSizes:
        """Return the schedule of a mapping {first step: batch size}. Raise TypeError or ValueError if it is none."""
        what = "batch_size takes a number of rows, or a dict of first steps and sizes such as {0: 8, 1000: 16}"
        if not isinstance(given, Mapping):
            raise TypeError(f"{what}, got {given!r:.60}")
        try:
            given = {index(step): index(size) for step, size in given.items()}
        except TypeError:
            raise TypeError(f"{what}, got {given!r:.60}") from None
        if not given:
            raise TypeError(f"{what}, got {given!r:.60}")
        steps = tuple(sorted(given))
        if steps[0] != 0 or min(given.values()) < 1:
            raise ValueError(f"{what}: the first step is 0, and sizes are at least 1. Got {given!r:.60}")
        return BatchSizes(steps, tuple(given[step] for step in steps))

    @property
    def text(self) -> str:
        """The schedule in words."""
        return ",".join(f"{step}:{size}" for step, size in zip(self.steps, self.sizes, strict=True))

    @staticmethod
    def of_text(text: str) -> BatchSizes:
        """Return the schedule that a text describes."""
        return BatchSizes.of(
            {int(step): int(size) for step, _, size in (one.partition(":") for one in text.split(","))}
        )

    def at(self, step: int) -> int:
        """Return the batch size of a step."""
        return self.sizes[bisect_right(self.steps, step) - 1]

    def before(self, step: int) -> int:
        """Return the rows of all steps before one."""
        number = bisect_right(self.steps, step) - 1
        return self._starts[number] + (step - self.steps[number]) * self.sizes[number]

    def step_at(self, rows: int) -> int:
        """Return the number of steps that are complete after a number of rows."""
        number = bisect_right(self._starts, rows) - 1
        return self.steps[number] + (rows - self._starts[number]) // self.sizes[number]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for number in range(1, len(self.steps)):
            starts.append(starts[-1] + (self.steps[number] - self.steps[number - 1]) * self.sizes[number - 1])
        return starts


Int64Array = npt.NDArray[np.int64]

Cost = Callable[[Int64Array], float]
"""The cost of a batch, by the lengths of its rows."""

BALANCES = ("tokens", "quadratic")
WINDOW = 10_000

GROUP = 8
"""Number of batches of about the same cost that follow each other, unless lanes were chosen."""


class TooLongError(ValueError):
    """A row does not fit into a batch. ``place``: its index in the window."""

    def __init__(self, place: int, length: int) -> None:
        super().__init__(f"a row of {length} tokens does not fit")
        self.place, self.length = place, length


class Batches(NamedTuple):
    """Batch k has the rows ``places[bounds[k]:bounds[k + 1]]`` of the window."""

    places: Int64Array
    bounds: Int64Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def at(self, number: int) -> Int64Array:
        """Return the places of a batch."""
        return self.places[self.bounds[number] : self.bounds[number + 1]]

    def sizes(self) -> Int64Array:
        """Return the number of rows of each batch."""
        return self.bounds[1:] - self.bounds[:-1]

    @property
    def checksum(self) -> int:
        """A number of 32 bits for which rows are in which batch."""
        return crc32(self.bounds.astype("<i8").tobytes(), crc32(self.places.astype("<i8").tobytes()))

    def without(self, gone: npt.NDArray[np.bool_]) -> Batches:
        """Return the batches without some rows of the window. A batch may become empty."""
        kept = ~gone[self.places]
        return Batches(self.places[kept], np.append(0, np.cumsum(kept))[self.bounds])

    def in_order(self, order: Int64Array) -> Batches:
        """Return the batches in another order."""
        sizes = self.sizes()[order]
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
        return Batches(self.places[np.repeat(self.bounds[:-1][order], sizes) + within], bounds)


@dataclass(frozen=True)
class Budget:
    """The limits of a batch.

    ``padded``: a batch costs its rows times the longest of them, rounded up to ``multiple``. Otherwise it costs the sum
    of their lengths, each rounded up. ``rows``: most rows of a batch, 0 for any number. ``window``: consecutive
    positions of the epoch whose rows may go together. ``balance``: batches of about the same cost follow each other in
    groups of ``group``; the cost is of "tokens", "quadratic", or a function of the lengths of a batch. ``length``: the
    name of what is counted.
    """

    tokens: int
    rows: int = 0
    multiple: int = 1
    padded: bool = True
    window: int = WINDOW
    balance: str | Cost | None = None
    group: int = GROUP
    length: str = ""

    @cached_property
    def text(self) -> str:
        """All settings, as a state compares them. Functions are known by their names."""
        balance = self.balance
        if callable(balance):
            balance = f"function {getattr(balance, '__qualname__', type(balance).__name__)}"
        group = self.group if balance else 0
        return json.dumps(
            [self.tokens, self.rows, self.multiple, int(self.padded), self.window, balance or "", group, self.length],
            separators=(",", ":"),
        )

    @property
    def words(self) -> str:
        """The settings as arguments of a loader, for messages."""
        return in_words(self.text)

    def earlier(self, text: str) -> Budget | None:
        """Return the budget that a text describes, with the functions of this one. None if they are different."""
        if text == self.text:
            return self
        try:
            tokens, rows, multiple, padded, window, balance, group, length = json.loads(text)
            numbers = (tokens, rows, multiple, padded, window, group)
            if not all(type(each) is int and 0 <= each < 2**62 for each in numbers) or not (tokens and window):
                return None
        except (ValueError, TypeError, RecursionError):
            return None
        mine = json.loads(self.text)
        if length != mine[-1] or not isinstance(balance, str):
            return None
        if balance.startswith("function "):
            if balance != mine[5]:
                return None
            balance = self.balance
        elif balance and balance not in BALANCES:
            return None
        return Budget(
            tokens, rows, max(1, multiple), bool(padded), window, balance or None, max(1, group or GROUP), length
        )

    def split(self, lengths: Int64Array, key: npt.NDArray[np.uint64] | None) -> Batches:
        """Return the batches of a window of rows with these lengths, in the order of delivery.

        ``key``: of the order of batches or, with ``balance``, of groups of batches. None: the longest rows come first.
        """
        sizes = np.maximum(lengths, 1)
        if self.multiple > 1:
            sizes = -(-sizes // self.multiple) * self.multiple
        if len(sizes) and int(sizes.max()) > self.tokens:
            place = int(np.argmax(sizes > self.tokens))
            raise TooLongError(place, int(lengths[place]))
        batches = self._cut(sizes, self.tokens)
        if self.balance is None:
            return batches if key is None else batches.in_order(Bijection(len(batches), key)(np.arange(len(batches))))
        batches = self._in_whole_groups(batches, sizes)
        return batches.in_order(self._grouped(self.costs(batches, sizes), key))

    def _cut(self, sizes: Int64Array, tokens: int) -> Batches:
        return self._by_longest(sizes, tokens) if self.padded else self._by_sum(sizes, tokens)

    def _by_longest(self, sizes: Int64Array, tokens: int) -> Batches:
        """Cut the rows, sorted by length, into batches that are as full as possible."""
        order = _ascending(sizes.max(initial=0) - sizes)
        at, bounds = 0, [0]
        longest = sizes[order]
        while at < len(order):
            rows = tokens // int(longest[at])
            at += min(rows, self.rows) if self.rows else rows
            bounds.append(min(at, len(order)))
        return Batches(order, np.array(bounds, np.int64))

    def _by_sum(self, sizes: Int64Array, tokens: int) -> Batches:
        """Put the rows into as few batches as best-fit-decreasing finds."""
        if not len(sizes):
            return Batches(np.zeros(0, np.int64), np.zeros(1, np.int64))
        bins = best_fit(sizes, tokens).bins
        order = _ascending(sizes.max() - sizes)
        order = order[_ascending(bins[order])]
        counts = np.bincount(bins)
        if self.rows:  # a batch with too many rows becomes several
            counts = np.concatenate([_parts(int(count), self.rows) for count in counts])
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        fullest = np.argsort(-np.add.reduceat(sizes[order], bounds[:-1]), kind="stable")
        return Batches(order, bounds).in_order(fullest)

    def costs(self, batches: Batches, lengths: Int64Array) -> npt.NDArray[np.float64]:
        """Return the cost of each batch, by the lengths of rows."""
        sizes, starts, here = batches.sizes(), batches.bounds[:-1], lengths[batches.places]
        if callable(self.balance):
            costs = np.array([float(self.balance(lengths[batches.at(k)])) for k in range(len(batches))])
            if not np.isfinite(costs).all():
                raise ValueError(f"balance: the function must return a finite cost, it returned {costs.min()}")
            return costs
        power = 2.0 if self.balance == "quadratic" else 1.0
        if not len(batches):
            return np.zeros(0)
        if self.padded:
            return sizes * np.maximum.reduceat(here, starts).astype(np.float64) ** power
        return np.add.reduceat(here.astype(np.float64) ** power, starts)

    def _in_whole_groups(self, batches: Batches, sizes: Int64Array) -> Batches:
        """Split the last batches into more of them, of equal costs: groups are complete, and no step spans two."""
        count = len(batches)
        kept = count - count % self.group
        if kept == count or batches.bounds[-1] < self.group * -(-count // self.group):
            return batches  # there are fewer rows than batches would be needed
        while batches.bounds[-1] - batches.bounds[kept] < self.group * -(-(count - kept) // self.group):
            kept -= self.group  # few rows are left: those of the group before are split, too
        first = int(batches.bounds[kept])
        rows = batches.places[first:]
        wanted = self.group * -(-(count - kept) // self.group)
        low, high = int(sizes[rows].max()), self.tokens
        while low < high:  # the largest budget with which they become a group
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self._cut(sizes[rows], middle)) >= wanted else (low, middle - 1)
        parts = self._cut(sizes[rows], low)
        if len(parts) != wanted:  # no budget gives exactly so many: split some of the batches themselves
            pieces = dealt(batches.sizes()[kept:], wanted)
            ends = np.cumsum([stop - begin for _, begin, stop in pieces])
            parts = Batches(np.arange(len(rows)), np.concatenate([[0], ends]).astype(np.int64))
        bounds = np.concatenate([batches.bounds[:kept], first + parts.bounds])
        return Batches(np.concatenate([batches.places[:first], rows[parts.places]]), bounds)

    def _grouped(self, costs: npt.NDArray[np.float64], key: npt.NDArray[np.uint64] | None) -> Int64Array:
        """Return an order in which batches of about the same cost are in one group, and groups are shuffled."""
        order = np.argsort(-costs, kind="stable")
        whole = len(order) // self.group * self.group
        groups = order[:whole].reshape(-1, self.group)
        if key is not None:
            groups = groups[Bijection(len(groups), key)(np.arange(len(groups)))]
        return np.concatenate([groups.reshape(-1), order[whole:]])


def dealt(sizes: Int64Array, ranks: int) -> list[tuple[int, int, int]]:
    """Split batches of these numbers of rows into as many pieces as ranks: (batch, first row, stop) for each rank.

    A piece is of one batch, so that it is within the budget. There must be at least as many rows as ranks.
    """
    pieces = [1] * len(sizes)
    while sum(pieces) < ranks:  # one more for the batch with the largest pieces
        pieces[max(range(len(sizes)), key=lambda k: (int(sizes[k]) > pieces[k], sizes[k] / pieces[k], -k))] += 1
    found = []
    for number, (size, count) in enumerate(zip(sizes.tolist(), pieces, strict=True)):
        bounds = [size * piece // count for piece in range(count + 1)]
        found += [(number, bounds[piece], bounds[piece + 1]) for piece in range(count)]
    return found


def _ascending(keys: Int64Array) -> Int64Array:
    """Return the stable order of keys from 0 on. 10,000 take numpy 0.2 ms with 16 bits, else 1 ms."""
    small = len(keys) == 0 or int(keys.max()) < 1 << 16
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _parts(count: int, most: int) -> Int64Array:
    pieces = -(-count // most)
    return np.full(pieces, count // pieces, np.int64) + (np.arange(pieces) < count % pieces)


def in_words(text: str) -> str:
    """Return the settings in a text of ``Budget`` as arguments of a loader. Any other text is returned as it is."""
    try:
        tokens, rows, multiple, padded, window, balance, group, length = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text
    given = {
        "max_tokens": tokens,
        "batch_size": rows or None,
        "pad_to_multiple_of": multiple if multiple != 1 else None,
        "layout": None if padded else "varlen",
        "bucket_window": window,
        "balance": balance or None,
        "length": length,
    }
    settings = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    return ", ".join([*settings, *([f"in groups of {group}"] if balance else [])])


def checked_balance(balance: Any) -> str | Cost | None:
    """Return the argument ``balance`` of a loader. Raise ValueError unless it is known."""
    if balance is None or callable(balance) or balance in BALANCES:
        return balance  # type: ignore[no-any-return]
    names = ", ".join(map(repr, BALANCES))
    raise ValueError(f"balance must be one of {names}, or a function of the lengths of a batch, got {balance!r}")
