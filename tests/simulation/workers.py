"""Workers of a simulated rank, as threads of its process. Messages are copied, as those of processes."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from typing import Any

from midepoch.errors import WorkerError
from midepoch.loader.crew import Job, MainIsGone, Message
from simulation.cluster import Cluster, Killed, Rank, Task


class Mailbox:
    """Messages to one reader, who waits for them."""

    def __init__(self, cluster: Cluster, rank: Rank) -> None:
        self._cluster, self._rank = cluster, rank
        self._messages: deque[bytes] = deque()
        self._reader: Task | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Any) -> None:
        self._messages.append(pickle.dumps(message))
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.wake = self._cluster.monotonic

    def wait(self, seconds: float) -> bool:
        """Wait for a message, or the end of the writer."""
        until = self._cluster.monotonic + seconds
        while not self._messages and not self.closed and self._cluster.monotonic < until:
            self._reader = self._cluster.task
            self._reader.wake = until
            self._cluster.switch()
            self._reader = None
            if not self._rank.alive:
                raise Killed
        return bool(self._messages) or self.closed

    def get(self) -> Any:
        """Return the next message. Raises EOFError."""
        self.wait(float("inf"))
        if not self._messages:
            raise EOFError
        return pickle.loads(self._messages.popleft())


class Link:
    """The end of a worker. It may die, or be late, at any message."""

    is_process = True

    def __init__(self, cluster: Cluster, rank: Rank, number: int) -> None:
        self._cluster, self._rank, self.number = cluster, rank, number
        self.inbox, self.outbox = Mailbox(cluster, rank), Mailbox(cluster, rank)
        self.granted = 0

    def hear(self) -> Any:
        try:
            return self.inbox.get()
        except EOFError:
            raise MainIsGone from None

    def is_waiting(self) -> bool:
        return bool(len(self.inbox))

    def accept(self, granted: int) -> int:
        return granted

    def allocator(self, slot: int) -> None:
        """Nothing is made in shared memory."""

    def send(self, message: Message, slot: int | None) -> None:
        late = self._cluster.of_worker(self._rank)
        self.granted -= slot is not None
        assert self.granted >= 0, "a message without a slot"
        if late == float("inf"):
            self.outbox.close()
            raise MainIsGone
        self._cluster.sleep(late if late else self._cluster.random.choice((0.0, 0.0, 0.001, 0.01)))
        self.outbox.put(message)


class SimulatedCrew:
    """The workers of a loader."""

    is_here = True

    def __init__(self, cluster: Cluster, job: Job, count: int) -> None:
        self._cluster, rank = cluster, cluster.current
        assert rank is not None
        self._links = [Link(cluster, rank, number) for number in range(count)]
        for link in self._links:
            cluster.begin(rank, lambda link=link: self._work(job, link))  # type: ignore[misc]

    @staticmethod
    def _work(job: Job, link: Link) -> None:
        try:
            replace(job, drawing=()).run(link)
        except MainIsGone:
            link.outbox.close()

    def __len__(self) -> int:
        return len(self._links)

    def grant(self, number: int) -> int:
        self._links[number].granted += 1
        return 0

    def tell(self, number: int, message: Any) -> None:
        self._links[number].inbox.put(message)

    def receive(self, number: int) -> Message:
        self._cluster.operation("crew", "receive")
        try:
            message: Message = self._links[number].outbox.get()
        except EOFError:
            raise WorkerError(f"worker {number} has exited") from None
        return message

    def is_ready(self, number: int, seconds: float) -> bool:
        return self._links[number].outbox.wait(seconds)

    def fail(self, number: int, problem: tuple[Exception, str]) -> None:
        raise problem[0]

    def close(self) -> None:
        for link in self._links:
            link.inbox.close()
