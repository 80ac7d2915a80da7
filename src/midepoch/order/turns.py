"""Sources of consecutive draws with constant weights, when the weights of a mix change over a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from midepoch.order.bijection import hashed
from midepoch.order.keys import derive

Int64Array = npt.NDArray[np.int64]

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
        counts = sizes[:, None] * self._shares
        exact = np.flatnonzero(np.abs(counts - np.rint(counts)).max(axis=1) < 1e-9 * sizes)
        return (int(sizes[exact[0]]), True) if len(exact) else (_LONGEST, False)

    def sources(self, start: int, stop: int) -> Int64Array:
        """Return the source of each of the draws [start, stop)."""
        size, exact = self._size
        full = stop if self.rows is None else self.rows // size * size
        parts = []
        if exact and start < full:
            until = min(stop, full)
            first, last = start // size, -(-until // size)
            labels = self._labels(0, size)
            keys = hashed(np.arange(first * size, last * size), self._keys[0]).reshape(-1, size)
            ordered = labels[np.argsort(keys, axis=1, kind="stable")].reshape(-1)
            parts.append(ordered[start - first * size : until - first * size])
            start = until
        while start < stop:
            number = start // size
            until = min(stop, (number + 1) * size)
            parts.append(self._span(number)[start - number * size : until - number * size])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def _span(self, number: int) -> Int64Array:
        """Return the sources of one span. The last one is kept: a chunk of draws is often a part of it."""
        if self._last and self._last[0][0] == number:
            return self._last[0][1]
        size, begin = self._size[0], number * self._size[0]
        length = size if self.rows is None else min(size, self.rows - begin)
        keys = hashed(np.arange(begin, begin + length), self._keys[0])
        labels = self._labels(number, length)[np.argsort(keys, kind="stable")]
        self._last[:] = [(number, labels)]
        return labels

    def _labels(self, number: int, length: int) -> Int64Array:
        """Return the sources of a span in ascending order: systematic sampling, with one random offset for the span."""
        offset = int(hashed(np.array([number]), self._keys[1])[0] >> np.uint64(11)) / 2.0**53
        bounds = np.floor(np.round(np.cumsum(self._shares) * length, 9) + offset).astype(np.int64)
        bounds[-1] = length
        return np.searchsorted(bounds, np.arange(length), side="right")
