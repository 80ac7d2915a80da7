"""How the ranks of a run meet, through notes in the checkpoint folder: no collective, so that it works in a thread,
under any launcher, and so that nobody waits for ever for a rank that has died.

A note of an earlier run cannot be mistaken for one of this: who joins draws a number of their own, and goes on only
when rank 0 has answered to that number.

    leader-TOKEN              rank 0 is here
    absent-RANK-NUMBER        I will not come, and why
    join-RANK-NUMBER          I am here
    answer-RANK-NUMBER        rank 0: this is the attempt
    here-RANK-NUMBER          I have seen that, and have this to say
    done-RANK-NUMBER          what I have written, or why I could not
    outcome-TOKEN             rank 0: how it ended
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from midepoch.checkpoint.directory import STALE, Board, Process
from midepoch.errors import CheckpointError
from midepoch.world import World

_FIRST_PAUSE = 0.001
_LONG = 15.0
_RECENT = 600.0
_log = logging.getLogger("midepoch")


class RankError(CheckpointError):
    """A rank died, stayed away or failed."""


@dataclass
class Leader:
    """Rank 0 of a meeting."""

    board: Board
    group: str
    world: World
    timeout: float
    token: str
    members: dict[int, Process] = field(default_factory=dict)
    """Who was at the meetings before: of those that live on this machine it is seen if they die on the way here."""
    _begun: float = field(default_factory=time.time)
    _answered: set[str] = field(default_factory=set)
    _here: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # by rank: number, note

    def admit(self) -> dict[int, Any]:
        """Wait for all ranks; what each had to say. Raises RankError."""
        self.board.put(f"{self.group}/leader-{self.token}", _note())  # fails at once where nothing can be written
        waiting = _Waiting(self.timeout, self.board.patience)
        while len(self._here) < self.world.size - 1:
            names = self.board.names(self.group)
            for name in names:
                self._look_at(name)
            _raise_absence(self.board, names, self._begun)
            missing = sorted(set(range(1, self.world.size)) - set(self._here))
            for rank in missing:
                if rank in self.members and self.members[rank].is_dead():
                    raise RankError(f"rank {rank} of {self.world.size} has died before it came to {self.group}.")
            if missing and waiting.is_long():
                _log.warning(
                    "%s: waiting for rank %s of %d. Every rank has to call save and restore_latest; a process that "
                    "does so alone makes its PipelineCheckpoint with rank=0, world_size=1.",
                    self.group,
                    ", ".join(map(str, missing[:8])),
                    self.world.size,
                )
            if missing and not waiting.pause():
                raise RankError(
                    f"rank {', '.join(map(str, missing[:8]))} of {self.world.size} did not come to {self.group} within "
                    f"{self.timeout:g} s: it has died, stands at another step, or does not see {self.board.name}."
                )
        return {rank: note.get("says") for rank, (_, note) in self._here.items()}

    def _look_at(self, name: str) -> None:
        what, rank, number = _parts(name)
        if not 0 < rank < self.world.size:
            return
        if what == "join" and number not in self._answered:
            self._answered.add(number)
            self.board.put(f"{self.group}/answer-{rank}-{number}", _note(token=self.token))
        elif what == "here" and (note := _read(self.board, name)).get("token") == self.token:
            self._here[rank] = (number, note)
            if process := Process.of(note.get("process")):
                self.members[rank] = process

    def gather(self) -> dict[int, Any]:
        """Wait until all ranks are done; what each has to say. Raises RankError."""
        waiting = _Waiting(self.timeout, self.board.patience)
        done: dict[int, Any] = {}
        while True:
            # Looked at first: who is dead now has said before whatever it had to say.
            dead = [rank for rank, (_, note) in self._here.items() if rank not in done and _is_dead(note)]
            for rank, (number, _) in self._here.items():
                if rank not in done and (note := _read(self.board, f"{self.group}/done-{rank}-{number}")):
                    done[rank] = note
            for rank, note in done.items():
                if "error" in note:
                    raise RankError(f"rank {rank}: {note['error']}")
            if len(done) == len(self._here):
                return {rank: note.get("says") for rank, note in done.items()}
            for rank in dead:
                if rank not in done:
                    raise RankError(f"rank {rank} of {self.world.size} has died.")
            if not waiting.pause():
                late = sorted(set(self._here) - set(done))
                raise RankError(f"rank {', '.join(map(str, late[:8]))} was not done within {self.timeout:g} s.")

    def close(self, outcome: dict[str, Any]) -> None:
        """Tell all how it ended."""
        self.board.remove([f"{self.group}/leader-{self.token}"])
        self.board.put(f"{self.group}/outcome-{self.token}", _note(**outcome))
        for group in self.board.groups():
            left = [name for name in self.board.names(group) if _is_left(_read(self.board, name))]
            self.board.remove(left)


@dataclass
class Follower:
    """Any other rank."""

    board: Board
    group: str
    world: World
    timeout: float
    members: dict[int, Process] = field(default_factory=dict)
    _number: str = field(default_factory=lambda: secrets.token_hex(8))
    _begun: float = field(default_factory=time.time)
    token: str = ""

    def join(self, says: Any) -> str:
        """Say that this rank is here; the token of the attempt. Raises RankError."""
        self.board.put(self._name("join"), _note())
        answer = self._wait_for(self._name("answer"), "answer")
        self.token = str(answer["token"])
        if process := Process.of(answer.get("process")):
            self.members[0] = process
        self.board.put(self._name("here"), _note(token=self.token, says=says))
        return self.token

    def done(self, says: Any = None, error: str | None = None) -> None:
        self.board.put(self._name("done"), _note(says=says) if error is None else _note(error=error))

    def outcome(self) -> dict[str, Any]:
        """How it ended; raises RankError if rank 0 failed, has died or says nothing."""
        found = self._wait_for(f"{self.group}/outcome-{self.token}", "finish")
        self._leave()
        if "error" in found:
            raise RankError(str(found["error"]))
        return found

    def _leave(self) -> None:
        with suppress(Exception):  # it is only tidying
            self.board.remove([self._name(what) for what in ("join", "answer", "here", "done")])
            outcome = f"{self.group}/outcome-{self.token}"
            if self.board.names(self.group) == [outcome]:  # the last to leave
                self.board.remove([outcome])

    def _wait_for(self, name: str, what: str) -> dict[str, Any]:
        waiting = _Waiting(self.timeout, self.board.patience)
        while not (found := _read(self.board, name)):
            dead = 0 in self.members and self.members[0].is_dead()
            if dead and not (found := _read(self.board, name)):
                self._leave()
                raise RankError(f"rank 0 has died before it could {what} ({self.group}).")
            if dead:
                break
            if not self.token:
                _raise_absence(self.board, [n for n in self.board.names(self.group) if "/absent-0-" in n], self._begun)
            if waiting.is_long():
                _log.warning("%s: rank %d waits for rank 0 to %s", self.group, self.world.rank, what)
            if not waiting.pause():
                self._leave()
                raise RankError(
                    f"rank 0 did not {what} within {self.timeout:g} s ({self.group}): it has died, stands at another "
                    f"step, or does not see {self.board.name}."
                )
        return found

    def _name(self, what: str) -> str:
        return f"{self.group}/{what}-{self.world.rank}-{self._number}"


class _Waiting:
    """Pauses that get longer, until the time is up."""

    def __init__(self, timeout: float, longest: float) -> None:
        self._end, self._longest, self._next = time.monotonic() + timeout, longest, _FIRST_PAUSE
        self._long = time.monotonic() + _LONG

    def is_long(self) -> bool:
        """True once, when it has become long."""
        if time.monotonic() < self._long:
            return False
        self._long = float("inf")
        return True

    def pause(self) -> bool:
        if time.monotonic() > self._end:
            return False
        time.sleep(self._next)
        self._next = min(self._longest, self._next * 1.5)
        return True


def lead(meeting: Leader | None, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do what rank 0 has to do, and tell the others how it ended, also if it failed."""
    try:
        outcome = action()
    except BaseException as problem:
        if meeting is not None:
            why = f"{type(problem).__name__}: {problem}"
            with suppress(Exception):
                absent(meeting.board, meeting.group, meeting.world, why)  # for those that were not let in yet
                meeting.close({"error": why})
        raise
    if meeting is not None:
        try:
            meeting.close(outcome)
        except Exception as problem:  # what was done is done
            _log.warning("the other ranks could not be told that %s is done: %s", meeting.group, problem)
    return outcome


def absent(board: Board, group: str, world: World, why: str) -> None:
    """Say that this rank will not come to a meeting."""
    board.put(f"{group}/absent-{world.rank}-{secrets.token_hex(8)}", _note(error=why))


def _raise_absence(board: Board, names: Iterable[str], begun: float) -> None:
    """Raise RankError if a rank has said that it will not come: in the last moments before this began, or since."""
    for name in names:
        what, rank, _ = _parts(name)
        if what == "absent":
            note = _read(board, name)
            if isinstance(note.get("time"), float) and note["time"] > begun - _RECENT and not _is_dead(note):
                raise RankError(f"rank {rank}: {note.get('error')}")


def _parts(name: str) -> tuple[str, int, str]:
    what, _, rest = name.rsplit("/", 1)[-1].partition("-")
    rank, _, number = rest.partition("-")
    return what, int(rank) if rank.isdigit() else -1, number


def _read(board: Board, name: str) -> dict[str, Any]:
    try:
        found = json.loads(board.get(name) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _note(**content: Any) -> bytes:
    return json.dumps({"process": Process.here().note(), "time": time.time(), **content}).encode()


def _is_left(note: dict[str, Any]) -> bool:
    """Whether a note is one of the dead, or so old that it must be."""
    written = note.get("time")
    return _is_dead(note) or (isinstance(written, float) and written < time.time() - STALE)


def _is_dead(note: dict[str, Any]) -> bool:
    process = Process.of(note.get("process"))
    return process is not None and process.is_dead()
