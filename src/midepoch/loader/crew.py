"""Workers as the loader sees them, and the loader as a worker sees it: the same for processes and for threads."""

from __future__ import annotations

import traceback
from collections.abc import Hashable
from typing import Any, Protocol

from midepoch.errors import WorkerError
from midepoch.transforms.formats import Allocate

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


class Link(Protocol):
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


class Job(Protocol):
    """The work of a worker, once it is unpickled in its process."""

    def in_threads(self, drawing: tuple[Hashable, ...]) -> Job:
        """Return the job for threads. ``drawing``: functions that draw from torch's global generator."""

    def run(self, link: Link) -> None: ...


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
