"""Batches that are made in this process: copied from mapped files, read ahead by a thread, or made of groups."""

from __future__ import annotations

import os
import queue
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from midepoch._internal.processes import PREFIX, join
from midepoch.loader.batches import BatchMaker, Read
from midepoch.loader.plans import MadeBatch
from midepoch.order import Shard
from midepoch.pipeline.plans import StepPlan
from midepoch.pipeline.rows import Bundles, GroupedRows


class MadeAhead:
    """Values of a function, which a thread calls up to ``most`` times ahead. None is the end.

    The first value is made in the caller's thread: a look at it costs neither a thread nor the memory of those ahead.
    ``is_ready``: called until it returns True before each value, so that the thread can be stopped while it waits.
    """

    def __init__(self, make: Callable[[], Any], most: int, is_ready: Callable[[], bool] | None = None) -> None:
        self._make, self._is_ready = make, is_ready
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room, self._stop = threading.Semaphore(most), threading.Event()
        self._end: weakref.finalize[Any, Any] | None = None
        self._begun = self._over = False

    def next(self) -> Any:
        """Return the next value. Raises the errors of making it. There is room for another one after ``taken``."""
        if self._over:
            return None
        if not self._begun:
            self._begun, value = True, self._make()
        else:
            if self._end is None:
                self._start()
            value = self._ready.get()
        if value is None or isinstance(value, BaseException):
            self._over = True
            if value is not None:
                raise value
        return value

    def taken(self) -> None:
        """Make room for another value."""
        if self._end is not None:
            self._room.release()

    def _start(self) -> None:
        thread = threading.Thread(
            target=_make_ahead,
            args=(self._make, self._is_ready, self._ready, self._room, self._stop),
            name=f"{PREFIX}ahead",
            daemon=True,
        )
        # Also at exit: a daemon thread in C++ code would abort the process then (SIGABRT).
        self._end = weakref.finalize(self, _end_thread, thread, self._stop, self._room, os.getpid())
        thread.start()  # a machine may have no room for threads

    def close(self) -> bool:
        """Stop, and drop what was made. Return True if the thread does not run any more."""
        self._over = True
        stopped = self._end is None or self._end() is not False
        self._ready.put(None)  # another thread may wait for a value
        self._ready = queue.SimpleQueue() if stopped else self._ready
        return stopped


def _end_thread(thread: threading.Thread, stop: threading.Event, room: threading.Semaphore, process: int) -> bool:
    """Stop a thread that waits for room. Return True if it has stopped."""
    if process != os.getpid():
        return True  # a fork: the thread does not exist here, and its locks may be held indefinitely
    stop.set()
    room.release()
    return join([thread])


def _make_ahead(
    make: Callable[[], Any],
    is_ready: Callable[[], bool] | None,
    ready: queue.SimpleQueue[Any],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    """Run the thread. It refers only to its queue, so that it does not keep a dropped iterator alive."""
    try:
        while True:
            room.acquire()
            while is_ready is not None and not stop.is_set() and not is_ready():
                pass
            if stop.is_set():
                return
            value = make()
            ready.put(value)
            if value is None:
                return
            del value
    except BaseException as problem:
        ready.put(problem)


class ThreadedBatches:
    """The batches of a plan, in order. One thread reads up to ``prefetch`` chunks ahead."""

    def __init__(self, maker: BatchMaker, plan: StepPlan, prefetch: int) -> None:
        self._maker, self._plan = maker, plan
        self._chunks = MadeAhead(partial(next, maker.read(plan, 0, 1), None), prefetch)
        self._chunk: deque[Read] = deque()

    def next(self) -> MadeBatch | None:
        """Return the next batch, or None at the end. Raises the errors of reading."""
        while not self._chunk:
            if (chunk := self._chunks.next()) is None:
                return None
            self._chunks.taken()
            self._chunk.extend(chunk)
        return self._maker.make(self._plan, self._chunk.popleft())

    def close(self) -> bool:
        """Stop. Return True if no thread is still reading: then the maker can be reused."""
        return self._chunks.close()


class GroupedBatches:
    """The batches of a plan, in order. Workers make bundles ahead, and the main process assembles batches."""

    def __init__(self, maker: BatchMaker, bundles: Bundles, plan: StepPlan, shard: Shard, groups: int) -> None:
        self._maker, self._plan, self._shard, self._step = maker, plan, shard, 0
        self._rows = GroupedRows(bundles, plan.epoch, groups)

    def next(self) -> MadeBatch | None:
        """Return the next batch and the cursor after it, or None at the end."""
        plan, step = self._plan, self._step
        if not plan.has(step):
            return None
        wanted, _, genuine, _ = plan.ask([step], self._shard)
        if not len(wanted):
            made = MadeBatch(None, step, empty=True)
        else:
            read = Read(step, len(wanted), genuine=genuine)
            made = self._maker.present(plan, read, self._rows.read(wanted))
        self._step += 1
        return made

    def close(self) -> bool:
        """Leave the workers to their pool."""
        return True


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

    def next(self) -> MadeBatch | None:
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
