"""Batches on their way to a device or into page-locked memory: the next ones are sent before they are asked for."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

from midepoch._internal.threads import PREFIX
from midepoch.loader.plans import BatchSource, Made
from midepoch.loader.threads import end_thread
from midepoch.transforms import finish

_CHECK = 0.1
"""Seconds after which a thread that waits for a worker looks whether it has to stop."""


class Mover:
    """Moves batches, in order. ``depth``: batches that are under way beside the one that is delivered."""

    depth = 2

    def send(self, value: Any) -> Any:
        """Begin to move a batch, and return a ticket for it."""
        raise NotImplementedError

    def receive(self, ticket: Any) -> Any:
        """Return the batch of a ticket, ready for use in the caller's stream. By default, the ticket is the batch."""
        return ticket

    def close(self) -> None:
        """Wait for what is under way, and drop it. By default, nothing has to be waited for."""


class _Sent(NamedTuple):
    made: Made
    ticket: Any


class MovedBatches:
    """The batches of a source, moved ahead of delivery. The cursor of each stays with it.

    The source is asked in the caller's thread, where functions of the user may run: for one batch more than is
    delivered. Which it is does not depend on the time, since ranks may wait for each other in the source.
    """

    def __init__(self, source: BatchSource, mover: Mover, kind: str) -> None:
        self.source, self._mover, self._kind = source, mover, kind
        self._under_way: deque[_Sent] = deque()
        self._failure: Exception | None = None
        self._over = self._begun = False

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""
        if not self._under_way:
            self._look_ahead()
        taken = self._under_way.popleft() if self._under_way else None
        if taken is not None and self._begun and not self._under_way:
            self._look_ahead()
        self._begun = True
        if taken is None:
            if self._failure is not None:
                raise self._failure
            return None
        return _delivered(taken, self._mover)

    def _look_ahead(self) -> None:
        """Ask for the next batch, and send it. An error is raised in its turn, after the batches before it."""
        if self._over:
            return
        try:
            sent = _send(self.source, self._mover, self._kind)
            self._over = sent is None
            self._under_way.extend([] if sent is None else [sent])
        except Exception as problem:
            self._over, self._failure = True, problem

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        self._under_way.clear()
        self._mover.close()
        return self.source.close()


class FedBatches:
    """The batches of a source that runs no function of the user in this process, made and moved by a thread.

    The first batch comes in the caller's thread: a look at it costs neither a thread nor the memory of those ahead.
    """

    def __init__(self, source: BatchSource, mover: Mover, kind: str) -> None:
        self.source, self._mover, self._kind = source, mover, kind
        self._ready: queue.SimpleQueue[_Sent | BaseException | None] = queue.SimpleQueue()
        self._room, self._stop = threading.Semaphore(mover.depth + 1), threading.Event()
        self._end: weakref.finalize[Any, Any] | None = None
        self._begun = self._over = False

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""
        if self._over:
            return None
        if not self._begun:
            self._begun = True
            sent: Any = _send(self.source, self._mover, self._kind)
        else:
            if self._end is None:
                self._start()
            sent = self._ready.get()
        if sent is None or isinstance(sent, BaseException):
            self._over = True
            if sent is not None:
                raise sent
            return None
        made = _delivered(sent, self._mover)
        if self._end is not None:
            self._room.release()  # at the end: the thread must not compete for the interpreter lock before
        return made

    def _start(self) -> None:
        thread = threading.Thread(
            target=_feed,
            args=(self.source, self._mover, self._kind, self._ready, self._room, self._stop),
            name=f"{PREFIX}feed",
            daemon=True,
        )
        # Also at exit: a daemon thread in C++ code would abort the process then (SIGABRT).
        self._end = weakref.finalize(self, end_thread, thread, self._stop, self._room, os.getpid())
        thread.start()

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        stopped = self._end is None or self._end() is not False
        if stopped:
            self._ready = queue.SimpleQueue()
            self._mover.close()
        return stopped and self.source.close()


def _delivered(sent: _Sent, mover: Mover) -> Made:
    made, ticket = sent
    return made if made.empty else made._replace(value=mover.receive(ticket))


def _send(source: BatchSource, mover: Mover, kind: str) -> _Sent | None:
    made = source.next()
    if made is None:
        return None
    return _Sent(made._replace(value=None), None if made.empty else mover.send(finish(made.value, kind)))


def _feed(
    source: BatchSource,
    mover: Mover,
    kind: str,
    ready: queue.SimpleQueue[Any],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    """Run the thread. It does not refer to the batches object, so that it does not keep a dropped iterator alive."""
    is_ready = getattr(source, "is_ready", None)
    try:
        while True:
            room.acquire()
            while is_ready is not None and not stop.is_set() and not is_ready(_CHECK):
                pass
            if stop.is_set():
                return
            sent = _send(source, mover, kind)
            ready.put(sent)
            if sent is None:
                return
            del sent
    except BaseException as problem:
        ready.put(problem)
