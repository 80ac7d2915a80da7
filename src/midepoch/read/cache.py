"""Decoded blocks on disk, shared by all processes of a user that can access the folder.

A block that is missing or invalid is decoded again, so blocks may be removed at any time. A killed process leaves at
most a temporary file, which a later process removes. Blocks that no other process reads are kept in memory
(``KeptBlocks``).

The file of a block is a header of 64 bytes, then an Arrow stream of one record batch.

The header contains the identity of the block and its data, the number of rows, and the checksum of the rest. All of it
is checked when a block is opened.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataChangedError, FormatError
from midepoch.sources.source import CacheSpec
from midepoch.storage.cache_files import LockFile, check_owner, is_network, make_private, sweep, temporary_path
from midepoch.storage.damage import retried

_MAGIC = b"MEBLOCK2"
_HEADER = struct.Struct("<8s16sqqI")  # magic, identity, rows, bytes of the rest, their CRC-32
_HEADER_BYTES = 64  # keeps the alignment that Arrow needs


@dataclass(frozen=True)
class BlockFile:
    """File of one block. ``identity`` (16 bytes) identifies the block and its data. For ``mapped`` see ``read``."""

    path: Path
    identity: bytes
    mapped: bool

    def read(self, *, trusted: bool = False) -> pa.RecordBatch:
        """Return the rows. Raise OSError, or ValueError if the file is not valid.

        Mapped files share their memory between processes. Files on a network file system are read instead: a mapped
        page of a file that another machine has removed would crash the process. ``trusted``: just written by this
        process.
        """
        content = retried(self._content, str(self.path))
        if content.size < _HEADER_BYTES:
            raise ValueError(f"it has {content.size} bytes")
        magic, identity, rows, size, checksum = _HEADER.unpack_from(content)
        body = content.slice(_HEADER_BYTES)
        if magic != _MAGIC or identity != self.identity:
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

    def _content(self) -> pa.Buffer:
        if self.mapped:
            return pa.memory_map(str(self.path)).read_buffer()
        with pa.OSFile(str(self.path)) as file:
            return file.read_buffer()

    def write(self, batch: pa.RecordBatch) -> int:
        """Write the rows to this path, under which no reader looks for a block yet. Return the number of bytes."""
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with pa.OSFile(str(self.path), "wb") as sink:
            sink.write(bytes(_HEADER_BYTES))
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
        body = self._content().slice(_HEADER_BYTES)
        header = _HEADER.pack(_MAGIC, self.identity, batch.num_rows, body.size, zlib.crc32(body))
        with self.path.open("r+b") as file:
            file.write(header)
        return int(body.size) + _HEADER_BYTES


BLOCK = ".block"
LOCK = ".lock"
TIDIED = ".tidied-"
"""First part of the name of a user's file whose time is that of the last check of all folders."""
_RECENT_SECONDS = 60.0
_UNUSED_SECONDS = 24 * 3600.0
_TIDY_SECONDS = 3600.0

NextUse = Callable[[int], float]


def mark_used(path: Path) -> None:
    """Record that a block was used now, in its access time. Its modification time is kept."""
    with suppress(OSError):
        stat = os.stat(path)
        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))


def make_room(root: Path, limit: int, own: Path, next_use: NextUse) -> None:
    """Remove blocks until those below ``root`` take at most ``limit`` bytes, beginning with the one needed last.

    For blocks in the folder ``own`` the next use is known; for others, the time of the last use.
    """
    candidates = []
    for path in root.rglob(f"*{BLOCK}"):
        with suppress(OSError, ValueError):
            stat = path.stat()
            age = time.time() - max(stat.st_atime, stat.st_mtime)
            distance = next_use(int(path.stem)) if path.parent == own else _distance_of_others(age)
            candidates.append(((distance, age), path, stat.st_size))
    total = sum(size for _, _, size in candidates)
    for _, path, size in sorted(candidates, key=lambda each: each[0], reverse=True):
        if total <= limit:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


def bytes_kept(root: Path) -> int:
    """Return the total bytes of all blocks below a folder."""
    total = 0
    for path in root.rglob(f"*{BLOCK}"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def tidy(root: Path, own: Path) -> None:
    """Remove temporary files of dead processes, and folders without blocks that were unused for a day.

    Every reader tidies its own folder. All others are checked once an hour: 250 of them take 37 ms.
    """
    sweep(own, ".*.tmp")
    tidied = root / f"{TIDIED}{os.getuid()}"
    with suppress(OSError):
        if tidied.exists() and 0 <= time.time() - tidied.stat().st_mtime < _TIDY_SECONDS:
            return
        tidied.touch(mode=0o600)
    for folder in root.iterdir():
        with suppress(OSError):
            lock = folder / LOCK
            sweep(folder, ".*.tmp")
            if folder != own and os.listdir(folder) == [LOCK] and time.time() - lock.stat().st_mtime > _UNUSED_SECONDS:
                lock.unlink()
                folder.rmdir()


def _distance_of_others(age: float) -> float:
    return float("inf") if age > _RECENT_SECONDS else 0.0


class BlockTurns:
    """Set of blocks that are locked by a thread."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        self._done = threading.Condition()

    @contextmanager
    def held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """Lock a block. Yield True if this thread holds it, which is always so with ``wait``."""
        with self._done:
            while wait and block in self._busy:
                self._done.wait()
            mine = block not in self._busy
            if mine:
                self._busy.add(block)
        try:
            yield mine
        finally:
            if mine:
                with self._done:
                    self._busy.discard(block)
                    self._done.notify_all()


def bytes_of(data: pa.RecordBatch | pa.Table) -> int:
    """Return the bytes of the values, or of their buffers: pyarrow 20 cannot count the values of string views."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:
        return int(data.get_total_buffer_size())


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
            check_owner(self._folder)
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

    def has(self, block: int) -> bool:
        return block in self._blocks

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
