"""Files and folders of a disk: what outlives a power loss, who holds a lock, what is a plain file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from midepoch.checkpoint.helpers import Helper
from midepoch.errors import CheckpointDamagedError

# Windows has none: attempts of dead processes are then swept by their age.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None

NO_LOCKS = -1
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_AHEAD = 128 << 20
"""Bytes written before the disk is told to begin with them."""
_PATIENCE = 10.0
"""Seconds to wait for a turn: the others hold it for a few renames, unless they are stopped."""
_log = logging.getLogger("midepoch")


class LocalSink:
    """Lets the disk begin with what is there while more comes: the sync at the end has little to do then."""

    def __init__(self, fd: int) -> None:
        self._fd, self._unsynced = fd, 0
        self._syncer = Helper("sync")
        self._syncing: Future[None] | None = None

    def write(self, data: memoryview, /) -> None:
        while len(data):
            came = os.write(self._fd, data)
            data = data[came:]
            self._unsynced += came
        if self._unsynced >= _AHEAD and (self._syncing is None or self._syncing.done()):
            self.settle()
            self._unsynced = 0
            self._syncing = self._syncer.submit(_sync_and_close, os.dup(self._fd))

    def settle(self) -> None:
        """Wait for what was begun; raises what went wrong, which a later sync may not say again."""
        if self._syncing is not None:
            self._syncing.result()

    def end(self) -> None:
        self._syncer.end()


def _sync_and_close(fd: int) -> None:
    """Of a descriptor of its own: Ctrl-C may end the wait for it, and close the file, while it runs."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LocalSource:
    """An open file. A Source, see there."""

    chunk = 1 << 20
    readers = 4

    def __init__(self, fd: int) -> None:
        self._fd, self.size = fd, os.fstat(fd).st_size

    def again(self) -> LocalSource:
        return _HeldSource(os.dup(self._fd))

    def read_into(self, data: memoryview, at: int, /) -> int:
        done = 0
        while done < len(data):
            try:
                came = os.preadv(self._fd, [data[done:]], at + done)
            except OSError as problem:
                raise CheckpointDamagedError(f"byte {at + done} cannot be read ({problem.strerror})") from None
            if not came:
                break
            done += came
        return done


class _HeldSource(LocalSource):
    """A file that is closed when nobody needs it any more, and that may be removed meanwhile, but not written to."""

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)
        super().__init__(fd)
        self._written = os.fstat(fd).st_mtime_ns

    def read_into(self, data: memoryview, at: int, /) -> int:
        came = super().read_into(data, at)
        found = os.fstat(self._fd)
        if (found.st_size, found.st_mtime_ns) != (self.size, self._written):
            raise CheckpointDamagedError("the file was written to while it was read")
        return came


@contextmanager
def written(path: Path) -> Iterator[LocalSink]:
    """A new file: all of it outlives a power loss when the context is left."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW | _BINARY, 0o666)
    sink = LocalSink(fd)
    try:
        yield sink
        sink.settle()
        os.fsync(fd)
    finally:
        os.close(fd)
        sink.end()


@contextmanager
def opened(folder: Path, name: str) -> Iterator[LocalSource]:
    """A plain file of a folder; CheckpointDamagedError if it is something else, or lies elsewhere."""
    path = folder / name
    if os.path.realpath(path.parent) != os.path.join(os.path.realpath(folder), os.path.dirname(name)).rstrip("/"):
        raise CheckpointDamagedError(f"{name} lies outside of its step")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _NO_FOLLOW | _BINARY)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG):
            raise CheckpointDamagedError(f"{name} is no plain file ({problem.strerror})") from None
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise CheckpointDamagedError(f"{name} cannot be read ({problem.strerror})") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointDamagedError(f"{name} is no plain file")
        yield LocalSource(fd)
    finally:
        os.close(fd)


def signature(path: str) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.lstat(path)
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def lock_folder(folder: Path) -> int | None:
    """Lock a folder: a number to unlock it by, NO_LOCKS where there are none, or None if it is locked already.

    The kernel unlocks it when the process ends, however it ends.
    """
    if fcntl is None:
        return NO_LOCKS
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        return NO_LOCKS
    return fd


def unlock(fd: int | None) -> None:
    """Undo ``lock_folder``."""
    if fd is not None and fd != NO_LOCKS:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile holds the same lock
        os.close(fd)


_turns: dict[str, int] = {}  # which thread of this process has the turn in a folder


@contextmanager
def turn(folder: Path) -> Iterator[bool]:
    """The right to rename what is in a folder, one process at a time; False after waiting for it in vain.

    A signal handler that saves may interrupt a save that has the turn: it does not wait for what it interrupts.
    """
    mine, key = threading.get_ident(), str(folder)
    interrupts = _turns.get(key) == mine
    limit = time.monotonic() + (0.0 if interrupts else _PATIENCE)
    while (lock := lock_folder(folder)) is None and time.monotonic() < limit:
        time.sleep(0.005)
    if lock is None and not interrupts:
        _log.warning(
            "%s: another process has held the lock of the folder for %d s. Continuing without it; see whether a "
            "process that saves there is stopped.",
            folder,
            _PATIENCE,
        )
    before = _turns.get(key)
    try:
        if lock is not None:
            _turns[key] = mine
        yield lock is not None
    finally:
        if lock is not None:
            _turns.pop(key, None) if before is None else _turns.update({key: before})
        unlock(lock)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlive a power loss."""
    if path.is_symlink():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durably(folder: Path) -> None:
    """Make a folder and those it lies in, as far as they are not there."""
    if folder.is_dir():
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
