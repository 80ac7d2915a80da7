"""Decoded blocks in the memory of one process, for blocks that no other process reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pyarrow as pa

from midepoch.read.cache import one_batch
from midepoch.read.room import NextUse
from midepoch.read.sizes import bytes_of
from midepoch.read.turns import BlockTurns


class KeptBlocks:
    """Cache with the interface of ``BlockCache``, for the threads of one process."""

    def __init__(self, limit: int, next_use: NextUse) -> None:
        self._limit, self._next_use = limit, next_use
        self._blocks: dict[int, pa.RecordBatch] = {}
        self._bytes = 0
        self._turns, self._lock = BlockTurns(), threading.Lock()

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """Return the block, decoded by one thread at a time."""
        with self._turns.held(block, wait=True):
            batch = self._blocks.get(block)
            return batch if batch is not None else self._keep(block, one_batch(make()))

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> bool:
        """Decode the block unless it is cached or being decoded. Return True if it was decoded."""
        with self._turns.held(block, wait=False) as mine:
            if not mine or block in self._blocks:
                return False
            self._keep(block, one_batch(make()))
            return True

    def check(self, blocks: Iterable[int]) -> None:
        """Do nothing: no other process can write to this memory."""

    def _keep(self, block: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        with self._lock:
            self._blocks[block] = batch
            self._bytes += bytes_of(batch)
            while self._bytes > self._limit and len(self._blocks) > 1:
                farthest = max((each for each in self._blocks if each != block), key=self._next_use)
                self._bytes -= bytes_of(self._blocks.pop(farthest))
        return batch
