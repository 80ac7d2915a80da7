"""A folder of checkpoints on a disk.

step_100/                     a step: manifest.json and the files it names
.step_200.TOKEN.saving/       an attempt, locked by the process that makes it; files/ becomes the step
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
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.directory import STALE, STEP, Board, VanishedError
from midepoch.checkpoint.helpers import Helper
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointDamagedError

# Windows has none: attempts of dead processes are then swept by their age.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None

_HIDDEN = re.compile(r"\.step_(0|[1-9][0-9]{0,18})\.[0-9a-f]+\.(saving|old|gone)\Z")
_OLD = re.compile(_HIDDEN.pattern.replace("saving|old|gone", "old"))
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_NO_LOCKS = -1
_AHEAD = 128 << 20
"""Bytes written before the disk is told to begin with them."""


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
        found = {int(match[1]) for name in self._listed() if (match := STEP.match(name) or _OLD.match(name))}
        return sorted(found)

    def _folders(self) -> dict[int, Path]:
        """Where each step lies: in its folder, or where it was put aside while it was being replaced."""
        found: dict[int, str] = {}
        aside: dict[int, str] = {}
        for name in self._listed():
            if match := STEP.match(name):
                found[int(match[1])] = name
            elif (match := _HIDDEN.match(name)) and match[2] == "old":
                aside[int(match[1])] = name
        return {step: self.path / name for step, name in {**aside, **found}.items()}

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = self._folder(manifest.step)
        found = {}
        for name in manifest.files:
            with suppress(OSError):
                found[name] = os.stat(f"{folder}/{name}", follow_symlinks=False).st_size
        return found

    def _folder(self, step: int) -> Path | None:
        folder = self.path / f"step_{step}"
        return folder if folder.is_dir() else self._folders().get(step)

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def manifest(self, step: int) -> Manifest:
        known = self._read.get(step)
        with suppress(OSError):
            if known is not None and known[0] == _signature(f"{self.name}/step_{step}/{manifests.NAME}"):
                return known[1]
        folder = self._folder(step)
        if folder is None:
            raise VanishedError(f"{self.name} has no step {step}")
        try:
            try:
                seen = _signature(f"{folder}/{manifests.NAME}")
            except PermissionError as problem:
                raise CheckpointDamagedError(f"the manifest cannot be read ({problem.strerror})") from None
            with _opened(folder, manifests.NAME) as source:
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
        self._read[step] = (seen, found)
        return found

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[_LocalSource]:
        folder = self._folder(manifest.step) or self.path / f"step_{manifest.step}"
        try:
            with _opened(folder, name) as source:
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
        _make_durably(self.path)
        self._sweep()
        attempt = self._attempt(step, token)
        while True:
            os.mkdir(attempt)
            lock = None
            with suppress(FileNotFoundError):
                lock = _lock(attempt, wait=True)
            if attempt.exists():  # else another process has taken it for a dead one's before it was locked
                break
            _unlock(lock)
        self._locks[token] = _NO_LOCKS if lock is None else lock
        try:
            os.mkdir(attempt / "files")
        except BaseException:
            self.abandon(step, token)
            raise

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[_LocalSink]:
        path = self._attempt(step, token) / "files" / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW | _BINARY, 0o666)
        sink = _LocalSink(fd)
        try:
            yield sink
            sink.settle()
            os.fsync(fd)
        finally:
            sink.end()
            os.close(fd)

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        """The files are written in place. They are made durable here, whatever their library did."""
        folder = self._attempt(step, token) / "files" / part
        yield folder
        for path in sorted(folder.rglob("*")):
            _sync(path)
        _sync(folder)

    def folder_of(self, token: str) -> str:  # noqa: ARG002
        return ""

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        with self.sink(step, token, manifests.NAME) as sink:
            sink.write(memoryview(manifest))
        attempt, final = self._attempt(step, token), self.path / f"step_{step}"
        _sync(attempt / "files")
        while True:
            try:
                os.rename(attempt / "files", final)
                break
            except OSError as problem:
                if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            with suppress(FileNotFoundError):  # another process is replacing it at the same time
                os.rename(final, self._hidden(step, "old"))
        _sync(self.path)
        with suppress(OSError):  # the step is there; what is left is swept another time
            self.abandon(step, token)
            self._sweep()

    def _hidden(self, step: int, what: str) -> Path:
        return self.path / f".step_{step}.{secrets.token_hex(8)}.{what}"

    def abandon(self, step: int, token: str) -> None:
        shutil.rmtree(self._attempt(step, token), ignore_errors=True)
        _unlock(self._locks.pop(token, None))

    def remove(self, step: int) -> None:
        while (folder := self._folders().get(step)) is not None:
            gone = self._hidden(step, "gone")
            with suppress(FileNotFoundError):
                os.rename(folder, gone)
            _remove(gone)

    def _sweep(self) -> None:
        """Remove what dead processes have left, and put back what one of them had put aside."""
        for name in self._listed():
            if (match := _HIDDEN.match(name)) is None:
                continue
            path = self.path / name
            final = self.path / f"step_{match[1]}"
            with suppress(OSError):  # another process is at it, or it stays for the next time
                if match[2] == "gone" or (match[2] == "old" and final.exists()):
                    _remove(path)
                elif match[2] == "old":
                    os.rename(path, final)
                else:
                    self._sweep_attempt(int(match[1]), path)

    def _sweep_attempt(self, step: int, attempt: Path) -> None:
        lock = _lock(attempt, wait=False)
        if lock is None or (lock == _NO_LOCKS and time.time() - os.stat(attempt).st_mtime < STALE):
            return
        gone = self._hidden(step, "gone")
        os.rename(attempt, gone)
        _unlock(lock)
        _remove(gone)


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
            with suppress(FileNotFoundError):  # who left last has just removed the folder
                temporary.write_bytes(data)
                os.replace(temporary, path)
                return

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


class _LocalSink:
    """Lets the disk begin with what is there while more comes: the sync at the end has little to do then."""

    def __init__(self, fd: int) -> None:
        self._fd, self._unsynced = fd, 0
        self._syncer = Helper("sync")
        self._syncing: Future[None] | None = None

    def write(self, data: memoryview, /) -> None:
        while len(data):
            came = os.write(self._fd, data)
            data = data[came:]
            self._unsynced += came
        if self._unsynced >= _AHEAD and (self._syncing is None or self._syncing.done()):
            self.settle()
            self._unsynced = 0
            self._syncing = self._syncer.submit(os.fsync, self._fd)

    def settle(self) -> None:
        """Wait for what was begun; raises what went wrong, which a later sync may not say again."""
        if self._syncing is not None:
            self._syncing.result()

    def end(self) -> None:
        self._syncer.end()


class _LocalSource:
    def __init__(self, fd: int) -> None:
        self._fd, self.size = fd, os.fstat(fd).st_size

    def read_into(self, data: memoryview, at: int, /) -> int:
        done = 0
        while done < len(data):
            try:
                came = os.preadv(self._fd, [data[done:]], at + done)
            except OSError as problem:
                raise CheckpointDamagedError(f"byte {at + done} cannot be read ({problem.strerror})") from None
            if not came:
                break
            done += came
        return done


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[_LocalSource]:
    path = folder / name
    if os.path.realpath(path.parent) != os.path.join(os.path.realpath(folder), os.path.dirname(name)).rstrip("/"):
        raise CheckpointDamagedError(f"{name} lies outside of its step")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _NO_FOLLOW | _BINARY)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG):
            raise CheckpointDamagedError(f"{name} is no plain file ({problem.strerror})") from None
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise CheckpointDamagedError(f"{name} cannot be read ({problem.strerror})") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointDamagedError(f"{name} is no plain file")
        yield _LocalSource(fd)
    finally:
        os.close(fd)


def _signature(path: str) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.lstat(path)
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder: a number to unlock it by, _NO_LOCKS where there are none, or None if it is locked already.

    The kernel unlocks it when the process ends, however it ends.
    """
    if fcntl is None:
        return _NO_LOCKS
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        return _NO_LOCKS
    return fd


def _unlock(fd: int | None) -> None:
    if fd is not None and fd != _NO_LOCKS:
        os.close(fd)


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlive a power loss."""
    if path.is_symlink():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_durably(folder: Path) -> None:
    """Make a folder and those it lies in, as far as they are not there."""
    if folder.is_dir():
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
