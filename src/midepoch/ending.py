"""Waiting for threads of ours to end: never for ever, and never in one of them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable

PREFIX = "midepoch-"
"""What the names of all threads of ours begin with."""

_PATIENCE = 10.0
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
        if thread not in _left_behind:
            thread.join(max(0.0, end - time.monotonic()))
        ended &= not thread.is_alive()
        if thread.is_alive() and thread not in _left_behind:
            _left_behind.add(thread)
            _log.warning("%s still reads %g s after it was told to end: it is left behind", thread.name, _PATIENCE)
    return ended
