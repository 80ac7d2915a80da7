"""Selection of source rows by slices and picks, applied before the order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Selection:
    """Sequence of source rows: ranges, or picks in any order. Chosen row v is the v-th of them.

    >>> s = Selection.of_ranges([(0, 10)]).slice(2, 8)
    >>> s.source_rows(np.array([0, 5])).tolist(), len(s), s.text
    ([2, 7], 6, '2:8')
    """

    ranges: tuple[tuple[int, int], ...] = ()
    picks: Int64Array | None = None

    @staticmethod
    def of_ranges(ranges: Iterable[tuple[int, int]]) -> Selection:
        """Return the selection of consecutive ranges. Empty ranges are dropped and adjacent ones joined."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if start >= stop:
                continue
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return Selection(tuple(joined))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.ranges, self.picks)  # without the cached properties

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.picks is None else len(self.picks)

    @cached_property
    def _starts(self) -> Int64Array:
        """Chosen rows at which the ranges begin, and the total."""
        return np.cumsum([0, *(stop - start for start, stop in self.ranges)], dtype=np.int64)

    @cached_property
    def _offsets(self) -> Int64Array:
        """Difference of source row and chosen row in each range."""
        return np.array([start for start, _ in self.ranges], dtype=np.int64) - self._starts[:-1]

    def source_rows(self, chosen: Int64Array) -> Int64Array:
        """Map chosen rows (each in range(len)) to rows of the source."""
        if self.picks is not None:
            return self.picks[chosen]
        if len(self.ranges) == 1:
            return chosen if self._offsets[0] == 0 else chosen + self._offsets[0]
        return chosen + self._offsets[np.searchsorted(self._starts, chosen, side="right") - 1]

    def boundaries(self, starts: Int64Array) -> Int64Array:
        """Return the chosen rows at which a run inside one block or file begins, and the total.

        ``starts``: the first rows of the source's blocks or files, and the total.
        """
        if self.picks is not None:
            owner = np.searchsorted(starts, self.picks, side="right")
            inner = np.flatnonzero(np.diff(owner)) + 1
            return np.concatenate([[0], inner, [len(self)]]).astype(np.int64) if len(self) else np.zeros(1, np.int64)
        if self.ranges == ((0, int(starts[-1])),):
            return starts if len(starts) < 2 or (np.diff(starts) > 0).all() else np.unique(starts)
        cuts = [self._starts]
        for (start, stop), first in zip(self.ranges, self._starts[:-1], strict=True):
            low, high = np.searchsorted(starts, start, side="right"), np.searchsorted(starts, stop, side="left")
            cuts.append(starts[low:high] - start + first)
        return np.unique(np.concatenate(cuts))

    def slice(self, start: int | None, stop: int | None, step: int | None = None) -> Selection:
        """Return the selection ``[start:stop:step]`` of the chosen rows."""
        first, last, by = slice(start, stop, step).indices(len(self))
        if by != 1:
            return self.select(np.arange(first, last, by, dtype=np.int64))
        if self.picks is not None:
            return Selection(picks=self.picks[first:last])
        clipped = []
        for (begin, _), low, high in zip(self.ranges, self._starts[:-1], self._starts[1:], strict=True):
            a, b = max(int(low), first), min(int(high), last)
            clipped.append((begin + a - int(low), begin + b - int(low)))
        return Selection.of_ranges(clipped)

    def select(self, rows: Iterable[int] | Int64Array) -> Selection:
        """Return the selection of these chosen rows, in this order. Negative numbers count from the end."""
        if isinstance(rows, range) and rows.step == 1 and 0 <= rows.start <= rows.stop <= len(self):
            return self.slice(rows.start, rows.stop)
        picks = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows))
        if picks.ndim != 1:
            raise TypeError(f"select takes a list of row numbers, got an array of shape {picks.shape}")
        if picks.dtype == np.bool_:
            raise TypeError("select takes row numbers, got a mask of booleans. Pass np.flatnonzero(mask).")
        if len(picks) and not np.issubdtype(picks.dtype, np.integer):
            raise TypeError(f"select takes integers, got values of type {picks.dtype}")
        picks = picks.astype(np.int64)
        if len(picks) and (picks.min() < -len(self) or picks.max() >= len(self)):
            bad = picks[(picks < -len(self)) | (picks >= len(self))][0]
            raise IndexError(f"row {bad} is out of range: there are {len(self)} rows")
        return Selection(picks=self.source_rows(np.where(picks < 0, picks + len(self), picks)))

    @cached_property
    def text(self) -> str:
        """Short name that identifies the chosen rows. It is part of the state."""
        if self.picks is not None:
            return f"{len(self.picks)} picks {hashlib.blake2b(self.picks.tobytes(), digest_size=8).hexdigest()}"
        text = ",".join(f"{a}:{b}" for a, b in self.ranges)
        if len(text) <= 64:
            return text or "none"
        return f"{len(self.ranges)} ranges {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
