"""Is it a shuffle? Compared with what a true random permutation gives, with bounds of 5 standard deviations.

Seeds are fixed, so these tests cannot fail by chance.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from midepoch.order import Order, Selection, Shuffle, SourceLayout
from midepoch.order.epoch import EpochOrder

SIZES = [1_000, 10_000, 100_000, 10**6, 10**7, 10**8]
SAMPLE = 200_000


def epoch_order(
    n: int, seed: int, epoch: int = 0, scope: str = "rows", window: int = 64, block: int = 1000
) -> EpochOrder:
    starts = np.append(np.arange(0, n, block), n)
    layout = SourceLayout(starts, np.array([0, n]))
    return Order(Selection.of_ranges([(0, n)]), Shuffle(seed, scope, window)).at(epoch, layout)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_serial_correlation(n: int, lag: int) -> None:
    for seed in (0, 1, 42):
        count = min(n, SAMPLE)
        rows = epoch_order(n, seed).rows(np.arange(count))
        assert abs(correlation(rows[:-lag], rows[lag:])) < 5 / math.sqrt(count - lag)


@pytest.mark.parametrize("n", SIZES)
def test_positions_and_rows_are_uncorrelated(n: int) -> None:
    count = min(n, SAMPLE)
    positions = np.arange(0, n, n // count)[:count]
    rows = epoch_order(n, 7).rows(positions)
    assert abs(correlation(positions, rows)) < 5 / math.sqrt(count)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("classes", [2, 10])
def test_class_counts_per_batch_on_sorted_data(n: int, classes: int) -> None:
    """Rows sorted by class, batches of 100: class counts must vary as under sampling without replacement."""
    batch = 100
    batches = min(n, SAMPLE) // batch
    rows = epoch_order(n, 3).rows(np.arange(batches * batch))
    labels = (rows * classes // n).reshape(batches, batch)
    counts = np.stack([(labels == c).sum(axis=1) for c in range(classes)], axis=1)
    share = 1 / classes
    variance = batch * share * (1 - share) * (n - batch) / (n - 1)  # hypergeometric
    assert np.abs(counts.mean(axis=0) - batch * share).max() < 5 * math.sqrt(variance / batches) + 1e-9
    found = counts.var(axis=0)
    spread = 5 * variance * math.sqrt(2 / batches) * 1.5  # the variance of a variance, with room for its excess
    assert np.abs(found - variance).max() < spread + variance / batches


@pytest.mark.parametrize("n", [1_000, 10**6, 10**8])
def test_epochs_and_seeds_are_unrelated(n: int) -> None:
    count = min(n, SAMPLE)
    positions = np.arange(count)
    base = epoch_order(n, 1, 0).rows(positions)
    for seed, epoch in ((1, 1), (2, 0), (0, 1), (1, 2)):
        other = epoch_order(n, seed, epoch).rows(positions)
        assert abs(correlation(base, other)) < 5 / math.sqrt(count)
        assert (base == other).sum() <= 12  # a Poisson number of mean count/n <= 1


def test_window_spreads_blocks_over_the_epoch_and_rows_over_windows() -> None:
    n, block, window = 10**6, 1000, 16
    order = epoch_order(n, 5, scope="window", window=window, block=block)
    rows = order.rows(np.arange(n))
    first = rows[: window * block]
    assert len(np.unique(first // block)) == window  # exactly 16 blocks are being read at a time
    assert abs(correlation(first[:-1], first[1:])) < 5 / math.sqrt(len(first))
    assert abs(correlation(np.arange(n), rows)) < 5 / math.sqrt(n / block)


def test_lag_one_of_a_million_is_not_that_of_four_rounds() -> None:
    rows = epoch_order(10**6, 0).rows(np.arange(10**6))
    assert abs(correlation(rows[:-1], rows[1:])) < 0.005
