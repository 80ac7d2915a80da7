"""Store on a disk.

step_100/                     a step: manifest.json and the files it names
.step_200.TOKEN.saving/       a copy that is being made, locked by its process; becomes the step by a rename
.step_100.TOKEN.old/          a copy that is being replaced or removed: counts as the step as long as there is no other
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
from typing import Any

from midepoch.checkpoint import disk
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.disk import LocalSink, LocalSource
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import NUMBER, STALE, Copy, Object
from midepoch.errors import CheckpointDamagedError, CheckpointError

_COPY = re.compile(rf"step_{NUMBER}\Z|\.step_{NUMBER}\.[0-9a-f]+\.(saving|old)\Z")
_PAUSE, _TIMEOUT = 0.005, 10.0
"""Seconds between two looks, and seconds to wait for the removal of an empty folder."""


_LOOKS = 100
"""Most times that a folder is listed again because its names change."""


class LocalStore:
    """Store with a folder for each step."""

    poll_interval = 0.05
    scratch_is_private = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = str(self.path)
        self._is_durable = False  # the name of the folder
        self._locks: dict[str, disk.Lock] = {}

    # Small files. They need not survive a power loss: nothing of them is synced.

    def put(self, name: str, data: bytes) -> None:
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        while True:
            if not self.path.is_dir():
                disk.make_folder(self.path)
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
        path = self.path / name
        try:
            source = disk.open_file(path.parent, path.name)
        except FileNotFoundError:
            return None
        if source.size > manifests.LARGEST:
            raise CheckpointDamagedError(f"{path.name} is {source.size} bytes long")
        data = bytearray(source.size)
        return bytes(data[: source.read_into(memoryview(data), 0)])

    def list(self, below: str) -> dict[str, Object]:
        found: dict[str, Object] = {}
        for folder, _, names in os.walk(self.path / below):
            for name in names:
                with suppress(FileNotFoundError):
                    status = os.lstat(f"{folder}/{name}")
                    found[os.path.relpath(f"{folder}/{name}", self.path)] = Object(status.st_size, status.st_mtime)
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self.path / name
            path.unlink(missing_ok=True)
            for folder in (path.parent, path.parent.parent):
                with suppress(OSError):
                    folder.rmdir()

    # Files of copies

    def source(self, place: str, name: str) -> LocalSource:
        return disk.open_file(self.path / place, name)

    @contextmanager
    def sink(self, place: str, name: str) -> Iterator[LocalSink]:
        path = self.path / place / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        with disk.create_file(path) as sink:
            yield sink

    @contextmanager
    def scratch(self, place: str, name: str) -> Iterator[Path]:
        """Folder of the copy itself. Its files are synced here, whether their library did so or not."""
        folder = self.path / place / name
        yield folder
        for path in sorted(folder.rglob("*")):
            disk.sync(path)
        disk.sync(folder)

    @contextmanager
    def local_copy(self, manifest: Manifest) -> Iterator[Path]:
        yield self.path / manifest.place

    # Copies

    def copies(self, step: int | None = None) -> Sequence[Copy]:
        for _ in range(_LOOKS):
            names, copies = self._names(), []
            for name in names:
                if (match := _COPY.match(name)) and step in (None, number := int(match[1] or match[2])):
                    signature = None if match[3] == "saving" else self._signature(name)
                    copies.append(Copy(number, name, signature if match[3] or signature else ()))
            if set(names) == set(self._names()):
                break  # else a step may have been replaced meanwhile, and neither of its copies seen
        return copies

    def _names(self) -> Sequence[str]:
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

    def _signature(self, place: str) -> tuple[Any, ...] | None:
        try:
            status = os.lstat(f"{self.name}/{place}/{manifests.NAME}")
        except OSError:
            return None
        return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def attempt(self, step: int, token: str) -> str:
        return f".step_{step}.{token}.saving"

    def claim(self, step: int, token: str) -> None:
        if not (self._is_durable and self.path.is_dir()):  # another rank may have made it, for its notes
            disk.make_folder(self.path)
            self._is_durable = True
        path = self.path / self.attempt(step, token)
        limit = time.monotonic() + _TIMEOUT
        while True:
            os.mkdir(path)
            with suppress(FileNotFoundError):
                lock = disk.try_lock(path)
                if lock is not None and path.is_dir():
                    self._locks[token] = lock
                    return
            while path.is_dir():  # another process has found it before it was locked, and removes it
                if time.monotonic() > limit:
                    raise CheckpointError(f"{path} is locked by another process that has stopped.")
                time.sleep(_PAUSE)

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        place, final = self.attempt(step, token), f"step_{step}"
        with self.sink(place, manifests.NAME) as sink:
            sink.write(memoryview(manifest))
        disk.sync(self.path / place)
        while True:
            try:
                os.rename(self.path / place, self.path / final)
                break
            except OSError as problem:
                if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            with suppress(FileNotFoundError):  # another process is replacing it at the same time
                self.withdraw(Copy(step, final, ()))
        disk.sync(self.path)
        return final

    def release(self, step: int, token: str) -> None:  # noqa: ARG002
        if (lock := self._locks.pop(token, None)) is not None:
            lock.release()

    def withdraw(self, copy: Copy) -> Copy:
        if copy.is_withdrawn:
            return copy
        place = f".step_{copy.step}.{secrets.token_hex(8)}.old"
        os.rename(self.path / copy.place, self.path / place)
        return copy._replace(place=place)

    def settle(self, copy: Copy) -> None:
        if copy.is_withdrawn:
            with suppress(OSError):
                os.rename(self.path / copy.place, self.path / f"step_{copy.step}")

    def discard(self, copy: Copy) -> None:
        path = self.path / copy.place
        if path.is_dir() and not path.is_symlink():
            (path / manifests.NAME).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def retire(self, copy: Copy) -> None:
        path = self.path / copy.place
        lock = disk.NO_LOCKS if (is_old := copy.place.endswith(".old")) else disk.try_lock(path)
        if lock is None:
            return
        try:  # locked: a process that has just created it does not begin to use it
            if is_old or lock is not disk.NO_LOCKS or time.time() - os.stat(path).st_mtime >= STALE:
                self.discard(copy)
        finally:
            lock.release()
