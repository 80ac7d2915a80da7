"""Bounded waiting for threads, and finalizers that are silent at interpreter exit."""

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
