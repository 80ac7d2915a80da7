"""Writing a file whole or not at all, by one process at a time, leaving nothing that a crash could trip over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midepoch.processes import alive

try:
    import fcntl
except ImportError:  # not on Windows: two processes then may build the same index twice, which is harmless
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock beside ``path``; yields whether the folder can be written to.

    The kernel drops the lock when the process dies, however it dies; the empty lock file that stays is never a lock.
    It is a POSIX lock: children that were forked meanwhile (the pool of ``datasets``) do not hold it.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield False
        return
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: building twice is harmless, the write is atomic
                fcntl.lockf(fd, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: readers see the old file or the new one, whole, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _sweep(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sweep(path: Path) -> None:
    """Remove what killed writers of ``path`` left behind. The caller holds the lock, so none is in use here."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        pid = left.name.rsplit(".", 2)[1]
        if pid.isdigit() and not alive(int(pid)):
            left.unlink(missing_ok=True)
