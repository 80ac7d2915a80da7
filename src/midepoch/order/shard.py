"""Assignment of positions to ranks and workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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
            raise ValueError(f"the index must be in [0, {self.count}), got {self.index}")

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
