"""Who gets which positions: ranks of a world, and the batches of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """One of ``count`` equal shares of the positions: those that are ``index`` modulo ``count``.

    Any ``count`` consecutive positions hold exactly one of each share, wherever they start. So all shares that stand
    at one global position go on from it without gap or overlap, also when ``count`` has changed.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of shares must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(f"the index must be in [0, {self.count}), got {self.index}")

    def before(self, position: int) -> int:
        """How many positions of this share lie before ``position``."""
        return max(0, -((self.index - position) // self.count))

    def positions(self, start: int, stop: int) -> Int64Array:
        """This share's positions in the global range [start, stop)."""
        first = start + (self.index - start) % self.count
        return np.arange(first, stop, self.count, dtype=np.int64)

    def locals(self, start: int, stop: int) -> Int64Array:
        """The positions of this share's own rows number start to stop (of the whole epoch)."""
        return np.arange(start, stop, dtype=np.int64) * self.count + self.index

    def within(self, inner: Cut) -> Cut:
        """The share ``inner`` of this share: workers within a rank."""
        return Cut(self.index + self.count * inner.index, self.count * inner.count)


def epoch_end(start: int, rows: int, global_batch: int, drop_last: bool) -> int:
    """The position at which batches of ``global_batch`` from ``start`` on end."""
    if not drop_last:
        return rows
    return start + max(0, rows - start) // global_batch * global_batch
