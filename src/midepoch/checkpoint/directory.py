"""What a folder of checkpoints can do, on a disk (``local.py``) or in an object store (``remote.py``).

A step is saved in an attempt, which has a token of its own. ``commit`` makes it a step at once and for good, or not
at all: before it, nobody sees the attempt; after it, the step is whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from midepoch.checkpoint.files import Sink, Source
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointNotFoundError
from midepoch.processes import machine, started


class VanishedError(CheckpointNotFoundError):
    """A step that is not there, or not any more."""


STEP = re.compile(r"step_(0|[1-9][0-9]{0,18})\Z")
STALE = 24 * 3600.0
"""Seconds after which an attempt of a process that cannot be asked counts as dead."""


class Board(Protocol):
    """Small notes by which ranks find each other: written whole, seen by all after a moment."""

    name: str
    patience: float  # seconds between two looks, at most

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def names(self, group: str) -> list[str]: ...

    def groups(self) -> list[str]: ...

    def remove(self, names: Sequence[str]) -> None: ...


class Directory(Protocol):
    """A folder of checkpoints. Problems with the folder itself are raised as OSError or FetchError."""

    name: str
    board: Board
    scratch_is_own: bool  # whether each rank has a scratch folder of its own

    def steps(self) -> list[int]:
        """The steps that are there, by number."""

    def manifest(self, step: int) -> Manifest:
        """Raises CheckpointNotFoundError, CheckpointDamagedError, or CheckpointError if it is of a newer version."""

    def source(self, manifest: Manifest, name: str) -> AbstractContextManager[Source]:
        """A file of a step; CheckpointDamagedError if it is not there or no plain file."""

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        """How large the files of a step are, without reading them; those that are there."""

    def fetched(self, manifest: Manifest) -> AbstractContextManager[Path]:
        """All files of a step in a folder of this machine."""

    def begin(self, step: int, token: str) -> None:
        """Make room for an attempt, after sweeping away what dead processes have left."""

    def sink(self, step: int, token: str, name: str) -> AbstractContextManager[Sink]:
        """A new file of an attempt: durable when the context is left."""

    def scratch(self, step: int, token: str, part: str) -> AbstractContextManager[Path]:
        """A folder for other libraries to make and fill: what is in it when the context is left is durable then."""

    def folder_of(self, token: str) -> str:
        """Where the files of an attempt will lie below their step; empty if in it."""

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        """Make the attempt the step of that number, in place of one that may be there."""

    def abandon(self, step: int, token: str) -> None:
        """Remove an attempt."""

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        """Remove a step, for all readers in the same instant; True if it was there.

        ``only``: not if another process has committed the number again, or is about to. The number is then left alone.
        """


@dataclass(frozen=True)
class Process:
    """A process of a machine, told from one that got the same number later."""

    machine: str
    pid: int
    started: str

    @staticmethod
    def here() -> Process:
        return Process(machine(), os.getpid(), started(os.getpid()))

    @staticmethod
    def of(note: Any) -> Process | None:
        try:
            return Process(str(note["machine"]), int(note["pid"]), str(note["started"]))
        except (KeyError, TypeError, ValueError):
            return None

    def note(self) -> dict[str, Any]:
        return asdict(self)

    def is_dead(self) -> bool:
        """Whether it is known not to live any more: of another machine's processes nothing is known."""
        return self.machine == machine() and started(self.pid) != self.started
