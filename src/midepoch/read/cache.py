"""Decoded blocks on disk, shared by all processes of a user that can access the folder.

A block that is missing or invalid is decoded again, so blocks may be removed at any time. A killed process leaves at
most a temporary file, which a later process removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataChangedError, FormatError
from midepoch.read.block_files import BlockFile
from midepoch.read.room import BLOCK, LOCK, NextUse, bytes_kept, make_room, mark_used, tidy
from midepoch.read.turns import BlockTurns
from midepoch.sources.locks import LockFile
from midepoch.sources.mounts import is_network
from midepoch.sources.source import CacheSpec
from midepoch.sources.storage import make_private, temporary_path

_log = logging.getLogger("midepoch")
_EVICTING = 1 << 40  # number of the lock for eviction; locks of blocks have smaller numbers

_PATIENCE = 30.0
"""Seconds to wait for a block that another process is decoding."""
_REPORT_SECONDS = 60.0
_ROOM_SHARE = 16  # eviction runs again after limit / 16 bytes were written


class BlockCache:
    """Blocks of one source and choice of columns, identified by ``key``.

    ``next_use`` returns the distance to the next use of a block.
    """

    def __init__(self, spec: CacheSpec, key: str, next_use: NextUse) -> None:
        self._root = Path(spec.folder)
        self._folder = self._root / f"{key}-{os.getuid()}"  # other users cannot read it
        self._limit, self._next_use = spec.limit, next_use
        self._turns = BlockTurns()
        self._written = spec.limit  # evict with the first block: other runs may have left more than the limit
        self._unkept = _Unkept(self._root)
        self._locks: LockFile | None = None
        try:
            make_private(self._folder)
            self._locks = LockFile(self._folder / LOCK)
            tidy(self._root, self._folder)
        except OSError as problem:
            _log.warning(
                "decoded blocks cannot be cached in %s (%s): every process keeps its own", spec.folder, problem.strerror
            )
        self._mapped = self._locks is not None and not is_network(self._folder)
        self._versions: dict[int, tuple[int, int, int]] = {}  # of mapped files, when they were opened

    def _file(self, block: int, path: Path | None = None) -> BlockFile:
        identity = hashlib.blake2b(f"{self._folder.name} {block}".encode(), digest_size=16).digest()
        return BlockFile(path or self._folder / f"{block}{BLOCK}", identity, self._mapped)

    def has(self, block: int) -> bool:
        return self._locks is not None and self._file(block).path.exists()

    def open(self, block: int, *, trusted: bool = False) -> pa.RecordBatch | None:
        """Return the block if it is cached and valid, else None. ``trusted``: just written by this process."""
        if self._locks is None:
            return None
        file = self._file(block)
        try:
            version = _version(file.path)
            batch = file.read(trusted=trusted)
        except OSError as problem:
            if not isinstance(problem, FileNotFoundError):
                _log.info("the cached block %s cannot be read and is decoded again: %s", file.path, problem)
            return None
        except (CorruptBlockError, ValueError) as problem:
            _log.warning("the cached block %s is not valid and is decoded again: %s", file.path, problem)
            with contextlib.suppress(OSError):
                file.path.unlink(missing_ok=True)
            return None
        if self._mapped:
            self._versions[block] = version
        mark_used(file.path)
        return batch

    def check(self, blocks: Iterable[int]) -> None:
        """Raise DataChangedError if the file of one of these open blocks was written to in place."""
        for block in blocks:
            opened, file = self._versions.get(block), self._file(block)
            try:
                version = _version(file.path)
            except OSError:
                continue  # the mapping of a removed file is unchanged
            if opened is None or version == opened or version[0] != opened[0]:
                continue  # as is that of a replaced file
            try:
                file.read()
            except FileNotFoundError:
                continue
            except (CorruptBlockError, ValueError):
                file.path.unlink(missing_ok=True)
                raise DataChangedError(
                    f"the cached block {file.path} was written to while it was in use: batches since the last check, a "
                    "second ago, may contain wrong values. It was removed. Load the last state to resume."
                ) from None
            self._versions[block] = version

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """Return the block, from the cache or decoded by one process at a time."""
        batch = self.open(block)
        if batch is not None:
            return batch
        with self._held(block, wait=True):
            batch = self.open(block)
            return batch if batch is not None else self._make(block, make)

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> bool:
        """Decode the block unless it is cached or being decoded. Return True if it was decoded."""
        if self._locks is None or self.has(block):
            return False
        with self._held(block, wait=False) as mine:
            if not mine or self.has(block):
                return False
            self._make(block, make)
            return True

    def _make(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        batch = one_batch(make())
        if self._locks is None:
            return batch
        try:
            self._write(block, batch)
        except OSError as problem:
            self._unkept.report(problem)
            return batch
        return self.open(block, trusted=True) or batch

    def _write(self, block: int, batch: pa.RecordBatch) -> None:
        path = self._file(block).path
        temporary = temporary_path(path)
        make_private(self._folder)  # the cache may have been cleared
        try:
            try:
                size = self._file(block, temporary).write(batch)
            except OSError as problem:
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                temporary.unlink(missing_ok=True)
                self._make_room(bytes_kept(self._root) - 4 * batch.nbytes)
                size = self._file(block, temporary).write(batch)
            self._written += size
            if self._written > self._limit // _ROOM_SHARE:
                self._make_room(self._limit - size)
                self._written = 0
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, limit: int) -> None:
        assert self._locks is not None
        if self._locks.acquire(_EVICTING, "making room", wait=False):
            try:
                make_room(self._root, limit, self._folder, self._next_use)
            finally:
                self._locks.release(_EVICTING)

    @contextlib.contextmanager
    def _held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """Lock a block: between threads by turns, between processes by a lock that ends with its process."""
        with self._turns.held(block, wait=wait) as mine:
            if not mine or self._locks is None:
                yield mine
                return
            locked = self._locks.acquire(block, f"block {block}", wait=wait, limit=_PATIENCE)
            try:
                yield locked
            finally:
                if locked:
                    self._locks.release(block)


def _version(path: Path) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Unkept:
    """Counter of the blocks that cannot be cached. It logs at most once a minute."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._next_report = 0.0

    def report(self, problem: OSError) -> None:
        self._count += 1
        worker = multiprocessing.current_process().name
        if time.monotonic() < self._next_report or (worker.startswith("midepoch-worker-") and worker[-2:] != "-0"):
            return
        self._next_report = time.monotonic() + _REPORT_SECONDS
        _log.warning(
            "%d decoded block%s could not be cached in %s (%s) and will be decoded again when needed. "
            "Free some space, or set another cache_dir or a smaller cache_bytes.",
            self._count, "s" * (self._count > 1), self._folder, problem.strerror or problem,
        )  # fmt: skip


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table as one record batch."""
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)
    raise FormatError(
        f"a block of {table.num_rows:,} rows has more than 2 GiB of text in one column. Write smaller row groups, or "
        "the column as large_string."
    )
