"""Decoded blocks in the memory of one process: where nobody else reads the same, a file would only cost a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa

from midepoch.read.cache import NextUse, one_batch


class KeptBlocks:
    """As ``BlockCache``, for the threads of one process."""

    def __init__(self, limit: int, next_use: NextUse) -> None:
        self._limit, self._next_use = limit, next_use
        self._blocks: dict[int, pa.RecordBatch] = {}
        self._bytes = 0
        self._busy: set[int] = set()
        self._done = threading.Condition()

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """The block, made by one thread at a time."""
        with self._done:
            while block in self._busy:
                self._done.wait()
            found = self._blocks.get(block)
            if found is not None:
                return found
            self._busy.add(block)
        return self._make(block, make)

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> bool:
        """See to it that the block is there, unless somebody is at it already. Whether it was made."""
        with self._done:
            if block in self._busy or block in self._blocks:
                return False
            self._busy.add(block)
        self._make(block, make)
        return True

    def _make(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        batch = None
        try:
            batch = one_batch(make())
            return batch
        finally:
            with self._done:
                self._busy.discard(block)
                if batch is not None:
                    self._keep(block, batch)
                self._done.notify_all()

    def _keep(self, block: int, batch: pa.RecordBatch) -> None:
        self._blocks[block] = batch
        self._bytes += batch.nbytes
        while self._bytes > self._limit and len(self._blocks) > 1:
            farthest = max((each for each in self._blocks if each != block), key=self._next_use)
            self._bytes -= self._blocks.pop(farthest).nbytes
