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


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that were told to end.

    One that reads from a place that has gone away does not hear it; the error that made the loop end is to be seen all
    the same. And the garbage collector may call this from a thread that others wait for.
    """
    if threading.current_thread().name.startswith(PREFIX):
        return
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        if thread in _left_behind:
            continue
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            _left_behind.add(thread)
            _log.warning("%s still reads %g s after it was told to end: it is left behind", thread.name, _PATIENCE)
