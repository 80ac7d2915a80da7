"""Figures of batches, computed from the rows and the lengths of each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Batches = Sequence[Rows]


def padded_tokens(batches: Batches, lengths: Rows) -> Rows:
    """Return rows × longest row of each batch."""
    return np.array([len(rows) * lengths[rows].max() for rows in batches], np.int64)


def padding(batches: Batches, lengths: Rows) -> float:
    """Return the share of padded batches that is padding."""
    return 1 - sum(int(lengths[rows].sum()) for rows in batches) / int(padded_tokens(batches, lengths).sum())


def cost(rows: Rows, lengths: Rows, power: int, padded: bool = True) -> float:
    """Return the cost of a batch: tokens (power 1) or their squares (2), with padding or without."""
    here = lengths[rows].astype(np.float64) ** power
    return float(len(rows) * here.max() if padded else here.sum())


class Spread(NamedTuple):
    """How much the slowest rank of a step costs above the mean of ranks.

    ``mean``, ``median``, ``high`` (95th percentile): of steps. ``total``: the sum of maxima beside the sum of means.
    """

    mean: float
    median: float
    high: float
    total: float

    def __str__(self) -> str:
        return " / ".join(f"{each:.2%}" for each in self)


def spread(ranks: Sequence[Batches], lengths: Rows, power: int = 1, padded: bool = True) -> Spread:
    """Return the spread over the steps that every rank has."""
    steps = min(map(len, ranks))
    costs = np.array([[cost(rank[step], lengths, power, padded) for step in range(steps)] for rank in ranks])
    above = costs.max(0) / costs.mean(0) - 1
    total = costs.max(0).sum() / costs.mean(0).sum() - 1
    return Spread(float(above.mean()), float(np.median(above)), float(np.percentile(above, 95)), float(total))


class Randomness(NamedTuple):
    """How random the batches of an epoch are.

    ``distance``: mean distance in the stored order of two rows of a batch, beside that of two rows of the data (1.0).
    ``neighbours``: correlation of the mean lengths (their logarithms) of consecutive batches (0 if they are shuffled).
    ``again``: share of pairs of rows in one batch that are in one batch in the next epoch, too.
    """

    distance: float
    neighbours: float
    again: float

    def __str__(self) -> str:
        return f"{self.distance:.2f} / {self.neighbours:+.2f} / {self.again:.2%}"


def randomness(batches: Batches, following: Batches, lengths: Rows) -> Randomness:
    """Return the figures of an epoch and the one that follows."""
    some = np.random.default_rng(1)
    pairs = np.array([some.choice(rows, 2, replace=False) for rows in batches if len(rows) > 1])
    distance = np.abs(pairs[:, 0] - pairs[:, 1]).mean() / (len(lengths) / 3)
    means = np.log([lengths[rows].mean() for rows in batches])
    neighbours = np.corrcoef(means[:-1], means[1:])[0, 1]
    number = np.full(len(lengths), -1)
    for k, rows in enumerate(following):
        number[rows] = k
    both = sum(_pairs(Counter(number[rows].tolist()).values()) for rows in batches)
    return Randomness(float(distance), float(neighbours), both / _pairs(map(len, batches)))


def _pairs(counts: Iterable[int]) -> int:
    return sum(count * (count - 1) // 2 for count in counts)


class Delivered(NamedTuple):
    """Rows that no run delivered, and further deliveries of a row."""

    lost: int
    repeated: int

    def __str__(self) -> str:
        return f"{self.lost:,} / {self.repeated:,}"


def delivered(batches: Iterable[Rows], rows: int) -> Delivered:
    """Return the rows that were lost and repeated in an epoch."""
    counts = np.zeros(rows, np.int64)
    for each in batches:
        np.add.at(counts, each, 1)
    return Delivered(int((counts == 0).sum()), int((counts - 1).clip(0).sum()))
