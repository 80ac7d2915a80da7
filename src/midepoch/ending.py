"""The end of objects: waiting for their threads, never indefinitely, and closing them when nobody holds them."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

PREFIX = "midepoch-"
"""What the names of all threads of ours begin with."""

_PATIENCE = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
_left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_log = logging.getLogger("midepoch")


def join(threads: Iterable[threading.Thread]) -> bool:
    """Wait for threads that were told to end; whether they have.

    One that reads from a place that has gone away does not hear it; the error that made the loop end is to be seen all
    the same. And the garbage collector may call this from a thread that others wait for.
    """
    if threading.current_thread().name.startswith(PREFIX):
        return False
    ended, end = True, time.monotonic() + _PATIENCE
    for thread in threads:
        pause = _FIRST_PAUSE
        while _runs(thread) and thread not in _left_behind and time.monotonic() < end:
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        ended &= not _runs(thread)
        if _runs(thread) and thread not in _left_behind:
            _left_behind.add(thread)
            _log.warning("%s still reads %g s after it was told to end: it is left behind", thread.name, _PATIENCE)
    return ended


def _runs(thread: threading.Thread) -> bool:
    """True until a thread has ended. After a Ctrl-C its ``join`` and ``is_alive`` take it for ended (before 3.13)."""
    return thread in threading.enumerate()


def silent_at_exit(delete: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate a ``__del__``: what it raises while the interpreter ends is dropped.

    Modules may be cleared by then, so that their functions fail; threads and workers were ended before, at exit.
    """

    @functools.wraps(delete)
    def silent(self: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            delete(self)
        except Exception:
            if not is_finalizing():
                raise

    return silent
