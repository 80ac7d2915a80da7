"""The order as a whole: a frozen description, and the same bound to a layout and an epoch."""

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
    """Where a source's blocks and files begin, in rows, each with the total at the end."""

    block_starts: Int64Array
    file_starts: Int64Array

    @property
    def rows(self) -> int:
        return int(self.file_starts[-1])


class _Permute(Protocol):
    """Sequence indices in, chosen rows out; a bijection on range(rows)."""

    def __call__(self, sequence: Int64Array) -> Int64Array: ...


@dataclass(frozen=True, eq=False)
class Order:
    """Selection, shuffle and lanes: all that decides which row stands at a position of an epoch."""

    selection: Selection
    shuffle: Shuffle | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.lanes, bool) or not isinstance(self.lanes, int) or self.lanes < 1:
            raise ValueError(f"lanes must be a whole number of at least 1, got {self.lanes!r}")

    def __len__(self) -> int:
        return len(self.selection)

    def at(self, epoch: int, layout: Layout) -> EpochOrder:
        return EpochOrder(self, epoch, layout)


class EpochOrder:
    """``rows(positions)`` of one epoch. Opening it costs nothing by rows, one pass over the blocks by window."""

    def __init__(self, order: Order, epoch: int, layout: Layout) -> None:
        self._order, self._n = order, len(order)
        shuffle = order.shuffle
        self._permute: _Permute | None = None
        if shuffle is None or not self._n:
            return
        if shuffle.scope == "rows":
            self._permute = RowShuffle(shuffle, epoch, self._n)
        elif shuffle.scope == "window":
            self._permute = WindowShuffle(shuffle, epoch, order.selection.boundaries(layout.block_starts))
        else:
            self._permute = UnitShuffle(shuffle, epoch, order.selection.boundaries(layout.file_starts), "files")

    def sequence(self, positions: Int64Array) -> Int64Array:
        """Positions to sequence indices: lane ``p mod L``, offset ``p div L``, lanes being L equal pieces."""
        lanes = self._order.lanes
        if lanes == 1:
            return positions
        offset, lane = np.divmod(positions, lanes)
        size, longer = divmod(self._n, lanes)
        return lane * size + np.minimum(lane, longer) + offset

    def position(self, sequence: int) -> int:
        """The position of a sequence index: the inverse of ``sequence``."""
        lanes = self._order.lanes
        size, longer = divmod(self._n, lanes)
        edge = longer * (size + 1)
        if sequence < edge:
            lane, offset = divmod(sequence, size + 1)
        else:
            lane, offset = divmod(sequence - edge, size)
            lane += longer
        return offset * lanes + lane

    def chosen(self, positions: Int64Array) -> Int64Array:
        """Positions to chosen rows: the row numbers of the dataset before it was shuffled."""
        sequence = self.sequence(positions)
        return sequence if self._permute is None else self._permute(sequence)

    def rows(self, positions: Int64Array) -> Int64Array:
        """Positions (each in range(len)) to rows of the source."""
        return self._order.selection.source_rows(self.chosen(positions))
