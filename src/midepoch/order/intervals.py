"""Sets of positions: sorted, disjoint intervals of integers."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from midepoch.errors import StateError

Int64Array = npt.NDArray[np.int64]

_LARGEST = 1 << 62
_MOST = 1 << 24
"""Maximum number of intervals in a text: 256 MB in memory. Sets of one position in two rarely have that many."""
_MOST_BYTES = 27 * _MOST
"""Bytes of so many runs: three numbers of up to 9 bytes each."""


class Intervals:
    """An immutable set of positions, kept as half-open intervals ``[starts[i], stops[i])`` that do not touch."""

    __slots__ = ("_before", "_covered", "starts", "stops")

    starts: Final[Int64Array]
    stops: Final[Int64Array]

    def __init__(self, starts: Int64Array, stops: Int64Array) -> None:
        """Use ``Intervals.of`` for intervals that are not sorted, or that overlap or touch."""
        for array in (starts, stops):
            array.flags.writeable = False
        self.starts, self.stops = starts, stops
        self._covered = np.zeros(len(starts) + 1, np.int64)  # positions in the intervals before each one
        (stops - starts).cumsum(out=self._covered[1:])
        self._before = starts - self._covered[:-1]  # positions before each one that are not in the set

    @staticmethod
    def of(starts: npt.ArrayLike, stops: npt.ArrayLike) -> Intervals:
        """Return the union of intervals in any order. Empty ones are ignored."""
        first, last = np.array(starts, np.int64, ndmin=1), np.array(stops, np.int64, ndmin=1)
        if first.shape != last.shape or first.ndim != 1:
            raise ValueError(f"intervals need as many starts as stops, got {first.shape} and {last.shape}")
        full = first < last
        first, last = first[full], last[full]
        if not len(first):
            return EMPTY
        if len(first) > 1:
            order = first.argsort(kind="stable")
            first, last = first[order], np.maximum.accumulate(last[order])
        if first[0] < 0 or last[-1] > _LARGEST:
            raise ValueError(f"positions must be in [0, 2**62), got {first[0]} to {last[-1] - 1}")
        if len(first) == 1:
            return Intervals(first, last)
        begins = np.concatenate([_TRUE, first[1:] > last[:-1]])
        return Intervals(first[begins], last[np.concatenate([begins[1:], _TRUE])])

    @staticmethod
    def from_positions(positions: npt.ArrayLike | Iterable[int]) -> Intervals:
        """Return the set of some positions, in any order."""
        if isinstance(positions, range) and positions.step == 1:
            return Intervals.of(positions.start, positions.stop)
        given: Any = positions if isinstance(positions, np.ndarray) else list(positions)  # type: ignore[arg-type]
        found = np.asarray(given, np.int64)
        return Intervals.of(found, found + 1)

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __len__(self) -> int:
        """Return the number of positions in the set."""
        return int(self._covered[-1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return self is other or (np.array_equal(self.starts, other.starts) and np.array_equal(self.stops, other.stops))

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.stops.tobytes()))

    def __repr__(self) -> str:
        shown = [f"{start}–{stop - 1}" for start, stop in zip(self.starts[:4], self.stops[:4], strict=True)]
        return f"Intervals({', '.join(shown)}{', …' * (len(self.starts) > 4)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Intervals.of, (self.starts, self.stops)

    def positions(self) -> Int64Array:
        """Return all positions in the set, ascending."""
        numbers: Int64Array = np.arange(len(self), dtype=np.int64)
        numbers += np.repeat(self._before, self.stops - self.starts)
        return numbers

    def first(self, count: int) -> list[int]:
        """Return the first positions in the set."""
        few = zip(self.starts[:count].tolist(), self.stops[:count].tolist(), strict=True)
        return list(islice(chain.from_iterable(range(start, stop) for start, stop in few), count))

    def union(self, *others: Intervals) -> Intervals:
        """Return the positions in any of the sets."""
        sets = [each for each in (self, *others) if each]
        if len(sets) < 2:
            return sets[0] if sets else EMPTY
        return Intervals.of(np.concatenate([s.starts for s in sets]), np.concatenate([s.stops for s in sets]))

    def minus(self, other: Intervals) -> Intervals:
        """Return the positions of this set that are not in the other."""
        if not self or not other:
            return self
        # The edges of both sets in order. Between two edges, the number of open intervals of each set is constant.
        edges = np.concatenate([self.starts, self.stops, other.starts, other.stops])
        own = np.repeat([1, -1, 0, 0], [len(self.starts)] * 2 + [len(other.starts)] * 2)
        theirs = np.repeat([0, 0, 1, -1], [len(self.starts)] * 2 + [len(other.starts)] * 2)
        order = np.argsort(edges, kind="stable")
        edges, inside = edges[order], (np.cumsum(own[order]) > 0) & (np.cumsum(theirs[order]) == 0)
        return Intervals.of(edges[:-1][inside[:-1]], edges[1:][inside[:-1]])

    def intersection(self, other: Intervals) -> Intervals:
        """Return the positions in both sets."""
        return self.minus(self.minus(other))

    def from_(self, position: int) -> Intervals:
        """Return the part at and after a position."""
        if not self or position <= self.starts[0]:
            return self
        first = int(np.searchsorted(self.stops, position, side="right"))
        if first == len(self.starts):
            return EMPTY
        starts = self.starts[first:].copy()
        starts[0] = max(int(starts[0]), position)
        return Intervals(starts, self.stops[first:])

    def before_(self, position: int) -> Intervals:
        """Return the part before a position."""
        count = int(np.searchsorted(self.starts, position))
        if not count:
            return EMPTY
        if count == len(self.starts) and position >= self.stops[-1]:
            return self
        stops = self.stops[:count].copy()
        stops[-1] = min(int(stops[-1]), position)
        return Intervals(self.starts[:count], stops)

    def contains(self, positions: Int64Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the positions that are in the set."""
        if not self:
            return np.zeros(np.shape(positions), np.bool_)
        place = np.searchsorted(self.starts, positions, side="right") - 1
        return (place >= 0) & (np.asarray(positions) < self.stops[place])

    def contains_one(self, position: int) -> bool:
        """Return True if a position is in the set."""
        return self.after(position) != position

    def count(self, start: int, stop: int) -> int:
        """Return the number of positions of [start, stop) that are in the set."""
        return (stop - self.before(stop)) - (start - self.before(start)) if stop > start else 0

    @overload
    def remaining(self, number: int) -> int: ...
    @overload
    def remaining(self, number: Int64Array) -> Int64Array: ...
    def remaining(self, number: int | Int64Array) -> int | Int64Array:
        """Return the position with this number among those that are not in the set. The inverse of ``before``."""
        found = number + self._covered[np.searchsorted(self._before, number, side="right")]
        return found if isinstance(number, np.ndarray) else int(found)

    @overload
    def before(self, position: int) -> int: ...
    @overload
    def before(self, position: Int64Array) -> Int64Array: ...
    def before(self, position: int | Int64Array) -> int | Int64Array:
        """Return the number of positions before this one that are not in the set."""
        if not self:
            return position
        count = np.searchsorted(self.starts, position)  # intervals that begin before it
        over = np.where(count > 0, np.maximum(self.stops[count - 1] - position, 0), 0)
        found = position - self._covered[count] + over
        return found if isinstance(position, np.ndarray) else int(found)

    def after(self, position: int) -> int:
        """Return the first position at or after this one that is not in the set."""
        place = int(np.searchsorted(self.starts, position, side="right")) - 1
        return max(position, int(self.stops[place])) if place >= 0 else position

    def left(self, position: int, end: int) -> tuple[int, int, Intervals]:
        """Return how positions up to an end are delivered, if those in the set are not.

        That is: the first to deliver; the number of those before the end that are not in the set; and the part of the
        set between them. Positions before the first to deliver all count, so it is its own number.
        """
        if not self:
            return position, end, EMPTY
        first = min(self.after(position), end)
        between = self.from_(first).before_(end)
        return first, between.before(end), between

    def encode(self) -> str:
        """Return a compact text, of characters that JSON does not escape. Equal distances take a few bytes in all."""
        if not self:
            return ""
        if len(self.starts) > _MOST:
            raise ValueError(f"{len(self.starts):,} intervals are more than the {_MOST:,} that a state can have")
        gaps = self.starts - np.concatenate([_ZERO, self.stops[:-1]])
        lengths = self.stops - self.starts
        changes = np.concatenate([[True], (gaps[1:] != gaps[:-1]) | (lengths[1:] != lengths[:-1])])
        runs = np.flatnonzero(changes)
        repeats = np.diff(np.append(runs, len(gaps)))
        numbers = np.concatenate([gaps[runs], lengths[runs], repeats])
        return base64.b85encode(zlib.compress(_varints(numbers), 9)).decode()

    @staticmethod
    def decode(text: str) -> Intervals:
        """Return the set that ``encode`` wrote. Raises StateError if the text is damaged."""
        if text == "":
            return EMPTY
        try:
            inflate = zlib.decompressobj()
            data = inflate.decompress(base64.b85decode(text), _MOST_BYTES)
            if not inflate.eof or inflate.unused_data:
                raise ValueError("incomplete")
            numbers = _numbers(data)
            if not len(numbers) or len(numbers) % 3:
                raise ValueError("no runs")
            gaps, lengths, repeats = numbers.reshape(3, -1)
            spans = (gaps.astype(np.float64) + lengths) * repeats
            touching = gaps == 0
            touching[0] &= repeats[0] > 1  # the first may begin at 0
            if touching.any() or min(lengths.min(), repeats.min()) < 1 or spans.sum() > _LARGEST:
                raise ValueError("runs")
            if repeats.astype(np.float64).sum() > _MOST:
                raise ValueError("too many intervals")
        except (ValueError, TypeError, binascii.Error, zlib.error):
            raise StateError(f"the state is damaged: a set of positions is {text!r:.40}.") from None
        stops = np.cumsum(np.repeat(gaps + lengths, repeats))
        return Intervals(stops - np.repeat(lengths, repeats), stops)


def _varints(numbers: Int64Array) -> bytes:
    """Encode numbers in groups of 7 bits, the lowest first. All but the last have the bit 128."""
    groups = numbers[:, None] >> np.arange(0, 63, 7)
    used = np.maximum(1, (groups > 0).sum(axis=1))
    inside = np.arange(9) < used[:, None]
    more = np.arange(9) < used[:, None] - 1
    data: npt.NDArray[np.uint8] = ((groups & 127) + 128 * more)[inside].astype(np.uint8)
    return data.tobytes()


def _numbers(data: bytes) -> Int64Array:
    """Decode numbers. Raises ValueError if they are too large or incomplete."""
    groups = np.frombuffer(data, np.uint8)
    last = groups < 128
    if not len(groups) or not last[-1]:
        raise ValueError("incomplete")
    begins = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    sizes = np.diff(np.append(begins, len(groups)))
    if sizes.max() > 9:
        raise ValueError("too large")
    places = np.arange(len(groups)) - np.repeat(begins, sizes)
    return np.add.reduceat((groups & 127).astype(np.int64) << (7 * places), begins)


_ZERO, _TRUE = np.zeros(1, np.int64), np.ones(1, np.bool_)
EMPTY = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""The empty set."""
