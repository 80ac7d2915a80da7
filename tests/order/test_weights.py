"""Draws by weight: their probabilities, their independence, and that they are the same on every machine."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.order import Order, Selection, SourceLayout, Weighted
from midepoch.order.weights import AliasTable, logarithm

Floats = npt.NDArray[np.float64]


def drawn(weights: Floats, samples: int, *, seed: int = 1, epoch: int = 0, replacement: bool = True) -> Floats:
    weighted = Weighted(np.asarray(weights, float), seed, samples, replacement)
    return weighted.at(epoch)(np.arange(samples, dtype=np.int64))


def chi_square(counts: npt.NDArray[np.int64], expected: Floats) -> float:
    """How far counts are from expected ones, in standard deviations of chi-square."""
    used = expected > 0
    assert not counts[~used].any()
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    degrees = int(used.sum()) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def parts_of(table: AliasTable, rows: int) -> list[Fraction]:
    """The exact probability of each row, read from the slots of the table."""
    size = 1 << int(table._shift)
    parts = [Fraction(0)] * rows
    for slot, (limit, alias) in enumerate(zip(table._limits.tolist(), table._aliases.tolist(), strict=True)):
        assert 0 <= limit <= size
        parts[slot] += Fraction(limit, rows * size)
        parts[alias] += Fraction(size - limit, rows * size)
    return parts


finite = st.floats(0, allow_nan=False, allow_infinity=False)


@given(st.lists(st.one_of(finite, st.just(0.0), st.just(1.0)), min_size=1, max_size=60).filter(any))
@settings(max_examples=300)
def test_a_table_has_the_exact_probabilities(weights: list[float]) -> None:
    parts, total = parts_of(AliasTable(np.array(weights)), len(weights)), sum(map(Fraction, weights))
    assert sum(parts) == 1
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(weight) / total) < Fraction(1, 2**50)
        assert (part > 0) == (weight > 0)


def test_a_million_weights_over_twelve_orders_of_magnitude() -> None:
    """Rows are judged in groups by weight. Each group has its share, also those whose rows are almost never drawn."""
    weights = 10.0 ** np.random.default_rng(0).uniform(-12, 0, 10**6)
    weights[::1000] = 0
    rows = drawn(weights, 2 * 10**6)
    assert (weights[rows] > 0).all()
    order = np.argsort(weights)
    bounds = np.searchsorted(np.cumsum(weights[order]), np.linspace(0, weights.sum(), 200)[1:-1])
    group = np.zeros(len(weights), np.int64)
    group[order] = np.searchsorted(bounds, np.arange(len(weights)), side="right")
    expected = np.bincount(group, weights) / weights.sum() * len(rows)
    assert abs(chi_square(np.bincount(group[rows], minlength=len(expected)), expected)) < 4
    light = weights < 1e-3
    share, mean = light[rows].mean(), weights[light].sum() / weights.sum()
    assert abs(share - mean) < 4 * math.sqrt(mean / len(rows))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize(
    "weights", [np.ones(100), np.arange(100), 2.0 ** -np.arange(12), np.r_[5, np.zeros(50), 1, 1]], ids=str
)
def test_counts_of_draws_follow_the_weights(weights: Floats, seed: int) -> None:
    samples = 200_000
    counts = np.bincount(drawn(weights, samples, seed=seed), minlength=len(weights))
    assert abs(chi_square(counts, weights / weights.sum() * samples)) < 4


@pytest.mark.parametrize(("seeds", "epochs"), [((1, 1), (0, 1)), ((1, 2), (0, 0)), ((1, 2), (1, 0))], ids=str)
def test_epochs_and_seeds_are_independent(seeds: tuple[int, int], epochs: tuple[int, int]) -> None:
    """Pairs of draws at the same position, and of neighbours, come as often as their probabilities say."""
    weights, samples = np.arange(1.0, 13), 300_000
    first, second = (drawn(weights, samples, seed=s, epoch=e) for s, e in zip(seeds, epochs, strict=True))
    share = weights / weights.sum()
    expected = np.outer(share, share).ravel()
    for a, b in ((first, second), (first[1:], first[:-1]), (first[7:], second[:-7])):
        assert abs(chi_square(np.bincount(a * 12 + b, minlength=144), expected * len(a))) < 4


def test_without_replacement_is_drawing_from_what_is_left() -> None:
    """The first two rows of 8,000 epochs, against the probabilities of successive draws."""
    weights = np.array([1.0, 2.0, 0.0, 4.0, 8.0])
    weighted = Weighted(weights, 3, 2, replacement=False)
    pairs = np.array([weighted.at(epoch)(np.arange(2)) for epoch in range(8_000)])
    total = weights.sum()
    expected = np.array([[a / total * b / (total - a) for b in weights] for a in weights])
    np.fill_diagonal(expected, 0)
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    assert abs(chi_square(counts, expected.ravel() * len(pairs))) < 4


@given(st.lists(st.one_of(st.just(0.0), finite), min_size=1, max_size=80).filter(any), st.integers(0, 3))
def test_without_replacement_every_positive_row_comes_once(weights: list[float], epoch: int) -> None:
    rows = drawn(np.array(weights), int(np.count_nonzero(weights)), epoch=epoch, replacement=False)
    assert sorted(rows.tolist()) == np.flatnonzero(weights).tolist()


def test_logarithms_need_no_library() -> None:
    values = np.random.default_rng(0).random(100_000)
    values[:3] = 2.0**-53, 1 - 2.0**-52, math.sqrt(0.5)
    assert np.abs(logarithm(values) / np.log(values) - 1).max() < 1e-14


def test_draws_are_pinned() -> None:
    """Part of every state by its digest, and the same on every machine: these numbers never change."""
    weights = (np.arange(1, 41) % 7) / 3
    assert Weighted(weights, 42, 40).digest == "40 weights 0f053f1f9a45657b"
    assert drawn(weights, 12, seed=42, epoch=5).tolist() == [18, 3, 38, 4, 24, 26, 3, 1, 12, 28, 37, 11]
    once = drawn(weights, 12, seed=42, epoch=5, replacement=False)
    assert once.tolist() == [26, 15, 5, 7, 4, 10, 3, 38, 25, 33, 12, 18]
    tiny = np.ldexp(1.0, -3 * np.arange(60))
    assert drawn(tiny, 60, seed=7, replacement=False).tolist()[-5:] == [55, 56, 57, 58, 59]


orders = st.builds(
    lambda weights, samples, lanes, replacement: Order(
        Selection.of_ranges([(3, 3 + len(weights))]),
        Weighted(
            np.array(weights), 5, samples if replacement else min(samples, np.count_nonzero(weights)), replacement
        ),
        lanes,
    ),
    st.lists(st.integers(0, 4).map(float), min_size=1, max_size=40).filter(any),
    st.integers(1, 90),
    st.integers(1, 9),
    st.booleans(),
)
layout = SourceLayout(np.arange(0, 50, 7), np.array([0, 49]))


@given(orders, st.data())
def test_a_position_is_drawn_alone_as_among_others(order: Order, data: st.DataObject) -> None:
    here = order.at(2, layout)
    rows = here.rows(np.arange(len(order)))
    some = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=9)), np.int64)
    copy = pickle.loads(pickle.dumps(order))
    assert np.array_equal(copy.at(2, layout).rows(some), rows[some])


@given(orders)
def test_all_positions_of_a_row_are_found(order: Order) -> None:
    here = order.at(1, layout)
    chosen = here.chosen(np.arange(len(order)))
    for row in range(len(order.selection)):
        assert here.positions_of(row).tolist() == np.flatnonzero(chosen == row).tolist()


@given(orders)
def test_uses_are_the_blocks_of_the_draws(order: Order) -> None:
    here = order.at(1, layout)
    blocks, uses = here.rows(np.arange(len(order))) // 7, here.uses()
    assert uses.blocks.tolist() == list(dict.fromkeys(blocks.tolist()))
    for block, first, last in zip(uses.blocks, uses.first, uses.last, strict=True):
        places = np.flatnonzero(blocks == block)
        assert (first, last) == (places[0], places[-1])


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1, -1], "not negative, got -1.0 for row 1"),
        ([math.nan], "got nan for row 0"),
        ([1, math.inf], "got inf for row 1"),
        ([0, 0], "at least one of the 2 weights"),
        ([], "at least one of the 0 weights"),
        ([[1.0]], "one weight for each row"),
    ],
)
def test_weights_that_are_none(weights: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Weighted(np.array(weights, float), 1, 1)


def test_numbers_of_samples() -> None:
    for samples, replacement in ((0, True), (2**63, True), (3, False)):
        with pytest.raises(ValueError, match=r"num_samples must be in \[1, "):
            Weighted(np.array([1.0, 0, 2]), 1, samples, replacement)
    with pytest.raises(ValueError, match="expected 3 weights"):
        Order(Selection.of_ranges([(0, 3)]), Weighted(np.ones(2), 1, 1))
