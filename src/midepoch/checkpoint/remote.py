"""A folder of checkpoints in an object store, where nothing can be renamed: the manifest, written last, is the commit.

step_100/manifest.json        names the folder that holds the files of this step
step_100/TOKEN/…              the files of one attempt
.attempts/step_100.TOKEN      who makes the attempt
.removals/step_100.TOKEN      who removes the step
.ranks/…                      notes between ranks
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.directory import STALE, STEP, Board, Process, VanishedError
from midepoch.checkpoint.files import Source, sums_of
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.objects import Object, Objects
from midepoch.errors import CheckpointDamagedError, CheckpointError, FetchError

_ATTEMPT = re.compile(r"step_(\d{1,19})/([0-9a-f]+)/")
_MANIFEST = re.compile(STEP.pattern.removesuffix("\\Z") + "/" + re.escape(manifests.NAME) + "\\Z")
_PART_BYTES = 16 << 20
_TRIES = 3
_UNKNOWN = "?"
_PATIENCE = 300.0
"""Seconds that a commit waits while the step of its number is removed: a few requests, each tried for two minutes."""
_log = logging.getLogger("midepoch")


class RemoteDirectory:
    """Steps as objects. A Directory, see there."""

    scratch_is_own = True

    def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._objects = Objects(address, storage_options)
        self.name = self._objects.name
        self.board: Board = RemoteBoard(self._objects)

    def steps(self) -> list[int]:
        return sorted({int(match[1]) for name in self._objects.list() if (match := _MANIFEST.match(name))})

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = f"step_{manifest.step}/{manifest.folder}/"
        return {name.removeprefix(folder): found.size for name, found in self._objects.list(folder).items()}

    def manifest(self, step: int) -> Manifest:
        data = self._objects.get(f"step_{step}/{manifests.NAME}")
        if data is None:
            raise VanishedError(f"{self.name} has no step {step}")
        found = manifests.from_bytes(data)
        if found.step != step:
            raise CheckpointDamagedError(f"the manifest is that of step {found.step}")
        return found

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[Source]:
        path = f"step_{manifest.step}/{manifest.folder}/{name}"
        size = self._objects.size(path)
        if size is None:
            if self._objects.size(f"step_{manifest.step}/{manifests.NAME}") is None:
                raise VanishedError(f"step {manifest.step} has just been removed from {self.name}")
            raise CheckpointDamagedError(f"{name} is missing")
        yield _RemoteSource(self._objects, path, size)

    @contextmanager
    def fetched(self, manifest: Manifest) -> Iterator[Path]:
        with _temporary() as folder:
            piece = memoryview(bytearray(_PART_BYTES))
            for name in manifest.files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with self.source(manifest, name) as source, target.open("wb") as file:
                    for at in range(0, source.size, _PART_BYTES):
                        file.write(piece[: source.read_into(piece[: source.size - at], at)])
                if sums_of(target) != manifest.files[name]:
                    raise CheckpointDamagedError(f"{name} came damaged")
            yield folder

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        self._claim(f".attempts/step_{step}.{token}")

    def _claim(self, note: str) -> None:
        self._objects.put(note, json.dumps(Process.here().note()).encode())

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[_RemoteSink]:
        with self._objects.writer(f"step_{step}/{token}/{name}") as write:
            yield _RemoteSink(write)

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        with _temporary() as folder:
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
        self._objects.put(f"step_{step}/{manifests.NAME}", manifest)
        try:
            self._objects.delete([f".attempts/step_{step}.{token}"])
            self._clean(step, token, before - {token})
        except (FetchError, CheckpointError) as problem:  # the step is there; what is left is swept another time
            _log.warning("%s: what step %d has replaced could not be removed: %s", self.name, step, problem)

    def _clean(self, step: int, token: str, others: set[str]) -> None:
        """Remove what a step was before, unless that is what it is again."""
        for other in others:
            being_made = self._objects.size(f".attempts/step_{step}.{other}") is not None
            if not being_made and self.manifest(step).folder == token:
                self._objects.delete(list(self._objects.list(f"step_{step}/{other}")))

    def abandon(self, step: int, token: str) -> None:
        """Not if it may have become the step: the answer to a request can get lost, and the request not."""
        with suppress(Exception):
            try:
                if self.manifest(step).folder == token:
                    return
            except VanishedError:
                pass
            self._objects.delete([*self._objects.list(f"step_{step}/{token}"), f".attempts/step_{step}.{token}"])

    def remove(self, step: int, only: Manifest | None = None) -> bool:
        """Who removes says so and then looks for attempts; who commits has said so and then looks for removals.

        One of the two sees the other, without a lock: a removal gives way, a commit waits.
        """
        removal = f".removals/step_{step}.{secrets.token_hex(8)}"
        self._claim(removal)
        try:
            being_made = {name.rsplit(".", 1)[1] for name in self._alive(f".attempts/step_{step}.")}
            if only is not None and (being_made or not self._is_step(only)):
                return False
            names = self._objects.list(f"step_{step}")
            inside = {name: match[2] for name in names if (match := _ATTEMPT.match(name))}
            inside = {name: token for name, token in inside.items() if token not in being_made}
            notes = [f".attempts/step_{step}.{token}" for token in set(inside.values())]
            for note in notes:  # so that others can sweep, should this process die in the middle
                self._claim(note)
            self._objects.delete([f"step_{step}/{manifests.NAME}"])  # from here on the step is not there
        finally:
            self._objects.delete([removal])
        self._objects.delete([*inside, *notes])
        return f"step_{step}/{manifests.NAME}" in names

    def _is_step(self, manifest: Manifest) -> bool:
        try:
            return self.manifest(manifest.step) == manifest
        except CheckpointError:
            return False

    def _alive(self, prefix: str) -> list[str]:
        """Notes whose process is not known to be dead."""
        notes = self._objects.list(prefix.split("/", 1)[0])  # a prefix ends with a folder
        return [name for name in notes if name.startswith(prefix) and not self._is_dead(name)]

    def _await_removals(self, step: int) -> None:
        limit = time.monotonic() + _PATIENCE
        while removals := self._alive(f".removals/step_{step}."):
            if time.monotonic() > limit:
                _log.warning(
                    "%s: another process has been removing step %d for %d s. It is taken for dead.",
                    self.name,
                    step,
                    _PATIENCE,
                )
                self._objects.delete(removals)
                return
            time.sleep(0.2)

    def _sweep(self) -> None:
        """Remove attempts whose process is known to be dead, and objects of none that nobody has added to for a day."""
        names = self._objects.list()
        removals = [name for name in names if name.startswith(".removals/")]
        stale = time.time() - STALE
        self._objects.delete([name for name in removals if names[name].changed < stale or self._is_dead(name)])
        inside: dict[tuple[str, str], list[str]] = {}
        for name in names:
            if match := _ATTEMPT.match(name):
                inside.setdefault((match[1], match[2]), []).append(name)
            elif name.startswith(".attempts/step_"):
                inside.setdefault(tuple(name.removeprefix(".attempts/step_").split(".", 1)), [])  # type: ignore[arg-type]
        for (step, token), own in inside.items():
            note = f".attempts/step_{step}.{token}"
            youngest = max(names[name].changed for name in [*own, note] if name in names)
            dead = youngest < stale or (note in names and self._is_dead(note))
            current = self._folder_of(step, names) if dead else None
            if current == _UNKNOWN:
                continue
            if dead and current != token:
                self._objects.delete([*own, note])
            elif dead and note in names:
                self._objects.delete([note])  # killed just after its commit

    def _folder_of(self, step: str, names: Mapping[str, Object]) -> str | None:
        """The attempt that is the step, as far as that can be read."""
        if f"step_{step}/{manifests.NAME}" not in names:
            return None
        try:
            return self.manifest(int(step)).folder
        except VanishedError:
            return None
        except CheckpointError:  # damaged, or of a newer version: nothing of it is touched
            return _UNKNOWN

    def _is_dead(self, note: str) -> bool:
        try:
            process = Process.of(json.loads(self._objects.get(note) or b"null"))
        except ValueError:
            process = None
        return process is not None and process.is_dead()


class RemoteBoard:
    """Notes as objects."""

    patience = 0.5

    def __init__(self, objects: Objects) -> None:
        self._objects, self.name = objects, objects.name

    def groups(self) -> list[str]:
        return sorted({name.split("/")[1] for name in self._objects.list(".ranks")})

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(f".ranks/{name}", data)

    def get(self, name: str) -> bytes | None:
        return self._objects.get(f".ranks/{name}")

    def names(self, group: str) -> list[str]:
        return sorted(name.removeprefix(".ranks/") for name in self._objects.list(f".ranks/{group}"))

    def remove(self, names: Sequence[str]) -> None:
        self._objects.delete([f".ranks/{name}" for name in names])


class _RemoteSink:
    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write

    def write(self, data: memoryview, /) -> None:
        self._write(data)


class _RemoteSource:
    """An object. A Source, see there."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self._objects, self._path, self.size = objects, path, size
        self.readers = 4 if size and objects.has_ranges(path) else 1
        self.chunk = (8 << 20) if self.readers > 1 else (1 << 20)  # a request each, or a part of one
        self._parts: Iterator[memoryview] = iter(())
        self._rest, self._at = memoryview(b""), size + 1  # of the parts: what has come and was not read, and its place

    def read_into(self, data: memoryview, at: int, /) -> int:
        try:
            if self.readers > 1 and len(data):
                return self._objects.read_into(self._path, data, at)
            return self._read_on(data, at)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._path} is missing") from None

    def _read_on(self, data: memoryview, at: int) -> int:
        """Read from a server that sends objects from their beginning only: in order, so that it sends each once."""
        failures = done = 0
        while done < len(data):
            if at + done < self._at:
                self._parts, self._rest, self._at = self._objects.stream(self._path), memoryview(b""), 0
            skipped = min(at + done - self._at, len(self._rest))
            self._rest, self._at = self._rest[skipped:], self._at + skipped
            part = self._rest[: len(data) - done] if self._at == at + done else self._rest[:0]
            data[done : done + len(part)] = part
            self._rest, self._at, done = self._rest[len(part) :], self._at + len(part), done + len(part)
            if done < len(data):
                try:
                    self._rest = next(self._parts, memoryview(b""))
                except FetchError:
                    failures += 1
                    if failures > _TRIES:
                        raise
                    self._at = self.size + 1  # from the beginning
                    continue
                if not len(self._rest):
                    break
        return done

    def again(self) -> None:
        return None


@contextmanager
def _temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="midepoch-checkpoint-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
