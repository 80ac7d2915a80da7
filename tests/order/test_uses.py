"""When blocks are read: checked against the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.order import Order, Selection, Shuffle, SourceLayout

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@pytest.mark.parametrize("scope", [None, "rows", "window", "files"])
@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
@settings(max_examples=50)
def test_uses_are_when_blocks_are_read(
    scope: str | None, sizes: list[int], lanes: int, window: int, aligned: bool, data: st.DataObject
) -> None:
    blocks = np.cumsum([0, *sizes])
    files = np.unique(np.concatenate([[0], blocks[:: data.draw(st.integers(1, 3))], blocks[-1:]]))
    n = int(blocks[-1])
    start = data.draw(st.integers(0, n - 1))
    selection = Selection.of_ranges([(0, n)]).slice(start, data.draw(st.integers(start + 1, n)))
    shuffle = None if scope is None else Shuffle(3, scope, window, aligned)
    order = Order(selection, shuffle, lanes).at(1, SourceLayout(blocks, files))
    positions = np.arange(len(selection))
    rows = order.rows(positions)
    assert sorted(rows.tolist()) == selection.source_rows(positions).tolist()
    read = np.searchsorted(blocks, rows, side="right") - 1
    uses = order.uses()
    assert (np.diff(uses.first) >= 0).all()
    assert set(uses.blocks.tolist()) == set(read.tolist())
    for position, block in enumerate(read.tolist()):
        lane = position % lanes
        assert any(
            first <= position <= last
            for b, first, last, of in zip(uses.blocks, uses.first, uses.last, uses.lane, strict=True)
            if b == block and of in (lane, -1)
        )


@given(SIZES, st.integers(2, 6), st.integers(1, 4))
def test_aligned_lanes_share_only_the_block_in_which_one_begins(sizes: list[int], lanes: int, window: int) -> None:
    blocks = np.cumsum([0, *sizes])
    n = int(blocks[-1])
    order = Order(Selection.of_ranges([(0, n)]), Shuffle(5, "window", window, True), lanes).at(
        0, SourceLayout(blocks, blocks)
    )
    read = np.searchsorted(blocks, order.rows(np.arange(n)), side="right") - 1
    fetched = sum(len(set(read[lane::lanes].tolist())) for lane in range(lanes))
    assert fetched <= len(sizes) + lanes - 1
