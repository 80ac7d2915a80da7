"""Shuffles within an epoch: three scopes, each a function of the sequence index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from midepoch.order.bijection import Bijection, check_seed, derive

Int64Array = npt.NDArray[np.int64]
SCOPES = ("rows", "window", "files")
DEFAULT_WINDOW = 64


@dataclass(frozen=True)
class Shuffle:
    """Description of a shuffle: of all ``rows``, of rows in a ``window`` of blocks, or of entire ``files``.

    ``window`` is a number of blocks (record batches), used only by the scope of that name. ``aligned``: every lane
    begins with a new window, so that it shares only its first block with another lane.
    """

    seed: int
    scope: str = "rows"
    window: int = DEFAULT_WINDOW
    aligned: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_seed(self.seed))
        if self.scope not in SCOPES:
            scopes = ", ".join(map(repr, SCOPES))
            raise ValueError(
                f"scope must be one of {scopes}, got {self.scope!r}. There is no buffer size: all rows are shuffled, "
                "or those of window=… blocks."
            )
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a number of blocks of at least 1, got {self.window!r}")

    @property
    def text(self) -> str:
        """The order in words."""
        window = f", window={self.window}" if self.scope == "window" else ""
        return f"shuffled by {self.scope} (seed={self.seed}{window})"


class RowShuffle:
    """One permutation of all rows."""

    def __init__(self, shuffle: Shuffle, epoch: int, rows: int) -> None:
        self._permute = Bijection(rows, derive(shuffle.seed, epoch, "rows"))

    def __call__(self, sequence: Int64Array) -> Int64Array:
        return self._permute(sequence)

    def inverse(self, chosen: Int64Array) -> Int64Array:
        return self._permute.inverse(chosen)


class UnitShuffle:
    """Permutation of entire units (files or blocks). The rows inside keep their order.

    ``boundaries`` are the rows at which units begin, and the total.
    """

    def __init__(self, shuffle: Shuffle, epoch: int, boundaries: Int64Array, purpose: str) -> None:
        units = len(boundaries) - 1
        self._boundaries = boundaries
        self.permuted = Bijection(units, derive(shuffle.seed, epoch, purpose))(np.arange(units, dtype=np.int64))
        first = boundaries[self.permuted]
        self.starts = np.zeros(
            units + 1, dtype=np.int64
        )  # sequence index at which the unit at each permuted place begins
        np.cumsum(boundaries[self.permuted + 1] - first, out=self.starts[1:])
        self._shift = first - self.starts[:-1]

    def __call__(self, sequence: Int64Array) -> Int64Array:
        return sequence + self._shift[np.searchsorted(self.starts, sequence, side="right") - 1]

    def inverse(self, chosen: Int64Array) -> Int64Array:
        owner = np.searchsorted(self._boundaries, chosen, side="right") - 1
        return chosen + (self.sequence_starts - self._boundaries[:-1])[owner]

    @property
    def sequence_starts(self) -> Int64Array:
        """Sequence index at which each unit begins: of unit u, not of the unit at place u."""
        starts = np.empty(len(self.permuted), dtype=np.int64)
        starts[self.permuted] = self.starts[:-1]
        return starts


class WindowShuffle:
    """Permutation of blocks, then of the rows in windows of consecutive permuted blocks: an exact shuffle buffer."""

    def __init__(
        self, shuffle: Shuffle, epoch: int, boundaries: Int64Array, lane_starts: Int64Array | None = None
    ) -> None:
        self._blocks = UnitShuffle(shuffle, epoch, boundaries, "blocks")
        starts = self._blocks.starts
        if lane_starts is None:
            self._starts = np.append(starts[: -1 : shuffle.window], starts[-1])
        else:
            cuts = np.unique(np.concatenate([starts, lane_starts]))
            bounds = np.searchsorted(cuts, lane_starts).tolist()
            windows = [cuts[a : b : shuffle.window] for a, b in pairwise([*bounds, len(cuts) - 1])]
            self._starts = np.append(np.concatenate(windows), cuts[-1])
        self._seed, self._epoch = shuffle.seed, epoch
        self._last: tuple[int, Bijection] = (-1, Bijection(0, np.zeros(8, np.uint64)))

    @property
    def block_starts(self) -> Int64Array:
        """Sequence index at which each run of a block begins, before rows are moved within windows."""
        return self._blocks.sequence_starts

    @property
    def window_starts(self) -> Int64Array:
        """Sequence index at which each window begins, and the total."""
        return self._starts

    def _within(self, window: int) -> Bijection:
        if self._last[0] != window:  # rows are read window by window: cache the current one
            rows = int(self._starts[window + 1] - self._starts[window])
            self._last = (window, Bijection(rows, derive(self._seed, self._epoch, "window", window)))
        return self._last[1]

    def __call__(self, sequence: Int64Array) -> Int64Array:
        return self._blocks(self._in_windows(sequence, lambda window, inner: self._within(window)(inner)))

    def inverse(self, chosen: Int64Array) -> Int64Array:
        return self._in_windows(self._blocks.inverse(chosen), lambda window, inner: self._within(window).inverse(inner))

    def _in_windows(self, sequence: Int64Array, move: Callable[[int, Int64Array], Int64Array]) -> Int64Array:
        """Apply ``move`` to the sequence indices within their windows."""
        owner = np.searchsorted(self._starts, sequence, side="right") - 1
        moved = np.empty_like(sequence)
        for window in np.unique(owner).tolist():
            mine = owner == window
            start = self._starts[window]
            moved[mine] = start + move(window, sequence[mine] - start)
        return moved
