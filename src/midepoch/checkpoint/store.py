"""Stores of checkpoints: the interface of a folder on a disk (``local.py``) or in an object store (``remote.py``).

A step is saved in an attempt, which has a token of its own. ``commit`` turns the attempt into a step atomically:
before it nobody sees the attempt, after it the step is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from midepoch._internal.processes import machine, started
from midepoch.checkpoint.files import FileSource, Sink
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointError, CheckpointNotFoundError
from midepoch.storage.address import refuse_lost_slash

STEP = re.compile(r"step_(0|[1-9][0-9]{0,18})\Z")
STALE = 24 * 3600.0
"""Seconds after which an attempt of a process on another machine counts as dead."""
_ATTEMPTS = 100
T = TypeVar("T")


class StepRemovedError(CheckpointNotFoundError):
    """A step that does not exist, or no longer."""


class Board(Protocol):
    """Small objects through which ranks meet: written atomically, visible to all after a moment."""

    name: str
    poll_interval: float  # longest pause in seconds between two looks

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def list(self, below: str) -> Iterable[str]:
        """Return the names of all objects below a name."""

    def delete(self, names: Sequence[str]) -> None: ...


class CheckpointStore(Protocol):
    """Folder of checkpoints. Problems with the folder itself are raised as OSError or FetchError."""

    name: str
    board: Board
    scratch_is_private: bool  # each rank has a scratch folder of its own

    def steps(self) -> list[int]:
        """Return the numbers of all steps, in order."""

    def manifest(self, step: int) -> Manifest:
        """Raises CheckpointNotFoundError, CheckpointDamagedError, or CheckpointError if it is of a newer version."""

    def source(self, manifest: Manifest, name: str) -> AbstractContextManager[FileSource]:
        """Open a file of a step. Raises CheckpointDamagedError if it is missing or not a regular file."""

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        """Return the sizes of the files of a step that exist, without reading them."""

    def local_copy(self, manifest: Manifest) -> AbstractContextManager[Path]:
        """Folder of this machine with all files of a step."""

    def begin(self, step: int, token: str) -> None:
        """Start an attempt, after removing the leftovers of dead processes."""

    def sink(self, step: int, token: str, name: str) -> AbstractContextManager[Sink]:
        """Create a file of an attempt: durable when the context is left."""

    def scratch(self, step: int, token: str, part: str) -> AbstractContextManager[Path]:
        """Folder for another library to create and fill: its files are durable when the context is left."""

    def folder_of(self, token: str) -> str:
        """Return the folder of an attempt's files below their step; empty for the step itself."""

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        """Turn the attempt into the step of that number, in place of an existing one."""

    def abandon(self, step: int, token: str) -> None:
        """Remove an attempt."""

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        """Remove a step, for all readers in the same instant; True if it existed.

        With ``only``, a step of the same number that another process has committed since, or is about to commit, is
        left alone.
        """


def open_store(directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> CheckpointStore:
    """Open a local folder or an address like ``s3://bucket/run``."""
    refuse_lost_slash(directory)
    address = str(directory)
    if "://" in address and not address.startswith("file://"):
        from midepoch.checkpoint.remote import RemoteStore

        return RemoteStore(address, storage_options)
    from midepoch.checkpoint.local import LocalStore

    if storage_options:
        raise ValueError(f"storage_options were given, but {address!r} is a local folder")
    return LocalStore(unquote(address.removeprefix("file://")) if address.startswith("file://") else directory)


def read_manifests(store: CheckpointStore) -> tuple[list[Manifest], dict[int, CheckpointError]]:
    """Return all manifests in commit order, and by step the errors of those that cannot be read.

    Raises StepRemovedError if another process prunes a step meanwhile: it has committed another one before.
    """
    manifests: list[Manifest] = []
    errors: dict[int, CheckpointError] = {}
    for step in store.steps():
        try:
            manifests.append(store.manifest(step))
        except StepRemovedError:
            raise
        except CheckpointError as problem:
            errors[step] = problem
    return sorted(manifests, key=lambda manifest: (manifest.sequence, manifest.step)), errors


def retrying(store: CheckpointStore, action: Callable[[], T]) -> T:
    """Run an action again as long as other processes remove the steps that it reads."""
    for _ in range(_ATTEMPTS):
        with suppress(StepRemovedError):
            return action()
    raise CheckpointError(f"the steps of {store.name} are removed faster than they can be read.")


class Process(NamedTuple):
    """Process of a machine, distinguished from a later one with the same id."""

    machine: str
    pid: int
    started: str

    @staticmethod
    def current() -> Process:
        return Process(machine(), os.getpid(), started(os.getpid()))

    def is_dead(self) -> bool:
        """Return True if the process is known to have exited: nothing is known of other machines' processes."""
        return self.machine == machine() and started(self.pid) != self.started
