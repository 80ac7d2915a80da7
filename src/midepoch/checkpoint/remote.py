"""A folder of checkpoints in an object store, where nothing can be renamed: the manifest, written last, is the commit.

step_100/manifest.json        names the folder that holds the files of this step
step_100/TOKEN/…              the files of one attempt
.attempts/step_100.TOKEN      who makes the attempt
.ranks/…                      notes between ranks
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.directory import STALE, STEP, Board, Process, VanishedError
from midepoch.checkpoint.files import Source
from midepoch.checkpoint.manifest import Manifest
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, DataNotFoundError
from midepoch.sources.stores import Entry, Store

T = TypeVar("T")
_ATTEMPT = re.compile(r"step_(\d{1,19})/([0-9a-f]+)/")
_PART_BYTES = 16 << 20


class RemoteDirectory:
    """Steps as objects. A Directory, see there."""

    scratch_is_own = True

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path.rstrip("/")
        self.name = store.name(self._path)
        self.board: Board = RemoteBoard(self)

    def at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def steps(self) -> list[int]:
        return sorted({int(match[1]) for name in self.listed("") if (match := _MANIFEST.match(name))})

    def listed(self, below: str) -> dict[str, Entry]:
        """All objects below a name, by their names."""
        entries = self._store.list(self.at(below).rstrip("/"))
        return {entry.path[len(self._path) + 1 :]: entry for entry in entries}

    def sizes(self, manifest: Manifest) -> dict[str, int]:
        folder = f"step_{manifest.step}/{manifest.folder}/"
        return {name.removeprefix(folder): entry.size for name, entry in self.listed(folder).items()}

    def get(self, name: str) -> bytes | None:
        """A small object, or None."""

        def read() -> bytes:
            with self._store.filesystem.open_input_stream(self.at(name)) as stream:
                return bytes(stream.read())

        try:
            return self._store.persist(self.at(name), "read", read)
        except DataNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """A small object: there whole or not at all."""

        def write() -> None:
            with self._store.filesystem.open_output_stream(self.at(name)) as stream:
                stream.write(data)

        self._store.persist(self.at(name), "written", write)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(DataNotFoundError):
                self._store.persist(self.at(name), "removed", lambda: self._store.filesystem.delete_file(self.at(name)))  # noqa: B023

    def manifest(self, step: int) -> Manifest:
        data = self.get(f"step_{step}/{manifests.NAME}")
        if data is None:
            raise VanishedError(f"{self.name} has no step {step}")
        found = manifests.from_bytes(data)
        if found.step != step:
            raise CheckpointDamagedError(f"the manifest is that of step {found.step}")
        return found

    @contextmanager
    def source(self, manifest: Manifest, name: str) -> Iterator[Source]:
        path = self.at(f"step_{manifest.step}/{manifest.folder}/{name}")
        entry = self._store.stat(path)
        if entry is None:
            raise CheckpointDamagedError(f"{name} is missing")
        yield _RemoteSource(self._store, entry)

    @contextmanager
    def fetched(self, manifest: Manifest) -> Iterator[Path]:
        with _temporary() as folder:
            for name in manifest.files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with self.source(manifest, name) as source, target.open("wb") as file:
                    piece = bytearray(_PART_BYTES)
                    for at in range(0, source.size, _PART_BYTES):
                        came = source.read_into(memoryview(piece), at)
                        file.write(memoryview(piece)[:came])
            yield folder

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        self.put(f".attempts/step_{step}.{token}", json.dumps(Process.here().note()).encode())

    @contextmanager
    def sink(self, step: int, token: str, name: str) -> Iterator[_RemoteSink]:
        path = self.at(f"step_{step}/{token}/{name}")
        # No retries around a stream: pyarrow has its own for each part of it.
        stream = self._store.filesystem.open_output_stream(path)
        try:
            yield _RemoteSink(stream)
        except BaseException:
            with suppress(Exception):
                stream.abort() if hasattr(stream, "abort") else None
            raise
        stream.close()

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
        self.put(f"step_{step}/{manifests.NAME}", manifest)
        self.delete([f".attempts/step_{step}.{token}"])
        old = [name for name in self.listed(f"step_{step}") if _is_other(name, token)]
        self.delete(old)

    def abandon(self, step: int, token: str) -> None:
        with suppress(Exception):
            self.delete([*self.listed(f"step_{step}/{token}"), f".attempts/step_{step}.{token}"])

    def remove(self, step: int) -> None:
        names = list(self.listed(f"step_{step}"))
        first = f"step_{step}/{manifests.NAME}"
        self.delete([first, *(name for name in names if name != first)])

    def _sweep(self) -> None:
        """Remove attempts whose process is known to be dead, and objects of none that nobody has added to for a day."""
        names = self.listed("")
        groups: dict[tuple[int, str], list[str]] = {}
        for name in names:
            if match := _ATTEMPT.match(name):
                groups.setdefault((int(match[1]), match[2]), []).append(name)
        notes = [name for name in names if name.startswith(".attempts/")]
        for (step, token), inside in groups.items():
            if self._folder_of(step, names) == token:
                continue
            note = f".attempts/step_{step}.{token}"
            youngest = max(names[name].mtime_ns for name in inside) / 1e9
            if self._is_dead(note) if note in names else youngest < time.time() - STALE:
                self.delete([*inside, note])
                notes = [other for other in notes if other != note]
        self.delete([note for note in notes if self._is_dead(note)])

    def _folder_of(self, step: int, names: dict[str, Entry]) -> str | None:
        if f"step_{step}/{manifests.NAME}" not in names:
            return None
        try:
            return self.manifest(step).folder
        except (CheckpointNotFoundError, CheckpointDamagedError):
            return None

    def _is_dead(self, note: str) -> bool:
        try:
            process = Process.of(json.loads(self.get(note) or b"null"))
        except ValueError:
            process = None
        return process is not None and process.is_dead()


_MANIFEST = re.compile(STEP.pattern.removesuffix("\\Z") + "/" + re.escape(manifests.NAME) + "\\Z")


def _is_other(name: str, token: str) -> bool:
    match = _ATTEMPT.match(name)
    return match is not None and match[2] != token


class RemoteBoard:
    """Notes as objects."""

    patience = 0.5

    def __init__(self, directory: RemoteDirectory) -> None:
        self._directory, self.name = directory, directory.name

    def groups(self) -> list[str]:
        return sorted({name.split("/")[1] for name in self._directory.listed(".ranks")})

    def put(self, name: str, data: bytes) -> None:
        self._directory.put(f".ranks/{name}", data)

    def get(self, name: str) -> bytes | None:
        return self._directory.get(f".ranks/{name}")

    def names(self, group: str) -> list[str]:
        return sorted(name.removeprefix(".ranks/") for name in self._directory.listed(f".ranks/{group}"))

    def remove(self, names: Sequence[str]) -> None:
        self._directory.delete([f".ranks/{name}" for name in names])


class _RemoteSink:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: memoryview, /) -> None:
        self._stream.write(data)


class _RemoteSource:
    """Opened for each read: several threads read at once, and a retry begins anew."""

    def __init__(self, store: Store, entry: Entry) -> None:
        self._store, self._entry, self.size = store, entry, entry.size

    def read_into(self, data: memoryview, at: int, /) -> int:
        wanted = min(len(data), self.size - at)

        def read() -> bytes:
            with self._store.open(self._entry) as file:
                return file.read_at(wanted, at)

        came = self._persist(read) if wanted > 0 else b""
        data[: len(came)] = came
        return len(came)

    def _persist(self, action: Callable[[], T]) -> T:
        return self._store.persist(self._entry.path, "read", action)


@contextmanager
def _temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="midepoch-checkpoint-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
