"""Blocks that are fetched or decoded: prefetched in the known order and shared through the cache of the machine."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.processes import cores, join
from midepoch._internal.progress import Timings
from midepoch.order.epoch import BlockUses
from midepoch.read.cache import BlockCache, MemoryShelf, bytes_of
from midepoch.read.columns import HeldBuffers, Memory
from midepoch.sources import Source

Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger("midepoch")
_THREADS_LOCAL, _THREADS_REMOTE = 2, 4
_MOST_THREADS = 8
_AHEAD_SHARE = 0.7  # of the cache, for blocks in use and prefetched ones
_LEAST_AHEAD = 2
_KEPT_SHARE = 0.75  # of the cache; the rest is for blocks that are being decoded
_DECODING_BYTES = 48 << 20
"""Decoded size of the blocks that are decoded concurrently, for each thread. Decoding takes several times as much."""
_LARGE = 16 << 20
CHECK_SECONDS = 1.0
_AHEAD_BYTES = 256 << 20
"""Least decoded bytes to prefetch. As many bytes as are in use (the next window) are prefetched if that is more."""


class FetchedBlocks:
    """Record batches of a source by number, with only the requested columns. Not thread-safe, but it has threads.

    ``sharers``: the number of processes that may read the same blocks. If there are several, blocks are cached on disk.
    """

    def __init__(
        self, source: Source, columns: Sequence[str], sharers: int, threads: int, timings: Timings | None = None
    ) -> None:
        assert source.access is not None
        self._timings = Timings() if timings is None else timings
        self._source, self._columns = source, list(columns)
        spec = source.access.cache
        self._limit = int(spec.limit * _KEPT_SHARE)
        self._open: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._open_bytes = 0
        self._checked = time.monotonic()
        self._held = HeldBuffers()
        self._plan = _Plan(source, sharers)
        if sharers > 1 or spec.chosen:
            key = _key(source, self._columns)
            self._cache = BlockCache.in_folder(spec, key, self._plan.next_use, self._limit // sharers)
        else:
            self._cache = BlockCache(MemoryShelf(self._limit, self._plan.next_use))
        threads = max(threads, _THREADS_LOCAL if source.access.store.local else _THREADS_REMOTE)
        decoding = max(_THREADS_LOCAL, min(threads, cores())) * _DECODING_BYTES
        starts = source.layout.block_starts
        block_bytes = starts[-1] / max(1, len(starts) - 1) * source.bytes_per_row
        self._gate = threading.BoundedSemaphore(max(1, int(decoding // max(1.0, block_bytes))))
        self._ahead = _Ahead(self._cache, self._make, threads)
        self._close = weakref.finalize(self, self._ahead.close)

    def _make(self, block: int) -> pa.Table:
        with self._gate:
            table = self._source.fetch(block, self._columns)
        if bytes_of(table) > _LARGE:
            pa.default_memory_pool().release_unused()  # temporary memory of decoding
        return table

    def _make_late(self, block: int) -> pa.Table:
        self._timings.blocks_there -= 1
        return self._make(block)

    def expect(self, epoch: int, position: int, uses: Callable[[], tuple[BlockUses, BlockUses]]) -> None:
        """Announce that rows from this position of an epoch on are read next.

        Prefetching begins with the second call, so that reading a single batch costs only that batch.
        """
        is_known = self._plan.now is not None
        self._plan.move(epoch, position, uses)
        if is_known:
            plan, held = self._plan, frozenset(self._open)
            self._ahead.wake(lambda: [block for block in plan.coming() if block not in held])

    def need(self, blocks: Sequence[int]) -> None:
        """Fetch several blocks concurrently that are requested next."""
        missing = [block for block in blocks if block not in self._open]
        if len(missing) > 1:
            self._ahead.wake(lambda: missing)

    def get(self, block: int) -> tuple[pa.RecordBatch, bool]:
        """Return the block. Its addresses are valid until ``trim`` returns it."""
        batch = self._open.get(block)
        if batch is None:
            self._timings.blocks += 1
            self._timings.blocks_there += 1
            batch = self._cache.get(block, lambda: self._make_late(block))
            self._plan.learn(bytes_of(batch), batch.num_rows)
            self._open[block] = batch
            self._open_bytes += bytes_of(batch)
            self._held.add(block, [buffer for column in batch.columns for buffer in column.buffers() if buffer])
        else:
            self._open.move_to_end(block)
        return batch, True

    @property
    def memory(self) -> Memory:
        """Memory of the open blocks."""
        return self._held.memory

    def check(self, *, last: bool = False) -> None:
        """Raise DataChangedError if the file of a mapped block was written to.

        Checks at most once a second, except the ``last`` time.
        """
        now = time.monotonic()
        if last or now >= self._checked + CHECK_SECONDS:
            self._checked = now
            self._cache.shelf.check(list(self._open))

    def trim(self) -> list[int]:
        """Release blocks that are not needed any more, and the least recently used ones if there are too many."""
        dropped = []
        for block in list(self._open):
            if self._plan.over(block) or (self._open_bytes > self._limit and len(self._open) > 1):
                self._open_bytes -= bytes_of(self._open.pop(block))
                self._held.remove(block)
                dropped.append(block)
        return dropped


def threads_here(ranks: int) -> int:
    """Return the number of threads for decoding, of a process that shares the cores of its machine with other ranks."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(_MOST_THREADS, cores() // max(1, min(ranks, int(local) if local.isdecimal() else ranks)))


def _key(source: Source, columns: Sequence[str]) -> str:
    """Return a hash of everything that determines a decoded block: files, boundaries of blocks, filter, columns.

    The fingerprint alone is not enough: a file with other values may have the same one.
    """
    assert source.access is not None
    chosen = source.access.filter
    digest = hashlib.blake2b(digest_size=12)
    for text in (source.fingerprint, chosen.digest if chosen else "", "\0".join(columns)):
        digest.update(text.encode() + b"\0\0")
    digest.update(
        "".join(f"{file.path}\0{file.size}\0{file.mtime_ns}\0{file.etag}\0" for file in source.files).encode()
    )
    for array in (source.layout.block_starts, source.offsets):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(source.index.schema_bytes)
    return digest.hexdigest()


class _Plan:
    """Schedule of block uses, as far as known, and the size of blocks."""

    def __init__(self, source: Source, sharers: int) -> None:
        assert source.access is not None
        self._sharers, self._limit = sharers, source.access.cache.limit
        self._rows = np.diff(source.layout.block_starts)
        self._row_bytes = source.bytes_per_row
        self._warned = False
        self._epoch = -1
        self.now: tuple[BlockUses, int] | None = None
        """The uses by this process, and the position: one value, which other threads read."""
        self._last_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}

    def move(self, epoch: int, position: int, uses: Callable[[], tuple[BlockUses, BlockUses]]) -> None:
        if self.now is not None and epoch == self._epoch:
            self.now = self.now[0], position
            return
        own, shared = uses()
        order = np.argsort(shared.last, kind="stable")
        self._last_of = dict(zip(shared.blocks[order].tolist(), shared.last[order].tolist(), strict=True))
        self._first_of = dict(zip(shared.blocks[::-1].tolist(), shared.first[::-1].tolist(), strict=True))
        self._epoch, self.now = epoch, (own, position)

    def learn(self, size: int, rows: int) -> None:
        """Update the estimated bytes per row from the size of some rows."""
        self._row_bytes += (size / max(1, rows) - self._row_bytes) / 4

    def over(self, block: int) -> bool:
        """Return True if a block will not be read again in this epoch."""
        last = self._last_of.get(block)
        return last is not None and self.now is not None and last < self.now[1]

    def next_use(self, block: int) -> float:
        """Return the number of positions until the next use."""
        first, last = self._first_of.get(block), self._last_of.get(block)
        if self.now is None or first is None or last is None or last < self.now[1]:
            return float("inf")
        return float(max(0, first - self.now[1]))

    def coming(self) -> list[int]:
        """Return the blocks in use, then the next ones in order, as many as fit."""
        assert self.now is not None
        own, position = self.now
        start = int(np.searchsorted(own.first, position, side="right"))
        used = own.blocks[:start][own.last[:start] >= position]
        ahead = own.blocks[start : start + 4096]
        taken = float(self._rows[used].sum()) * self._row_bytes
        room = min(self._limit * _AHEAD_SHARE / self._sharers - taken, max(_AHEAD_BYTES, taken))
        if taken > self._limit and not self._warned:
            self._warned = True
            _log.warning(
                "%d blocks are in use at the same time and take about %d MB, more than cache_bytes=%d: they will be "
                "decoded repeatedly. Increase cache_bytes, or use shuffle(scope='window', window=…) with fewer blocks.",
                len(used), taken / 1e6, self._limit,
            )  # fmt: skip
        fits = int(np.searchsorted(np.cumsum(self._rows[ahead]) * self._row_bytes, room, side="right"))
        return [*used.tolist(), *ahead[: max(_LEAST_AHEAD if taken < self._limit else 0, fits)].tolist()]


class _Ahead:
    """Threads that prefetch blocks, started when there are blocks for them. They never reference the reader."""

    def __init__(self, cache: BlockCache, make: Callable[[int], pa.Table], threads: int) -> None:
        self._cache, self._most = cache, threads
        self._make = weakref.WeakMethod(make)
        self._changed = threading.Condition()
        self._request: Callable[[], Sequence[int]] | None = None
        self._is_new = False
        self._blocks: deque[int] = deque()
        self._threads: list[threading.Thread] = []
        self._stop, self._process = False, os.getpid()
        self._failed: set[int] = set()

    def wake(self, request: Callable[[], Sequence[int]]) -> None:
        """Fetch these blocks in this order, and drop earlier requests."""
        with self._changed:
            self._request, self._is_new = request, True
            self._call_one()

    def _call_one(self) -> None:
        """Let one more thread look for work. Only those that find some call others: idle ones cost the reader time."""
        self._changed.notify()
        if len(self._threads) < self._most and not self._stop and (self._blocks or not self._threads):
            name = f"midepoch-fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no room for another, or the process exits
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._blocks or self._stop)
                if self._stop:
                    return
                request = self._request if self._is_new else None
                self._is_new = False
                if request is None:
                    block = self._blocks.popleft()
                    if self._blocks:
                        self._call_one()
            if request is None:
                make = self._make()
                if make is None:  # the reader no longer exists
                    return
                try:
                    self._cache.prefetch(block, partial(make, block))
                except Exception as problem:  # the reader gets the error when it needs the block
                    self._failed.add(block)
                    _log.debug("block %d could not be prefetched: %s", block, problem)
                del make
            else:
                shelf = self._cache.shelf
                try:
                    blocks = deque(each for each in request() if each not in self._failed and not shelf.has(each))
                except Exception as problem:  # without this thread, nothing would be prefetched any more
                    _log.debug("blocks could not be prefetched: %s", problem)
                    continue
                with self._changed:
                    if request is self._request:  # else another thread has a later one
                        self._blocks = blocks

    def close(self) -> None:
        if self._process != os.getpid():
            return  # a fork: the threads do not exist here, and their lock may be held indefinitely
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        join(self._threads)
