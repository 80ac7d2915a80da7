"""Batches that are only copied from mapped files: made in the caller's thread, whatever ``num_workers`` is.

Workers would only add a second copy: the main process would spend as much time on receiving a batch as on gathering it.
Only pages that are not in memory yet take long. Threads therefore touch the pages ahead, from the first page that had
to be waited for until all touched pages are found in memory.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
import weakref
from collections import deque

from midepoch._internal.threads import join
from midepoch.loader.batches import BatchMaker, Read
from midepoch.loader.plans import Made
from midepoch.pipeline.plans import StepPlan

_TOUCHED = 256
"""Number of batches whose pages are touched ahead after a page had to be read from disk."""
_THREADS = 4


class DirectBatches:
    """The batches of a plan, in order."""

    def __init__(self, maker: BatchMaker, plan: StepPlan, prefetch: int, workers: int) -> None:
        self._maker, self._plan, self._prefetch = maker, plan, max(1, prefetch)
        self._chunks = maker.read(plan, 0, 1, delivered=True)
        self._located: deque[Read] = deque(next(self._chunks, ()))
        self._toucher = _Toucher(maker, max(_THREADS, workers))
        self._faults = _faults()
        self._keep = 0  # minimum of reads to locate before the next one is made

    def next(self) -> Made | None:
        """Return the next batch, or None at the end."""
        if len(self._located) <= self._keep:
            self._look_ahead()
        if not self._located:
            return None
        return self._maker.make(self._plan, self._located.popleft())

    def _look_ahead(self) -> None:
        """Locate ``prefetch`` chunks ahead while pages have to be touched, else only the next one."""
        if (faults := _faults()) != self._faults:
            self._faults = faults
            self._toucher.wake()
        for _ in range(self._prefetch if self._toucher.needed else 1):
            chunk = next(self._chunks, ())
            if self._toucher.needed:
                self._keep = len(chunk)
                for read in chunk:
                    self._toucher.touch(read)
            else:
                self._keep = 0
            self._located.extend(chunk)

    def close(self) -> bool:
        self._toucher.close()
        return True


class _Toucher:
    """Threads that touch pages so that they are read from disk. They are started when they are needed."""

    def __init__(self, maker: BatchMaker, threads: int) -> None:
        self._maker = maker  # keeps the files mapped as long as a thread may read them
        self._count = threads
        self._todo: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._left = 0
        self._closed = threading.Event()

    @property
    def needed(self) -> bool:
        return self._left > 0

    def wake(self) -> None:
        """Touch the next batches, because a page had to be waited for."""
        self._left = _TOUCHED

    def touch(self, read: Read) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"midepoch-read-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
            # They must not run when the process exits: see ThreadedBatches.
            weakref.finalize(self, _end, self._threads, self._todo, self._closed, os.getpid())
        self._left -= 1
        self._todo.put(read)

    def _run(self) -> None:
        before = _faults()
        while (read := self._todo.get()) is not None:
            if self._closed.is_set():
                continue
            read.touch()
            if (faults := _faults()) != before:
                before = faults
                self.wake()

    def close(self) -> None:
        threads, self._threads = self._threads, []
        _end(threads, self._todo, self._closed, os.getpid())


def _end(
    threads: list[threading.Thread], todo: queue.SimpleQueue[Read | None], closed: threading.Event, process: int
) -> None:
    if process != os.getpid() or not threads:
        return
    closed.set()
    for _ in threads:
        todo.put(None)
    join(threads)


def _faults() -> int:
    """Return the number of pages that this thread has had to wait for. (Times would mislead on a busy machine.)"""
    return resource.getrusage(_WHOSE).ru_majflt


_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts only for the process
