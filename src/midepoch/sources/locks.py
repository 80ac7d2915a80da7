"""File locks with bounded, logged waiting.

The kernel releases a lock when its process ends, for whatever reason. A stopped process keeps it. Therefore a waiting
process logs the holder, and continues without the lock if the holder shows no sign of life for too long. A lock only
saves work: the guarded task must also be correct when two processes do it at the same time.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows: two processes may do the same work, which is harmless
    fcntl = None  # type: ignore[assignment]

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


class LockFile:
    """Locks by number, each held by one process at a time, in one file. They do not exclude threads of a process.

    They are POSIX locks: forked children (such as the pool of ``datasets``) do not hold them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        self._fd: int | None = os.open(path, flags, 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # the system closes the file at exit
        self._guard = threading.Lock()
        self._first_seen: dict[int, tuple[bytes, float]] = {}
        self._ignored: dict[tuple[str, int] | None, float] = {}
        check_owner(path)

    def acquire(self, number: int, task: str, *, wait: bool, limit: float | None = None) -> bool:
        """Return True if this process is to do the task: it holds the lock, or ignores the holder.

        ``limit``: seconds without a sign of life of the holder, LIMIT_SECONDS by default.
        """
        limit = LIMIT_SECONDS if limit is None else limit
        started, next_notice = time.monotonic(), NOTICE_SECONDS
        while not self._try(number):
            holder, silent = self._holder(number)
            waited = time.monotonic() - started
            if time.monotonic() < self._ignored.get(_key(holder), 0.0):
                return True
            if silent >= limit or waited >= LONGEST_SECONDS:
                self._ignore(holder, task, max(silent, waited), limit)
                return True
            if not wait:
                return False
            if waited >= next_notice:
                next_notice = waited + _REPEAT_SECONDS
                _log.warning(
                    "waiting for %s, which holds the lock %s, to finish %s. Continue or end that process if it is "
                    "stopped. After %.0f s without a sign of life from it, this process does the work itself.",
                    _described(holder), self._path, task, limit,
                )  # fmt: skip
            time.sleep(min(0.1, 0.002 + waited / 20))
        self._first_seen.pop(number, None)
        self._write_note(number, _now(), 0)
        return True

    def release(self, number: int) -> None:
        """Release a lock, if it is held."""
        with self._guard:
            if fcntl is not None and self._fd is not None:
                with suppress(OSError):
                    fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    @contextmanager
    def signs_of_life(self, number: int) -> Iterator[None]:
        """Show waiting processes that this process is alive, during work that may take longer than they wait."""
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

    def close(self) -> None:
        with self._guard:
            self._fd = None
            self._close()

    def _try(self, number: int) -> bool:
        if fcntl is None or self._fd is None:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True  # a file system without locks
        return True

    def _write_note(self, number: int, since: str, beats: int) -> None:
        note = {"lock": number, "pid": os.getpid(), "host": socket.gethostname(), "since": since, "beats": beats}
        text = json.dumps(note).encode().ljust(_NOTE_BYTES)
        with self._guard, suppress(OSError):  # a full disk
            if self._fd is not None and len(text) == _NOTE_BYTES:
                os.pwrite(self._fd, text, number % _NOTES * _NOTE_BYTES)

    def _holder(self, number: int) -> tuple[dict[str, Any] | None, float]:
        """Return the note of a lock's holder (None if it is not legible) and the seconds since it changed."""
        text = b""
        with suppress(OSError):
            if self._fd is not None:
                text = os.pread(self._fd, _NOTE_BYTES, number % _NOTES * _NOTE_BYTES)
        now = time.monotonic()
        seen = self._first_seen.get(number)
        if seen is None or seen[0] != text:
            seen = self._first_seen[number] = (text, now)
        try:
            note = json.loads(text)
            legible = note["lock"] == number and {"pid", "host", "since"} <= note.keys()
        except (ValueError, KeyError, TypeError):
            legible = False
        return note if legible else None, now - seen[1]

    def _ignore(self, holder: dict[str, Any] | None, task: str, seconds: float, limit: float) -> None:
        """Ignore this holder for a while: it may hold other locks as well."""
        if holder is not None:
            self._ignored[_key(holder)] = time.monotonic() + _IGNORED_LIMITS * limit
        _log.warning(
            "%s holds the lock %s and has not finished %s after %.0f s: this process does the work itself.",
            _described(holder), self._path, task, seconds,
        )  # fmt: skip


def check_owner(path: Path) -> None:
    """Raise PermissionError if a file or folder belongs to neither this user nor the owner of its folder.

    In a folder that all users can write to, another user may have created it first.
    """
    if hasattr(os, "getuid") and path.lstat().st_uid not in (os.getuid(), path.parent.stat().st_uid):
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _key(holder: dict[str, Any] | None) -> tuple[str, int] | None:
    return None if holder is None else (str(holder["host"]), holder["pid"])


def _described(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder['pid']} on host {holder['host']} (since {holder['since']})"
