"""num_workers=0: a thread reads ahead; maps and collation run in the caller's thread."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from midepoch._internal.threads import join
from midepoch.loader.batches import BatchMaker
from midepoch.loader.plans import Made
from midepoch.pipeline.plans import StepPlan


class ThreadedBatches:
    """The batches of a plan, in order. One thread reads up to ``prefetch`` chunks ahead.

    The first chunk, which is one batch, is read in the caller's thread: a look at it costs neither a thread nor the
    memory of prefetched chunks.
    """

    def __init__(self, maker: BatchMaker, plan: StepPlan, prefetch: int) -> None:
        self._maker, self._plan = maker, plan
        self._chunks = maker.read(plan, 0, 1)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(prefetch)
        self._stop = threading.Event()
        self._chunk: deque[Any] = deque(next(self._chunks, ()))
        self._thread: threading.Thread | None = None
        self._over = False

    def next(self) -> Made | None:
        """Return the next batch, or None at the end. Raises the errors of reading."""
        while not self._chunk:
            if self._over:
                return None
            if self._thread is None:
                self._start()
            chunk = self._ready.get()
            if chunk is None or isinstance(chunk, BaseException):
                self._over = True
                if chunk is not None:
                    raise chunk
                return None
            self._room.release()
            self._chunk.extend(chunk)
        return self._maker.make(self._plan, self._chunk.popleft())

    def _start(self) -> None:
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._chunks, self._ready, self._room, self._stop),
            name="midepoch-read",
            daemon=True,
        )
        # Also at exit: a daemon thread in C++ code would abort the process then (SIGABRT).
        self._end = weakref.finalize(self, end_thread, thread, self._stop, self._room, os.getpid())
        thread.start()  # a machine may have no room for threads
        self._thread = thread

    def close(self) -> bool:
        """Stop. Return True if no thread is still reading: then the maker can be reused."""
        return self._thread is None or self._end() is not False


def end_thread(thread: threading.Thread, stop: threading.Event, room: threading.Semaphore, process: int) -> bool:
    """Stop a thread that waits for room. Return True if it has stopped."""
    if process != os.getpid():
        return True  # a fork: the thread does not exist here, and its locks may be held indefinitely
    stop.set()
    room.release()
    return join([thread])


def _read_ahead(
    chunks: Iterator[Any], ready: queue.SimpleQueue[Any], room: threading.Semaphore, stop: threading.Event
) -> None:
    """Run the reading thread. It refers only to its queue, so that it does not keep a dropped iterator alive."""
    try:
        while True:
            room.acquire()
            if stop.is_set():
                return
            chunk = next(chunks, None)
            ready.put(chunk)
            if chunk is None:
                return
    except BaseException as problem:
        ready.put(problem)
