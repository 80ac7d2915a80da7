"""A folder of checkpoints on a disk.

step_100/                     a step: manifest.json and the files it names
.step_200.TOKEN.saving/       an attempt, locked by the process that makes it; files/ becomes the step
.step_200.TOKEN.new/          an attempt that is not locked yet, and empty
.step_100.TOKEN.old/          a step that is being replaced: counts as the step as long as there is no other
.step_100.TOKEN.gone/         being removed
.ranks/                       notes between ranks
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.directory import STALE, STEP, Board, VanishedError
from midepoch.checkpoint.disk import (
    NO_LOCKS,
    LocalSink,
    LocalSource,
    lock_folder,
    make_durably,
    opened,
    remove,
    signature,
    sync,
    turn,
    unlock,
    written,
)
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointDamagedError, CheckpointError

_HIDDEN = re.compile(r"\.step_(0|[1-9][0-9]{0,18})\.[0-9a-f]+\.(saving|new|old|gone)\Z")


class LocalDirectory:
    """Steps as folders. A Directory, see there."""

    scratch_is_own = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = str(self.path)
        self.board: Board = LocalBoard(self.path / ".ranks")
        self._locks: dict[str, int] = {}
        self._read: dict[int, tuple[tuple[int, ...], Manifest]] = {}  # by step: what its manifest was when it was read

    def steps(self) -> list[int]:
        return sorted(self._folders())

    def _folders(self) -> dict[int, str]:
        """The folder of each step: its own, or the one it was put aside in while it was being replaced."""
        found: dict[int, str] = {}
        aside: dict[int, str] = {}
        for name in self._listed():
            if match := STEP.match(name):
                found[int(match[1])] = name
            elif (match := _HIDDEN.match(name)) and match[2] == "old":
                aside[int(match[1])] = name
        return {**aside, **found}

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = self._folder(manifest.step)
        found = {}
        for name in manifest.files:
            with suppress(OSError):
                found[name] = os.stat(f"{folder}/{name}", follow_symlinks=False).st_size
        return found

    def _folder(self, step: int) -> Path | None:
        folder = self.path / f"step_{step}"
        if folder.is_dir():
            return folder
        name = self._folders().get(step)
        return None if name is None else self.path / name

    def _listed(self) -> list[str]:
        try:
            found = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError(f"{self.name} is a file: name the folder that holds the steps.") from None
        if manifests.NAME in found:
            raise CheckpointError(f"{self.name} is a step itself: name the folder around it, {self.path.parent}.")
        return found

    def manifest(self, step: int) -> Manifest:
        known = self._read.get(step)
        with suppress(OSError):
            if known is not None and known[0] == signature(f"{self.name}/step_{step}/{manifests.NAME}"):
                return known[1]
        folder = self._folder(step)
        if folder is None:
            raise VanishedError(f"{self.name} has no step {step}")
        seen, found = self._manifest_in(folder, step)
        self._read[step] = (seen, found)
        return found

    def _manifest_in(self, folder: Path, step: int) -> tuple[tuple[int, ...], Manifest]:
        """The signature of the manifest in a folder, and the manifest."""
        try:
            try:
                seen = signature(f"{folder}/{manifests.NAME}")
            except PermissionError as problem:
                raise CheckpointDamagedError(f"the manifest cannot be read ({problem.strerror})") from None
            with opened(folder, manifests.NAME) as source:
                if source.size > manifests.LARGEST:
                    raise CheckpointDamagedError(f"the manifest is {source.size} bytes long")
                data = bytearray(source.size)
                source.read_into(memoryview(data), 0)
        except (FileNotFoundError, NotADirectoryError):
            # Another process may have removed it, or be replacing it: then it is there again.
            if not os.path.lexists(folder) or os.path.lexists(folder / manifests.NAME):
                raise VanishedError(f"step {step} has just been removed from {self.name}") from None
            raise CheckpointDamagedError("there is no manifest") from None
        found = manifests.from_bytes(bytes(data))
        if found.step != step:
            raise CheckpointDamagedError(f"the manifest is that of step {found.step}")
        return seen, found

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[LocalSource]:
        folder = self._folder(manifest.step) or self.path / f"step_{manifest.step}"
        try:
            with opened(folder, name) as source:
                yield source
        except FileNotFoundError:
            if not folder.is_dir():
                raise VanishedError(f"step {manifest.step} has just been removed from {self.name}") from None
            raise CheckpointDamagedError(f"{name} is missing") from None

    @contextmanager
    def fetched(self, manifest: Manifest) -> Iterator[Path]:
        yield self._folder(manifest.step) or self.path / f"step_{manifest.step}"

    def _attempt(self, step: int, token: str) -> Path:
        return self.path / f".step_{step}.{token}.saving"

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        make_durably(self.path)
        attempt, unlocked = self._attempt(step, token), self._hidden(step, "new")
        os.mkdir(unlocked)
        lock = lock_folder(unlocked)
        self._locks[token] = NO_LOCKS if lock is None else lock
        try:
            os.rename(unlocked, attempt)  # nobody takes it for a dead one's: it is locked when it gets this name
            os.mkdir(attempt / "files")
        except BaseException:
            self.abandon(step, token)
            raise

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[LocalSink]:
        path = self._attempt(step, token) / "files" / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as sink:
            yield sink

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        """The files are written in place. They are made durable here, whatever their library did."""
        folder = self._attempt(step, token) / "files" / part
        yield folder
        for path in sorted(folder.rglob("*")):
            sync(path)
        sync(folder)

    def folder_of(self, token: str) -> str:  # noqa: ARG002
        return ""

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        with self.sink(step, token, manifests.NAME) as sink:
            sink.write(memoryview(manifest))
        attempt, final = self._attempt(step, token), self.path / f"step_{step}"
        sync(attempt / "files")
        with turn(self.path):
            while True:
                try:
                    os.rename(attempt / "files", final)
                    break
                except OSError as problem:
                    if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                with suppress(FileNotFoundError):  # another process is replacing it at the same time
                    os.rename(final, self._hidden(step, "old"))
        sync(self.path)
        with suppress(OSError):  # the step is there; what is left is swept another time
            self.abandon(step, token)
            self._sweep()

    def _hidden(self, step: int, what: str) -> Path:
        return self.path / f".step_{step}.{secrets.token_hex(8)}.{what}"

    def abandon(self, step: int, token: str) -> None:
        attempt = self._attempt(step, token)
        try:
            os.rmdir(attempt)  # empty after a commit
        except OSError:
            shutil.rmtree(attempt, ignore_errors=True)
        unlock(self._locks.pop(token, None))

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        removed = False
        while (name := self._folders().get(step)) is not None:
            gone = self._hidden(step, "gone")
            with suppress(FileNotFoundError), turn(self.path):
                if only is None:
                    os.rename(self.path / name, gone)
                elif not self._set_aside(step, name, only, gone):
                    return removed
                removed = True
            remove(gone)
        return removed

    def _set_aside(self, step: int, name: str, only: Manifest, gone: Path) -> bool:
        """Move a step out of sight if it is the one that is meant.

        Looked at again where nobody replaces it: until then it counts as the step, so that no reader misses it.
        """
        if self.manifest(step) != only:
            return False
        aside = self._hidden(step, "old")
        os.rename(self.path / name, aside)
        if self._manifest_in(aside, step)[1] == only:
            os.rename(aside, gone)
            return True
        with suppress(OSError):  # there is a newer one already
            os.rename(aside, self.path / f"step_{step}")
        return False

    def _sweep(self) -> None:
        """Remove what dead processes have left, and put back what one of them had put aside."""
        for name in self._listed():
            if (match := _HIDDEN.match(name)) is None:
                continue
            path = self.path / name
            with suppress(OSError):  # another process is at it, or it stays for the next time
                if match[2] == "gone":
                    remove(path)
                elif match[2] == "old":
                    self._sweep_old(int(match[1]), path)
                elif match[2] == "new":
                    if time.time() - os.stat(path).st_mtime > STALE:
                        os.rmdir(path)
                else:
                    self._sweep_attempt(int(match[1]), path)

    def _sweep_old(self, step: int, path: Path) -> None:
        final = self.path / f"step_{step}"
        with turn(self.path) as mine:
            if not mine:
                return
            if not final.exists():
                os.rename(path, final)
                return
            gone = self._hidden(step, "gone")
            os.rename(path, gone)
        remove(gone)

    def _sweep_attempt(self, step: int, attempt: Path) -> None:
        lock = lock_folder(attempt)
        if lock is None or (lock == NO_LOCKS and time.time() - os.stat(attempt).st_mtime < STALE):
            return
        gone = self._hidden(step, "gone")
        os.rename(attempt, gone)
        unlock(lock)
        remove(gone)


class LocalBoard:
    """Notes as files. They need not outlive a power loss: nothing is synced."""

    patience = 0.05

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path.parent)

    def groups(self) -> list[str]:
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    def put(self, name: str, data: bytes) -> None:
        path = self._path / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
                return
            except FileNotFoundError:  # who left last has just removed the folder
                continue
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, group: str) -> list[str]:
        try:
            found = os.listdir(self._path / group)
        except FileNotFoundError:
            return []
        return sorted(f"{group}/{name}" for name in found if not name.startswith("."))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)
            for folder in ((self._path / name).parent, self._path):
                with suppress(OSError):
                    folder.rmdir()
