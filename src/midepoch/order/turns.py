"""Sources of the draws of a mix, computed by arithmetic: their turns, their counts, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from midepoch.order.bijection import derive, hashed

Int64Array = npt.NDArray[np.int64]
_PIECE = 1 << 16


def count(turns: Turns, stop: int) -> Int64Array:
    """Return the number of draws of each source among the draws [0, stop).

    >>> count(Turns((0.75, 0.25), 10, 0, 0, 0, 0), 8).tolist()
    [6, 2]
    """
    size, exact = turns._size
    spans = (stop if turns.rows is None else min(stop, turns.rows)) // size
    sources = len(turns.weights)
    if exact:
        found: Int64Array = spans * turns._counts(np.array([0]), size)[0]
    else:
        found = np.zeros(sources, np.int64)
        for first in range(0, spans, _PIECE):
            found += turns._counts(np.arange(first, min(spans, first + _PIECE)), size).sum(axis=0)
    rest = turns.sources(spans * size, stop)
    return found + np.bincount(rest, minlength=sources)


def draw_of(turns: Turns, source: int, number: int) -> int | None:
    """Return the draw in which a source occurs for the given time, counted from 0. None if it has fewer draws.

    >>> turns = Turns((0.75, 0.25), 100, 0, 0, 0, 0)
    >>> turns.sources(0, 100).tolist().index(1) == draw_of(turns, 1, 0)
    True
    """
    if not turns.weights[source]:
        return None
    high = number + 1 if turns.rows is None else turns.rows
    while count(turns, high)[source] <= number:
        if turns.rows is not None:
            return None
        high *= 2
    low = 0  # among the draws [0, low) it occurs at most ``number`` times, among [0, high) more often
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(turns, middle)[source] <= number else (low, middle)
    return low


_LONGEST_SPAN = 10_000


def spans(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the count of each source in a span: the shortest span that matches the weights exactly, or 10,000
    positions.

    A source of weight 0 has count 0.

    >>> spans([0.5, 0.3, 0.2])
    (5, 3, 2)
    """
    total = sum(weights)
    shares = np.array([weight / total for weight in weights])
    least = (shares > 0).astype(np.int64)
    for size in range(1, _LONGEST_SPAN + 1):
        counts = shares * size
        if np.abs(counts - np.rint(counts)).max() < 1e-9 * size and (np.rint(counts) >= least).all():
            return tuple(int(count) for count in np.rint(counts))
    counts = np.floor(shares * _LONGEST_SPAN).astype(np.int64)
    for i in np.argsort(counts - shares * _LONGEST_SPAN, kind="stable")[: _LONGEST_SPAN - int(counts.sum())]:
        counts[i] += 1
    if (counts < least).any():
        raise ValueError(f"expected weights of 0 or at least 1/{_LONGEST_SPAN:,} of the total, got {list(weights)}")
    return tuple(int(count) for count in counts)


@dataclass(frozen=True)
class MixOrder:
    """Sources of the positions of one lane in one epoch. ``schedule_version`` counts the changes of the mix."""

    counts: tuple[int, ...]
    seed: int
    epoch: int
    lane: int = 0
    schedule_version: int = 0

    @cached_property
    def _key(self) -> np.uint64:
        word = derive(self.seed, self.epoch, "mix", (self.schedule_version << 32) + self.lane, words=1)[0]
        return np.uint64(word)

    @cached_property
    def _labels(self) -> Int64Array:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def sources(self, start: int, stop: int) -> Int64Array:
        """Return the source at each of the positions [start, stop)."""
        size = len(self._labels)
        first, last = start // size, -(-stop // size)
        keys = hashed(np.arange(first * size, last * size), self._key).reshape(-1, size)
        labels = self._labels[np.argsort(keys, axis=1, kind="stable")].reshape(-1)
        return labels[start - first * size : stop - first * size]


_LONGEST = 1_000


@dataclass(frozen=True)
class Turns:
    """Sources of the draws of one lane from one change of the weights to the next.

    Draws are cut into spans: the shortest in which every source occurs exactly in proportion to its weight, or 1,000.
    If ``rows``, the number of draws up to the next change, is known, the last span is as long as what is left. In a
    span that cannot be exact, the count of a source is its share of the span, rounded down or up: right on average.
    ``number`` is that of the change, which makes the order of every stretch of draws different.
    """

    weights: tuple[float, ...]
    rows: int | None
    seed: int
    epoch: int
    lane: int
    number: int
    _last: list[tuple[int, Int64Array]] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def _keys(self) -> npt.NDArray[np.uint64]:
        """Keys of the order within spans, and of the rounding of their counts."""
        return derive(self.seed, self.epoch, "schedule", (self.number << 32) + self.lane, words=2)

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        weights: npt.NDArray[np.float64] = np.array(self.weights, dtype=np.float64)
        return weights / float(weights.sum())

    @cached_property
    def _size(self) -> tuple[int, bool]:
        """The length of a span, and True if all counts in it are exact."""
        sizes = np.arange(1, _LONGEST + 1)
        for share in self._shares:  # one by one: weights that change linearly are hardly ever exact, so one is enough
            counts = sizes * share
            sizes = sizes[np.abs(counts - np.rint(counts)) < 1e-9 * sizes]
            if not len(sizes):
                return _LONGEST, False
        return int(sizes[0]), True

    def sources(self, start: int, stop: int) -> Int64Array:
        """Return the source of each of the draws [start, stop)."""
        size = self._size[0]
        full = stop if self.rows is None else self.rows // size * size  # up to here, spans are complete
        parts = []
        while start < stop:
            number = start // size
            if not self._last or self._last[0][0] != number:
                last = -(-min(stop, full) // size) if start < full else number + 1
                spans = self._spans(number, last)
                self._last[:] = [(last - 1, spans[-1])]  # a chunk of draws often ends in the middle of one
                found, until = spans.reshape(-1), min(stop, last * size)
            else:
                found, until = self._last[0][1], min(stop, (number + 1) * size)
            parts.append(found[start - number * size : until - number * size])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def _spans(self, first: int, last: int) -> Int64Array:
        """Return the sources of spans of one length, one span a row, in one call: a hash of a few numbers takes as long
        as one of a thousand.
        """
        size, exact = self._size
        length = size if self.rows is None else min(size, self.rows - first * size)
        begin = first * size
        keys = hashed(np.arange(begin, begin + (last - first) * length), self._keys[0]).reshape(-1, length)
        order = np.argsort(keys, axis=1)  # no two keys are equal: the hash is a bijection
        if exact and length == size:
            labels: Int64Array = self._labels(np.array([0]), size)[0]
            return labels[order]
        return np.take_along_axis(self._labels(np.arange(first, last), length), order, axis=1)

    def _labels(self, numbers: Int64Array, length: int) -> Int64Array:
        """Return the sources of spans in ascending order."""
        counts = self._counts(numbers, length)
        return np.repeat(np.tile(np.arange(counts.shape[1]), len(numbers)), counts.reshape(-1)).reshape(-1, length)

    def _counts(self, numbers: Int64Array, length: int) -> Int64Array:
        """Return the count of each source in spans: systematic sampling, with one random offset for each span."""
        offsets = (hashed(numbers, self._keys[1]) >> np.uint64(11)) / 2.0**53
        bounds = np.floor(np.round(np.cumsum(self._shares) * length, 9) + offsets[:, None]).astype(np.int64)
        bounds[:, -1] = length
        counts: Int64Array = np.diff(np.minimum(bounds, length), axis=1, prepend=0)  # an offset may round to 1
        return counts
