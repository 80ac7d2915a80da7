"""The complete order: its frozen description, and its form bound to a layout and an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from midepoch.order.selection import Selection
from midepoch.order.shuffle import RowShuffle, Shuffle, UnitShuffle, WindowShuffle

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """First rows of a source's blocks and files, each array with the total at the end."""

    block_starts: Int64Array
    file_starts: Int64Array

    @property
    def rows(self) -> int:
        return int(self.file_starts[-1])


@dataclass(frozen=True, eq=False)
class Uses:
    """Use of blocks by lane: first and last position, sorted by first use.

    Lane -1 means all lanes. A block in two lanes is listed twice.
    """

    blocks: Int64Array
    first: Int64Array
    last: Int64Array
    lane: Int64Array


class _Permute(Protocol):
    """Bijection on range(rows), from sequence indices to chosen rows, with its inverse."""

    def __call__(self, sequence: Int64Array) -> Int64Array: ...

    def inverse(self, chosen: Int64Array) -> Int64Array: ...


@dataclass(frozen=True, eq=False)
class Order:
    """Selection, shuffle and lanes: everything that determines the row at a position of an epoch."""

    selection: Selection
    shuffle: Shuffle | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or self.lanes < 1:
            raise ValueError(f"lanes must be an integer of at least 1, got {self.lanes!r}")

    def __len__(self) -> int:
        return len(self.selection)

    def at(self, epoch: int, layout: Layout) -> EpochOrder:
        return EpochOrder(self, epoch, layout)


class EpochOrder:
    """Order of one epoch. Creating it is free for scope "rows" and takes one pass over the blocks for "window"."""

    def __init__(self, order: Order, epoch: int, layout: Layout) -> None:
        self._order, self._n, self._layout = order, len(order), layout
        shuffle = order.shuffle
        self._permute: _Permute | None = None
        if shuffle is None or not self._n:
            return
        if shuffle.scope == "rows":
            self._permute = RowShuffle(shuffle, epoch, self._n)
        elif shuffle.scope == "window":
            lanes = self.lane_starts[self.lane_starts < self._n] if shuffle.aligned else None
            self._permute = WindowShuffle(shuffle, epoch, order.selection.boundaries(layout.block_starts), lanes)
        else:
            self._permute = UnitShuffle(shuffle, epoch, order.selection.boundaries(layout.file_starts), "files")

    @property
    def lane_starts(self) -> Int64Array:
        """The sequence index at which each lane begins."""
        lane = np.arange(self._order.lanes, dtype=np.int64)
        size, longer = divmod(self._n, self._order.lanes)
        return lane * size + np.minimum(lane, longer)

    def uses(self) -> Uses:
        """Return the positions at which each block is read."""
        runs = self._order.selection.boundaries(self._layout.block_starts)
        first_rows = self._order.selection.source_rows(runs[:-1])
        blocks = np.searchsorted(self._layout.block_starts, first_rows, side="right") - 1
        starts = runs[:-1].copy()
        if isinstance(self._permute, RowShuffle):
            zeros = np.zeros(len(blocks), dtype=np.int64)
            return Uses(blocks, zeros, zeros + self._n - 1, zeros - 1)
        if isinstance(self._permute, UnitShuffle):
            files = self._order.selection.boundaries(self._layout.file_starts)
            owner = np.searchsorted(files, starts, side="right") - 1
            starts += (self._permute.sequence_starts - files[:-1])[owner]
        elif isinstance(self._permute, WindowShuffle):
            starts = self._permute.block_starts
        stops = starts + (runs[1:] - runs[:-1])
        if isinstance(self._permute, WindowShuffle):
            windows = self._permute.window_starts
            starts = windows[np.searchsorted(windows, starts, side="right") - 1]
            stops = windows[np.searchsorted(windows, stops - 1, side="right")]
        return self._in_lanes(blocks, starts, stops)

    def _in_lanes(self, blocks: Int64Array, starts: Int64Array, stops: Int64Array) -> Uses:
        """Convert ranges of the sequence to ranges of positions, one for each lane that they touch."""
        edges = np.append(self.lane_starts, self._n)
        low = np.searchsorted(edges[:-1], starts, side="right") - 1
        high = np.searchsorted(edges[:-1], stops - 1, side="right") - 1
        which = np.repeat(np.arange(len(blocks)), high - low + 1)
        lane = (
            low[which] + np.arange(len(which)) - np.repeat(np.cumsum(high - low + 1) - (high - low + 1), high - low + 1)
        )
        first = np.maximum(starts[which], edges[lane]) - edges[lane]
        last = np.minimum(stops[which], edges[lane + 1]) - 1 - edges[lane]
        lanes = self._order.lanes
        order = np.argsort(first * lanes + lane, kind="stable")
        return Uses(blocks[which][order], (first * lanes + lane)[order], (last * lanes + lane)[order], lane[order])

    def sequence(self, positions: Int64Array) -> Int64Array:
        """Map positions to sequence indices: lane ``p mod L``, offset ``p div L``, where lanes are L equal pieces."""
        lanes = self._order.lanes
        if lanes == 1:
            return positions
        offset, lane = np.divmod(positions, lanes)
        size, longer = divmod(self._n, lanes)
        return lane * size + np.minimum(lane, longer) + offset

    def position(self, sequence: int) -> int:
        """Return the position of a sequence index: the inverse of ``sequence``."""
        return int(self._in_lane(np.array([sequence]))[0])

    def _in_lane(self, sequence: Int64Array) -> Int64Array:
        lane = np.searchsorted(self.lane_starts, sequence, side="right") - 1
        return (sequence - self.lane_starts[lane]) * self._order.lanes + lane

    def positions(self, chosen: Int64Array) -> Int64Array:
        """Map chosen rows to their positions: the inverse of ``chosen``."""
        sequence = chosen if self._permute is None else self._permute.inverse(chosen)
        return sequence if self._order.lanes == 1 else self._in_lane(sequence)

    def chosen(self, positions: Int64Array) -> Int64Array:
        """Map positions to chosen rows: the row numbers of the dataset before the shuffle."""
        sequence = self.sequence(positions)
        return sequence if self._permute is None else self._permute(sequence)

    def rows(self, positions: Int64Array) -> Int64Array:
        """Map positions (each in range(len)) to rows of the source."""
        return self._order.selection.source_rows(self.chosen(positions))
