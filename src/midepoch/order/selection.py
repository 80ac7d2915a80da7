"""Rows that are chosen: slices and picks of a source, applied before the order, and the positions of a shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def _instead_of(rows: Any) -> str:
    ways = {"slice": "a range, use ds.slice(start, stop)", "function": "a condition, use ds.filter(function)"}
    ways["NoneType"] = "all rows, omit it"
    return f"For {ways.get(type(rows).__name__, f'one row, use ds[{rows!r:.60}]')}."


@dataclass(frozen=True)
class Shard:
    """One of ``count`` equal shards of the positions: those that are ``index`` modulo ``count``.

    Any ``count`` consecutive positions contain exactly one of each shard. Therefore all shards continue from one global
    position without gap or overlap, even if ``count`` has changed.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of shards must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"the index must be from 0 to {self.count - 1} for num_shards={self.count}, got {self.index}. By name: "
                "shard(num_shards=4, index=1)."
            )

    def before(self, position: int) -> int:
        """Return the number of positions of this shard before ``position``."""
        return max(0, -((self.index - position) // self.count))

    def positions(self, start: int, stop: int) -> Int64Array:
        """Return this shard's positions in the global range [start, stop)."""
        first = start + (self.index - start) % self.count
        return np.arange(first, stop, self.count, dtype=np.int64)

    def locals(self, start: int, stop: int) -> Int64Array:
        """Return the epoch positions of this shard's own rows [start, stop)."""
        return np.arange(start, stop, dtype=np.int64) * self.count + self.index

    def within(self, inner: Shard) -> Shard:
        """Return the shard ``inner`` of this shard: workers within a rank."""
        return Shard(self.index + self.count * inner.index, self.count * inner.count)


def epoch_end(start: int, rows: int, global_batch: int, drop_last: bool) -> int:
    """Return the position at which batches of ``global_batch`` rows, counted from ``start``, end."""
    if not drop_last:
        return rows
    return start + max(0, rows - start) // global_batch * global_batch


@dataclass(frozen=True, eq=False)
class Selection:
    """Sequence of source rows: ranges, or picks in any order. Chosen row v is the v-th of them.

    >>> s = Selection.of_ranges([(0, 10)]).slice(2, 8)
    >>> s.source_rows(np.array([0, 5])).tolist(), len(s), s.text
    ([2, 7], 6, '2:8')
    """

    ranges: Int64Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Start and stop of each range."""
    picks: Int64Array | None = None

    @staticmethod
    def of_ranges(ranges: Iterable[tuple[int, int]] | Int64Array) -> Selection:
        """Return the selection of consecutive ranges. Empty ranges are dropped and adjacent ones joined."""
        pairs = np.asarray(ranges if isinstance(ranges, np.ndarray) else list(ranges), dtype=np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        apart = pairs[1:, 0] != pairs[:-1, 1]
        starts = pairs[np.concatenate([[True], apart])[: len(pairs)], 0]
        stops = pairs[np.concatenate([apart, [True]])[-len(pairs) or 1 :], 1]
        return Selection(np.stack([starts, stops], axis=1))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.ranges, self.picks)  # without the cached properties

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.picks is None else len(self.picks)

    @cached_property
    def _starts(self) -> Int64Array:
        """Chosen rows at which the ranges begin, and the total."""
        return np.concatenate([[0], np.cumsum(self.ranges[:, 1] - self.ranges[:, 0])]).astype(np.int64)

    @cached_property
    def _offsets(self) -> Int64Array:
        """Difference of source row and chosen row in each range."""
        return self.ranges[:, 0] - self._starts[:-1]

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
        if self.ranges.tolist() == [[0, int(starts[-1])]]:
            return starts if len(starts) < 2 or (np.diff(starts) > 0).all() else np.unique(starts)
        low = np.searchsorted(starts, self.ranges[:, 0], side="right")
        counts = np.maximum(np.searchsorted(starts, self.ranges[:, 1], side="left") - low, 0)
        inside = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
        return np.unique(np.concatenate([self._starts, starts[inside] - np.repeat(self._offsets, counts)]))

    def slice(self, start: int | None, stop: int | None, step: int | None = None) -> Selection:
        """Return the selection ``[start:stop:step]`` of the chosen rows."""
        first, last, by = slice(start, stop, step).indices(len(self))
        if by != 1:
            return self.select(np.arange(first, last, by, dtype=np.int64))
        if self.picks is not None:
            return Selection(picks=self.picks[first:last])
        return self._within(np.array([[first, last]]))

    def without(self, rows: Int64Array) -> Selection:
        """Return the selection of the other chosen rows. ``rows``: sorted, without duplicates."""
        if self.picks is not None:
            return Selection(picks=np.delete(self.picks, rows))
        bounds = np.concatenate([[0], np.repeat(rows, 2), [len(self)]]).astype(np.int64)
        bounds[2::2] += 1  # the row after each one that is left out
        return self._within(bounds.reshape(-1, 2))

    def _within(self, ranges: Int64Array) -> Selection:
        """Return the selection of ranges of chosen rows, in ascending order."""
        edges = np.unique(np.concatenate([ranges.reshape(-1), self._starts]))
        owner = np.searchsorted(ranges[:, 0], edges, side="right") - 1
        kept = np.flatnonzero((owner >= 0) & (edges < ranges[owner, 1]))
        starts = self.source_rows(edges[kept])
        return Selection.of_ranges(np.stack([starts, starts + edges[kept + 1] - edges[kept]], axis=1))

    def select(self, rows: Iterable[int] | Int64Array) -> Selection:
        """Return the selection of these chosen rows, in this order. Negative numbers count from the end."""
        if isinstance(rows, range) and rows.step == 1 and 0 <= rows.start <= rows.stop <= len(self):
            return self.slice(rows.start, rows.stop)
        if not isinstance(rows, Iterable):
            raise TypeError(f"select takes a list of row numbers, got {rows!r:.60}. {_instead_of(rows)}")
        picks = np.asarray(rows if hasattr(rows, "__array__") else list(rows))
        if picks.ndim != 1:
            raise TypeError(f"select takes a list of row numbers, got an array of shape {picks.shape}")
        if picks.dtype == np.bool_:
            raise TypeError("select takes row numbers, got a mask of booleans. Pass np.flatnonzero(mask).")
        if len(picks) and not np.issubdtype(picks.dtype, np.integer):
            remedy = ". For columns, use select_columns([…])." if picks.dtype.kind in "UO" else ""
            raise TypeError(f"select takes integers, got values of type {picks.dtype}{remedy}")
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
        text = ",".join(f"{a}:{b}" for a, b in self.ranges.tolist())
        if len(text) <= 64:
            return text or "none"
        return f"{len(self.ranges)} ranges {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
