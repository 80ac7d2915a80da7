"""Blocks that are fetched or decoded: read ahead in the order that is known, mapped from the cache of the machine."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.ending import join
from midepoch.order.epoch import Uses
from midepoch.read.cache import BlockCache
from midepoch.read.kept import KeptBlocks
from midepoch.read.memory import HeldBuffers, Memory
from midepoch.read.sizes import bytes_of
from midepoch.sources import Source
from midepoch.spent import Spent

Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger("midepoch")

_THREADS_LOCAL, _THREADS_REMOTE = 2, 4
_AHEAD_SHARE = 0.7  # of the cache, for blocks in use and to come
_LEAST_AHEAD = 2
_KEPT_SHARE = 0.75  # of the cache; the rest is for what is being decoded
_DECODING_BYTES = 96 << 20
"""Of blocks that are decoded at once, when done: decoding takes several times as much."""
_LARGE = 16 << 20
CHECK_SECONDS = 1.0
_AHEAD_BYTES = 256 << 20
"""Blocks to come, decoded: as many bytes as are in use (the next window), and at least this many."""


class FetchedBlocks:
    """Record batches of a source by number, with just the columns asked for. Not thread-safe, but it has threads.

    ``sharers``: how many processes may read the same, so that blocks are kept where all of them find them.
    """

    def __init__(
        self, source: Source, columns: Sequence[str], sharers: int, threads: int, spent: Spent | None = None
    ) -> None:
        assert source.access is not None
        self._spent = Spent() if spent is None else spent
        self._source, self._columns = source, list(columns)
        spec = source.access.cache
        self._limit = int(spec.limit * _KEPT_SHARE)
        self._open: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._open_bytes = 0
        self._checked = time.monotonic()
        self._held = HeldBuffers()
        self._plan = _Plan(source, sharers)
        self._cache: BlockCache | KeptBlocks
        if sharers > 1 or spec.chosen:
            key = _key(source, self._columns)
            self._cache = BlockCache(spec, key, self._plan.next_use)
        else:
            self._cache = KeptBlocks(self._limit, self._plan.next_use)
        self._gate = threading.BoundedSemaphore(max(1, int(_DECODING_BYTES // max(1.0, self._plan.block_bytes))))
        least = _THREADS_LOCAL if source.access.store.local else _THREADS_REMOTE
        self._ahead = _Ahead(self._cache, self._make, max(least, threads))
        self._close = weakref.finalize(self, self._ahead.close)

    def _make(self, block: int) -> pa.Table:
        with self._gate:
            table = self._source.fetch(block, self._columns)
        if bytes_of(table) > _LARGE:
            pa.default_memory_pool().release_unused()  # what decoding took besides
        return table

    def _make_now(self, block: int) -> pa.Table:
        self._spent.blocks_there -= 1
        return self._make(block)

    def expect(self, epoch: int, position: int, uses: Callable[[], tuple[Uses, Uses]]) -> None:
        """Rows from this position of an epoch on will be read next.

        Nothing is fetched ahead before the second time: who looks at one batch pays for that batch.
        """
        known = self._plan.known
        self._plan.move(epoch, position, uses)
        if known:
            plan, held = self._plan, frozenset(self._open)
            self._ahead.wake(lambda: [block for block in plan.coming() if block not in held])

    def need(self, blocks: Sequence[int]) -> None:
        """Several blocks will be asked for at once: fetch them side by side."""
        missing = [block for block in blocks if block not in self._open]
        if len(missing) > 1:
            self._ahead.wake(lambda: missing)

    def get(self, block: int) -> tuple[pa.RecordBatch, bool]:
        """The block. Its addresses hold until ``trim`` names it."""
        batch = self._open.get(block)
        if batch is None:
            self._spent.blocks += 1
            self._spent.blocks_there += 1
            batch = self._cache.get(block, lambda: self._make_now(block))
            self._plan.learn(bytes_of(batch), batch.num_rows)
            self._open[block] = batch
            self._open_bytes += bytes_of(batch)
            self._held.add(block, [buffer for column in batch.columns for buffer in column.buffers() if buffer])
        else:
            self._open.move_to_end(block)
        return batch, True

    @property
    def memory(self) -> Memory:
        """The blocks that are held."""
        return self._held.memory

    def check(self) -> None:
        """Once a second, look whether files of mapped blocks were written to. Raises DataChangedError."""
        now = time.monotonic()
        if now >= self._checked + CHECK_SECONDS:
            self._checked = now
            self._cache.check(list(self._open))

    def trim(self) -> list[int]:
        """Let go of blocks that are not needed any more, or of those not used for longest if there are too many."""
        dropped = []
        for block in list(self._open):
            if self._plan.over(block) or (self._open_bytes > self._limit and len(self._open) > 1):
                self._open_bytes -= bytes_of(self._open.pop(block))
                self._held.remove(block)
                dropped.append(block)
        return dropped


def _key(source: Source, columns: Sequence[str]) -> str:
    """All that decides what a decoded block holds: the files here and now, how they are cut, the filter, the columns.

    The fingerprint alone would not do: it may be that of a file with other values.
    """
    assert source.access is not None
    chosen = source.access.filter
    digest = hashlib.blake2b(digest_size=12)
    for text in (source.fingerprint, chosen.digest if chosen else "", "\0".join(columns)):
        digest.update(text.encode() + b"\0\0")
    for file in source.files:
        digest.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\0{file.etag}\0".encode())
    for array in (source.layout.block_starts, source.offsets):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(source.indexes[0].schema_bytes)
    return digest.hexdigest()


class _Plan:
    """Which blocks are read when, as far as it is known, and how large they are."""

    def __init__(self, source: Source, sharers: int) -> None:
        self._sharers = sharers
        self._lock = threading.Lock()
        self._rows = np.diff(source.layout.block_starts)
        self._row_bytes = source.bytes_per_row
        self._warned = False
        self._limit = source.access.cache.limit if source.access else 0
        self._epoch = -1
        self._position = 0
        self.known = False
        self._blocks = self._first = self._last = np.empty(0, dtype=np.int64)
        self._last_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}

    @property
    def block_bytes(self) -> float:
        """Of a block, decoded, on average."""
        return float(self._rows.mean()) * self._row_bytes if len(self._rows) else 0.0

    def move(self, epoch: int, position: int, uses: Callable[[], tuple[Uses, Uses]]) -> None:
        with self._lock:
            if epoch != self._epoch:
                own, found = uses()
                self._epoch, self._blocks, self._first, self._last = epoch, own.blocks, own.first, own.last
                order = np.argsort(found.last, kind="stable")
                self._last_of = dict(zip(found.blocks[order].tolist(), found.last[order].tolist(), strict=True))
                self._first_of = dict(zip(found.blocks[::-1].tolist(), found.first[::-1].tolist(), strict=True))
            self._position, self.known = position, True

    def learn(self, size: int, rows: int) -> None:
        """How many bytes some rows have taken."""
        self._row_bytes += (size / max(1, rows) - self._row_bytes) / 4

    def over(self, block: int) -> bool:
        """Whether a block will not be read again in this epoch."""
        last = self._last_of.get(block)
        return last is not None and last < self._position

    def next_use(self, block: int) -> float:
        """How many positions away the next use is."""
        first, last = self._first_of.get(block), self._last_of.get(block)
        if first is None or last is None or last < self._position:
            return float("inf")
        return float(max(0, first - self._position))

    def coming(self) -> list[int]:
        """Blocks in use and to come, in order, as many as have room."""
        with self._lock:
            start = int(np.searchsorted(self._first, self._position, side="right"))
            blocks, last, position = self._blocks, self._last, self._position
        used = blocks[:start][last[:start] >= position]
        ahead = blocks[start : start + 4096]
        taken = float(self._rows[used].sum()) * self._row_bytes
        room = min(self._limit * _AHEAD_SHARE / self._sharers - taken, max(_AHEAD_BYTES, taken))
        if taken > self._limit and not self._warned:
            self._warned = True
            _log.warning(
                "%d blocks are in use at once and take about %d MB, more than cache_bytes=%d: they will be decoded "
                "again and again. Give more cache_bytes, or shuffle(scope='window', window=…) with fewer blocks.",
                len(used), taken / 1e6, self._limit,
            )  # fmt: skip
        fits = int(np.searchsorted(np.cumsum(self._rows[ahead]) * self._row_bytes, room, side="right"))
        return [*used.tolist(), *ahead[: max(_LEAST_AHEAD if taken < self._limit else 0, fits)].tolist()]


class _Ahead:
    """Threads that fetch what comes next. They hold the cache and the plan, never the one who reads."""

    def __init__(self, cache: BlockCache | KeptBlocks, make: Callable[[int], pa.Table], threads: int) -> None:
        self._cache, self._count = cache, threads
        self._make = weakref.WeakMethod(make)
        self._moved = threading.Condition()
        self._asked = 0  # how often somebody asked for more: a thread looks once for all that was asked meanwhile
        self._wanted: Callable[[], Sequence[int]] = list
        self._threads: list[threading.Thread] = []
        self._stop, self._process = False, os.getpid()
        self._failed: set[int] = set()

    def wake(self, wanted: Callable[[], Sequence[int]]) -> None:
        """Fetch these blocks, in this order, and whatever was asked for before them no more."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"midepoch-fetch-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        with self._moved:
            self._asked, self._wanted = self._asked + 1, wanted
            self._moved.notify_all()

    def _run(self) -> None:
        heard = 0
        while True:
            with self._moved:
                while self._asked == heard and not self._stop:
                    self._moved.wait()
                heard, wanted = self._asked, self._wanted
            if self._over():
                return
            for block in wanted():
                if self._over():
                    return
                if self._asked != heard:
                    break
                if block not in self._failed and not self._fetch(block):
                    return

    def _over(self) -> bool:
        return self._stop

    def _fetch(self, block: int) -> bool:
        """Whether to go on: not when there is nobody left to fetch for."""
        make = self._make()
        if make is None:
            return False
        try:
            self._cache.prefetch(block, lambda: make(block))
        except Exception as problem:  # whoever needs the block will hear of it
            self._failed.add(block)
            _log.debug("block %d could not be fetched ahead: %s", block, problem)
        return True

    def close(self) -> None:
        if self._process != os.getpid():
            return  # a fork: the threads are not here, and their lock may be held for ever
        with self._moved:
            self._stop = True
            self._moved.notify_all()
        join(self._threads)
