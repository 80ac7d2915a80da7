"""Workers that are threads of this process: for functions that release the interpreter lock, and Pythons without one.

They run the same jobs as worker processes, with queues instead of pipes, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from midepoch._internal.threads import PREFIX, join
from midepoch.errors import MidepochError, WorkerError
from midepoch.loader.crew import Job, MainIsGone, Message


class ThreadCrew:
    """Worker threads. A busy one stops after the batch that it is making."""

    def __init__(self, job: Job, count: int) -> None:
        self._owner = os.getpid()
        self._links = [_QueueLink(number) for number in range(count)]
        self._unread: list[list[Message | None]] = [[] for _ in range(count)]
        threads: list[threading.Thread] = []
        # Also at exit: a daemon thread in C++ code would abort the process then (SIGABRT).
        self._end = weakref.finalize(self, _end, threads, self._links, self._owner)
        for link in self._links:
            thread = threading.Thread(target=_work, args=(job, link), name=f"{PREFIX}worker-{link.number}", daemon=True)
            thread.start()
            threads.append(thread)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def is_here(self) -> bool:
        """True if the threads run in this process, not in one from which it was forked."""
        return self._owner == os.getpid()

    def grant(self, number: int) -> int:  # noqa: ARG002
        """Return a slot: all messages may be sent, since nothing is copied."""
        return 0

    def tell(self, number: int, message: Any) -> None:
        """Send a message to a worker."""
        self._check()
        self._links[number].inbox.put(message)

    def receive(self, number: int) -> Message:
        """Return the next message of a worker."""
        self._check()
        unread = self._unread[number]
        message = unread.pop() if unread else self._links[number].outbox.get()
        if message is None:
            raise WorkerError("the workers were stopped by close() in another thread while a batch was requested.")
        return message

    def is_ready(self, number: int, seconds: float) -> bool:
        """Return True if a message of a worker can be received, or its error raised, within a time."""
        if not self._unread[number] and self.is_here:
            with contextlib.suppress(queue.Empty):
                self._unread[number].append(self._links[number].outbox.get(timeout=seconds))
        return bool(self._unread[number]) or not self.is_here

    def fail(self, number: int, problem: tuple[Exception, str]) -> None:
        """Raise the error of a worker."""
        error, _ = problem
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"in worker {number}, a thread")
        raise error

    def _check(self) -> None:
        if not self.is_here:
            raise MidepochError(
                "these workers belong to the process from which this one was forked. Create a separate loader here."
            )

    def close(self) -> None:
        """Stop the threads, after the batches that they are making."""
        self._end()


class _QueueLink:
    """A worker's end of its two queues."""

    is_process = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.closed = threading.Event()

    def hear(self) -> Any:
        """Return the next message of the main thread. Raise MainIsGone after ``close``."""
        message = self.inbox.get()
        if self.closed.is_set():
            raise MainIsGone
        return message

    def is_waiting(self) -> bool:
        """Return True if there is a message."""
        return not self.inbox.empty()

    def accept(self, granted: int) -> int:
        """Return the slot of a grant."""
        return granted

    def send(self, message: Message, slot: int | None) -> None:  # noqa: ARG002
        """Send a message."""
        self.outbox.put(message)

    def allocator(self, slot: int) -> None:
        """Return None: nothing is copied."""


def _work(job: Job, link: _QueueLink) -> None:
    try:
        job.run(link)
    except MainIsGone:
        pass
    finally:
        link.outbox.put(None)


def _end(threads: Sequence[threading.Thread], links: Sequence[_QueueLink], process: int) -> bool:
    if process != os.getpid():
        return True  # a fork: the threads do not exist here, and their locks may be held indefinitely
    for link in links:
        link.closed.set()
        link.inbox.put(None)
        link.outbox.put(None)
    return join(threads)
