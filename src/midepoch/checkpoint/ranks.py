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
    go-TOKEN                  rank 0: all are here and agree (only where they write together)
    outcome-TOKEN             rank 0: how it ended

Who fails says why. If that cannot be written, as on a full disk, who fails removes the notes of all that wait, which
needs no space: a rank whose own note is gone has nothing more to wait for.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from midepoch.checkpoint.directory import Board, Process
from midepoch.checkpoint.notes import (
    RankError,
    Waiting,
    absent,
    dismiss,
    is_dead,
    is_left,
    note_of,
    parts_of,
    raise_absence,
    read_note,
    tell_absence,
    why_of,
)
from midepoch.reasons import reason
from midepoch.world import World

_log = logging.getLogger("midepoch")


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
    _was_listed: bool = False
    _here: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # by rank: number, note

    def admit(self) -> dict[int, Any]:
        """Wait for all ranks; what each had to say. Raises RankError."""
        self.board.put(f"{self.group}/leader-{self.token}", note_of())  # fails at once where nothing can be written
        waiting = Waiting(self.timeout, self.board.patience)
        while len(self._here) < self.world.size - 1:
            names = self.board.names(self.group)
            for name in names:
                self._look_at(name)
            raise_absence(self.board, names, self._begun)
            self._check_own(names)
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
        what, rank, number = parts_of(name)
        if not 0 < rank < self.world.size:
            return
        if what == "join" and number not in self._answered:
            self._answered.add(number)
            self.board.put(f"{self.group}/answer-{rank}-{number}", note_of(token=self.token))
        elif what == "here" and (note := read_note(self.board, name)).get("token") == self.token:
            self._here[rank] = (number, note)
            if process := Process.of(note.get("process")):
                self.members[rank] = process

    def gather(self) -> dict[int, Any]:
        """Wait until all ranks are done; what each has to say. Raises RankError."""
        waiting = Waiting(self.timeout, self.board.patience)
        done: dict[int, Any] = {}
        while True:
            # Looked at first: who is dead now has said before whatever it had to say.
            dead = [rank for rank, (_, note) in self._here.items() if rank not in done and is_dead(note)]
            for rank, (number, _) in self._here.items():
                if rank not in done and (note := read_note(self.board, f"{self.group}/done-{rank}-{number}")):
                    done[rank] = note
            for rank, note in done.items():
                if "error" in note:
                    raise RankError(f"rank {rank}: {note['error']}")
            if len(done) == len(self._here):
                return {rank: note.get("says") for rank, note in done.items()}
            for rank in dead:
                if rank not in done:
                    raise RankError(f"rank {rank} of {self.world.size} has died.")
            self._check_own(self.board.names(self.group))
            if not waiting.pause():
                late = sorted(set(self._here) - set(done))
                raise RankError(f"rank {', '.join(map(str, late[:8]))} was not done within {self.timeout:g} s.")

    def go(self) -> None:
        """Let the others begin to write."""
        self.board.put(f"{self.group}/go-{self.token}", note_of())

    def close(self, outcome: dict[str, Any]) -> None:
        """Tell all how it ended."""
        self.board.remove([f"{self.group}/{what}-{self.token}" for what in ("leader", "go")])
        self.board.put(f"{self.group}/outcome-{self.token}", note_of(**outcome))
        for group in self.board.groups():
            left = [name for name in self.board.names(group) if is_left(read_note(self.board, name))]
            self.board.remove(left)

    def fail(self, problem: BaseException, free: Callable[[], None]) -> None:
        """Tell all that it failed: if that cannot be written, after ``free`` has made room, or else without a word."""
        for make_room in (None, free, self.dismiss):
            with suppress(Exception):
                if make_room is not None:
                    make_room()
                absent(self.board, self.group, self.world, problem)  # for those that were not let in yet
                self.close({"error": why_of(problem)})
                return

    def dismiss(self) -> None:
        dismiss(self.board, self.group)

    def _check_own(self, names: list[str]) -> None:
        is_listed = f"{self.group}/leader-{self.token}" in names
        if self._was_listed and not is_listed:
            raise RankError(f"another rank failed and could not write why ({self.group}): see its own error.")
        self._was_listed = is_listed


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
    _is_here: bool = False
    token: str = ""

    def join(self, says: Any) -> str:
        """Say that this rank is here; the token of the attempt. Raises RankError."""
        self.board.put(self._name("join"), note_of())
        answer = self._wait_for(self._name("answer"), "answer", "join")
        self.token = str(answer["token"])
        if process := Process.of(answer.get("process")):
            self.members[0] = process
        self.board.put(self._name("here"), note_of(token=self.token, says=says))
        self._is_here = True
        return self.token

    def done(self, says: Any = None) -> None:
        self.board.put(self._name("done"), note_of(says=says))

    def fail(self, problem: BaseException) -> None:
        """Tell rank 0 that this rank failed."""
        if self._is_here:
            with suppress(Exception):
                self.board.put(self._name("done"), note_of(error=why_of(problem)))
                return
        tell_absence(self.board, self.group, self.world, problem)

    def allowed(self) -> None:
        """Wait until rank 0 lets all write; raises RankError if it failed, has died or says nothing."""
        self._wait_for(f"{self.group}/go-{self.token}", "begin", "here")

    def outcome(self) -> dict[str, Any]:
        """How it ended; raises RankError if rank 0 failed, has died or says nothing."""
        found = self._wait_for(self._outcome, "finish", "here")
        self._leave()
        return found

    def _leave(self) -> None:
        with suppress(Exception):  # it is only tidying
            self.board.remove([self._name(what) for what in ("join", "answer", "here", "done")])
            if self.board.names(self.group) == [self._outcome]:  # the last to leave
                self.board.remove([self._outcome])

    def _wait_for(self, name: str, what: str, own: str) -> dict[str, Any]:
        """A note of rank 0. ``own``: this rank's note that says that it waits."""
        waiting = Waiting(self.timeout, self.board.patience)
        was_there = False
        while not (found := self._heard(name)):
            dead = 0 in self.members and self.members[0].is_dead()
            is_there = self.board.get(self._name(own)) is not None
            gone, was_there = was_there and not is_there, is_there
            if (dead or gone) and (found := self._heard(name)):
                break
            if dead:
                self._leave()
                raise RankError(f"rank 0 has died before it could {what} ({self.group}).")
            if gone:
                self._leave()
                raise RankError(f"another rank failed and could not write why ({self.group}): see its own error.")
            if not self.token:
                raise_absence(self.board, [n for n in self.board.names(self.group) if "/absent-0-" in n], self._begun)
            if waiting.is_long():
                _log.warning("%s: rank %d waits for rank 0 to %s", self.group, self.world.rank, what)
            if not waiting.pause():
                self._leave()
                raise RankError(
                    f"rank 0 did not {what} within {self.timeout:g} s ({self.group}): it has died, stands at another "
                    f"step, or does not see {self.board.name}."
                )
        return found

    def _heard(self, name: str) -> dict[str, Any]:
        """A note of rank 0, or nothing. Raises RankError if rank 0 has told that it failed."""
        if self.token and name != self._outcome:
            self.raise_failure()
        note = read_note(self.board, name)
        self._raise(note)
        return note

    def raise_failure(self) -> None:
        """Raise RankError if rank 0 has told that it failed."""
        self._raise(read_note(self.board, self._outcome))

    def _raise(self, note: dict[str, Any]) -> None:
        if "error" in note:
            self._leave()
            raise RankError(str(note["error"]))

    @property
    def _outcome(self) -> str:
        return f"{self.group}/outcome-{self.token}"

    def _name(self, what: str) -> str:
        return f"{self.group}/{what}-{self.world.rank}-{self._number}"


def nothing() -> None:
    """Free no space: there is none that was taken."""


def lead(
    meeting: Leader | None, action: Callable[[], dict[str, Any]], free: Callable[[], None] = nothing
) -> dict[str, Any]:
    """Do what rank 0 has to do, and tell the others how it ended, also if it failed.

    ``free`` gives back the space that a failed action has taken.
    """
    try:
        outcome = action()
    except BaseException as problem:
        try:
            if meeting is not None:
                meeting.fail(problem, free)
        finally:
            free()
        raise
    if meeting is not None:
        try:
            meeting.close(outcome)
        except Exception as problem:  # what was done is done
            _log.warning("the other ranks could not be told that %s is done: %s", meeting.group, reason(problem))
            with suppress(Exception):
                meeting.dismiss()
    return outcome
