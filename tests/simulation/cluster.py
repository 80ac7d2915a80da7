"""The scheduler: ranks and their threads as greenlets, a clock, and a launcher that kills what is left of a start.

Every operation of the simulated disk and store passes ``Cluster.operation``. There a rank may be switched, killed,
interrupted, or given an error. A rank that is dead has no effect on anything: its cleanup runs, and changes nothing.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import greenlet

MOST_TURNS = 100_000
"""Turns of the scheduler in one start. Clean ones take up to about 3,000, and four ranks that save after every step to a
disk that always fails up to about 45,000.
"""
MOST_OPERATIONS = 100_000
EPOCH_SECONDS = 1_700_000_000.0


class Killed(BaseException):
    """A rank is killed: raised in it so that its stack unwinds, without effect."""


class HangError(AssertionError):
    """A start needs more turns than any that is well."""


@dataclass(frozen=True)
class Fault:
    """Event at the n-th operation of a rank in a place.

    ``kind``: "kill" of the rank, "power" loss of the machine, "interrupt" (KeyboardInterrupt), "error" with a number,
    "jump" of the clock; in the store also "throttle", "lost answer", "twice" and "slow"; "worker" that dies at the n-th
    message of the workers of a rank, or is late by a number of seconds. ``count``: how many operations have it.
    """

    kind: str
    rank: int
    at: int
    where: str = ""
    """"checkpoint", "ledger", "store", or any place."""
    number: int = 0
    count: int = 1
    reads: bool = False
    """An error also of reads."""
    verb: str = ""
    """Only operations of this name count, such as "rename"."""


@dataclass(eq=False)
class Task:
    """A thread of a process. The first one is that of its program."""

    body: greenlet.greenlet
    rank: Rank
    wake: float = 0.0


@dataclass(eq=False)
class Rank:
    """A process of a start."""

    pid: int
    number: int
    tasks: list[Task] = field(default_factory=list)
    alive: bool = True
    left: bool = False
    """True if its program has come to its end. Threads that are left over end with it."""
    faults: dict[tuple[str, str], list[Fault]] = field(default_factory=dict)
    """By the place and the verb of the operations that they strike."""
    operations: dict[tuple[str, str], int] = field(default_factory=dict)
    """Those that it has done, in the same way. Without faults they are not told apart."""
    done: int = 0
    """All of its operations."""
    passes: int = 0
    made: dict[str, int] = field(default_factory=dict)
    problem: BaseException | None = None


class Cluster:
    """One history: its clock, its processes and its faults."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.monotonic, self.offset = 1000.0, EPOCH_SECONDS
        self.ranks: list[Rank] = []
        self.faults: list[Fault] = []
        self.happened: list[str] = []
        """Faults that took place, in order."""
        self.pids = 1000
        self.power_lost = False
        self.on_power_loss: Callable[[], None] = lambda: None
        self.on_death: Callable[[Rank], None] = lambda _: None
        self.current: Rank | None = None
        """The rank that runs, or None outside of a start."""
        self.task: Task
        """The thread that runs."""
        self._hub: greenlet.greenlet | None = None
        self._arrived: dict[int, Any] = {}
        self._result: dict[int, Any] = {}
        self._generation = self.turns = 0

    # Processes

    def run(self, mains: list[Callable[[], None]], faults: list[Fault]) -> list[Rank]:
        """Run a start to its end. Its ranks are dead afterwards."""
        self.faults, self.power_lost, self.turns, self._struck = list(faults), False, 0, list[Fault]()
        self._hub, self._arrived, self._result = greenlet.getcurrent(), {}, {}
        self.ranks = [self._spawn(number, main) for number, main in enumerate(mains)]
        mercy: int | None = None  # turns that are left to the others after a death
        while living := [rank for rank in self.ranks if rank.alive]:
            if len(living) < len(self.ranks) and any(rank.problem is not None for rank in self.ranks):
                mercy = self.random.choice((0, 3, 40, 400)) if mercy is None else mercy - 1
            tasks = [task for rank in living for task in rank.tasks]
            ready = [task for task in tasks if task.wake <= self.monotonic]
            if not ready:
                soonest = min(task.wake for task in tasks)
                if soonest == float("inf") and mercy is None:
                    raise HangError("all ranks wait for each other")
                mercy = 0 if soonest == float("inf") else mercy
                self.monotonic = max(self.monotonic, soonest) if mercy != 0 else self.monotonic
            if self.power_lost or (mercy is not None and mercy <= 0):
                for rank in living:
                    self._kill(rank)
                break
            self.turns += 1
            if self.turns > MOST_TURNS:
                raise HangError(f"{MOST_TURNS} turns of the scheduler")
            if ready:
                self.monotonic += 0.0005
                self._resume(self.random.choice(ready))
                for rank in living:
                    if not rank.alive and rank.tasks:  # a thread has died, or is left over
                        self._kill(rank)
        if self.power_lost:
            self.on_power_loss()
        return self.ranks

    def _spawn(self, number: int, main: Callable[[], None]) -> Rank:
        self.pids += 1

        def body() -> None:
            try:
                main()
            except Killed as problem:
                rank.problem = problem
            except BaseException as problem:  # its process exits
                rank.problem = problem
            if rank.alive:
                rank.alive, rank.left = False, True
                self.on_death(rank)

        rank = Rank(self.pids, number)
        for fault in self.faults:
            if fault.rank == number and fault.kind != "worker":
                rank.faults.setdefault((fault.where, fault.verb), []).append(fault)
        self.begin(rank, body)
        return rank

    def begin(self, rank: Rank, action: Callable[[], None]) -> None:
        """Begin a thread of a process."""

        def body() -> None:
            with suppress(Killed):  # its process ends
                action()
            rank.tasks.remove(task)

        task = Task(greenlet.greenlet(body, self._hub), rank)
        rank.tasks.append(task)

    def _resume(self, task: Task, *problem: BaseException) -> None:
        """Let a thread run until it waits, or raise an error in it."""
        self.task, self.current = task, task.rank
        try:
            task.body.throw(*problem) if problem else task.body.switch()
        finally:
            self.current = None

    def _kill(self, rank: Rank) -> None:
        if rank.alive:
            rank.alive = False
            self.on_death(rank)
        if not rank.left:
            rank.problem = rank.problem or Killed()
        for task in [*rank.tasks]:
            if task.body:  # begun, and not over
                self._resume(task, Killed())
        rank.tasks.clear()

    # What a rank calls

    def operation(self, where: str, name: str, *, reads: bool = False) -> Fault | None:
        """Count an operation of the running rank. Raises its fault; returns one that the store has to act out."""
        rank = self.current
        if rank is None:
            return None
        if not rank.alive:
            raise Killed
        found, counts = None, rank.operations
        rank.done += 1
        if rank.done > MOST_OPERATIONS:
            raise HangError(f"{MOST_OPERATIONS} operations of a rank, the last is {name}")
        for place in ((where, ""), ("", ""), (where, name.partition(" ")[0])) if rank.faults else ():
            count = counts[place] = counts.get(place, 0) + 1
            for fault in rank.faults.get(place, ()):
                if fault.at <= count < fault.at + fault.count:
                    found = self._strike(fault, rank, name, reads) or found
        if self.random.random() < 0.15:
            self.switch()
        return found

    def of_worker(self, rank: Rank) -> float:
        """Count a message of a worker. Returns the seconds by which it is late; infinity if it dies instead."""
        if not rank.alive:
            raise Killed
        count = rank.operations["worker", ""] = rank.operations.get(("worker", ""), 0) + 1
        for fault in self.faults:
            if fault.kind == "worker" and fault.rank == rank.number and fault.at == count:
                self.happened.append(f"a worker of rank {rank.number} {'is late' if fault.number else 'dies'}")
                return fault.number or float("inf")
        return 0.0

    def _strike(self, fault: Fault, rank: Rank, name: str, reads: bool) -> Fault | None:
        full = fault.number == errno.ENOSPC and name.split()[0] not in ("create", "mkdir", "write", "allocate")
        if fault.kind == "error" and ((reads and not fault.reads) or full or name == "receive"):
            return None
        if fault.kind == "interrupt" and self.task is not rank.tasks[0]:  # signals are for the main thread
            return None
        if fault not in self._struck:
            self._struck.append(fault)
            text = f"{fault.kind} {errno.errorcode.get(abs(fault.number), '')}".strip()
            self.happened.append(f"{text} at {name} of rank {rank.number}")
        if fault.kind == "kill":
            self.die()
        if fault.kind == "power":
            self.power_lost = True
            rank.alive = False
            raise Killed
        if fault.kind == "interrupt":
            raise KeyboardInterrupt
        if fault.kind == "error":
            raise OSError(fault.number, errno.errorcode[fault.number])
        if fault.kind == "jump":
            self.offset += fault.number
            return None
        return fault

    def die(self, cause: str = "") -> NoReturn:
        """Kill the running rank."""
        rank = self.current
        assert rank is not None
        self.happened += [cause] if cause else []
        rank.alive = False
        self.on_death(rank)
        raise Killed

    def switch(self) -> None:
        """Let another rank run."""
        rank = self.current
        if rank is not None and rank.alive and self._hub is not None:
            self._hub.switch()

    def sleep(self, seconds: float) -> None:
        rank = self.current
        if rank is None:
            self.monotonic += seconds
            return
        if not rank.alive:
            raise Killed
        self.task.wake = self.monotonic + seconds
        self.switch()

    def agree(self, value: Any) -> list[Any]:
        """Wait for all ranks of the start, as in a training step, and return their values."""
        rank, generation = self.current, self._generation
        assert rank is not None
        self._arrived[rank.number] = value
        if len(self._arrived) == len(self.ranks):
            self._result, self._arrived = self._arrived, {}
            self._generation += 1
            for other in self.ranks:
                if other.tasks:
                    other.tasks[0].wake = self.monotonic
        while generation == self._generation:
            self.task.wake = float("inf")
            self.switch()
            if not rank.alive:
                raise Killed
        return [self._result[number] for number in range(len(self.ranks))]

    # The clock, of the interface of the module time

    def time(self) -> float:
        return self.offset + self.monotonic

    def now(self) -> float:
        self.monotonic += 0.0001
        return self.monotonic

    def token(self, size: int) -> str:
        return self.random.randbytes(size).hex()
