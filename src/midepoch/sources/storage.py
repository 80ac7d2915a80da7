"""Files of the cache folder: written whole or not at all, for nobody but their owner, by one process at a time.

A crash leaves nothing that a later process could trip over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midepoch.processes import alive, machine
from midepoch.sources.locks import LockFile

_log = logging.getLogger("midepoch")
_ABANDONED_SECONDS = 24 * 3600.0
"""The age at which a temporary file of another machine, whose processes cannot be asked, counts as abandoned."""
_warned: set[tuple[Path, str]] = set()


class Place:
    """A path at which this process keeps a file, if its folder allows it."""

    def __init__(self, path: Path, what: str, problem: OSError | None) -> None:
        self._path, self._what, self._problem = path, what, problem
        self._before = _identity(path)

    def keep(self, write: Callable[[], object]) -> bool:
        """Write the file by calling ``write``; return whether it is there.

        A file that came meanwhile stays: another process did not wait for this one, and began later.
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
                "%s cannot be kept in %s (%s): it will be made again next time. Set MIDEPOCH_CACHE or index_dir to a "
                "folder that can be written to and has room.",
                self._what, *reason,
            )  # fmt: skip
        return False


@contextmanager
def locked(path: Path, what: str) -> Iterator[Place]:
    """Hold the lock of ``path`` while ``what`` is made, which is to be kept there. See ``LockFile`` for its limits."""
    try:
        make_private(path.parent)
        lock = LockFile(path.with_name(f".{path.name}.lock"))
    except OSError as problem:
        yield Place(path, what, problem)
        return
    try:
        lock.acquire(0, what, wait=True)
        with lock.signs_of_life(0):
            yield Place(path, what, None)
    finally:
        lock.close()


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, as far as they are missing, for nobody but their owner."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if not missing:
        folder.mkdir(exist_ok=True)  # raises if it is a file


def temporary_path(path: Path) -> Path:
    """A name beside ``path`` that no other thread, process or machine uses, and that ``sweep`` recognizes."""
    return path.with_name(f".{path.name}.{_machine_digest()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def atomic_write(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: readers see the old file or the new one, whole, whatever happens meanwhile."""
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
    """Remove the temporary files that ended processes left in a folder."""
    for left in folder.glob(pattern):
        *_, digest, pid, _token, _suffix = ["", "", *left.name.split(".")]
        with suppress(OSError):
            if digest == _machine_digest() and pid.isdigit():
                abandoned = not alive(int(pid))
            else:
                abandoned = time.time() - left.stat().st_mtime > _ABANDONED_SECONDS
            if abandoned:
                left.unlink(missing_ok=True)


def _machine_digest() -> str:
    return hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns
