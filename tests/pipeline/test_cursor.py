"""The arithmetic of cursors: what they know, which outputs a process gets, and where a resume begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Numbers, dataset_of
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import (
    ConcatAt,
    Cursor,
    FlowAt,
    HeldWeights,
    LaneCursor,
    MixAt,
    PartAt,
    RowAt,
    StageAt,
    WindowAt,
    ZipAt,
    flow_cursor,
    listed,
)
from midepoch.pipeline.lanes import Lanes, Share, StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Node, Slice
from midepoch.transforms import Batch

ROWS = 24


def at(outputs: int, ended: bool = False, **done: Intervals) -> LaneCursor:
    return LaneCursor(outputs, RowAt(outputs), ended=ended, **done)


counts = st.integers(0, 2**40)
weights = st.lists(st.floats(0.5, 9), min_size=1, max_size=3).map(tuple)
held = st.none() | st.builds(HeldWeights, counts, weights, st.lists(st.integers(-1, 3)).map(tuple), st.integers(-1, 99))
row_cursors = st.builds(RowAt, counts, counts, st.none() | counts, st.integers(-1, 9))


def combined(inner: st.SearchStrategy[FlowAt]) -> st.SearchStrategy[FlowAt]:
    parts = st.lists(st.builds(PartAt, counts, st.integers(0, 2), inner), min_size=1, max_size=3).map(tuple)
    return (
        st.builds(StageAt, inner, counts, st.none() | counts)
        | st.builds(MixAt, counts, counts, parts, held=held)
        | st.builds(MixAt, counts, counts, parts, counts, counts, held)
        | st.builds(ConcatAt, counts, inner, st.lists(st.integers(-1, 9)).map(tuple))
        | st.builds(ZipAt, st.lists(inner, min_size=1, max_size=3).map(tuple))
    )


flow_cursors = st.recursive(row_cursors, combined, max_leaves=6)


@given(flow_cursors)
def test_a_state_has_the_cursor_of_every_flow_as_lists_of_numbers(cursor: FlowAt) -> None:
    assert flow_cursor(json.loads(json.dumps(listed(cursor)))) == cursor


@pytest.mark.parametrize(
    "value",
    [None, [], [1], [-1, 0], [True, 0], [0, 1.5], [[0, 0], "1"], [0, 0, [[0, 0]]], [0, 0, [], 1], [[0, 0], 0, 0, 0]],
)
def test_lists_that_are_no_cursor(value: Any) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        flow_cursor(value)


def test_a_cursor_is_begun_unless_it_is_the_beginning_of_an_epoch() -> None:
    assert not Cursor().begun and not Cursor(epoch=3, steps=9).begun
    assert Cursor(lanes={0: LaneCursor(1)}).begun
    assert Cursor(lanes={0: at(0)}).begun  # rows were dropped, and nothing was delivered


def test_a_cursor_of_rows_is_begun_if_a_row_is_taken_or_done() -> None:
    assert Cursor.at_row(3, LaneCursor(), 9) == Cursor(3, steps=9)
    assert not Cursor.at_row(0, LaneCursor(0, WindowAt())).begun
    later = Intervals.of(5, 7)
    for lane in (
        LaneCursor(1),
        LaneCursor(excluded=later),
        LaneCursor(ahead=later),
        LaneCursor(0, WindowAt(LaneCursor(4))),
        LaneCursor(0, WindowAt(LaneCursor(excluded=later))),
    ):
        cursor = Cursor.at_row(2, lane, 9)
        assert cursor.begun and (cursor.epoch, cursor.lane, cursor.steps) == (2, lane, 9)


def test_the_position_is_what_the_known_lanes_have_taken() -> None:
    assert Cursor(4).position == 0 and Cursor(4).lane == LaneCursor()
    assert Cursor.at_row(0, LaneCursor(192), 3).position == 192
    assert Cursor(0, {1: at(3), 3: at(2, True)}).position == 5


def test_what_is_done_is_excluded_or_ahead_until_it_is_passed() -> None:
    lane = at(2, excluded=Intervals.of(4, 6), ahead=Intervals.of(5, 9))
    assert lane.done.positions().tolist() == [4, 5, 6, 7, 8]
    assert Cursor(0, {1: at(3), 3: lane}).has_done and not Cursor(0, {1: at(3)}).has_done
    moved = lane.moved(6, RowAt(7))
    assert (moved.taken, moved.at, moved.ended) == (6, RowAt(7), False)
    assert not moved.excluded and moved.ahead.positions().tolist() == [6, 7, 8]
    assert lane.moved(9, RowAt(9), ended=True) == at(9, True)


def test_lanes_have_ended_when_all_that_are_known_have() -> None:
    assert not Cursor().lanes_ended
    assert not Cursor(lanes={0: LaneCursor(9)}).lanes_ended
    assert not Cursor(0, {0: at(3, True), 1: at(2)}).lanes_ended
    assert Cursor(0, {1: at(3, True), 3: at(2, True)}).lanes_ended


def test_at_end_keeps_all_but_what_is_left() -> None:
    cursor = Cursor(2, {1: at(3, True), 3: at(2, excluded=Intervals.of(4, 6), ahead=Intervals.of(7, 8))}, 6)
    ended = cursor.at_end()
    assert ended.lanes_ended and not cursor.lanes_ended
    assert ended == Cursor(2, {1: at(3, True), 3: at(2, True)}, 6) and ended.position == 5
    assert Cursor(1, steps=4).at_end() == Cursor(1, steps=4)


def test_the_next_epoch_keeps_the_steps() -> None:
    assert Cursor(2, {1: at(3, True)}, 6).next_epoch() == Cursor(3, {}, 6, 6)


@given(lanes=st.integers(1, 12), world=st.integers(1, 12))
def test_shares_deal_all_outputs_in_turn(lanes: int, world: int) -> None:
    """Output p is of lane p modulo the lanes, and goes to process p modulo the world."""
    for index in range(world):
        share = Share.of(lanes, Shard(index, world))
        assert lanes % share.lanes.count == 0
        of_lanes = [p for p in range(lanes * world) if p % lanes % share.lanes.count == share.lanes.index]
        assert of_lanes[share.shard.index :: share.shard.count] == list(range(index, lanes * world, world))


class MadeHere:
    """Bundles of three rows, of each of which a number of outputs is made: its number, so many times."""

    def __init__(self, leaf: Leaf, times: Sequence[int]) -> None:
        self.engines: Any = [SimpleNamespace(leaf=leaf)]
        self.times, self.skipped = times, 0
        self.first_passes: Any = {}
        self.excluded = ()

    def take(
        self, leaf: int, epoch: int, lane: Shard, row: int, total: int, excluded: Intervals = EMPTY
    ) -> tuple[int, Batch]:
        assert not excluded
        stop = min(row + 3, total)
        rows = lane.locals(row, stop)
        places = np.repeat(np.arange(len(rows)), [self.times[row] for row in rows])
        return stop, Batch({"id": rows[places]}, rows[places], places, True)


Opened = Callable[..., Lanes]
Times = list[int]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Opens the lanes of one process at a cursor."""
    ds = dataset_of(tmp_path_factory.mktemp("cursor"), pa.table({"id": range(ROWS)}))
    leaf = ds.flat_map(lambda row: []).pipeline.base

    def open_lanes(times: Times, cursor: Cursor, lanes: int = 1, shard: Shard | None = None, *stages: Slice) -> Lanes:
        share = Share.of(lanes, shard or Shard())
        return Lanes(Node(leaf, stages), lanes, share, MadeHere(leaf, times), cursor)

    return open_lanes


def ids(step: StepOutputs | None) -> list[int]:
    return [] if step is None else np.asarray(materialize(step.items).columns["id"]).tolist()


def in_turn(lanes: int, times: Times) -> list[int]:
    """The next output is always that of the lane that has had the fewest, in plain Python."""
    left = [[row for row in range(lane, ROWS, lanes) for _ in range(times[row])] for lane in range(lanes)]
    had, found = [0] * lanes, []
    while any(left):
        lane = min((lane for lane in range(lanes) if left[lane]), key=lambda lane: (had[lane], lane))
        found.append(left[lane].pop(0))
        had[lane] += 1
    return found


any_times = st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS)


@given(lanes=st.integers(1, 5), times=any_times, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=50)
def test_lanes_are_dealt_in_turn_whatever_is_taken_at_a_time(
    opened: Opened, lanes: int, times: Times, sizes: list[int]
) -> None:
    flow, found = opened(times, Cursor(), lanes), list[int]()
    for size in cycle(sizes):
        step = flow.take(size)
        if step is None:
            break
        found += ids(step)
        assert flow.cursor().position == step.cursor().position == len(found)
    assert found == in_turn(lanes, times)
    assert flow.cursor().lanes_ended


@given(
    lanes=st.integers(1, 4), world=st.integers(1, 4), times=any_times, count=st.integers(1, 9), own=st.integers(0, 9)
)
@settings(max_examples=50)
def test_the_cursor_after_any_output_resumes_with_the_next(
    opened: Opened, lanes: int, world: int, times: Times, count: int, own: int
) -> None:
    """Of every process of a world, also after a part of what was taken."""
    expected = in_turn(lanes, times)
    for index in range(world):
        shard = Shard(index, world)
        whole = ids(opened(times, Cursor(), lanes, shard).take(2 * ROWS))
        step = opened(times, Cursor(), lanes, shard).take(count)
        assert set(whole) <= set(expected)
        if step is None:
            continue
        delivered = min(own, len(ids(step)))
        cursor = step.cursor(delivered)
        assert ids(step)[:delivered] + ids(opened(times, cursor, lanes, shard).take(2 * ROWS)) == whole
        assert sorted(cursor.lanes) == Share.of(lanes, shard).lanes.positions(0, lanes).tolist()


@given(lanes=st.integers(1, 4), world=st.integers(1, 4), times=any_times)
@settings(max_examples=50)
def test_processes_together_get_every_output_once(opened: Opened, lanes: int, world: int, times: Times) -> None:
    found = [row for i in range(world) for row in ids(opened(times, Cursor(), lanes, Shard(i, world)).take(2 * ROWS))]
    assert sorted(found) == sorted(in_turn(lanes, times))


@pytest.mark.parametrize(
    ("spec", "outputs", "left"),
    [
        (Slice(), 9, 9),
        (Slice(2), 9, 7),
        (Slice(2, 5), 9, 3),
        (Slice(2, 5), 4, 2),
        (Slice(2, 5), 1, 0),
        (Slice(0, 5), None, 5),
        (Slice(7, 5), None, 0),
        (Slice(0, 5), 3.6, 4),
    ],
    ids=str,
)
def test_a_slice_counts_what_it_leaves(spec: Slice, outputs: float | None, left: int) -> None:
    assert spec.count_of(outputs) == left


@given(times=any_times, start=st.integers(0, 20), length=st.integers(1, 20), count=st.integers(0, 20))
@settings(max_examples=50)
def test_the_cursor_of_a_slice_has_the_number_of_the_next_output(
    opened: Opened, times: Times, start: int, length: int, count: int
) -> None:
    """skip and then take: two slices, each of which counts the outputs that it is given."""
    stages = Slice(start), Slice(0, length)
    expected = in_turn(1, times)[start : start + length]
    step = opened(times, Cursor(), 1, None, *stages).take(ROWS)
    assert ids(step) == expected
    if step is not None:
        count = min(count, len(expected) - 1)
        cursor = step.cursor(count)
        taken = cursor.lane.at
        assert (taken.before.delivered, taken.delivered) == (start + count, count)
        assert ids(opened(times, cursor, 1, None, *stages).take(ROWS)) == expected[count:]


def test_a_dataset_saves_the_cursor_that_it_resumes_from(numbers: Numbers) -> None:
    ds = numbers(0, 20).filter(lambda row: row["n"] % 3 > 0).skip(2).take(5)
    rows = iter(ds)
    assert [next(rows)["n"] for _ in range(3)] == [4, 5, 7]
    assert ds.state_dict()["cursor"] == [[0, 3, [[[8, 0], 5], 3]]]
