"""Order as a whole: bijective on every scope, seek equals skip, cuts disjoint and complete, pinned for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.order import Order, Selection, Shard, Shuffle, SourceLayout, epoch_end

GOLDEN = Path(__file__).parent.parent / "golden" / "order.json"


def layout_of(files: list[list[int]]) -> SourceLayout:
    """Files given as the rows of their blocks."""
    blocks = [rows for file in files for rows in file]
    return SourceLayout(
        np.cumsum([0, *blocks], dtype=np.int64), np.cumsum([0, *(sum(file) for file in files)], dtype=np.int64)
    )


files_strategy = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=6)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, SourceLayout, int]:
    layout = layout_of(draw(files_strategy))
    selection = Selection.of_ranges([(0, layout.rows)])
    kind = draw(st.sampled_from(["all", "slice", "ranges", "picks"]))
    if kind == "slice":
        a, b = sorted(draw(st.tuples(st.integers(0, layout.rows), st.integers(0, layout.rows))))
        selection = selection.slice(a, b)
    elif kind == "ranges":
        cuts = sorted(draw(st.lists(st.integers(0, layout.rows), min_size=4, max_size=4)))
        selection = Selection.of_ranges([(cuts[2], cuts[3]), (cuts[0], cuts[1])])
    elif kind == "picks":
        selection = selection.select(draw(st.lists(st.integers(0, layout.rows - 1), unique=True, max_size=40)))
    scope = draw(st.sampled_from([None, "rows", "window", "files"]))
    shuffle = None if scope is None else Shuffle(draw(st.integers(0, 9)), scope, draw(st.integers(1, 5)))
    return Order(selection, shuffle, draw(st.integers(1, 9))), layout, draw(st.integers(0, 3))


@given(orders())
@settings(max_examples=120)
def test_every_selected_row_once(case: tuple[Order, SourceLayout, int]) -> None:
    order, layout, epoch = case
    rows = order.at(epoch, layout).rows(np.arange(len(order)))
    expected = order.selection.source_rows(np.arange(len(order)))
    assert np.array_equal(np.sort(rows), np.sort(expected))


@given(orders(), st.data())
@settings(max_examples=120)
def test_seek_equals_skip(case: tuple[Order, SourceLayout, int], data: st.DataObject) -> None:
    order, layout, epoch = case
    n = len(order)
    whole = order.at(epoch, layout).rows(np.arange(n))
    a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    assert np.array_equal(order.at(epoch, layout).rows(np.arange(a, b)), whole[a:b])
    some = np.array(data.draw(st.lists(st.integers(0, max(0, n - 1)), max_size=5)) if n else [], dtype=np.int64)
    assert np.array_equal(order.at(epoch, layout).rows(some), whole[some])


@given(orders())
@settings(max_examples=100)
def test_position_inverts_sequence(case: tuple[Order, SourceLayout, int]) -> None:
    order, layout, epoch = case
    bound = order.at(epoch, layout)
    positions = np.arange(len(order))
    assert [bound.position(int(q)) for q in bound.sequence(positions)] == positions.tolist()


@given(orders(), st.integers(1, 6), st.integers(1, 6), st.integers(0, 400))
@settings(max_examples=120)
def test_cuts_are_disjoint_and_complete(
    case: tuple[Order, SourceLayout, int], ranks: int, workers: int, start: int
) -> None:
    """From any position, for any world and workers: all shares together are the rest of the epoch, once."""
    n = len(case[0])
    start = min(start, n)
    shares = [Shard(r, ranks).within(Shard(w, workers)) for r in range(ranks) for w in range(workers)]
    seen = np.concatenate([share.positions(start, n) for share in shares])
    assert np.array_equal(np.sort(seen), np.arange(start, n))
    lengths = [len(share.positions(start, n)) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    for share in shares:
        assert share.before(n) - share.before(start) == len(share.positions(start, n))
        assert np.array_equal(share.locals(share.before(start), share.before(n)), share.positions(start, n))


@given(st.integers(1, 8), st.integers(1, 50), st.integers(0, 500), st.integers(0, 500))
def test_ranks_share_every_global_batch_equally(ranks: int, batch: int, start: int, n: int) -> None:
    size = ranks * batch
    end = epoch_end(min(start, n), n, size, drop_last=True)
    for first in range(min(start, n), end, size):
        parts = [Shard(rank, ranks).positions(first, first + size) for rank in range(ranks)]
        assert {len(part) for part in parts} == {batch}


def test_lanes_keep_a_rank_on_its_own_files() -> None:
    layout = layout_of([[10], [10], [10], [10]])
    order = Order(Selection.of_ranges([(0, 40)]), Shuffle(3, "files"), lanes=4).at(0, layout)
    for rank in range(4):
        rows = order.rows(Shard(rank, 4).positions(0, 40))
        assert len(np.unique(rows // 10)) == 1


def test_slices_come_before_the_order() -> None:
    """A shuffle never moves a row from one slice into another."""
    layout = layout_of([[25, 25], [50]])
    everything = Selection.of_ranges([(0, 100)])
    for scope in ("rows", "window", "files"):
        train = Order(everything.slice(0, 90), Shuffle(1, scope, 2)).at(0, layout).rows(np.arange(90))
        test = Order(everything.slice(90, 100), Shuffle(1, scope, 2)).at(0, layout).rows(np.arange(10))
        assert set(train.tolist()) == set(range(90))
        assert set(test.tolist()) == set(range(90, 100))


@pytest.mark.parametrize("n", [10**9, 10**12])
def test_opens_at_once_on_any_number_of_rows(n: int) -> None:
    starts = np.linspace(0, n, 1001).astype(np.int64)
    order = Order(Selection.of_ranges([(0, n)]), Shuffle(1)).at(5, SourceLayout(starts, np.array([0, n])))
    rows = order.rows(np.arange(n - 100, n))
    assert len(np.unique(rows)) == 100


def test_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="scope"):
        Shuffle(1, "row")
    with pytest.raises(ValueError, match="window"):
        Shuffle(1, "window", 0)
    with pytest.raises(ValueError, match="lanes"):
        Order(Selection.of_ranges([(0, 1)]), None, 0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Shard(2, 2)


def golden_orders() -> dict[str, dict[str, object]]:
    """Small orders in full, large ones as a digest of some positions."""
    found: dict[str, dict[str, object]] = {}
    uneven = layout_of([[4, 4, 1], [1], [7, 5], [3, 3, 2]])
    for scope in (None, "rows", "window", "files"):
        for lanes in (1, 3):
            for epoch in (0, 1):
                shuffle = None if scope is None else Shuffle(42, scope, 2)
                order = Order(Selection.of_ranges([(0, 30)]), shuffle, lanes).at(epoch, uneven)
                found[f"30 rows {scope} lanes={lanes} epoch={epoch}"] = {"rows": order.rows(np.arange(30)).tolist()}
    for n in (5_000, 10**6, 10**9, 10**13):
        for seed, epoch in ((0, 0), (42, 3), (2**64 - 1, 2**33)):
            starts = np.append(np.arange(0, n, max(1000, n // 1000)), n)
            for scope in ("rows", "window"):
                order = Order(Selection.of_ranges([(0, n)]), Shuffle(seed, scope, 8)).at(
                    epoch, SourceLayout(starts, starts)
                )
                positions = np.concatenate([np.arange(1000), np.arange(n - 1000, n)])
                rows = order.rows(positions)
                digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
                found[f"{n} rows {scope} seed={seed} epoch={epoch}"] = {"first": rows[:4].tolist(), "sha256": digest}
    return found


def test_order_is_pinned_for_ever() -> None:
    """If this fails, runs in progress everywhere would resume into another order. Never update the file: fix the code."""
    assert golden_orders() == json.loads(GOLDEN.read_text())


@given(orders())
@settings(max_examples=100)
def test_positions_undo_chosen(case: tuple[Order, SourceLayout, int]) -> None:
    order, layout, epoch = case
    here, positions = order.at(epoch, layout), np.arange(len(order))
    assert [here.positions_of(row).tolist() for row in here.chosen(positions).tolist()] == [[p] for p in positions]


@pytest.mark.parametrize("rows", [1, 4096, 4097, 10**6, 10**9, 2**33])
def test_a_row_is_found_at_once_among_very_many(rows: int) -> None:
    """Small ones by table, large ones by undoing the rounds, and above 2**32 without tables of hashes."""
    order = Order(Selection.of_ranges([(0, rows)]), Shuffle(7, "rows"), lanes=min(rows, 48))
    here = order.at(3, SourceLayout(np.array([0, rows]), np.array([0, rows])))
    positions = np.unique(np.random.default_rng(0).integers(0, rows, 100))
    assert [here.positions_of(row).tolist() for row in here.chosen(positions).tolist()] == [[p] for p in positions]
