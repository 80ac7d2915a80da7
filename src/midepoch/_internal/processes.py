"""Liveness of processes, bounded waiting for threads, and finalizers that are silent at interpreter exit."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

_ENDED = ("Z", "X")
"""States of processes that have ended, but are not removed yet."""


def alive(pid: int) -> bool:
    """Return True if a process with this id is running, whichever user owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process of another user
    fields = _fields(pid)
    return fields is None or fields[0] not in _ENDED


def started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot. Empty if there is no such process."""
    fields = _fields(pid)
    if fields is None:
        return "" if os.path.isdir("/proc/self") or not alive(pid) else "running"
    return "" if fields[0] in _ENDED else fields[19]


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name. None if the file does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    except OSError:
        return None


@lru_cache(1)
def machine() -> str:
    """Return the scope in which process ids are unique: host, boot and PID namespace."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # each container has its own process ids
    return f"{socket.gethostname()} {boot} {namespace}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


PREFIX = "midepoch-"
"""Prefix of the names of all threads of midepoch."""

_PATIENCE = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_log = logging.getLogger("midepoch")


def join(threads: Iterable[threading.Thread]) -> bool:
    """Wait for threads that were asked to stop. Return True if all have stopped.

    The wait is bounded: a thread that reads from an unreachable store does not notice the request, and must not hide
    the error that stopped the loop. The garbage collector may call this from a thread that others wait for.
    """
    if threading.current_thread().name.startswith(PREFIX):
        return False
    all_stopped, deadline = True, time.monotonic() + _PATIENCE
    for thread in threads:
        pause = _FIRST_PAUSE
        while _runs(thread) and thread not in _abandoned and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        all_stopped &= not _runs(thread)
        if _runs(thread) and thread not in _abandoned:
            _abandoned.add(thread)
            _log.warning("%s is still busy %g s after it was asked to stop: it is left behind", thread.name, _PATIENCE)
    return all_stopped


def _runs(thread: threading.Thread) -> bool:
    """Return True until a thread has stopped. Before 3.13, ``is_alive`` is wrong after a Ctrl-C in ``join``."""
    return thread in threading.enumerate()


def silent_at_exit(delete: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate a ``__del__`` so that errors during interpreter shutdown are dropped.

    Modules may be cleared by then, so that their functions fail. Threads and workers were stopped before, at exit.
    """

    @functools.wraps(delete)
    def silent(self: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            delete(self)
        except Exception:
            if not is_finalizing():
                raise

    return silent
