"""Rendezvous of the ranks of a run, through notes on a board: the checkpoint folder, which every rank sees.

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
from typing import Any

from midepoch._internal.values import reason
from midepoch.checkpoint.store import STALE, Board, Process
from midepoch.distributed.runs import run_identity
from midepoch.distributed.world import World
from midepoch.errors import CheckpointError

_log = logging.getLogger("midepoch")
_FIRST_PAUSE = 0.001
_LONG = 15.0
"""Seconds after which a wait is logged."""
_RECENT = 600.0
"""Seconds before the start of a rendezvous in which an absence counts."""
_process_started = time.time()


def _after_fork() -> None:
    global _process_started
    _process_started = time.time()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class RankError(CheckpointError):
    """A rank died, did not arrive or failed."""


class Members:
    """Processes of the ranks, as far as they are known: if one on this machine dies before it arrives, that is noticed.

    A rank is known from its last rendezvous. Until its first one, a note on the board names its process.
    """

    def __init__(self, board: Board, world: World) -> None:
        self._board, self._processes, self._note = board, dict[int, Process](), ""
        if world.size > 1:
            self._group = f"present{run_identity(world)}"
            self._note = f"{self._group}/present-{world.rank}-{secrets.token_hex(8)}"
            with suppress(Exception):  # a rank that only reads may have no access
                board.put(self._note, encode_note())

    def add(self, rank: int, note: dict[str, Any]) -> None:
        """Remember the process that wrote a note."""
        if process := Process.parse(note.get("process")):
            self._processes[rank] = process

    def forget(self) -> None:
        """Forget the processes of earlier rendezvous: ranks may have been replaced."""
        self._processes.clear()

    def has_died(self, rank: int) -> bool:
        if rank not in self._processes and self._note:
            names = [name for name in self._board.names(self._group) if parse_name(name)[1] == rank]
            notes = [read_note(self._board, name) for name in names]
            # An earlier note belongs to another run. Of several, that of a live process counts.
            recent = [note for note in notes if isinstance(note.get("time"), float) and note["time"] > _process_started]
            for note in sorted(recent, key=is_dead, reverse=True):
                self.add(rank, note)
        return rank in self._processes and self._processes[rank].is_dead()

    def arrived(self) -> None:
        """Remove the note: this rank has been to a rendezvous."""
        note, self._note = self._note, ""
        if note:
            with suppress(Exception):
                self._board.remove([note])


@dataclass
class _Member:
    board: Board
    group: str
    world: World
    timeout: float
    members: Members = field(kw_only=True)
    _started: float = field(default_factory=time.time, init=False)

    def _error_without_note(self) -> RankError:
        return RankError(f"another rank failed and could not write why ({self.group}): see its own error.")


@dataclass
class Leader(_Member):
    """Rank 0 of a rendezvous."""

    token: str
    _answered: set[str] = field(default_factory=set, init=False)
    _was_listed: bool = field(default=False, init=False)
    _present: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict, init=False)  # by rank: number, note

    def admit(self) -> dict[int, Any]:
        """Wait for all ranks; return the payload of each. Raises RankError."""
        self.board.put(f"{self.group}/leader-{self.token}", encode_note())  # fails early where nothing can be written
        backoff = Backoff(self.timeout, self.board.poll_interval)
        while len(self._present) < self.world.size - 1:
            names = self.board.names(self.group)
            for name in names:
                self._receive(name)
            raise_absence(self.board, names, self._started)
            self._check_listed(names)
            missing = sorted(set(range(1, self.world.size)) - set(self._present))
            for rank in missing:
                if self.members.has_died(rank):
                    raise_absence(self.board, self.board.names(self.group), self._started)  # written before it exited
                    raise RankError(f"rank {rank} of {self.world.size} has died before it came to {self.group}.")
            waiting = (
                f"{self.group}: waiting for rank {_first(missing)} of {self.world.size}. Every rank has to call save "
                "and restore_latest. A process that calls them alone creates its PipelineCheckpoint with rank=0, "
                "world_size=1."
            )
            if missing and not backoff.pause(waiting):
                raise RankError(
                    f"rank {_first(missing)} of {self.world.size} did not come to {self.group} within "
                    f"{self.timeout:g} s: it has died, is at another step, or does not see {self.board.name}."
                )
        self.members.arrived()
        return {rank: note.get("payload") for rank, (_, note) in self._present.items()}

    def _receive(self, name: str) -> None:
        topic, rank, number = parse_name(name)
        if not 0 < rank < self.world.size:
            return
        if topic == "join" and number not in self._answered:
            self._answered.add(number)
            self.board.put(f"{self.group}/answer-{rank}-{number}", encode_note(token=self.token))
        elif topic == "here" and (note := read_note(self.board, name)).get("token") == self.token:
            self._present[rank] = (number, note)
            self.members.add(rank, note)

    def gather(self) -> dict[int, Any]:
        """Wait until all ranks have finished; return the payload of each. Raises RankError."""
        backoff = Backoff(self.timeout, self.board.poll_interval)
        done: dict[int, Any] = {}
        while True:
            # Checked first: a rank that is dead now has written its notes before.
            dead = [rank for rank, (_, note) in self._present.items() if rank not in done and is_dead(note)]
            for rank, (number, _) in self._present.items():
                if rank not in done and (note := read_note(self.board, f"{self.group}/done-{rank}-{number}")):
                    done[rank] = note
            for rank, note in done.items():
                if "error" in note:
                    raise RankError(f"rank {rank}: {note['error']}")
            if len(done) == len(self._present):
                return {rank: note.get("payload") for rank, note in done.items()}
            for rank in dead:
                if rank not in done:
                    raise RankError(f"rank {rank} of {self.world.size} has died.")
            self._check_listed(self.board.names(self.group))
            if not backoff.pause():
                late = sorted(set(self._present) - set(done))
                raise RankError(f"rank {_first(late)} was not done within {self.timeout:g} s.")

    def go(self) -> None:
        """Let the other ranks begin to write."""
        self.board.put(f"{self.group}/go-{self.token}", encode_note())

    def close(self, outcome: dict[str, Any]) -> None:
        """Publish the outcome, and remove the notes of dead processes."""
        self.board.remove([f"{self.group}/{topic}-{self.token}" for topic in ("leader", "go")])
        self.board.put(f"{self.group}/outcome-{self.token}", encode_note(**outcome))
        self.board.remove([name for name in self.board.names() if _is_stale(read_note(self.board, name))])

    def fail(self, problem: BaseException, free: Callable[[], None]) -> None:
        """Publish an error: if it cannot be written, after ``free`` has made space, or else by removing notes."""

        def publish() -> None:
            _post_absence(self.board, self.group, self.world, problem)  # for ranks that have no answer yet
            self.close({"error": _error_text(problem)})

        _publish(publish, free, self.dismiss)

    def dismiss(self) -> None:
        _dismiss(self.board, self.group)

    def _check_listed(self, names: list[str]) -> None:
        is_listed = f"{self.group}/leader-{self.token}" in names
        if self._was_listed and not is_listed:
            raise self._error_without_note()
        self._was_listed = is_listed


@dataclass
class Follower(_Member):
    """Any other rank of a rendezvous."""

    token: str = field(default="", init=False)
    _number: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _is_present: bool = field(default=False, init=False)

    def join(self, payload: Any) -> str:
        """Arrive with a payload; return the token of the attempt. Raises RankError."""
        self.board.put(self._name("join"), encode_note())
        answer = self._wait_for(self._name("answer"), "answer", "join")
        self.token = str(answer["token"])
        self.members.add(0, answer)
        self.board.put(self._name("here"), encode_note(token=self.token, payload=payload))
        self._is_present = True
        self.members.arrived()
        return self.token

    def done(self, payload: Any = None) -> None:
        self.board.put(self._name("done"), encode_note(payload=payload))

    def fail(self, problem: BaseException) -> None:
        """Publish an error of this rank."""
        if self._is_present:
            with suppress(Exception):
                self.board.put(self._name("done"), encode_note(error=_error_text(problem)))
                return
        report_absence(self.board, self.group, self.world, problem)

    def wait_for_go(self) -> None:
        """Wait until rank 0 lets all ranks write; raises RankError if it failed, died or stays silent."""
        self._wait_for(f"{self.group}/go-{self.token}", "begin", "here")

    def outcome(self) -> dict[str, Any]:
        """Return the outcome; raises RankError if rank 0 failed, died or stays silent."""
        outcome = self._wait_for(self._outcome, "finish", "here")
        self._leave()
        return outcome

    def _leave(self) -> None:
        with suppress(Exception):  # only cleanup
            self.board.remove([self._name(topic) for topic in ("join", "answer", "here", "done")])
            if self.board.names(self.group) == [self._outcome]:  # the last rank to leave
                self.board.remove([self._outcome])

    def _wait_for(self, name: str, action: str, own: str) -> dict[str, Any]:
        """Wait for a note of rank 0. ``own``: the note of this rank that shows that it waits."""
        backoff = Backoff(self.timeout, self.board.poll_interval)
        was_listed = False
        while not (note := self._read(name)):
            dead = self.members.has_died(0)
            is_listed = self.board.get(self._name(own)) is not None
            dismissed, was_listed = was_listed and not is_listed, is_listed
            if (dead or dismissed) and (note := self._read(name)):
                break
            if not self.token:
                absences = [other for other in self.board.names(self.group) if "/absent-0-" in other]
                raise_absence(self.board, absences, self._started)
            if dead:
                self._leave()
                raise RankError(f"rank 0 has died before it could {action} ({self.group}).")
            if dismissed:
                self._leave()
                raise self._error_without_note()
            if not backoff.pause(f"{self.group}: rank {self.world.rank} waits for rank 0 to {action}"):
                self._leave()
                raise RankError(
                    f"rank 0 did not {action} within {self.timeout:g} s ({self.group}): it has died, is at another "
                    f"step, or does not see {self.board.name}."
                )
        return note

    def _read(self, name: str) -> dict[str, Any]:
        """Return a note of rank 0, or an empty dict. Raises RankError if rank 0 has failed."""
        if self.token and name != self._outcome:
            self.raise_failure()
        return self._checked(read_note(self.board, name))

    def raise_failure(self) -> None:
        """Raise RankError if rank 0 has published that it failed."""
        self._checked(read_note(self.board, self._outcome))

    def _checked(self, note: dict[str, Any]) -> dict[str, Any]:
        if "error" in note:
            self._leave()
            raise RankError(str(note["error"]))
        return note

    @property
    def _outcome(self) -> str:
        return f"{self.group}/outcome-{self.token}"

    def _name(self, topic: str) -> str:
        return f"{self.group}/{topic}-{self.world.rank}-{self._number}"


def lead(
    leader: Leader | None, action: Callable[[], dict[str, Any]], free: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run the action of rank 0 and publish its outcome, also if it fails.

    ``free`` releases the space that a failed action has used.
    """
    try:
        outcome = action()
    except BaseException as problem:
        try:
            if leader is not None:
                leader.fail(problem, free)
        finally:
            free()
        raise
    if leader is not None:
        try:
            leader.close(outcome)
        except Exception as problem:  # the action itself has succeeded
            _log.warning("the other ranks could not be notified that %s is done: %s", leader.group, reason(problem))
            with suppress(Exception):
                leader.dismiss()
    return outcome


class Backoff:
    """Pauses that get longer, up to a timeout."""

    def __init__(self, timeout: float, longest: float) -> None:
        self._end, self._longest, self._next = time.monotonic() + timeout, longest, _FIRST_PAUSE
        self._long = time.monotonic() + _LONG

    def pause(self, message: str = "") -> bool:
        """Sleep; False after the timeout. Logs the message once, when the wait has become long."""
        if message and time.monotonic() > self._long:
            self._long = float("inf")
            _log.warning("%s", message)
        if time.monotonic() > self._end:
            return False
        time.sleep(self._next)
        self._next = min(self._longest, self._next * 1.5)
        return True


def report_absence(board: Board, group: str, world: World, problem: BaseException) -> None:
    """Publish that this rank will not come, and why; if that cannot be written, by removing notes."""
    _publish(lambda: _post_absence(board, group, world, problem), lambda: _dismiss(board, group))


def _publish(publish: Callable[[], None], *make_space: Callable[[], None]) -> None:
    """Write notes, after making space in one way after the other if that fails; without an error in any case."""
    for prepare in (lambda: None, *make_space):
        with suppress(Exception):
            prepare()
            publish()
            return


def _post_absence(board: Board, group: str, world: World, problem: BaseException) -> None:
    board.put(f"{group}/absent-{world.rank}-{secrets.token_hex(8)}", encode_note(error=_error_text(problem)))


def raise_absence(board: Board, names: Iterable[str], started: float) -> None:
    """Raise RankError if a rank has published its absence, shortly before this rendezvous started or since.

    Of a process that is dead by now, only an absence since this process was started counts: an earlier one belongs to
    another run.
    """
    for name in names:
        topic, rank, _ = parse_name(name)
        if topic == "absent":
            note = read_note(board, name)
            earliest = max(started - _RECENT, _process_started if is_dead(note) else 0.0)
            if isinstance(note.get("time"), float) and note["time"] > earliest:
                raise RankError(f"rank {rank}: {note.get('error')}")


def _dismiss(board: Board, group: str) -> None:
    """Stop the wait of all ranks without a message, which needs no space."""
    board.remove([name for name in board.names(group) if parse_name(name)[0] in ("leader", "join", "here")])


def parse_name(name: str) -> tuple[str, int, str]:
    """Return the topic, the rank (-1 if none) and the number in the name of a note."""
    topic, _, rest = name.rsplit("/", 1)[-1].partition("-")
    rank, _, number = rest.partition("-")
    return topic, int(rank) if rank.isdigit() else -1, number


def read_note(board: Board, name: str) -> dict[str, Any]:
    try:
        note = json.loads(board.get(name) or b"{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def encode_note(**content: Any) -> bytes:
    return json.dumps({"process": Process.current().to_dict(), "time": time.time(), **content}).encode()


def is_dead(note: dict[str, Any]) -> bool:
    process = Process.parse(note.get("process"))
    return process is not None and process.is_dead()


def _is_stale(note: dict[str, Any]) -> bool:
    """Return True for a note of a dead process, or one too old to be of a live one."""
    written = note.get("time")
    return is_dead(note) or (isinstance(written, float) and written < time.time() - STALE)


def _error_text(problem: BaseException) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def _first(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8]))
