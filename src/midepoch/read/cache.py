"""Cache of decoded blocks, with two shelves: memory, and files that all processes of a user share.

A block that is missing or invalid is decoded again, so blocks may be removed at any time. A killed process leaves at
most a temporary file, which a later process removes.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch.errors import CorruptBlockError, DataChangedError, FormatError
from midepoch.sources import CacheSpec
from midepoch.storage.cache_files import LockFile, check_owner, is_network, make_private, sweep, temporary_path
from midepoch.storage.damage import retried

NextUse = Callable[[int], float]
"""Returns the distance to the next use of a block. The farthest one is removed first."""
_log = logging.getLogger("midepoch")


class BlockCache:
    """Blocks on a shelf, each decoded by one thread and process at a time."""

    def __init__(self, shelf: MemoryShelf | DiskShelf) -> None:
        self.shelf = shelf
        self._busy: set[int] = set()
        self._done = threading.Condition()

    @staticmethod
    def in_folder(spec: CacheSpec, key: str, next_use: NextUse, limit: int) -> BlockCache:
        """Return the cache in a folder, or one of ``limit`` bytes of memory if the folder cannot be used."""
        try:
            return BlockCache(DiskShelf(spec, key, next_use))
        except OSError as problem:
            _log.warning(
                "decoded blocks cannot be cached in %s (%s): every process keeps its own", spec.folder, problem.strerror
            )
            return BlockCache(MemoryShelf(limit, next_use))

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """Return the block, from the shelf or decoded."""
        batch = self.shelf.open(block)
        if batch is not None:
            return batch
        with self._held(block, wait=True):
            batch = self.shelf.open(block)
            return batch if batch is not None else self.shelf.keep(block, one_batch(make()))

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> None:
        """Decode the block unless it is there or being decoded."""
        if not self.shelf.has(block):
            with self._held(block, wait=False) as mine:
                if mine and not self.shelf.has(block):
                    self.shelf.keep(block, one_batch(make()))

    @contextmanager
    def _held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """Lock a block between threads and processes. Yield True if it is to be decoded here: always with ``wait``."""
        with self._done:
            while wait and block in self._busy:
                self._done.wait()
            mine = block not in self._busy
            self._busy.add(block)
        locks = self.shelf.locks
        try:
            yield mine and (locks is None or locks.acquire(block, f"block {block}", wait=wait, limit=_PATIENCE))
        finally:
            if mine:
                try:
                    if locks is not None:
                        locks.release(block)
                finally:  # also after an interrupt: a reader would wait for the block indefinitely
                    with self._done:
                        self._busy.discard(block)
                        self._done.notify_all()


class MemoryShelf:
    """Blocks in memory, for the threads of one process."""

    locks = None

    def __init__(self, limit: int, next_use: NextUse) -> None:
        self._limit, self._next_use = limit, next_use
        self._blocks: dict[int, pa.RecordBatch] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def has(self, block: int) -> bool:
        return block in self._blocks

    def open(self, block: int) -> pa.RecordBatch | None:
        return self._blocks.get(block)

    def keep(self, block: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        with self._lock:
            self._blocks[block] = batch
            self._bytes += bytes_of(batch)
            while self._bytes > self._limit and len(self._blocks) > 1:
                farthest = max((each for each in self._blocks if each != block), key=self._next_use)
                self._bytes -= bytes_of(self._blocks.pop(farthest))
        return batch

    def check(self, blocks: Iterable[int]) -> None:
        """Do nothing: no other process can write to this memory."""


_MAGIC = b"MEBLOCK2"
_HEADER = struct.Struct("<8s16sqqI")  # magic, identity, rows, bytes of the rest, their CRC-32
_HEADER_BYTES = 64  # keeps the alignment that Arrow needs
BLOCK = ".block"
LOCK = ".lock"
TIDIED = ".tidied-"
"""First part of the name of a user's file whose time is that of the last check of all folders."""
_RECENT_SECONDS = 60.0
_UNUSED_SECONDS = 24 * 3600.0
_TIDY_SECONDS = 3600.0
_EVICTING = 1 << 40  # number of the lock for eviction; locks of blocks have smaller numbers
_PATIENCE = 30.0
"""Seconds to wait for a block that another process is decoding."""
_ROOM_SHARE = 16  # eviction runs again after limit / 16 bytes were written


class DiskShelf:
    """Blocks of one source and choice of columns, identified by ``key``, in files. Raises OSError if they cannot be.

    The file of a block is a header of 64 bytes, then an Arrow stream of one record batch. The header contains the
    identity of the block and its data, the number of rows, and the checksum of the rest. All of it is checked when a
    block is opened.

    Files are mapped, so that processes share their memory. On a network file system they are read instead: a mapped
    page of a file that another machine has removed would crash the process.
    """

    def __init__(self, spec: CacheSpec, key: str, next_use: NextUse) -> None:
        self._root = Path(spec.folder)
        self._folder = self._root / f"{key}-{os.getuid()}"  # other users cannot read it
        self._limit, self._next_use = spec.limit, next_use
        self._written = spec.limit  # evict with the first block: other runs may have left more than the limit
        self._versions: dict[int, tuple[int, int, int]] = {}  # of mapped files, when they were opened
        make_private(self._folder)
        check_owner(self._folder)
        self.locks = LockFile(self._folder / LOCK)
        self._mapped = not is_network(self._folder)
        self._tidy()

    def has(self, block: int) -> bool:
        return self._path(block).exists()

    def open(self, block: int, *, trusted: bool = False) -> pa.RecordBatch | None:
        """Return the block if it is there and valid, else None. ``trusted``: just written by this process."""
        path = self._path(block)
        try:
            version = _version(path)
            batch = self._read(block, trusted=trusted)
        except FileNotFoundError:
            return None
        except OSError as problem:
            _log.info("the cached block %s cannot be read and is decoded again: %s", path, problem)
            return None
        except (CorruptBlockError, ValueError) as problem:
            _log.warning("the cached block %s is not valid and is decoded again: %s", path, problem)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        if self._mapped:
            self._versions[block] = version
        with suppress(OSError):  # the access time is that of the last use
            os.utime(path, ns=(time.time_ns(), version[2]))
        return batch

    def keep(self, block: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Save a block. Return it as it was saved, or as given if it cannot be."""
        try:
            self._save(block, batch)
        except OSError as problem:
            worker = multiprocessing.current_process().name
            if not worker.startswith("midepoch-worker-") or worker.endswith("-0"):
                warn_once(
                    "decoded blocks could not be cached in %s (%s) and will be decoded again when needed. Free some "
                    "space, or set another cache_dir or a smaller cache_bytes.",
                    str(self._root), problem.strerror or str(problem),
                )  # fmt: skip
            return batch
        return self.open(block, trusted=True) or batch

    def check(self, blocks: Iterable[int]) -> None:
        """Raise DataChangedError if the file of one of these open blocks was written to in place."""
        for block in blocks:
            opened, path = self._versions.get(block), self._path(block)
            try:
                version = _version(path)
            except OSError:
                continue  # the mapping of a removed file is unchanged
            if opened is None or version == opened or version[0] != opened[0]:
                continue  # as is that of a replaced file
            try:
                self._read(block)
            except FileNotFoundError:
                continue
            except (CorruptBlockError, ValueError):
                path.unlink(missing_ok=True)
                raise DataChangedError(
                    f"the cached block {path} was written to while it was in use: batches since the last check, a "
                    "second ago, may contain wrong values. It was removed. Load the last state to resume."
                ) from None
            self._versions[block] = version

    def _path(self, block: int) -> Path:
        return self._folder / f"{block}{BLOCK}"

    def _identity(self, block: int) -> bytes:
        return hashlib.blake2b(f"{self._folder.name} {block}".encode(), digest_size=16).digest()

    def _content(self, path: Path) -> pa.Buffer:
        if self._mapped:
            return pa.memory_map(str(path)).read_buffer()
        with pa.OSFile(str(path)) as file:
            return file.read_buffer()

    def _read(self, block: int, *, trusted: bool = False) -> pa.RecordBatch:
        """Return the rows of a file. Raise OSError, or ValueError if it is not valid."""
        path = self._path(block)
        content = retried(lambda: self._content(path), str(path))
        if content.size < _HEADER_BYTES:
            raise ValueError(f"it has {content.size} bytes")
        magic, identity, rows, size, checksum = _HEADER.unpack_from(content)
        body = content.slice(_HEADER_BYTES)
        if magic != _MAGIC or identity != self._identity(block):
            raise ValueError("it is not this block")
        if size != body.size or (not trusted and zlib.crc32(body) != checksum):
            raise ValueError("its checksum differs")
        try:
            batch = pa.ipc.open_stream(body).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as problem:
            raise ValueError(str(problem)) from None
        if batch.num_rows != rows:
            raise ValueError(f"it has {batch.num_rows} rows instead of {rows}")
        return batch

    def _save(self, block: int, batch: pa.RecordBatch) -> None:
        path = self._path(block)
        temporary = temporary_path(path)
        make_private(self._folder)  # the cache may have been cleared
        try:
            try:
                size = self._write(temporary, block, batch)
            except OSError as problem:
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                temporary.unlink(missing_ok=True)
                self._make_room(self._limit, at_least=4 * batch.nbytes)
                size = self._write(temporary, block, batch)
            self._written += size
            if self._written > self._limit // _ROOM_SHARE:
                self._make_room(self._limit - size)
                self._written = 0
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _write(self, path: Path, block: int, batch: pa.RecordBatch) -> int:
        """Write a block to a path under which no reader looks for it. Return the number of bytes."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with pa.OSFile(str(path), "wb") as sink:
            sink.write(bytes(_HEADER_BYTES))
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
        content = self._content(path)
        body = content.slice(_HEADER_BYTES)
        with path.open("r+b") as file:
            file.write(_HEADER.pack(_MAGIC, self._identity(block), batch.num_rows, body.size, zlib.crc32(body)))
        return int(content.size)

    def _make_room(self, limit: int, at_least: int = 0) -> None:
        """Remove blocks of all folders, the one needed last first, until they take ``limit`` bytes, and ``at_least``
        some bytes. The next use is known for blocks of this folder; for others, the time of the last use.
        """
        if not self.locks.acquire(_EVICTING, "making room", wait=False):
            return
        try:
            candidates = []
            for path in self._root.rglob(f"*{BLOCK}"):
                with suppress(OSError, ValueError):
                    stat = path.stat()
                    age = time.time() - max(stat.st_atime, stat.st_mtime)
                    distance = float("inf") if age > _RECENT_SECONDS else 0.0
                    if path.parent == self._folder:
                        distance = self._next_use(int(path.stem))
                    candidates.append(((distance, age), path, stat.st_size))
            total = sum(size for _, _, size in candidates)
            limit = min(limit, total - at_least)
            for _, path, size in sorted(candidates, key=lambda each: each[0], reverse=True):
                if total <= limit:
                    break
                with suppress(OSError):
                    path.unlink()
                    total -= size
        finally:
            self.locks.release(_EVICTING)

    def _tidy(self) -> None:
        """Remove temporary files of dead processes, and folders without blocks that were unused for a day.

        Every reader tidies its own folder. All others are checked once an hour: 250 of them take 37 ms.
        """
        sweep(self._folder, ".*.tmp")
        tidied = self._root / f"{TIDIED}{os.getuid()}"
        with suppress(OSError):
            if tidied.exists() and 0 <= time.time() - tidied.stat().st_mtime < _TIDY_SECONDS:
                return
            tidied.touch(mode=0o600)
        for folder in self._root.iterdir():
            with suppress(OSError):
                lock = folder / LOCK
                sweep(folder, ".*.tmp")
                is_empty = folder != self._folder and os.listdir(folder) == [LOCK]
                if is_empty and time.time() - lock.stat().st_mtime > _UNUSED_SECONDS:
                    lock.unlink()
                    folder.rmdir()


def _version(path: Path) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def bytes_of(data: pa.RecordBatch | pa.Table) -> int:
    """Return the bytes of the values, or of their buffers: pyarrow 20 cannot count the values of string views."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:
        return int(data.get_total_buffer_size())


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
