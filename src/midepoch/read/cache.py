"""Decoded blocks on disk, shared by all processes of a machine.

A block is a file: a header of 64 bytes, then an Arrow stream of one record batch. The header says which block of which
data it is, how many rows it has, and the checksum of the rest; all of it is checked when a block is opened, and a block
that does not hold is made again. A killed process leaves at most a temporary file, which the next one removes. Blocks
of an earlier boot are removed too: they were never synced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.processes import alive
from midepoch.read.resources import retried
from midepoch.read.turns import Turns
from midepoch.sources.source import CacheSpec

try:
    import fcntl
except ImportError:  # not on Windows: two processes may decode the same block, which is harmless
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("midepoch")
_EVICTING = 1 << 40  # the byte of the lock file that stands for making room; blocks have the bytes before it

_MAGIC = b"MEBLOCK2"
_HEADER = struct.Struct("<8s16sqqI")  # magic, identity, rows, bytes of the rest, their CRC-32
_HEADER_BYTES = 64  # so that the rest is aligned as Arrow wants it

_PATIENCE = 30.0
"""Seconds to wait for a block that another process is making."""

NextUse = Callable[[int], float]


class BlockCache:
    """The blocks of one source and choice of columns, which ``key`` stands for.

    ``next_use`` says how soon a block will be read again.
    """

    def __init__(self, spec: CacheSpec, key: str, next_use: NextUse) -> None:
        self._root = Path(spec.folder) / _machine()
        self._folder = self._root / key
        self._limit, self._next_use = spec.limit, next_use
        self._turns = Turns()
        self._written = 0
        self._fd: int | None = None
        self._usable = self._prepare(Path(spec.folder))

    def _prepare(self, folder: Path) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            _log.warning("decoded blocks cannot be kept in %s (%s): every process keeps its own", folder, problem)
            return False
        host = self._root.name.rsplit("-", 1)[0]
        for other in folder.glob(f"{host}-*"):
            if other.name != self._root.name and other.name.rsplit("-", 1)[0] == host:
                shutil.rmtree(other, ignore_errors=True)
        for left in self._root.glob("*/.*.tmp"):
            pid = left.name.split(".")[2]
            if pid.isdigit() and not alive(int(pid)):
                left.unlink(missing_ok=True)
        return True

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None and os is not None:  # os goes before this at the end of a process
            os.close(self._fd)  # type: ignore[arg-type]

    def _path(self, block: int) -> Path:
        return self._folder / f"{block}.block"

    def has(self, block: int) -> bool:
        return self._usable and self._path(block).exists()

    def _identity(self, block: int) -> bytes:
        return hashlib.blake2b(f"{self._folder.name} {block}".encode(), digest_size=16).digest()

    def open(self, block: int, *, trusted: bool = False) -> pa.RecordBatch | None:
        """The block, mapped, if it is there and is what it should be. ``trusted``: just written by this process."""
        if not self._usable:
            return None
        path = self._path(block)
        try:
            mapped = retried(lambda: pa.memory_map(str(path)).read_buffer(), str(path))
            if mapped.size < _HEADER_BYTES:
                raise ValueError(f"it has {mapped.size} bytes")
            magic, identity, rows, size, checksum = _HEADER.unpack_from(mapped)
            body = mapped.slice(_HEADER_BYTES)
            if magic != _MAGIC or identity != self._identity(block):
                raise ValueError("it is not this block")
            if size != body.size or (not trusted and zlib.crc32(body) != checksum):
                raise ValueError("its checksum differs")
            batch = pa.ipc.open_stream(body).read_next_batch()
            if batch.num_rows != rows:
                raise ValueError(f"it has {batch.num_rows} rows instead of {rows}")
        except FileNotFoundError:
            return None
        except (pa.ArrowException, CorruptBlockError, ValueError, StopIteration) as problem:
            _log.warning("the cached block %s cannot be used and is made again: %s", path, problem)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # of other runs' blocks the one that was not used for longest goes first
        return batch

    def get(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        """The block: mapped if it is there, else made, by one process at a time."""
        found = self.open(block)
        if found is not None:
            return found
        with self._held(block, wait=True):
            found = self.open(block)
            return found if found is not None else self._make(block, make)

    def prefetch(self, block: int, make: Callable[[], pa.Table]) -> bool:
        """See to it that the block is there, unless somebody is at it already. Whether it was made."""
        if not self._usable or self.has(block):
            return False
        with self._held(block, wait=False) as mine:
            if not mine or self.has(block):
                return False
            self._make(block, make)
            return True

    def _make(self, block: int, make: Callable[[], pa.Table]) -> pa.RecordBatch:
        batch = one_batch(make())
        if self._usable:
            try:
                self._write(block, batch)
            except OSError as problem:
                if problem.errno == errno.ENOSPC:
                    self._make_room(0)
                _log.warning("the decoded block %s cannot be kept: %s", self._path(block), problem)
                return batch
            return self.open(block, trusted=True) or batch
        return batch

    def _write(self, block: int, batch: pa.RecordBatch) -> None:
        path = self._path(block)
        temporary = path.with_name(f".{block}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the cache
            with pa.OSFile(str(temporary), "wb") as sink:
                sink.write(bytes(_HEADER_BYTES))
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
            written = pa.memory_map(str(temporary)).read_buffer().slice(_HEADER_BYTES)
            header = _HEADER.pack(_MAGIC, self._identity(block), batch.num_rows, written.size, zlib.crc32(written))
            with temporary.open("r+b") as file:
                file.write(header)
            size = written.size + _HEADER_BYTES
            del written
            self._written += size
            if self._written > self._limit // 16:
                self._make_room(self._limit - size)
                self._written = 0
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, limit: int) -> None:
        """Remove blocks until those of all sources together take no more than ``limit`` bytes."""
        if not self._lock(_EVICTING, wait=False):
            return
        try:
            found = [(file, file.stat()) for file in self._root.glob("*/*.block")]
            total = sum(stat.st_size for _, stat in found)
            if total <= limit:
                return
            for file, stat in sorted(found, key=lambda each: self._distance(*each), reverse=True):
                with contextlib.suppress(OSError):
                    file.unlink()
                    total -= stat.st_size
                if total <= limit:
                    return
        except OSError:
            return  # another process is at it as well
        finally:
            self._unlock(_EVICTING)

    def _distance(self, file: Path, stat: os.stat_result) -> tuple[float, float]:
        """How far away the next use of a block is; of those that nobody here knows, how long ago the last one was."""
        age = time.time() - stat.st_mtime
        if file.parent != self._folder:
            return float("inf") if age > 60 else 0.0, age
        return self._next_use(int(file.stem)), age

    @contextlib.contextmanager
    def _held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """A block for this thread alone: in this process by turns, on the machine by a lock that dies with it."""
        with self._turns.held(block, wait=wait) as mine:
            locked = mine and self._lock(block, wait=wait)
            try:
                yield locked
            finally:
                if locked:
                    self._unlock(block)

    def _lock(self, byte: int, *, wait: bool) -> bool:
        """Whether the lock is held. Waits only so long: its holder may be stopped, and a block may be made twice."""
        deadline = time.monotonic() + (_PATIENCE if wait else 0.0)
        while fcntl is not None and self._fd is not None:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    return wait
                time.sleep(0.005)
            except OSError:
                return True  # a file system without locks
            else:
                return True
        return True

    def _unlock(self, byte: int) -> None:
        if fcntl is not None and self._fd is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """A table as one record batch."""
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)
    raise FormatError(
        f"a block of {table.num_rows:,} rows has more than 2 GiB of text in one column: write smaller row groups, or "
        "the column as large_string."
    )


def _machine() -> str:
    """This host since it was last started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "0"
    return f"{socket.gethostname()}-{boot}"
