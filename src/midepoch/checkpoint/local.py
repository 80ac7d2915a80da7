"""Store on a disk.

step_100/                     a step: manifest.json and the files it names
.step_200.TOKEN.saving/       an attempt, locked by its process; files/ becomes the step
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

from midepoch.checkpoint import disk
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.disk import LocalSink, LocalSource
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import STALE, STEP, Board, StepRemovedError
from midepoch.errors import CheckpointDamagedError, CheckpointError

_HIDDEN = re.compile(r"\.step_(0|[1-9][0-9]{0,18})\.[0-9a-f]+\.(saving|old|gone)\Z")


class LocalStore:
    """Store with a folder for each step."""

    scratch_is_private = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = str(self.path)
        self.board: Board = LocalBoard(self.path)
        self._is_durable = False  # the name of the folder
        self._locks: dict[str, disk.Lock] = {}
        self._manifests: dict[int, tuple[tuple[int, ...], Manifest]] = {}  # by step: signature when read, manifest

    def steps(self) -> list[int]:
        return sorted(self._folders())

    def _folders(self) -> dict[int, str]:
        """Return the folder of each step: its own, or the one it was moved to while it is being replaced."""
        own: dict[int, str] = {}
        replaced: dict[int, str] = {}
        for name in self._names():
            if match := STEP.match(name):
                own[int(match[1])] = name
            elif (match := _HIDDEN.match(name)) and match[2] == "old":
                replaced[int(match[1])] = name
        return {**replaced, **own}

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = self._folder(manifest.step)
        sizes = {}
        for name in manifest.files:
            with suppress(OSError):
                sizes[name] = os.stat(f"{folder}/{name}", follow_symlinks=False).st_size
        return sizes

    def _folder(self, step: int) -> Path | None:
        folder = self.path / f"step_{step}"
        if folder.is_dir():
            return folder
        name = self._folders().get(step)
        return None if name is None else self.path / name

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            file = next((path for path in (self.path, *self.path.parents) if path.is_file()), self.path)
            raise CheckpointError(f"{file} is a file: name the folder that holds the steps.") from None
        if manifests.NAME in names:
            raise CheckpointError(f"{self.name} is a step itself: name the folder around it, {self.path.parent}.")
        return names

    def manifest(self, step: int) -> Manifest:
        cached = self._manifests.get(step)
        with suppress(OSError):
            if cached is not None and cached[0] == disk.signature(f"{self.name}/step_{step}/{manifests.NAME}"):
                return cached[1]
        folder = self._folder(step)
        if folder is None:
            raise StepRemovedError(f"{self.name} has no step {step}")
        self._manifests[step] = self._manifest_in(folder, step)
        return self._manifests[step][1]

    def _manifest_in(self, folder: Path, step: int) -> tuple[tuple[int, ...], Manifest]:
        """Return the signature of the manifest in a folder, and the manifest."""
        try:
            try:
                signature = disk.signature(f"{folder}/{manifests.NAME}")
            except PermissionError as problem:
                raise CheckpointDamagedError(f"the manifest cannot be read ({problem.strerror})") from None
            with disk.open_file(folder, manifests.NAME) as source:
                if source.size > manifests.LARGEST:
                    raise CheckpointDamagedError(f"the manifest is {source.size} bytes long")
                data = bytearray(source.size)
                source.read_into(memoryview(data), 0)
        except (FileNotFoundError, NotADirectoryError):
            # Another process may have removed it, or be replacing it: then it exists again.
            if not os.path.lexists(folder) or os.path.lexists(folder / manifests.NAME):
                raise StepRemovedError(f"step {step} has just been removed from {self.name}") from None
            raise CheckpointDamagedError("there is no manifest") from None
        return signature, manifests.from_bytes(bytes(data), step)

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[LocalSource]:
        with self.local_copy(manifest) as folder:
            try:
                with disk.open_file(folder, name) as source:
                    yield source
            except FileNotFoundError:
                if not folder.is_dir():
                    raise StepRemovedError(f"step {manifest.step} has just been removed from {self.name}") from None
                raise CheckpointDamagedError(f"{name} is missing") from None

    @contextmanager
    def local_copy(self, manifest: Manifest) -> Iterator[Path]:
        yield self._folder(manifest.step) or self.path / f"step_{manifest.step}"

    def _attempt(self, step: int, token: str) -> Path:
        return self.path / f".step_{step}.{token}.saving"

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        if not (self._is_durable and self.path.is_dir()):  # another rank may have made it, for its notes
            disk.make_folder(self.path)
            self._is_durable = True
        attempt = self._attempt(step, token)
        with disk.folder_lock(self.path):  # no sweep sees it before it is locked
            os.mkdir(attempt)
            self._locks[token] = disk.try_lock(attempt) or disk.NO_LOCKS
        try:
            os.mkdir(attempt / "files")
        except BaseException:
            self.abandon(step, token)
            raise

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[LocalSink]:
        path = self._attempt(step, token) / "files" / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        with disk.create_file(path) as sink:
            yield sink

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        """Folder of the attempt itself. Its files are synced here, whether their library did so or not."""
        folder = self._attempt(step, token) / "files" / part
        yield folder
        for path in sorted(folder.rglob("*")):
            disk.sync(path)
        disk.sync(folder)

    def folder_of(self, token: str) -> str:  # noqa: ARG002
        return ""

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        with self.sink(step, token, manifests.NAME) as sink:
            sink.write(memoryview(manifest))
        attempt, final = self._attempt(step, token), self.path / f"step_{step}"
        disk.sync(attempt / "files")
        with disk.folder_lock(self.path):
            while True:
                try:
                    os.rename(attempt / "files", final)
                    break
                except OSError as problem:
                    if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                with suppress(FileNotFoundError):  # another process is replacing it at the same time
                    os.rename(final, self._hidden(step, "old"))
        disk.sync(self.path)
        with suppress(OSError):  # the step is committed; the next sweep removes the rest
            self.abandon(step, token)
            self._sweep()

    def _hidden(self, step: int, state: str) -> Path:
        return self.path / f".step_{step}.{secrets.token_hex(8)}.{state}"

    def abandon(self, step: int, token: str) -> None:
        lock = self._locks.pop(token, None)
        attempt = self._attempt(step, token)
        try:
            os.rmdir(attempt)  # empty after a commit
        except OSError:
            shutil.rmtree(attempt, ignore_errors=True)
        if lock is not None:
            lock.release()

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        removed = False
        while (name := self._folders().get(step)) is not None:
            gone = self._hidden(step, "gone")
            with suppress(FileNotFoundError), disk.folder_lock(self.path):
                if only is None:
                    os.rename(self.path / name, gone)
                elif not self._rename_only(step, name, only, gone):
                    return removed
                removed = True
            disk.remove(gone)
        return removed

    def _rename_only(self, step: int, name: str, only: Manifest, gone: Path) -> bool:
        """Rename a step to ``gone`` if it is the expected one.

        Its manifest is read again under a name that nobody replaces. Until then it counts as the step, so that no
        reader misses it.
        """
        if self.manifest(step) != only:
            return False
        old = self._hidden(step, "old")
        os.rename(self.path / name, old)
        if self._manifest_in(old, step)[1] == only:
            os.rename(old, gone)
            return True
        with suppress(OSError):  # there is a newer one already
            os.rename(old, self.path / f"step_{step}")
        return False

    def _sweep(self) -> None:
        """Remove the leftovers of dead processes, and restore the steps that they were replacing."""
        hidden = [match for name in self._names() if (match := _HIDDEN.match(name))]
        if not hidden:
            return
        with disk.folder_lock(self.path) as is_locked:
            for match in hidden if is_locked else ():
                with suppress(OSError):  # another process removes it, or the next sweep
                    self._retire(self.path / match[0], int(match[1]), match[2])
        for name in self._names():
            if (match := _HIDDEN.match(name)) and match[2] == "gone":
                with suppress(OSError):
                    disk.remove(self.path / name)

    def _retire(self, path: Path, step: int, state: str) -> None:
        """Rename a folder to one that is removed, unless it is the attempt of a live process or its step is missing."""
        final = self.path / f"step_{step}"
        if state == "old":
            os.rename(path, self._hidden(step, "gone") if final.exists() else final)
        elif state == "saving" and (lock := disk.try_lock(path)) is not None:
            if lock is not disk.NO_LOCKS or time.time() - os.stat(path).st_mtime >= STALE:
                os.rename(path, self._hidden(step, "gone"))
            lock.release()


class LocalBoard:
    """Board of files. They need not survive a power loss: nothing of them is synced."""

    poll_interval = 0.05

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    def put(self, name: str, data: bytes) -> None:
        path = self._path / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        while True:
            if not self._path.is_dir():
                disk.make_folder(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
                return
            except FileNotFoundError:  # the last rank to leave has just removed the folder
                continue
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, below: str) -> list[str]:
        folders = os.walk(self._path / below)
        files = (Path(folder, name) for folder, _, names in folders for name in names if not name.startswith("."))
        return [file.relative_to(self._path).as_posix() for file in files]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._path / name
            path.unlink(missing_ok=True)
            for folder in (path.parent, path.parent.parent):
                with suppress(OSError):
                    folder.rmdir()
