"""Notes by which ranks tell each other where they are, that they have failed, and why."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from midepoch.checkpoint.directory import STALE, Board, Process
from midepoch.errors import CheckpointError
from midepoch.world import World

_FIRST_PAUSE = 0.001
_LONG = 15.0
_RECENT = 600.0
_started = time.time()


def _after_fork() -> None:
    global _started
    _started = time.time()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class RankError(CheckpointError):
    """A rank died, stayed away or failed."""


class Waiting:
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


def why_of(problem: BaseException) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def tell_absence(board: Board, group: str, world: World, problem: BaseException) -> None:
    """Say that this rank will not come to a meeting, and why; without a word if that cannot be written."""
    for make_room in (None, dismiss):
        with suppress(Exception):
            if make_room is not None:
                make_room(board, group)
            absent(board, group, world, problem)
            return


def dismiss(board: Board, group: str) -> None:
    """End the wait of all ranks without a word, which needs no space."""
    names = board.names(group)
    board.remove([name for name in names if parts_of(name)[0] in ("leader", "join", "here")])


def absent(board: Board, group: str, world: World, problem: BaseException) -> None:
    """Say that this rank will not come to a meeting."""
    board.put(f"{group}/absent-{world.rank}-{secrets.token_hex(8)}", note_of(error=why_of(problem)))


def raise_absence(board: Board, names: Iterable[str], begun: float) -> None:
    """Raise RankError if a rank has said that it will not come: in the last moments before this began, or since.

    Of a process that is dead by now, only what it said after this one was started: before, that was another run.
    """
    for name in names:
        what, rank, _ = parts_of(name)
        if what == "absent":
            note = read_note(board, name)
            earliest = max(begun - _RECENT, _started if is_dead(note) else 0.0)
            if isinstance(note.get("time"), float) and note["time"] > earliest:
                raise RankError(f"rank {rank}: {note.get('error')}")


def parts_of(name: str) -> tuple[str, int, str]:
    what, _, rest = name.rsplit("/", 1)[-1].partition("-")
    rank, _, number = rest.partition("-")
    return what, int(rank) if rank.isdigit() else -1, number


def read_note(board: Board, name: str) -> dict[str, Any]:
    try:
        found = json.loads(board.get(name) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def note_of(**content: Any) -> bytes:
    return json.dumps({"process": Process.here().note(), "time": time.time(), **content}).encode()


def is_left(note: dict[str, Any]) -> bool:
    """Whether a note is one of the dead, or so old that it must be."""
    written = note.get("time")
    return is_dead(note) or (isinstance(written, float) and written < time.time() - STALE)


def is_dead(note: dict[str, Any]) -> bool:
    process = Process.of(note.get("process"))
    return process is not None and process.is_dead()
