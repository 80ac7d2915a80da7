"""Sources of the positions of a mix, computed by arithmetic, with exact counts in every span of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from midepoch.order.bijection import hashed
from midepoch.order.keys import derive

Int64Array = npt.NDArray[np.int64]

_LONGEST = 10_000


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
    for size in range(1, _LONGEST + 1):
        counts = shares * size
        if np.abs(counts - np.rint(counts)).max() < 1e-9 * size and (np.rint(counts) >= least).all():
            return tuple(int(count) for count in np.rint(counts))
    counts = np.floor(shares * _LONGEST).astype(np.int64)
    for i in np.argsort(counts - shares * _LONGEST, kind="stable")[: _LONGEST - int(counts.sum())]:
        counts[i] += 1
    if (counts < least).any():
        raise ValueError(f"expected weights of 0 or at least 1/{_LONGEST:,} of the total, got {list(weights)}")
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
