"""Files of the cache folder: written atomically, private to their owner, by one process at a time.

A crash leaves nothing that disturbs a later process.

Locks have bounded, logged waiting. The kernel releases a lock when its process ends, for whatever reason. A stopped
process keeps it. Therefore a waiting process logs the holder, and continues without the lock if the holder shows no
sign of life for too long. A lock only saves work: the guarded task must also be correct when two processes do it at the
same time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from midepoch._internal.hints import warn_once
from midepoch._internal.processes import alive, machine
from midepoch.errors import MidepochError
from midepoch.storage.address import check_folder

T = TypeVar("T")
_log = logging.getLogger("midepoch")
NOTICE_SECONDS = 5.0
"""Time to wait before the holder is logged."""
LIMIT_SECONDS = 60.0
"""Time without a sign of life of the holder after which its lock is ignored."""
LONGEST_SECONDS = 3600.0
"""Time after which the lock of a live holder is ignored."""
_REPEAT_SECONDS = 60.0
_BEAT_SECONDS = 1.0
_IGNORED_LIMITS = 10

_NOTE_BYTES, _NOTES = 256, 1024  # of a lock file: descriptions of the holders, at most 256 KiB
_UNKNOWN = "another process"


class LockFile:
    """Locks by number, each held by one process at a time, in one file. They do not exclude threads of a process.

    They are POSIX locks: forked children (such as the pool of ``datasets``) do not hold them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # the system closes the file at exit
        self._guard = threading.Lock()
        self._first_seen: dict[int, tuple[bytes, float]] = {}
        self._ignored: dict[str, float] = {}
        check_owner(path)

    def acquire(self, number: int, task: str, *, wait: bool, limit: float | None = None) -> bool:
        """Return True if this process is to do the task: it holds the lock, or ignores the holder.

        ``limit``: seconds without a sign of life of the holder, LIMIT_SECONDS by default.
        """
        limit = LIMIT_SECONDS if limit is None else limit
        started, next_notice = time.monotonic(), NOTICE_SECONDS
        while not self._try(number):
            holder, since, silent = self._holder(number)
            waited = time.monotonic() - started
            if time.monotonic() < self._ignored.get(holder, 0.0):
                return True
            if silent >= limit or waited >= LONGEST_SECONDS:
                if holder != _UNKNOWN:  # it may hold other locks as well
                    self._ignored[holder] = time.monotonic() + _IGNORED_LIMITS * limit
                _log.warning(
                    "%s%s holds the lock %s and has not finished %s after %.0f s: this process does the work itself.",
                    holder, since, self._path, task, max(silent, waited),
                )  # fmt: skip
                return True
            if not wait:
                return False
            if waited >= next_notice:
                next_notice = waited + _REPEAT_SECONDS
                _log.warning(
                    "waiting for %s%s, which holds the lock %s, to finish %s. Continue or end that process if it is "
                    "stopped. After %.0f s without a sign of life from it, this process does the work itself.",
                    holder, since, self._path, task, limit,
                )  # fmt: skip
            time.sleep(min(0.1, 0.002 + waited / 20))
        self._first_seen.pop(number, None)
        self._write_note(number, _now(), 0)
        return True

    def release(self, number: int) -> None:
        """Release a lock, if it is held."""
        with self._guard, suppress(OSError):
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    @contextmanager
    def held(self, task: str, number: int = 0) -> Iterator[None]:
        """Hold a lock, and show waiting processes that this process is alive, as it may take longer than they wait."""
        self.acquire(number, task, wait=True)
        over, since = threading.Event(), _now()

        def beat() -> None:
            beats = 0
            while not over.wait(_BEAT_SECONDS):
                beats += 1
                self._write_note(number, since, beats)

        threading.Thread(target=beat, name="midepoch-lock", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self.release(number)

    def close(self) -> None:
        with self._guard:
            self._fd = None
            self._close()

    def _try(self, number: int) -> bool:
        with suppress(OSError):  # of a file system without locks
            try:
                if self._fd is not None:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except (BlockingIOError, PermissionError):
                return False
        return True

    def _write_note(self, number: int, since: str, beats: int) -> None:
        owner = f"process {os.getpid()} on host {socket.gethostname()}"
        text = f"{number}\t{owner}\t{since}\t{beats}".encode().ljust(_NOTE_BYTES)
        with self._guard, suppress(OSError):  # a full disk
            if self._fd is not None and len(text) == _NOTE_BYTES:
                os.pwrite(self._fd, text, number % _NOTES * _NOTE_BYTES)

    def _holder(self, number: int) -> tuple[str, str, float]:
        """Return the holder of a lock, since when it holds it, and the seconds since its note changed."""
        text = b""
        with suppress(OSError):
            if self._fd is not None:
                text = os.pread(self._fd, _NOTE_BYTES, number % _NOTES * _NOTE_BYTES)
        now = time.monotonic()
        seen, since = self._first_seen.get(number, (None, now))
        if seen != text:
            since = now
            self._first_seen[number] = (text, now)
        noted, *about = text.decode(errors="replace").split("\t")
        if noted != str(number) or len(about) != 3:
            return _UNKNOWN, "", now - since
        return about[0], f" (since {about[1]})", now - since


def check_owner(path: Path) -> None:
    """Raise PermissionError if a file or folder belongs to neither this user nor the owner of its folder.

    In a folder that all users can write to, another user may have created it first.
    """
    if path.lstat().st_uid not in (os.getuid(), path.parent.stat().st_uid):
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


_ABANDONED_SECONDS = 24 * 3600.0
"""Age at which a temporary file of another machine, whose processes are not visible, counts as abandoned."""
_NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse", "gpfs", "beegfs", "9p", "ceph")


def file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system, by the longest mount point above it. None if it is unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    path = str(folder.resolve())
    above = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else None


def is_network(folder: Path) -> bool:
    """Return True if other machines may access the same files."""
    return (file_system(folder) or "").startswith(_NETWORK)


class CacheSlot:
    """Path at which this process saves a file, if its folder allows it."""

    def __init__(self, path: Path, what: str, problem: OSError | None) -> None:
        self._path, self._what, self._problem = path, what, problem
        self._before = _identity(path)

    def keep(self, write: Callable[[], object]) -> bool:
        """Write the file by calling ``write``. Return True if it exists.

        A file that another process wrote in the meantime is kept.
        """
        problem = self._problem
        if problem is None:
            try:
                if _identity(self._path) == self._before:
                    write()
                return True
            except MidepochError:  # of the data
                raise
            except OSError as refused:
                problem = refused
        warn_once(
            "%s cannot be saved in %s (%s) and will be created again next time. Set MIDEPOCH_CACHE or index_dir to "
            "a writable folder with free space.",
            self._what, str(self._path.parent), problem.strerror or str(problem),
        )  # fmt: skip
        return False


@contextmanager
def locked(path: Path, what: str) -> Iterator[CacheSlot]:
    """Hold the lock of ``path`` while ``what`` is created for it. See ``LockFile`` for the limits of the lock."""
    try:
        make_private(path.parent)
        lock = LockFile(path.with_name(f".{path.name}.lock"))
    except OSError as problem:
        yield CacheSlot(path, what, problem)
        return
    with closing(lock), lock.held(what):
        yield CacheSlot(path, what, None)


def read_or_make(path: Path, what: str, read: Callable[[], T | None], make: Callable[[CacheSlot], T]) -> T:
    """Return what ``read`` finds. Else ``make`` it, and save it at ``path``, by one process at a time."""
    if (found := read()) is not None:
        return found
    with locked(path, what) as slot:
        found = read()  # another process may have made it
        return make(slot) if found is None else found


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, private to their owner."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if not missing:
        folder.mkdir(exist_ok=True)  # raises if it is a file


def temporary_path(path: Path) -> Path:
    """Return a unique name beside ``path`` that ``sweep`` recognizes."""
    return path.with_name(f".{path.name}.{_machine_digest()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when it is complete, so that readers never see a part of it.

    After an error, nothing is left of it.
    """
    sweep(path.parent, f".{path.name}.*.tmp")
    temporary = temporary_path(path)
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str) -> None:
    """Remove temporary files, and folders, of dead processes from a folder."""
    for left in folder.glob(pattern):
        *_, digest, pid, _token, _suffix = ["", "", *left.name.split(".")]
        with suppress(OSError):
            if digest == _machine_digest() and pid.isdigit():
                abandoned = not alive(int(pid))
            else:
                abandoned = time.time() - left.stat().st_mtime > _ABANDONED_SECONDS
            if abandoned and left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            elif abandoned:
                left.unlink(missing_ok=True)


def _machine_digest() -> str:
    return hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def named_folder(given: object, what: str) -> Path:
    """Return the local folder that an argument names. Raise TypeError if it names none."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise TypeError(f"{what} takes the name of a local folder, got {given!r:.60}. Omit it for the default.")
    check_folder(given)
    return Path(os.path.expanduser(given))


def default_index_dir() -> Path:
    """Return ``$MIDEPOCH_CACHE``, or ``midepoch`` in the user's cache folder."""
    if given := os.environ.get("MIDEPOCH_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "midepoch"
