"""The complete order: its frozen description, and its form bound to a layout and an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midepoch.order.selection import Selection
from midepoch.order.shuffle import RowShuffle, Shuffle, UnitShuffle, WindowShuffle
from midepoch.order.weights import DrawnOnce, Draws, Weighted

Int64Array = npt.NDArray[np.int64]
_SPAN = 1 << 20
_MOST_DRAWN = 1 << 20
"""Draws of an epoch up to which the blocks they use are computed (0.1 s). Beyond, any block may be used at any time."""


@dataclass(frozen=True, eq=False)
class SourceLayout:
    """First rows of a source's blocks and files, each array with the total at the end."""

    block_starts: Int64Array
    file_starts: Int64Array

    @property
    def rows(self) -> int:
        return int(self.file_starts[-1])


@dataclass(frozen=True, eq=False)
class BlockUses:
    """Use of blocks by lane: first and last position, sorted by first use.

    Lane -1 means all lanes. A block in two lanes is listed twice.
    """

    blocks: Int64Array
    first: Int64Array
    last: Int64Array
    lane: Int64Array


@dataclass(frozen=True, eq=False)
class Order:
    """Selection, shuffle and lanes: everything that determines the row at a position of an epoch.

    A draw by weights takes the place of the shuffle.
    """

    selection: Selection
    shuffle: Shuffle | Weighted | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or self.lanes < 1:
            raise ValueError(f"lanes must be an integer of at least 1, got {self.lanes!r}")
        if isinstance(self.shuffle, Weighted) and len(self.shuffle.weights) != len(self.selection):
            raise ValueError(
                f"expected {len(self.selection)} weights, one for each row, got {len(self.shuffle.weights)}"
            )

    def __len__(self) -> int:
        return self.shuffle.samples if isinstance(self.shuffle, Weighted) else len(self.selection)

    @property
    def repeats(self) -> bool:
        """True if a row may come more than once an epoch."""
        return isinstance(self.shuffle, Weighted) and self.shuffle.replacement

    def at(self, epoch: int, layout: SourceLayout) -> EpochOrder:
        return EpochOrder(self, epoch, layout)


class EpochOrder:
    """Order of one epoch. Creating it is free for scope "rows" and takes one pass over the blocks for "window".

    Draws by weights without replacement sort all rows.
    """

    def __init__(self, order: Order, epoch: int, layout: SourceLayout) -> None:
        self._order, self._n, self._layout = order, len(order), layout
        shuffle = order.shuffle
        self._permute: RowShuffle | WindowShuffle | UnitShuffle | None = None
        self._drawn: Draws | DrawnOnce | None = None
        if shuffle is None or not self._n:
            return
        if isinstance(shuffle, Weighted):
            self._drawn = shuffle.at(epoch)
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

    def uses(self) -> BlockUses:
        """Return the positions at which each block is read."""
        if self._drawn is not None and self._n <= _MOST_DRAWN:
            return self._drawn_uses()
        runs = self._order.selection.boundaries(self._layout.block_starts)
        first_rows = self._order.selection.source_rows(runs[:-1])
        blocks = np.searchsorted(self._layout.block_starts, first_rows, side="right") - 1
        starts = runs[:-1].copy()
        if isinstance(self._permute, RowShuffle) or self._drawn is not None:
            zeros = np.zeros(len(blocks), dtype=np.int64)
            return BlockUses(blocks, zeros, zeros + self._n - 1, zeros - 1)
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

    def _drawn_uses(self) -> BlockUses:
        """Return the positions at which each block is read, by drawing the entire epoch."""
        rows = self.rows(np.arange(self._n, dtype=np.int64))
        used = np.searchsorted(self._layout.block_starts, rows, side="right") - 1
        blocks, first = np.unique(used, return_index=True)
        last = self._n - 1 - np.unique(used[::-1], return_index=True)[1]
        order = np.argsort(first, kind="stable")
        return BlockUses(blocks[order], first[order], last[order], np.full(len(blocks), -1))

    def _in_lanes(self, blocks: Int64Array, starts: Int64Array, stops: Int64Array) -> BlockUses:
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
        return BlockUses(blocks[which][order], (first * lanes + lane)[order], (last * lanes + lane)[order], lane[order])

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

    def positions_of(self, chosen: int) -> Int64Array:
        """Return the positions of a chosen row: one, or any number if rows are drawn by weights."""
        if self._drawn is not None:
            sequence = self._drawn.find(chosen)
        else:
            row = np.array([chosen], dtype=np.int64)
            sequence = row if self._permute is None else self._permute.inverse(row)
        return np.sort(self._in_lane(sequence))

    def positions_of_rows(self, chosen: Int64Array) -> Int64Array:
        """Return the positions of chosen rows, in ascending order. Of rows drawn by weights, the epoch is drawn."""
        if self._drawn is None:
            sequence = chosen if self._permute is None or not len(chosen) else self._permute.inverse(chosen)
            return np.sort(self._in_lane(sequence))
        wanted = np.zeros(len(self._order.selection), np.bool_)
        wanted[chosen] = True
        spans = (np.arange(first, min(first + _SPAN, self._n)) for first in range(0, self._n, _SPAN))
        return np.concatenate([np.zeros(0, np.int64), *(span[wanted[self.chosen(span)]] for span in spans)])

    def chosen(self, positions: Int64Array) -> Int64Array:
        """Map positions to chosen rows: the row numbers of the dataset before the shuffle."""
        sequence = self.sequence(positions)
        if self._drawn is not None:
            return self._drawn(sequence)
        return sequence if self._permute is None else self._permute(sequence)

    def rows(self, positions: Int64Array) -> Int64Array:
        """Map positions (each in range(len)) to rows of the source."""
        return self._order.selection.source_rows(self.chosen(positions))
