"""Store in an object store, where nothing can be renamed: the manifest, written last, is the commit.

step_100/TOKEN/manifest.json  a step, if no other of its copies is newer
step_100/TOKEN/…              its files
step_100/TOKEN/claim          the process that makes or removes this copy
.ranks/…                      notes between ranks

The client is obstore. Objects appear complete or not at all, and a listing shows everything written before it. obstore
retries transient faults. (pyarrow, which reads the data, does not work here: it writes an empty object where the last
one of a "folder" was removed, which some servers take for a file in place of the folder.)

Errors of obstore are replaced: errors raised here have their text without credentials, and no chained exception.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from midepoch._internal.values import reason
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint.files import FileSource, Sink, verify_file
from midepoch.checkpoint.local import LocalSource, write_at
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import NUMBER, STALE, Copy, Object, Process
from midepoch.errors import CheckpointDamagedError, FetchError
from midepoch.storage.address import Address, Secrets
from midepoch.storage.addresses import check_endpoint, native_options

T = TypeVar("T")
# The names that from_files accepts, which are pyarrow's; any other is passed to obstore unchanged.
_NAMES = {
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
    "session_token": "session_token",
    "endpoint_override": "endpoint",
    "anonymous": "skip_signature",
}


class _ObjectSink(NamedTuple):
    """Sink into a new object."""

    write: Callable[[memoryview], Any]


class Objects:
    """Objects below an address like ``s3://bucket/run``. Raises FetchError when all retries have failed."""

    poll_interval = 0.5

    def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
        given, options = Address(address.rstrip("/")), dict(storage_options or {})
        self._secrets = Secrets.of(given, options)
        self.name, target = given.public, given.raw
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as problem:
            raise ImportError(f'checkpoints in {self.name} need obstore: pip install "midepoch[store]"') from problem
        if given.links[0].scheme in ("s3", "s3a"):
            path, own = native_options(given.links[0])
            self.name = f"{given.links[0].scheme}://{path}".rstrip("/")
            target = self.name.replace("?", "%3F").replace("#", "%23")  # no query and no fragment, but a key
            options = {**own, **options}
        self._obstore: Any = obstore
        try:
            self._store: Any = self._do("", lambda: from_url(target, **_options(target, options)))
        except FetchError as problem:
            raise ValueError(f"checkpoints cannot be saved to {problem}") from None
        self._ranges: bool | None = None

    def list(self, below: str = "") -> dict[str, Object]:
        """Return all objects below a name, by their names."""
        entries = self._call("list", prefix=below or None)
        return {entry["path"]: Object(entry["size"], entry["last_modified"].timestamp()) for entry in entries}

    def size(self, name: str) -> int:
        """Return the size of an object. Raises FileNotFoundError."""
        return int(self._call("head", name)["size"])

    def get(self, name: str) -> bytes | None:
        """Return a small object, or None if it does not exist."""
        try:
            return bytes(self._call("get", name))
        except FileNotFoundError:
            return None

    def has_ranges(self, name: str) -> bool:
        """Return True if the server supports range requests; tried once, with an object that is not empty."""
        if self._ranges is None:
            try:
                self._call("get_range", name, start=0, length=1)
                self._ranges = True
            except FetchError as problem:
                if "non-partial response" not in str(problem):
                    raise
                self._ranges = False
        return self._ranges

    def read_into(self, name: str, data: memoryview, offset: int) -> int:
        """Read a range of an object; return the number of bytes received."""
        received = self._call("get_range", name, start=offset, length=len(data))
        data[: len(received)] = memoryview(received)
        return len(received)

    def stream(self, name: str) -> Iterator[memoryview]:
        """Iterate over the parts of an object."""
        parts = self._do(name, lambda: iter(self._obstore.get(self._store, name).stream(min_chunk_size=1 << 20)))
        while (part := self._do(name, lambda: next(parts, None))) is not None:
            yield memoryview(part)

    def put(self, name: str, data: bytes) -> None:
        self._call("put", name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[Sink]:
        """Sink into a new object; it exists when the context is left without an error."""
        writer = self._call("open_writer", name, buffer_size=_PART_BYTES)
        yield _ObjectSink(lambda data: self._do(name, lambda: writer.write(data)))
        self._do(name, writer.close)

    def delete(self, names: Sequence[str]) -> None:
        """Remove the objects that exist."""
        if names:
            with suppress(FileNotFoundError):
                self._call("delete", list(names))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        def call() -> Any:
            result = getattr(self._obstore, method)(self._store, *arguments, **options)
            # Listings and bodies are lazy, and so are their errors.
            return result.collect() if method == "list" else result.bytes() if method == "get" else result

        return self._do(arguments[0] if arguments and isinstance(arguments[0], str) else "", call)

    def _do(self, name: str, action: Callable[[], T]) -> T:
        """Run an action on an object. Raises FileNotFoundError or FetchError."""
        try:
            return action()
        except Exception as problem:
            text = self._secrets.clean(reason(problem).split("\n\nDebug source", 1)[0])
            error = FileNotFoundError if isinstance(problem, FileNotFoundError) else FetchError
        # Outside of the except block: a chained exception would show its text with credentials.
        raise error(f"{self.name}/{name}: {text}")


def _options(address: str, given: Mapping[str, Any]) -> dict[str, Any]:
    options = {_NAMES.get(name, name): value for name, value in given.items()}
    scheme = options.pop("scheme", None)
    endpoint = options.get("endpoint")
    check_endpoint(str(endpoint or ""))
    if endpoint and "://" not in str(endpoint):
        endpoint = options["endpoint"] = f"{scheme or 'https'}://{endpoint}"
    if str(endpoint or "").startswith("http://"):
        options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
    options.setdefault("retry_config", {"max_retries": 6, "retry_timeout": timedelta(minutes=2)})
    if address.startswith("s3://") and not {"access_key_id", "credential_provider", "skip_signature"} & set(options):
        with suppress(ImportError, ValueError):  # those of boto3 if it is installed: obstore looks in fewer places
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    return options


_FILE = re.compile(rf"step_{NUMBER}/([0-9a-f]+)/(.+)\Z")
_CLAIM = "claim"
_PART_BYTES = 16 << 20
_temporary_folder = partial(tempfile.TemporaryDirectory[str], prefix="midepoch-checkpoint-", ignore_cleanup_errors=True)


class RemoteStore:
    """Store with objects below a prefix."""

    scratch_is_private = True

    def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._objects = objects = Objects(address, storage_options)
        self.name, self.poll_interval = objects.name, objects.poll_interval
        self.put, self.get, self.list, self.delete = objects.put, objects.get, objects.list, objects.delete

    def source(self, place: str, name: str) -> FileSource:
        path = f"{place}/{name}"
        size = self._objects.size(path)
        if not size or self._objects.has_ranges(path):
            return _RemoteSource(self._objects, path, size)
        with tempfile.TemporaryFile(prefix="midepoch-checkpoint-", buffering=0) as file:
            for part in self._objects.stream(path):
                file.write(part)
            return LocalSource(os.dup(file.fileno()))

    def sink(self, place: str, name: str) -> AbstractContextManager[Sink]:
        return self._objects.writer(f"{place}/{name}")

    @contextmanager
    def scratch(self, place: str, name: str) -> Iterator[Path]:
        with _temporary_folder() as temporary:
            folder = Path(temporary)
            yield folder / name
            for path in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
                with path.open("rb") as file, self.sink(place, path.relative_to(folder).as_posix()) as sink:
                    while data := file.read(_PART_BYTES):
                        sink.write(memoryview(data))

    @contextmanager
    def local_copy(self, manifest: Manifest) -> Iterator[Path]:
        with _temporary_folder() as folder:
            for name, sums in manifest.files.items():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    verify_file(self.source(manifest.place, name), sums, name, partial(write_at, file.fileno()))
            yield Path(folder)

    def copies(self, step: int | None = None) -> Sequence[Copy]:
        copies: dict[str, Copy] = {}
        for name, entry in self._objects.list("" if step is None else f"step_{step}").items():
            if match := _FILE.match(name):
                place = self.attempt(int(match[1]), match[2])
                copy = copies.setdefault(place, Copy(int(match[1]), place, None))
                if match[3] == manifests.NAME:
                    copies[place] = copy._replace(signature=tuple(entry))
                elif match[3] == _CLAIM:
                    copies[place] = copy._replace(is_claimed=True)
        return tuple(copies.values())

    def attempt(self, step: int, token: str) -> str:
        return f"step_{step}/{token}"

    def claim(self, step: int, token: str) -> None:
        self._claim(self.attempt(step, token))

    def _claim(self, place: str) -> None:
        self._objects.put(f"{place}/{_CLAIM}", json.dumps(Process.current()).encode())

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        place = self.attempt(step, token)
        self._objects.put(f"{place}/{manifests.NAME}", manifest)
        return place

    def release(self, step: int, token: str) -> None:
        self._objects.delete([f"{self.attempt(step, token)}/{_CLAIM}"])

    def withdraw(self, copy: Copy) -> Copy:
        return copy  # no two copies have the same name

    def settle(self, copy: Copy) -> None:
        if (copy.is_claimed or copy.signature is None) and self._is_abandoned(copy):
            if copy.signature is None:
                self.discard(copy)
            else:
                self._objects.delete([f"{copy.place}/{_CLAIM}"])

    def discard(self, copy: Copy) -> None:
        if copy.signature is not None:
            self._claim(copy.place)  # so that other processes can continue if this one dies in between
            self._objects.delete([f"{copy.place}/{manifests.NAME}"])
        self._objects.delete([name for name in self._objects.list(copy.place) if not name.endswith(f"/{_CLAIM}")])
        self._objects.delete([f"{copy.place}/{_CLAIM}"])

    def _is_abandoned(self, copy: Copy) -> bool:
        """Return True if the process of a copy is dead, or nothing of it has changed for a day."""
        claim = self._objects.get(f"{copy.place}/{_CLAIM}")
        if claim is not None and Process(*json.loads(claim)).is_dead():
            return True
        changed = [entry.changed for entry in self._objects.list(copy.place).values()]
        return max(changed, default=0.0) < time.time() - STALE


class _RemoteSource:
    """Source over an object of a server with range requests."""

    chunk = 8 << 20  # a request each

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self._objects, self._path, self.size = objects, path, size

    def read_into(self, data: memoryview, offset: int, /) -> int:
        try:
            return self._objects.read_into(self._path, data, offset)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._path} is missing") from None
