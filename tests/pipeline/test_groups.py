"""Groups of batched functions are at fixed positions, against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import dataset_of
from midepoch.order import Shard
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import BundlesHere, GroupedRows

ROWS = 53


def sums(batch: dict[str, Any]) -> dict[str, Any]:
    return {"sum": [sum(batch["id"])] * len(batch["id"]), "size": [len(batch["id"])] * len(batch["id"])}


@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Leaf]:
    folder = tmp_path_factory.mktemp("groups")

    @cache
    def make(size: int, shuffled: bool) -> Leaf:
        ds = dataset_of(folder, pa.table({"id": range(ROWS)}), 8)
        found: Leaf = (ds.shuffle(seed=5) if shuffled else ds).map(sums, batched=True, batch_size=size).pipeline.leaf
        return found

    return make


@cache
def made_here(leaf: Leaf) -> BundlesHere:
    """Files are opened once."""
    return BundlesHere([leaf])


def expected(order: list[int], position: int, groups: int, size: int) -> tuple[int, int, int]:
    """The id at a position, the sum of its group, and how many rows that has."""
    sequence = order[position % groups :: groups]
    number = position // groups
    group = sequence[number - number % size : number - number % size + size]
    return order[position], sum(group), len(group)


def rows_of(made: Any) -> list[tuple[int, int, int]]:
    columns = [np.asarray(made.columns[name]).tolist() for name in ("id", "sum", "size")]
    return list(zip(*columns, strict=True))


@given(
    size=st.integers(1, 9),
    groups=st.integers(1, 6),
    shuffled=st.booleans(),
    epoch=st.integers(0, 2),
    reads=st.lists(st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=12), min_size=1, max_size=5),
    draw=st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_what_a_function_is_given_depends_on_the_position_alone(
    leaf: Callable[[int, bool], Leaf],
    size: int,
    groups: int,
    shuffled: bool,
    epoch: int,
    reads: list[set[int]],
    draw: Any,
) -> None:
    bundles = made_here(leaf(size, shuffled))
    order = bundles.engines[0].chosen(epoch, np.arange(ROWS)).tolist()
    rows = GroupedRows(bundles, epoch, groups)
    for positions in reads:
        asked = draw.sample(sorted(positions), len(positions))  # in any order
        made = rows.read(np.array(asked))
        assert rows_of(made) == [expected(order, position, groups, size) for position in asked]
        assert made.places.tolist() == list(range(len(asked)))


@pytest.mark.parametrize("groups", [1, 3])
def test_every_row_is_made_once(
    leaf: Callable[[int, bool], Leaf], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that are asked for in ascending order, few at a time."""
    bundles, made = BundlesHere([leaf(4, True)]), list[tuple[int, int]]()
    take = bundles.take

    def noting(number: int, epoch: int, lane: Shard, row: int, total: int) -> tuple[int, Any]:
        stop, batch = take(number, epoch, lane, row, total)
        made.extend((lane.index, one) for one in range(row, stop))
        return stop, batch

    monkeypatch.setattr(bundles, "take", noting)
    rows, found = GroupedRows(bundles, 0, groups), []
    for first in range(0, ROWS, 5):
        found += rows_of(rows.read(np.arange(first, min(first + 5, ROWS))))
    order = bundles.engines[0].chosen(0, np.arange(ROWS)).tolist()
    assert found == [expected(order, position, groups, 4) for position in range(ROWS)]
    assert len(made) == len(set(made)) == ROWS
