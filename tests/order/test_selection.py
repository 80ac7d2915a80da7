"""Selections against lists of row numbers: ranges in any order, slices, picks, and what is left without some rows."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midepoch.order import Selection

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5)


def rows_of(selection: Selection) -> list[int]:
    return selection.source_rows(np.arange(len(selection))).tolist()


@given(RANGES, st.integers(-50, 50), st.integers(-50, 50), st.sampled_from([None, 1, 3, -2]))
def test_ranges_and_slices_are_those_of_a_list(
    ranges: list[tuple[int, int]], start: int, stop: int, step: int | None
) -> None:
    rows = [row for first, last in ranges for row in range(first, last)]
    selection = Selection.of_ranges(ranges)
    assert rows_of(selection) == rows_of(pickle.loads(pickle.dumps(selection))) == rows
    assert rows_of(selection.slice(start, stop, step)) == rows[start:stop:step]


@given(RANGES, st.booleans(), st.sets(st.integers(0, 60)))
def test_rows_that_are_left(ranges: list[tuple[int, int]], picked: bool, taken: set[int]) -> None:
    selection = Selection.of_ranges(ranges)
    if picked:
        selection = selection.select(np.arange(len(selection)))
    rows = rows_of(selection)
    some = sorted(row for row in taken if row < len(rows))
    left = selection.without(np.array(some, dtype=np.int64))
    assert rows_of(left) == [row for place, row in enumerate(rows) if place not in taken]


@given(RANGES, st.sets(st.integers(1, 39)))
def test_boundaries_separate_blocks(ranges: list[tuple[int, int]], inner: set[int]) -> None:
    starts = np.array([0, *sorted(inner), 40])
    selection = Selection.of_ranges(ranges)
    bounds = selection.boundaries(starts).tolist()
    assert bounds[0] == 0 and bounds[-1] == len(selection) and bounds == sorted(set(bounds))
    rows = np.array(rows_of(selection), dtype=np.int64)
    for first, stop in pairwise(bounds):
        run = rows[first:stop]
        assert (np.diff(run) == 1).all() and len(set(np.searchsorted(starts, run, side="right").tolist())) == 1


def test_ranges_that_take_less_memory_than_picks() -> None:
    left = Selection.of_ranges([(0, 10_000_000)]).without(np.arange(0, 10_000_000, 1000))
    assert len(left) == 9_990_000 and left.picks is None and left.ranges.nbytes < 200_000
    assert left.source_rows(np.array([0, 998, 999, 9_989_999])).tolist() == [1, 999, 1001, 9_999_999]


def test_text_is_that_of_the_first_version() -> None:
    """It is part of every state."""
    assert Selection.of_ranges([(2, 8), (8, 9), (0, 1)]).text == "2:9,0:1"
    many = Selection.of_ranges([(2 * i, 2 * i + 1) for i in range(40)])
    assert many.text == "40 ranges 2763f82bec5ab08a"
