"""Rendezvous of the ranks of a run, through notes in the checkpoint folder, which every rank sees.

It uses no collectives: it works in a thread, under any launcher, and no rank waits indefinitely for one that has died.

    leader-TOKEN              rank 0 has arrived
    absent-RANK-NUMBER        this rank will not come, and why
    join-RANK-NUMBER          this rank has arrived
    answer-RANK-NUMBER        from rank 0: the token of the attempt
    here-RANK-NUMBER          this rank has read the answer; its payload
    done-RANK-NUMBER          payload of a rank that has finished, or its error
    go-TOKEN                  from rank 0: all have arrived and agree (only where they write together)
    outcome-TOKEN             from rank 0: the result
    present-RANK-NUMBER       this rank has been started, and has not been to a rendezvous yet

A note of an earlier run cannot be mistaken for one of this run: a joining rank draws a number of its own and continues
only when rank 0 has answered to that number.

A rank that fails writes its error. If that is impossible, as on a full disk, it removes the notes of all ranks that
wait, which needs no space: a rank whose own note has vanished stops waiting.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from midepoch._internal.values import reason
from midepoch.checkpoint.store import STALE, CheckpointStore, Process
from midepoch.distributed.keyvalue import Backoff, run_identity
from midepoch.distributed.world import World
from midepoch.errors import CheckpointError

_log = logging.getLogger("midepoch")
T = TypeVar("T")
_FOLDER = ".ranks"
_RECENT = 600.0
"""Seconds before the start of a rendezvous in which an absence counts."""
_process_started = time.time()


def _after_fork() -> None:
    global _process_started
    _process_started = time.time()


os.register_at_fork(after_in_child=_after_fork)


class RankError(CheckpointError):
    """A rank died, did not arrive or failed."""


_ALL_RANKS = (
    "Every rank has to call save and restore_latest. A process that calls them alone creates its PipelineCheckpoint "
    "with rank=0, world_size=1."
)


@dataclass(frozen=True)
class Notes:
    """Notes of the ranks that meet under one name."""

    store: CheckpointStore
    group: str

    def put(self, name: str, **content: Any) -> None:
        note = {"process": Process.current(), "time": time.time(), **content}
        self.store.put(f"{_FOLDER}/{self.group}/{name}", json.dumps(note).encode())

    def get(self, name: str) -> dict[str, Any]:
        """Return a note; an empty dict if it does not exist."""
        return _read(self.store, f"{_FOLDER}/{self.group}/{name}")

    def names(self) -> list[str]:
        names = (path.rsplit("/", 1)[1] for path in self.store.list(f"{_FOLDER}/{self.group}"))
        return sorted(name for name in names if not name.startswith("."))  # without files that are being written

    def remove(self, names: Iterable[str]) -> None:
        self.store.delete([f"{_FOLDER}/{self.group}/{name}" for name in names])

    def dismiss(self) -> None:
        """Stop the wait of all ranks without a message, which needs no space."""
        self.remove(name for name in self.names() if parse_name(name)[0] in ("leader", "join", "here"))

    def report_absence(self, world: World, problem: BaseException) -> None:
        """Publish that this rank will not come, and why; if that cannot be written, by removing notes."""
        _publish(lambda: self.post_absence(world, problem), self.dismiss)

    def post_absence(self, world: World, problem: BaseException) -> None:
        self.put(f"absent-{world.rank}-{secrets.token_hex(8)}", error=_error_text(problem))

    def raise_absence(self, names: Iterable[str], started: float) -> None:
        """Raise RankError if a rank has published its absence, shortly before this rendezvous started or since.

        Of a process that is dead by now, only an absence since this process was started counts: an earlier one belongs
        to another run.
        """
        for name in names:
            topic, rank, _ = parse_name(name)
            if topic != "absent" or not (note := self.get(name)):
                continue
            if note["time"] > max(started - _RECENT, _process_started if is_dead(note) else 0.0):
                raise RankError(f"rank {rank}: {note['error']}")


class Members:
    """Processes of the ranks, as far as they are known: if one on this machine dies before it arrives, that is noticed.

    A rank is known from its last rendezvous. Until its first one, a note names its process.
    """

    def __init__(self, store: CheckpointStore, world: World) -> None:
        self._processes: dict[int, Process] = {}
        self._notes, self._own = Notes(store, ""), ""
        if world.size > 1:
            self._notes = Notes(store, f"present{run_identity(world)}")
            self._own = f"present-{world.rank}-{secrets.token_hex(8)}"
            with suppress(Exception):  # a rank that only reads may have no access
                self._notes.put(self._own)

    def add(self, rank: int, note: dict[str, Any]) -> None:
        """Remember the process that wrote a note."""
        self._processes[rank] = Process(*note["process"])

    def forget(self) -> None:
        """Forget the processes of earlier rendezvous: ranks may have been replaced."""
        self._processes.clear()

    def has_died(self, rank: int) -> bool:
        if rank not in self._processes and self._own:
            notes = [self._notes.get(name) for name in self._notes.names() if parse_name(name)[1] == rank]
            # An earlier note belongs to another run. Of several, that of a live process counts.
            recent = [note for note in notes if note and note["time"] > _process_started]
            for note in sorted(recent, key=is_dead, reverse=True):
                self.add(rank, note)
        return rank in self._processes and self._processes[rank].is_dead()

    def arrived(self) -> None:
        """Remove the note: this rank has been to a rendezvous."""
        own, self._own = self._own, ""
        if own:
            with suppress(Exception):
                self._notes.remove([own])


@dataclass
class _Member:
    notes: Notes
    world: World
    timeout: float
    members: Members
    _started: float = field(default_factory=lambda: time.time(), init=False)
    _listed: set[str] = field(default_factory=set, init=False)

    def _wait(
        self,
        own: str,
        action: str,
        awaited: Callable[[], Iterable[int]],
        look: Callable[[], T | None],
        *,
        arrive: bool = False,
    ) -> T:
        """Look until there is a result. RankError if a rank that is awaited for an action has died or stays silent.

        ``own``: the note of this rank that shows that it waits. If it has vanished since an earlier look: RankError.
        ``arrive``: the others may not have come at all.
        """
        hint = f" {_ALL_RANKS}" if arrive else ""
        backoff = Backoff(self.timeout, self.notes.store.poll_interval)
        of_all = "" if self.world.rank else f" of {self.world.size}"

        def late() -> str:
            return f"rank {', '.join(map(str, sorted(awaited())[:8]))}{of_all}"

        while True:
            # Checked first: what a rank has written before it died or removed notes can be read now.
            dead = [rank for rank in awaited() if self.members.has_died(rank)]
            is_listed = bool(self.notes.get(own))
            if (result := look()) is not None:
                return result
            for rank in set(dead) & set(awaited()):
                raise RankError(f"rank {rank}{of_all} has died before it could {action}.")
            if own in self._listed and not is_listed:
                raise RankError(f"another rank failed and could not write why ({self.notes.group}): see its own error.")
            if is_listed:
                self._listed.add(own)
            if not backoff.pause(lambda: f"rank {self.world.rank} waits for {late()} to {action}.{hint}"):
                raise RankError(
                    f"{late()} did not {action} within {self.timeout:g} s: it has died, is at another step, or does "
                    f"not see {self.notes.store.name}.{hint}"
                )


@dataclass
class Leader(_Member):
    """Rank 0 of a rendezvous."""

    token: str
    _answered: set[str] = field(default_factory=set, init=False)
    _present: dict[int, tuple[str, Any]] = field(default_factory=dict, init=False)  # by rank: number, payload

    def admit(self) -> dict[int, Any]:
        """Wait for all ranks; return the payload of each. Raises RankError."""

        def missing() -> set[int]:
            return set(range(1, self.world.size)) - set(self._present)

        def look() -> bool | None:
            names = self.notes.names()
            for name in names:
                self._receive(name)
            self.notes.raise_absence(names, self._started)
            return None if missing() else True

        self.notes.put(f"leader-{self.token}")  # fails early where nothing can be written
        self._wait(f"leader-{self.token}", f"come to {self.notes.group}", missing, look, arrive=True)
        self.members.arrived()
        return {rank: payload for rank, (_, payload) in self._present.items()}

    def _receive(self, name: str) -> None:
        topic, rank, number = parse_name(name)
        if not 0 < rank < self.world.size:
            return
        if topic == "join" and number not in self._answered:
            self._answered.add(number)
            self.notes.put(f"answer-{rank}-{number}", token=self.token)
        elif topic == "here" and (note := self.notes.get(name)).get("token") == self.token:
            self._present[rank] = number, note["payload"]
            self.members.add(rank, note)

    def gather(self) -> dict[int, Any]:
        """Wait until all ranks have finished; return the payload of each. Raises RankError."""
        done: dict[int, Any] = {}

        def look() -> bool | None:
            for rank in self._present.keys() - done:
                if note := self.notes.get(f"done-{rank}-{self._present[rank][0]}"):
                    _raise_error(note, f"rank {rank}: ")
                    done[rank] = note["payload"]
            return True if done.keys() == self._present.keys() else None

        self._wait(f"leader-{self.token}", f"finish {self.notes.group}", lambda: self._present.keys() - done, look)
        return done

    def go(self) -> None:
        """Let the other ranks begin to write."""
        self.notes.put(f"go-{self.token}")

    def close(self, **outcome: Any) -> None:
        """Publish the outcome, and remove the notes of dead processes, and those too old to be of a live one."""
        self.notes.remove(f"{topic}-{self.token}" for topic in ("leader", "go"))
        self.notes.put(f"outcome-{self.token}", **outcome)
        store = self.notes.store
        others = {path: note for path in store.list(_FOLDER) if (note := _read(store, path))}
        oldest = time.time() - STALE
        store.delete([path for path, note in others.items() if is_dead(note) or note["time"] < oldest])

    def fail(self, problem: BaseException, free: Callable[[], None]) -> None:
        """Publish an error: if it cannot be written, after ``free`` has made space, or else by removing notes."""

        def publish() -> None:
            self.notes.post_absence(self.world, problem)  # for ranks that have no answer yet
            self.close(error=_error_text(problem))

        _publish(publish, free, self.notes.dismiss)


@dataclass
class Follower(_Member):
    """Any other rank of a rendezvous."""

    token: str = field(default="", init=False)
    _number: str = field(default_factory=lambda: secrets.token_hex(8), init=False)

    def join(self, payload: Any) -> str:
        """Arrive with a payload; return the token of the attempt. Raises RankError."""
        self.notes.put(self._name("join"))
        answer = self._wait_for(self._name("answer"), "answer in", "join")
        self.members.add(0, answer)
        self.notes.put(self._name("here"), token=answer["token"], payload=payload)
        self.token = str(answer["token"])
        self.members.arrived()
        return self.token

    def done(self, payload: Any = None) -> None:
        self.notes.put(self._name("done"), payload=payload)

    def fail(self, problem: BaseException) -> None:
        """Publish an error of this rank."""
        if self.token:
            with suppress(Exception):
                self.notes.put(self._name("done"), error=_error_text(problem))
                return
        self.notes.report_absence(self.world, problem)

    def wait_for_go(self) -> None:
        """Wait until rank 0 lets all ranks write; raises RankError if it failed, died or stays silent."""
        self._wait_for(f"go-{self.token}", "begin", "here")

    def outcome(self) -> dict[str, Any]:
        """Return the outcome; raises RankError if rank 0 failed, died or stays silent."""
        outcome = self._wait_for(f"outcome-{self.token}", "finish", "here")
        self._leave()
        return outcome

    def raise_failure(self) -> None:
        """Raise RankError if rank 0 has published that it failed."""
        _raise_error(self.notes.get(f"outcome-{self.token}"))

    def _leave(self) -> None:
        with suppress(Exception):  # only cleanup
            self.notes.remove(self._name(topic) for topic in ("join", "answer", "here", "done"))
            if self.notes.names() == [f"outcome-{self.token}"]:  # the last rank to leave
                self.notes.remove([f"outcome-{self.token}"])

    def _wait_for(self, name: str, action: str, own: str) -> dict[str, Any]:
        """Wait for a note of rank 0. ``own``: the note of this rank that shows that it waits."""

        def look() -> dict[str, Any] | None:
            if note := self.notes.get(name):
                _raise_error(note)
                return note
            if self.token:
                self.raise_failure()
            else:
                absences = [other for other in self.notes.names() if other.startswith("absent-0-")]
                self.notes.raise_absence(absences, self._started)
            return None

        try:
            what = f"{action} {self.notes.group}"
            return self._wait(self._name(own), what, lambda: (0,), look, arrive=not self.token)
        except RankError:
            self._leave()
            raise

    def _name(self, topic: str) -> str:
        return f"{topic}-{self.world.rank}-{self._number}"


def lead(
    leader: Leader | None, action: Callable[[], tuple[int | None, T]], free: Callable[[], None] = lambda: None
) -> T:
    """Run the action of rank 0, publish the step that it returns, or its error, and return its result.

    ``free`` releases the space that a failed action has used.
    """
    try:
        step, result = action()
    except BaseException as problem:
        try:
            if leader is not None:
                leader.fail(problem, free)
        finally:
            free()
        raise
    if leader is not None:
        try:
            leader.close(step=step)
        except Exception as problem:  # the action itself has succeeded
            group = leader.notes.group
            _log.warning("the other ranks could not be notified that %s is done: %s", group, reason(problem))
            with suppress(Exception):
                leader.notes.dismiss()
    return result


def _publish(publish: Callable[[], None], *make_space: Callable[[], None]) -> None:
    """Write notes, after making space in one way after the other if that fails; without an error in any case."""
    for prepare in (lambda: None, *make_space):
        with suppress(Exception):
            prepare()
            publish()
            return


def parse_name(name: str) -> tuple[str, int, str]:
    """Return the topic, the rank (-1 if none) and the number in the name of a note."""
    topic, _, rest = name.partition("-")
    rank, _, number = rest.partition("-")
    return topic, int(rank) if rank.isdigit() else -1, number


def _read(store: CheckpointStore, path: str) -> dict[str, Any]:
    data = store.get(path)
    try:
        note: dict[str, Any] = json.loads(data) if data else {}
    except ValueError:  # after a power loss
        return {}
    return note


def _raise_error(note: dict[str, Any], rank: str = "") -> None:
    if "error" in note:
        raise RankError(f"{rank}{note['error']}")


def is_dead(note: dict[str, Any]) -> bool:
    return Process(*note["process"]).is_dead()


def _error_text(problem: BaseException) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
