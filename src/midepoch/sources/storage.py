"""Files of the cache folder: written atomically, private to their owner, by one process at a time.

A crash leaves nothing that disturbs a later process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midepoch._internal.processes import alive, machine
from midepoch.sources.locks import LockFile

_log = logging.getLogger("midepoch")
_ABANDONED_SECONDS = 24 * 3600.0
"""Age at which a temporary file of another machine, whose processes are not visible, counts as abandoned."""
_warned: set[tuple[Path, str]] = set()


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
            if _identity(self._path) != self._before:
                return True
            try:
                write()
            except OSError as error:
                problem = error
            else:
                return True
        reason = (self._path.parent, problem.strerror or str(problem))
        if reason not in _warned:
            _warned.add(reason)
            _log.warning(
                "%s cannot be saved in %s (%s) and will be created again next time. Set MIDEPOCH_CACHE or index_dir to "
                "a writable folder with free space.",
                self._what, *reason,
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
    try:
        lock.acquire(0, what, wait=True)
        with lock.signs_of_life(0):
            yield CacheSlot(path, what, None)
    finally:
        lock.close()


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
    """Write ``data`` to ``path`` atomically: readers see either the complete old file or the complete new one."""
    sweep(path.parent, f".{path.name}.*.tmp")
    temporary = temporary_path(path)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
