"""Decoded blocks in the memory of one process: where nobody else reads the same, a file would only cost a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pyarrow as pa

from midepoch.read.cache import one_batch
from midepoch.read.room import NextUse
from midepoch.read.sizes import bytes_of
from midepoch.read.turns import Turns


class KeptBlocks:
    """As ``BlockCache``, for the threads of one process."""

    def __init__(self, limit: int, next_use: NextUse) -> None:
        self._limit, self._next_use = limit, next_use
        self._blocks: dict[int, pa.RecordBatch] = {}
        self._bytes = 0
        self._turns, self._lock = Turns(), threading.Lock()

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """The block, made by one thread at a time."""
        with self._turns.held(block, wait=True):
            found = self._blocks.get(block)
            return found if found is not None else self._keep(block, one_batch(make()))

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> bool:
        """See to it that the block is there, unless somebody is at it already. Whether it was made."""
        with self._turns.held(block, wait=False) as mine:
            if not mine or block in self._blocks:
                return False
            self._keep(block, one_batch(make()))
            return True

    def check(self, blocks: Iterable[int]) -> None:
        """Do nothing: nobody else can write to memory."""

    def _keep(self, block: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        with self._lock:
            self._blocks[block] = batch
            self._bytes += bytes_of(batch)
            while self._bytes > self._limit and len(self._blocks) > 1:
                farthest = max((each for each in self._blocks if each != block), key=self._next_use)
                self._bytes -= bytes_of(self._blocks.pop(farthest))
        return batch
