"""Files and folders of a local disk: durable writes, reads of regular files, locks."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from midepoch.checkpoint.files import BytesSource, Checksums, FileSource, SideThread, read_verified, verify_file
from midepoch.errors import CheckpointDamagedError

# Windows has none: attempts of dead processes are then removed by their age.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG)
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
_WRITE_AHEAD = 128 << 20
"""Bytes written before their sync is started."""


class LocalSource:
    """Source over an open local file, closed when nothing refers to it. The file may be removed, but not written to."""

    chunk = 1 << 20

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)
        self._fd, status = fd, os.fstat(fd)
        self.size, self._mtime = status.st_size, status.st_mtime_ns

    def read_into(self, data: memoryview, offset: int, /) -> int:
        done = 0
        while done < len(data):
            try:
                size = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as problem:
                raise CheckpointDamagedError(f"byte {offset + done} cannot be read ({problem.strerror})") from None
            if not size:
                break
            done += size
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._mtime):
            raise CheckpointDamagedError("the file was written to while it was read")
        return done


class LocalSink:
    """Sink into a local file that syncs in the background while it is written: the final sync has little to do."""

    def __init__(self, fd: int) -> None:
        self._fd, self._unsynced = fd, 0
        self._thread = SideThread("sync")
        self._syncing: Future[None] | None = None

    def write(self, data: memoryview, /) -> None:
        while len(data):
            size = os.write(self._fd, data)
            data = data[size:]
            self._unsynced += size
        if self._unsynced >= _WRITE_AHEAD and (self._syncing is None or self._syncing.done()):
            self.settle()
            self._unsynced = 0
            self._syncing = self._thread.submit(_sync_and_close, os.dup(self._fd))

    def settle(self) -> None:
        """Wait for the sync in the background. Raises its error, which a later sync may not report again."""
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> None:
        self._thread.close()


def _sync_and_close(fd: int) -> None:
    """Sync and close a duplicate descriptor: Ctrl-C may close the original one while the sync runs."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def create_file(path: Path) -> Iterator[LocalSink]:
    """Create a file that survives a power loss once the context is left."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW | _BINARY, 0o666)
    sink = LocalSink(fd)
    try:
        yield sink
        sink.settle()
        os.fsync(fd)
    finally:
        os.close(fd)
        sink.close()


def open_file(folder: Path, name: str) -> LocalSource:
    """Open a regular file of a folder. Raises CheckpointDamagedError if it is not one, or is outside of the folder."""
    path = folder / name
    if "/" in name and os.path.realpath(path.parent) != os.path.join(os.path.realpath(folder), os.path.dirname(name)):
        raise CheckpointDamagedError(f"{name} is outside of the folder of its step")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _NO_FOLLOW | _BINARY)
    except OSError as problem:
        if problem.errno in _NO_PLAIN_FILE:
            raise CheckpointDamagedError(f"{name} is not a regular file ({problem.strerror})") from None
        if problem.errno in _UNREADABLE:
            raise CheckpointDamagedError(f"{name} cannot be read ({problem.strerror})") from None
        raise
    source = LocalSource(fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise CheckpointDamagedError(f"{name} is not a regular file")
    return source


def verified(source: FileSource, sums: Checksums, name: str) -> FileSource:
    """Verify a file, and return it for more reads. An object is copied to this machine.

    Raises CheckpointDamagedError.
    """
    if isinstance(source, LocalSource):
        verify_file(source, sums, name)
        return source
    try:
        with tempfile.TemporaryFile(prefix="midepoch-checkpoint-") as file:
            verify_file(source, sums, name, partial(write_at, file.fileno()))
            return LocalSource(os.dup(file.fileno()))
    except OSError as problem:
        if problem.errno not in _NO_SPACE:
            raise
    return BytesSource(read_verified(source, sums, name))


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file."""
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class Lock:
    """Lock of a folder. It is released when nothing refers to it, also after an interrupt before ``release``.

    The kernel releases it when the process exits for any reason.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._finalizer = None if fd is None else weakref.finalize(self, _unlock_and_close, fd, os.getpid())
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def release(self) -> None:
        if self._fd is not None and self._finalizer is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile holds it, too
            fd, self._fd = self._fd, None
            if self._finalizer.detach():
                os.close(fd)


def _unlock_and_close(fd: int, process: int) -> None:
    if os.getpid() == process:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


NO_LOCKS = Lock(None)


def try_lock(folder: Path) -> Lock | None:
    """Lock a folder. Returns NO_LOCKS where locks are not supported, None if it is locked."""
    if fcntl is None:
        return NO_LOCKS
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    lock = Lock(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        lock.release()
        return None if isinstance(problem, BlockingIOError) else NO_LOCKS
    return lock


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power loss."""
    if path.is_symlink():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents so that they survive a power loss.

    The last folder that exists may be that of a process that was killed before it could sync its name.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    existing = missing[-1].parent if missing else folder
    with suppress(OSError):  # a parent may be unreadable
        sync(existing.parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)
