"""Sets of positions behave as Python's sets, and their text is compact and safe to read."""

from __future__ import annotations

import json
import pickle
import zlib
from base64 import b85encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midepoch.errors import StateError
from midepoch.order.intervals import EMPTY, Intervals

POSITIONS = st.sets(st.integers(0, 60), max_size=40)


@given(POSITIONS, POSITIONS, st.integers(0, 70))
def test_operations_equal_those_of_sets(first: set[int], second: set[int], position: int) -> None:
    one, other = Intervals.from_positions(first), Intervals.from_positions(second)
    assert set(one.positions().tolist()) == first and len(one) == len(first) and bool(one) == bool(first)
    assert set(one.union(other).positions().tolist()) == first | second
    assert set(one.minus(other).positions().tolist()) == first - second
    assert set(one.intersection(other).positions().tolist()) == first & second
    assert set(one.from_(position).positions().tolist()) == {each for each in first if each >= position}
    assert set(one.before_(position).positions().tolist()) == {each for each in first if each < position}
    everything = np.arange(75)
    assert one.contains(everything).tolist() == [each in first for each in range(75)]
    assert one.count(position, 70) == len([each for each in first if position <= each < 70])
    assert one.after(position) == next(each for each in range(position, 200) if each not in first)
    assert one == Intervals.from_positions(sorted(first, reverse=True)) == pickle.loads(pickle.dumps(one))
    assert (one == other) == (first == second) and (hash(one) == hash(other) or first != second)


@given(POSITIONS)
def test_remaining_and_before_are_inverse(taken: set[int]) -> None:
    done = Intervals.from_positions(taken)
    left = np.array([each for each in range(200) if each not in taken])
    numbers = np.arange(len(left))
    assert done.remaining(numbers).tolist() == left.tolist()
    assert done.before(left).tolist() == numbers.tolist()
    assert [done.remaining(k) for k in range(10)] == left[:10].tolist()
    assert [done.before(p) for p in range(80)] == [len([each for each in left if each < p]) for p in range(80)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_intervals_in_any_order_are_joined(pairs: list[tuple[int, int]]) -> None:
    made = Intervals.of([start for start, _ in pairs], [stop for _, stop in pairs])
    assert set(made.positions().tolist()) == {each for start, stop in pairs for each in range(start, stop)}
    assert (made.starts[1:] > made.stops[:-1]).all() and (made.starts < made.stops).all()


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**20), st.integers(1, 50)), max_size=20))
def test_text_restores_the_set(runs: list[tuple[int, int, int]]) -> None:
    starts = [first + k * 2 * length for first, length, repeats in runs for k in range(repeats)]
    made = Intervals.of(starts, [s + length for s, (_, length, repeats) in _each(starts, runs)])
    text = made.encode()
    assert Intervals.decode(text) == made and json.dumps(text) == f'"{text}"'


def _each(starts: list[int], runs: list[tuple[int, int, int]]) -> list[tuple[int, tuple[int, int, int]]]:
    return list(zip(starts, [run for run in runs for _ in range(run[2])], strict=True))


def test_text_is_compact() -> None:
    rng = np.random.default_rng(0)
    scattered = Intervals.from_positions(np.cumsum(rng.integers(2, 2**14, 1000)))
    strided = Intervals.from_positions(np.arange(1_000_000) * 8 + 3)
    assert len(scattered.starts) == 1000 and len(scattered.encode()) < 3000
    assert len(strided.encode()) < 200 and Intervals.decode(strided.encode()) == strided
    assert EMPTY.encode() == "" and Intervals.decode("") is EMPTY


def _text(*numbers: int) -> str:
    data = bytearray()
    for number in numbers:
        while number > 127:
            data.append(number & 127 | 128)
            number >>= 7
        data.append(number)
    return b85encode(zlib.compress(bytes(data))).decode()


@pytest.mark.parametrize(
    "text",
    [
        "no zlib",
        '"',
        _text(3, 1),  # not three numbers
        _text(3, 0, 1),  # an empty interval
        _text(0, 1, 2),  # intervals that touch
        _text(3, 1, 2**50),  # too many
        _text(2**61, 2**61, 2),  # too far
        _text(1, 2**80, 1),
        b85encode(zlib.compress(b"\x83")).decode(),  # an incomplete number
        b85encode(zlib.compress(b"\x01\x01\x01")[:-2]).decode(),
        b85encode(zlib.compress(bytes(2**20)) + b"more").decode(),
    ],
)
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(StateError, match="damaged"):
        Intervals.decode(text)
    assert Intervals.decode(_text(3, 1, 2)) == Intervals.from_positions([3, 7])


@pytest.mark.parametrize(("starts", "stops"), [([-1], [2]), ([0], [2**63 - 1]), ([0, 1], [2])])
def test_positions_out_of_range_are_refused(starts: list[int], stops: list[int]) -> None:
    with pytest.raises(ValueError, match=r"positions must be|as many starts"):
        Intervals.of(starts, stops)
