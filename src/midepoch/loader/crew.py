"""Workers as the loader sees them, and the loader as a worker sees it; and those that are threads."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from midepoch._internal.processes import PREFIX, join
from midepoch.errors import MidepochError, WorkerError
from midepoch.loader.options import Options
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms.formats import Allocate


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


Message = tuple[Any, Any, Any]
"""From a worker: what it belongs to, the result, and the error with its traceback."""

SHORT = b"+"
"""First byte of a message that is sent as it is. Pickles begin otherwise."""


class Crew(Protocol):
    """Workers, each with a queue of messages to and from it. They stop when this process exits."""

    @property
    def is_here(self) -> bool:
        """True if the workers belong to this process, not to one from which it was forked."""

    def __len__(self) -> int: ...

    def grant(self, number: int) -> int:
        """Return a slot in which a worker may send one more message."""

    def tell(self, number: int, message: Any) -> None:
        """Send a message to a worker: any object, or bytes that begin with ``SHORT``."""

    def receive(self, number: int) -> Message:
        """Return the next message of a worker. Raises WorkerError if it has exited."""

    def is_ready(self, number: int, seconds: float) -> bool:
        """Return True if a message of a worker can be received, or its error raised, within a time."""

    def fail(self, number: int, problem: tuple[Exception, str]) -> None:
        """Raise the error of a worker."""

    def close(self) -> None:
        """Stop the workers."""


class WorkerLink(Protocol):
    """A worker's end."""

    number: int
    is_process: bool

    def hear(self) -> Any:
        """Return the next message of the main process. Raise MainIsGone if it has exited."""

    def is_waiting(self) -> bool:
        """Return True if there is a message."""

    def accept(self, granted: int) -> int:
        """Return the slot of a grant."""

    def send(self, message: Message, slot: int | None) -> None:
        """Send a message in a slot that was granted, or a short one without."""

    def allocator(self, slot: int) -> Allocate | None:
        """Return a function that allocates parts of the next batch in its slot, or None if nothing is copied."""


class Worker(Protocol):
    """The work of a worker, in its process or thread."""

    def __init__(self, link: WorkerLink, job: Job) -> None: ...

    def live(self) -> None:
        """Work until the link raises MainIsGone."""


@dataclass(frozen=True)
class Job:
    """The work of a crew, as it is sent to its workers.

    ``options``: without a device, which only the main process uses. ``drawing``: in threads, the functions that draw
    from torch's generator.
    """

    worker: type[Worker]
    leaves: tuple[Leaf, ...]
    options: Options
    drawing: tuple[Hashable, ...] | None = None

    def run(self, link: WorkerLink) -> None:
        """Work until the main process has exited."""
        self.worker(link, self).live()


class MainIsGone(BaseException):
    """The main process has closed the queue. Not an Exception, so that it is not attributed to a map."""


def receive_within(crew: Crew, number: int, timeout: float) -> Message:
    """Return the next message of a worker. Raise WorkerError if none comes within a time; 0 is no limit."""
    if timeout and not crew.is_ready(number, timeout):
        raise WorkerError(
            f"worker {number} of {len(crew)} delivered nothing within timeout={timeout:g} seconds. A function may be "
            "blocked: `py-spy dump` shows where. The batches delivered so far are unaffected."
        )
    return crew.receive(number)


def report(problem: BaseException, number: int) -> tuple[Exception, str]:
    """Return the error of a worker with its traceback."""
    text = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    if not isinstance(problem, Exception):  # a sys.exit() in a map must not end the training as if it had succeeded
        problem = WorkerError(f"worker {number} was stopped by {type(problem).__name__}({problem})")
    return problem, text
