"""Store on a disk, and its files: durable writes, reads of regular files, locks.

step_100/                     a step: manifest.json and the files it names
.step_200.TOKEN.saving/       a copy that is being made, locked by its process; becomes the step by a rename
.step_100.TOKEN.old/          a copy that is being replaced or removed: counts as the step as long as there is no other
.ranks/                       notes between ranks
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.files import BytesSource, Checksums, FileSource, read_verified, verify_file
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import NUMBER, STALE, Copy, Object
from midepoch.errors import CheckpointDamagedError, CheckpointError

_NO_PLAIN_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG)
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
_WRITE_AHEAD = 32 << 20
"""Bytes written before the disk is asked to begin. It may drop them from memory, too: nobody reads them soon."""
_COPY = re.compile(rf"step_{NUMBER}\Z|\.step_{NUMBER}\.[0-9a-f]+\.(saving|old)\Z")
_PAUSE, _TIMEOUT = 0.005, 10.0
"""Seconds between two looks, and seconds to wait for the removal of an empty folder."""
_LOOKS = 100
"""Most times that a folder is listed again because its names change."""


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
    """Sink into a local file. The disk begins while it is written, so that the sync at the end has little to do."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size, self._begun = fd, 0, 0

    def write(self, data: memoryview, /) -> None:
        while len(data):
            size = os.write(self._fd, data)
            data = data[size:]
            self._size += size
        if self._size - self._begun >= _WRITE_AHEAD:
            with suppress(OSError, AttributeError):  # it only saves time, and not all systems have it
                os.posix_fadvise(self._fd, self._begun, self._size - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._size


@contextmanager
def create_file(path: Path) -> Iterator[LocalSink]:
    """Create a file that survives a power loss once the context is left."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield LocalSink(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(folder: str | os.PathLike[str], name: str) -> LocalSource:
    """Open a regular file of a folder. Raises CheckpointDamagedError if it is not one, or is outside of the folder."""
    path, inner = os.path.join(folder, name), os.path.dirname(name)
    if inner and os.path.realpath(os.path.join(folder, inner)) != os.path.join(os.path.realpath(folder), inner):
        raise CheckpointDamagedError(f"{name} is outside of the folder of its step")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
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
    """Lock a folder. Returns NO_LOCKS on a file system without locks, None if it is locked."""
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


class LocalStore:
    """Store with a folder for each step."""

    poll_interval = 0.05
    scratch_is_private = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = str(self.path)
        self._is_durable = False  # the name of the folder
        self._locks: dict[str, Lock] = {}

    # Small files. They need not survive a power loss: nothing of them is synced.

    def put(self, name: str, data: bytes) -> None:
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        while True:
            if not self.path.is_dir():
                make_folder(self.path)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
                os.replace(temporary, path)
                return
            except FileNotFoundError:  # the last rank to leave has just removed a folder
                continue
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes | None:
        folder, file = os.path.split(os.path.join(self.path, name))
        try:
            source = open_file(folder, file)
        except FileNotFoundError:
            return None
        if source.size > manifests.LARGEST:
            raise CheckpointDamagedError(f"{file} is {source.size} bytes long")
        data = bytearray(source.size)
        return bytes(data[: source.read_into(memoryview(data), 0)])

    def list(self, below: str) -> dict[str, Object]:
        found: dict[str, Object] = {}
        root = os.path.join(self.path, "")
        for folder, _, names in os.walk(self.path / below):
            for path in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    status = os.lstat(path)
                    found[path[len(root) :]] = Object(status.st_size, status.st_mtime)
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = os.path.join(self.path, name)
            with suppress(FileNotFoundError):
                os.unlink(path)
            folder = os.path.dirname(path)
            for empty in (folder, os.path.dirname(folder)):
                with suppress(OSError):
                    os.rmdir(empty)

    # Files of copies

    def source(self, place: str, name: str) -> LocalSource:
        return open_file(self.path / place, name)

    def sink(self, place: str, name: str) -> AbstractContextManager[LocalSink]:
        path = self.path / place / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        return create_file(path)

    @contextmanager
    def scratch(self, place: str, name: str) -> Iterator[Path]:
        """Folder of the copy itself. Its files are synced here, whether their library did so or not."""
        folder = self.path / place / name
        yield folder
        for path in sorted(folder.rglob("*")):
            sync(path)
        sync(folder)

    def local_copy(self, manifest: Manifest) -> AbstractContextManager[Path]:
        return nullcontext(self.path / manifest.place)

    # Copies

    def copies(self, step: int | None = None) -> Sequence[Copy]:
        for _ in range(_LOOKS):
            names, copies = self._names(), []
            for name in names:
                if (match := _COPY.match(name)) and step in (None, number := int(match[1] or match[2])):
                    signature = None if match[3] == "saving" else self._signature(name)
                    copies.append(Copy(number, name, signature if match[3] or signature else ()))
            if set(names) == set(self._names()):
                break  # else a step may have been replaced meanwhile, and neither of its copies seen
        return copies

    def _names(self) -> Sequence[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            file = next((path for path in (self.path, *self.path.parents) if path.is_file()), self.path)
            raise CheckpointError(f"{file} is a file: name the folder that holds the steps.") from None
        if manifests.NAME in names:
            raise CheckpointError(f"{self.name} is a step itself: name the folder around it, {self.path.parent}.")
        return names

    def _signature(self, place: str) -> tuple[Any, ...] | None:
        try:
            status = os.lstat(f"{self.name}/{place}/{manifests.NAME}")
        except OSError:
            return None
        return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def attempt(self, step: int, token: str) -> str:
        return f".step_{step}.{token}.saving"

    def claim(self, step: int, token: str) -> None:
        if not (self._is_durable and self.path.is_dir()):  # another rank may have made it, for its notes
            make_folder(self.path)
            self._is_durable = True
        path = self.path / self.attempt(step, token)
        limit = time.monotonic() + _TIMEOUT
        while True:
            os.mkdir(path)
            with suppress(FileNotFoundError):
                lock = try_lock(path)
                if lock is not None and path.is_dir():
                    self._locks[token] = lock
                    return
            while path.is_dir():  # another process has found it before it was locked, and removes it
                if time.monotonic() > limit:
                    raise CheckpointError(f"{path} is locked by another process that has stopped.")
                time.sleep(_PAUSE)

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        place, final = self.attempt(step, token), f"step_{step}"
        with self.sink(place, manifests.NAME) as sink:
            sink.write(memoryview(manifest))
        sync(self.path / place)
        while True:
            try:
                os.rename(self.path / place, self.path / final)
                break
            except OSError as problem:
                if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            with suppress(FileNotFoundError):  # another process is replacing it at the same time
                self.withdraw(Copy(step, final, ()))
        sync(self.path)
        return final

    def release(self, step: int, token: str) -> None:  # noqa: ARG002
        if (lock := self._locks.pop(token, None)) is not None:
            lock.release()

    def withdraw(self, copy: Copy) -> Copy:
        if copy.is_withdrawn:
            return copy
        place = f".step_{copy.step}.{secrets.token_hex(8)}.old"
        os.rename(self.path / copy.place, self.path / place)
        return copy._replace(place=place)

    def settle(self, copy: Copy) -> None:
        if copy.signature is None:
            self._discard_abandoned(copy)
        elif copy.is_withdrawn:
            with suppress(OSError):
                os.rename(self.path / copy.place, self.path / f"step_{copy.step}")

    def discard(self, copy: Copy) -> None:
        if copy.signature is not None:
            sync(self.path)  # its process may have failed in this: a loss of power could take the newest copy back
        path = self.path / copy.place
        if path.is_dir() and not path.is_symlink():
            (path / manifests.NAME).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _discard_abandoned(self, copy: Copy) -> None:
        path = self.path / copy.place
        lock = NO_LOCKS if (is_old := copy.place.endswith(".old")) else try_lock(path)
        if lock is None:
            return
        try:  # locked: a process that has just created it does not begin to use it
            if is_old or lock is not NO_LOCKS or time.time() - os.stat(path).st_mtime >= STALE:
                self.discard(copy)
        finally:
            lock.release()
