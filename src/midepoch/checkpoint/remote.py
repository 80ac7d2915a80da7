"""Store in an object store, where nothing can be renamed: the manifest, written last, is the commit.

step_100/manifest.json        names the folder with the files of this step
step_100/TOKEN/…              the files of one attempt
.attempts/step_100.TOKEN      the process that makes the attempt
.removals/step_100.TOKEN      the process that removes the step
.ranks/…                      notes between ranks
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.files import FileSource, file_checksums
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.objects import Object, Objects
from midepoch.checkpoint.store import STALE, STEP, Board, Process, StepRemovedError
from midepoch.errors import CheckpointDamagedError, CheckpointError, FetchError

_ATTEMPT = re.compile(r"step_(\d{1,19})/([0-9a-f]+)/")
_MANIFEST = re.compile(STEP.pattern.removesuffix("\\Z") + "/" + re.escape(manifests.NAME) + "\\Z")
_PART_BYTES = 16 << 20
_RETRIES = 3
_UNKNOWN = "?"
_REMOVAL_TIMEOUT = 300.0
"""Seconds that a commit waits for the removal of the same step: a few requests, each retried for two minutes."""
_log = logging.getLogger("midepoch")


class RemoteStore:
    """Store with objects below a prefix."""

    scratch_is_private = True

    def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._objects = Objects(address, storage_options)
        self.name = self._objects.name
        self.board: Board = RemoteBoard(self._objects)

    def steps(self) -> list[int]:
        return sorted({int(match[1]) for name in self._objects.list() if (match := _MANIFEST.match(name))})

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = f"step_{manifest.step}/{manifest.folder}/"
        return {name.removeprefix(folder): entry.size for name, entry in self._objects.list(folder).items()}

    def manifest(self, step: int) -> Manifest:
        data = self._objects.get(_manifest_of(step))
        if data is None:
            raise StepRemovedError(f"{self.name} has no step {step}")
        return manifests.from_bytes(data, step)

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[FileSource]:
        path = f"step_{manifest.step}/{manifest.folder}/{name}"
        size = self._objects.size(path)
        if size is None:
            if self._objects.size(_manifest_of(manifest.step)) is None:
                raise StepRemovedError(f"step {manifest.step} has just been removed from {self.name}")
            raise CheckpointDamagedError(f"{name} is missing")
        yield _RemoteSource(self._objects, path, size)

    @contextmanager
    def local_copy(self, manifest: Manifest) -> Iterator[Path]:
        with _temporary_folder() as folder:
            piece = memoryview(bytearray(_PART_BYTES))
            for name in manifest.files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with self.source(manifest, name) as source, target.open("wb") as file:
                    for offset in range(0, source.size, _PART_BYTES):
                        file.write(piece[: source.read_into(piece[: source.size - offset], offset)])
                if file_checksums(target) != manifest.files[name]:
                    raise CheckpointDamagedError(f"{name} arrived damaged")
            yield folder

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        self._claim(_claim_of(step, token))

    def _claim(self, note: str) -> None:
        self._objects.put(note, json.dumps(Process.current().to_dict()).encode())

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[_RemoteSink]:
        with self._objects.writer(f"step_{step}/{token}/{name}") as write:
            yield _RemoteSink(write)

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        with _temporary_folder() as folder:
            yield folder / part
            for path in sorted((folder / part).rglob("*")):
                if path.is_file():
                    self._upload(path, step, token, path.relative_to(folder).as_posix())

    def _upload(self, path: Path, step: int, token: str, name: str) -> None:
        with path.open("rb") as file, self.sink(step, token, name) as sink:
            while data := file.read(_PART_BYTES):
                sink.write(memoryview(data))

    def folder_of(self, token: str) -> str:
        return token

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        before = {match[2] for name in self._objects.list(f"step_{step}") if (match := _ATTEMPT.match(name))}
        self._await_removals(step)
        self._objects.put(_manifest_of(step), manifest)
        try:
            self._objects.delete([_claim_of(step, token)])
            self._remove_replaced(step, token, before - {token})
        except (FetchError, CheckpointError) as problem:  # the step is committed; a sweep removes the rest
            _log.warning("%s: the previous contents of step %d could not be removed: %s", self.name, step, problem)

    def _remove_replaced(self, step: int, token: str, others: set[str]) -> None:
        """Remove the earlier attempts of a step, unless one of them is the step again."""
        for other in others:
            being_made = self._objects.size(_claim_of(step, other)) is not None
            if not being_made and self.manifest(step).folder == token:
                self._objects.delete(list(self._objects.list(f"step_{step}/{other}")))

    def abandon(self, step: int, token: str) -> None:
        """Remove an attempt unless it may have become the step: the response to a successful request can get lost."""
        with suppress(Exception):
            try:
                if self.manifest(step).folder == token:
                    return
            except StepRemovedError:
                pass
            self._objects.delete([*self._objects.list(f"step_{step}/{token}"), _claim_of(step, token)])

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        """Remove a step. A removal writes its claim, then looks for attempts; a commit has written its claim, then
        looks for removals.

        One of the two sees the other, without a lock: a removal gives way, a commit waits.
        """
        removal = f".removals/step_{step}.{secrets.token_hex(8)}"
        self._claim(removal)
        try:
            being_made = {name.rsplit(".", 1)[1] for name in self._alive(_claim_of(step, ""))}
            if only is not None and (being_made or not self._is_current(only)):
                return False
            names = self._objects.list(f"step_{step}")
            files = {name: match[2] for name in names if (match := _ATTEMPT.match(name))}
            files = {name: token for name, token in files.items() if token not in being_made}
            claims = [_claim_of(step, token) for token in set(files.values())]
            for claim in claims:  # so that other processes can sweep if this one dies in between
                self._claim(claim)
            self._objects.delete([_manifest_of(step)])  # from here on the step does not exist
        finally:
            self._objects.delete([removal])
        self._objects.delete([*files, *claims])
        return _manifest_of(step) in names

    def _is_current(self, manifest: Manifest) -> bool:
        try:
            return self.manifest(manifest.step) == manifest
        except CheckpointError:
            return False

    def _alive(self, prefix: str) -> list[str]:
        """Return the claims whose process is not known to be dead."""
        claims = self._objects.list(prefix.split("/", 1)[0])  # a prefix ends with a folder
        return [name for name in claims if name.startswith(prefix) and not self._is_dead(name)]

    def _await_removals(self, step: int) -> None:
        limit = time.monotonic() + _REMOVAL_TIMEOUT
        while removals := self._alive(f".removals/step_{step}."):
            if time.monotonic() > limit:
                _log.warning(
                    "%s: another process has been removing step %d for %d s. It is taken for dead.",
                    self.name,
                    step,
                    _REMOVAL_TIMEOUT,
                )
                self._objects.delete(removals)
                return
            time.sleep(0.2)

    def _sweep(self) -> None:
        """Remove attempts of dead processes, and objects without a claim that are unchanged for a day."""
        names = self._objects.list()
        removals = [name for name in names if name.startswith(".removals/")]
        stale = time.time() - STALE
        self._objects.delete([name for name in removals if names[name].changed < stale or self._is_dead(name)])
        attempts: dict[tuple[str, str], list[str]] = {}
        for name in names:
            if match := _ATTEMPT.match(name):
                attempts.setdefault((match[1], match[2]), []).append(name)
            elif name.startswith(".attempts/step_"):
                step, _, token = name.removeprefix(".attempts/step_").partition(".")
                attempts.setdefault((step, token), [])
        for (step, token), files in attempts.items():
            claim = _claim_of(step, token)
            youngest = max(names[name].changed for name in [*files, claim] if name in names)
            if not (youngest < stale or (claim in names and self._is_dead(claim))):
                continue
            current = self._current_folder(step, names)
            if current not in (token, _UNKNOWN):
                self._objects.delete([*files, claim])
            elif current == token and claim in names:
                self._objects.delete([claim])  # killed right after its commit

    def _current_folder(self, step: str, names: Mapping[str, Object]) -> str | None:
        """Return the token of the attempt that is the step; _UNKNOWN if its manifest cannot be read."""
        if _manifest_of(step) not in names:
            return None
        try:
            return self.manifest(int(step)).folder
        except StepRemovedError:
            return None
        except CheckpointError:  # damaged, or of a newer version: nothing of it is touched
            return _UNKNOWN

    def _is_dead(self, claim: str) -> bool:
        try:
            process = Process.parse(json.loads(self._objects.get(claim) or b"null"))
        except ValueError:
            process = None
        return process is not None and process.is_dead()


def _manifest_of(step: int | str) -> str:
    return f"step_{step}/{manifests.NAME}"


def _claim_of(step: int | str, token: str) -> str:
    return f".attempts/step_{step}.{token}"


class RemoteBoard:
    """Board of objects."""

    poll_interval = 0.5

    def __init__(self, objects: Objects) -> None:
        self._objects, self.name = objects, objects.name

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(f".ranks/{name}", data)

    def get(self, name: str) -> bytes | None:
        return self._objects.get(f".ranks/{name}")

    def names(self, group: str = "") -> list[str]:
        return sorted(name.removeprefix(".ranks/") for name in self._objects.list(f".ranks/{group}".rstrip("/")))

    def remove(self, names: Sequence[str]) -> None:
        self._objects.delete([f".ranks/{name}" for name in names])


class _RemoteSink:
    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write

    def write(self, data: memoryview, /) -> None:
        self._write(data)


class _RemoteSource:
    """Source over an object."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self._objects, self._path, self.size = objects, path, size
        self.readers = 4 if size and objects.has_ranges(path) else 1
        self.chunk = (8 << 20) if self.readers > 1 else (1 << 20)  # a request each, or a part of one
        self._parts: Iterator[memoryview] = iter(())
        self._rest, self._offset = memoryview(b""), size + 1  # bytes received and not yet read, and their offset

    def read_into(self, data: memoryview, offset: int, /) -> int:
        try:
            if self.readers > 1 and len(data):
                return self._objects.read_into(self._path, data, offset)
            return self._read_in_order(data, offset)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._path} is missing") from None

    def _read_in_order(self, data: memoryview, offset: int) -> int:
        """Read from a server without range requests: sequential reads make it send the object once."""
        failures = done = 0
        while done < len(data):
            if offset + done < self._offset:
                self._parts, self._rest, self._offset = self._objects.stream(self._path), memoryview(b""), 0
            skipped = min(offset + done - self._offset, len(self._rest))
            self._rest, self._offset = self._rest[skipped:], self._offset + skipped
            part = self._rest[: len(data) - done] if self._offset == offset + done else self._rest[:0]
            data[done : done + len(part)] = part
            self._rest, self._offset, done = self._rest[len(part) :], self._offset + len(part), done + len(part)
            if done < len(data):
                try:
                    self._rest = next(self._parts, memoryview(b""))
                except FetchError:
                    failures += 1
                    if failures > _RETRIES:
                        raise
                    self._offset = self.size + 1  # from the beginning
                    continue
                if not len(self._rest):
                    break
        return done

    def reopen(self) -> None:
        return None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="midepoch-checkpoint-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
