"""Steps in a store: how they are listed, committed, replaced, removed and recovered, on a disk and in an object store.

A copy is the files of one save of a step, in a folder of its own. Its manifest is written last: a copy with a manifest
is committed, and never changes again. The step is the newest of its committed copies. Therefore

- a commit is one atomic act of the store: a rename (``local.py``), or one PUT of the manifest (``remote.py``);
- a step is replaced by committing another copy; the older one is discarded afterwards;
- a step is removed by removing its copies, so that a copy that another process commits meanwhile stays, without a lock;
- a killed process leaves copies without a manifest, or older copies: the next save discards them.

Written here because no library commits several files in one act, in both kinds of store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from midepoch._internal.processes import machine, started
from midepoch._internal.values import reason
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.files import FileSource, Sink
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, FetchError
from midepoch.storage.address import check_folder
from midepoch.storage.addresses import check_options

NUMBER = "(0|[1-9][0-9]{0,18})"
"""Pattern of the number of a step in a name."""
STALE = 24 * 3600.0
"""Seconds after which an attempt counts as dead where nothing is known of its process."""
_ATTEMPTS = 100
_log = logging.getLogger("midepoch")
T = TypeVar("T")


class StepRemovedError(CheckpointNotFoundError):
    """A step that does not exist, or no longer."""


class Object(NamedTuple):
    """Description of a file or object."""

    size: int
    changed: float


class Copy(NamedTuple):
    """Files of one save of a step."""

    step: int
    place: str
    """Folder below the store."""
    signature: tuple[Any, ...] | None
    """Values that change when the manifest is written again, empty if it is lost; None if the copy is not committed."""
    is_claimed: bool = False
    """True if a process makes or removes it, or died doing so; only known in an object store."""

    @property
    def is_withdrawn(self) -> bool:
        """True if it counts as the step only as long as there is no other copy."""
        return self.place.startswith(".")


class CheckpointStore(Protocol):
    """Folder on a disk or in an object store. Problems with it are raised as OSError or FetchError.

    Names are paths below it. A file is written atomically and is visible to all processes after a moment.
    """

    name: str
    poll_interval: float  # longest pause in seconds between two looks
    scratch_is_private: bool  # each rank has a scratch folder of its own

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def list(self, below: str) -> dict[str, Object]:
        """Return all files below a folder, by their names."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove the files that exist."""

    def source(self, place: str, name: str) -> FileSource:
        """Open a file of a copy. FileNotFoundError, or CheckpointDamagedError if it is not a regular file."""

    def sink(self, place: str, name: str) -> AbstractContextManager[Sink]:
        """Create a file of a copy: durable when the context is left."""

    def scratch(self, place: str, name: str) -> AbstractContextManager[Path]:
        """Folder of a copy for another library to create and fill: durable when the context is left."""

    def local_copy(self, manifest: Manifest) -> AbstractContextManager[Path]:
        """Folder of this machine with all files of a committed copy."""

    def copies(self, step: int | None = None) -> Sequence[Copy]:
        """Return all copies, or those of a step."""

    def attempt(self, step: int, token: str) -> str:
        """Return the folder of a copy that is being made."""

    def claim(self, step: int, token: str) -> None:
        """Create a copy that belongs to this process."""

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        """Turn a copy into the step of that number, in one act that others see completely or not at all.

        Returns its folder.
        """

    def release(self, step: int, token: str) -> None:
        """Give up the claim to a copy."""

    def withdraw(self, copy: Copy) -> Copy:
        """Return a committed copy under a name that no other copy can get; FileNotFoundError if it was removed."""

    def settle(self, copy: Copy) -> None:
        """Remove what a dead process left: a copy that is not committed, its claim, the name of a withdrawn copy."""

    def discard(self, copy: Copy) -> None:
        """Remove a copy: its manifest first. Commits that can be seen are durable before a committed one is removed."""


def open_store(directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> CheckpointStore:
    """Open a local folder or an address like ``s3://bucket/run``."""
    check_folder(directory)
    check_options(storage_options)
    address = str(directory)
    if "://" in address and not address.startswith("file://"):
        from midepoch.checkpoint.remote import RemoteStore

        return RemoteStore(address, storage_options)
    from midepoch.checkpoint.local import LocalStore

    if storage_options:
        raise ValueError(f"storage_options were given, but {address!r} is a local folder. Omit them.")
    return LocalStore(unquote(address.removeprefix("file://")) if address.startswith("file://") else directory)


class Steps:
    """Steps of a store."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store, self.name = store, store.name
        self._manifests: dict[str, tuple[tuple[Any, ...], Manifest]] = {}  # by place: signature when read, manifest

    def numbers(self) -> list[int]:
        """Return the numbers of all steps, in order."""
        return sorted(self._committed())

    def manifest(self, step: int) -> Manifest:
        """Raises CheckpointNotFoundError, CheckpointDamagedError, or CheckpointError if it is of a newer version."""
        copies = self._committed(step).get(step)
        if not copies:
            raise StepRemovedError(f"{self.name} has no step {step}")
        return self._newest(copies)

    def manifests(self) -> tuple[list[Manifest], dict[int, CheckpointError]]:
        """Return all manifests in commit order, and by step the errors of those that cannot be read.

        Reads again if another process removes a step meanwhile: it has committed another one before.
        """
        return self.retrying(self._read_all)

    def _read_all(self) -> tuple[list[Manifest], dict[int, CheckpointError]]:
        found: list[Manifest] = []
        errors: dict[int, CheckpointError] = {}
        committed = self._committed()
        places = {copy.place for copies in committed.values() for copy in copies}
        self._manifests = {place: entry for place, entry in self._manifests.items() if place in places}
        for step, copies in committed.items():
            try:
                found.append(self._newest(copies))
            except StepRemovedError:
                raise
            except CheckpointError as problem:
                errors[step] = problem
        return sorted(found, key=lambda manifest: (manifest.sequence, manifest.step)), errors

    def retrying(self, action: Callable[[], T]) -> T:
        """Run an action again as long as other processes remove the steps that it reads."""
        for _ in range(_ATTEMPTS):
            with suppress(StepRemovedError):
                return action()
        raise CheckpointError(f"the steps of {self.name} are removed faster than they can be read.")

    def source(self, manifest: Manifest, name: str) -> FileSource:
        """Open a file of a step. Raises CheckpointDamagedError if it is missing or not a regular file."""
        try:
            return self.store.source(manifest.place, name)
        except FileNotFoundError:
            if self.store.get(f"{manifest.place}/{manifests.NAME}") is None:
                raise StepRemovedError(f"step {manifest.step} has just been removed from {self.name}") from None
            raise CheckpointDamagedError(f"{name} is missing") from None

    def is_complete(self, manifest: Manifest) -> bool:
        """Return True if all files of a step have their sizes; their contents are not read."""
        sizes = {name: file.size for name, file in self.store.list(manifest.place).items()}
        return all(sizes.get(f"{manifest.place}/{name}") == sums.size for name, sums in manifest.files.items())

    def begin(self, step: int, token: str) -> None:
        """Start a copy, after removing the leftovers of dead processes."""
        self.sweep()
        self.store.claim(step, token)

    def sink(self, step: int, token: str, name: str) -> AbstractContextManager[Sink]:
        """Create a file of a copy that is being made."""
        return self.store.sink(self.store.attempt(step, token), name)

    def commit(self, token: str, manifest: Manifest) -> Manifest:
        """Turn a copy into the step of its manifest, in place of an existing one; return it as it can be read."""
        step = manifest.step
        place = self.store.commit(step, token, manifests.to_bytes(manifest))
        try:
            self.store.release(step, token)
            self.sweep(step)
        except (OSError, FetchError, CheckpointError) as problem:  # it is committed; the next save removes the rest
            _log.warning("%s: the previous step %d could not be removed: %s", self.name, step, reason(problem))
        return replace(manifest, place=place)

    def abandon(self, step: int, token: str) -> None:
        """Remove a copy that was not committed. The response to a successful commit can get lost."""
        try:
            with suppress(Exception):
                for copy in self.store.copies(step):
                    if copy.place == self.store.attempt(step, token) and copy.signature is None:
                        self.store.discard(copy)
        finally:
            with suppress(Exception):
                self.store.release(step, token)

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        """Remove a step; True if it existed.

        With ``only``, a step of the same number that another process has committed since is left alone.
        """
        removed = False
        for _ in range(_ATTEMPTS):  # a sweep of another process may put it back
            copies = [copy for copy in self._committed(step).get(step, []) if self._is(copy, only)]
            if not copies:
                break
            for copy in copies:
                with suppress(FileNotFoundError):
                    # Read again under a name that nobody replaces. It counts as the step until it is discarded.
                    withdrawn = self.store.withdraw(copy)
                    if self._is(withdrawn, only):
                        self.store.discard(withdrawn)
                        removed = True
                    else:
                        self.store.settle(withdrawn)
        return removed

    def sweep(self, step: int | None = None) -> None:
        """Remove the copies of dead processes, and those that newer ones have replaced."""
        for copies in _by_step(self.store.copies(step)).values():
            committed = [copy for copy in copies if copy.signature is not None]
            with suppress(OSError):  # another process removes it, or the next sweep
                for copy in copies:
                    if copy.signature is None:
                        self.store.settle(copy)
                if len(committed) > 1:
                    *replaced, (newest, _) = self._in_order(committed)
                    for copy, content in replaced:
                        if isinstance(content, (Manifest, CheckpointDamagedError)):  # not of a newer version
                            self.store.discard(copy)
                    committed = [newest]
                for copy in committed:
                    self.store.settle(copy)

    def _committed(self, step: int | None = None) -> dict[int, list[Copy]]:
        return _by_step([copy for copy in self.store.copies(step) if copy.signature is not None])

    def _newest(self, copies: Sequence[Copy]) -> Manifest:
        content = self._in_order(copies)[-1][1]
        if isinstance(content, CheckpointError):
            raise content
        return content

    def _in_order(self, copies: Sequence[Copy]) -> list[tuple[Copy, Manifest | CheckpointError]]:
        """Return the committed copies of a step and their manifests, the newest last.

        One whose manifest cannot be read has the error in its place, and counts as older than any other.
        """
        found: list[tuple[Any, Copy, Manifest | CheckpointError]] = []
        for copy in copies:
            try:
                manifest = self._read(copy)
                found.append(((not copy.is_withdrawn, manifest.sequence, manifest.time), copy, manifest))
            except CheckpointError as problem:
                found.append(((not copy.is_withdrawn, -1, 0.0), copy, problem))
        return [(copy, content) for _, copy, content in sorted(found, key=lambda entry: (entry[0], entry[1].place))]

    def _read(self, copy: Copy) -> Manifest:
        cached = self._manifests.get(copy.place)
        if cached is not None and copy.signature and cached[0] == copy.signature:
            return cached[1]
        data = self.store.get(f"{copy.place}/{manifests.NAME}")
        if data is None:
            if copy.signature or copy not in self.store.copies(copy.step):
                raise StepRemovedError(f"step {copy.step} has just been removed from {self.name}")
            raise CheckpointDamagedError("there is no manifest")
        manifest = replace(manifests.from_bytes(data, copy.step), place=copy.place)
        if copy.signature:
            self._manifests[copy.place] = copy.signature, manifest
        return manifest

    def _is(self, copy: Copy, only: Manifest | None) -> bool:
        with suppress(CheckpointError):
            return only is None or self._read(copy) == only
        return False


def _by_step(copies: Sequence[Copy]) -> dict[int, list[Copy]]:
    groups: dict[int, list[Copy]] = {}
    for copy in copies:
        groups.setdefault(copy.step, []).append(copy)
    return groups


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
