"""Store in an object store, where nothing can be renamed: the manifest, written last, is the commit.

step_100/manifest.json        names the folder with the files of this step
step_100/TOKEN/…              the files of one attempt
.attempts/step_100.TOKEN      the process that makes the attempt
.removals/step_100.TOKEN      the process that removes the step
.ranks/…                      notes between ranks

The client is obstore. Objects appear complete or not at all, and a listing shows everything written before it. obstore
retries transient faults. (pyarrow, which reads the data, does not work here: it writes an empty object where the last
one of a "folder" was removed, which some servers take for a file in place of the folder.)

Errors of obstore are replaced: errors raised here have their text without credentials, and no chained exception.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
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
from midepoch.checkpoint.disk import LocalSource, write_at
from midepoch.checkpoint.files import FileSource, Sink, verify_file
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import STALE, STEP, Board, Process, StepRemovedError
from midepoch.errors import CheckpointDamagedError, CheckpointError, FetchError
from midepoch.storage.address import Address
from midepoch.storage.addresses import check_endpoint, native_options
from midepoch.storage.redaction import Secrets

T = TypeVar("T")
# The names that from_files accepts, which are pyarrow's; any other is passed to obstore unchanged.
_NAMES = {
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
    "session_token": "session_token",
    "endpoint_override": "endpoint",
    "anonymous": "skip_signature",
}


class Object(NamedTuple):
    size: int
    changed: float


class _ObjectSink(NamedTuple):
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
        self._store: Any = self._clean(
            lambda: from_url(target, **_options(target, options)),
            lambda _, text: ValueError(f"checkpoints cannot be saved to {self.name}: {text}"),
        )
        self._ranges: bool | None = None

    def list(self, below: str = "") -> dict[str, Object]:
        """Return all objects below a name, by their names."""
        entries = self._call("list", prefix=below or None)
        return {entry["path"]: Object(entry["size"], entry["last_modified"].timestamp()) for entry in entries}

    def size(self, name: str) -> int | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            return int(self._call("head", name)["size"])
        except FileNotFoundError:
            return None

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

        def failure(problem: Exception, text: str) -> Exception:
            error = FileNotFoundError if isinstance(problem, FileNotFoundError) else FetchError
            return error(f"{self.name}/{name}: {text}")

        return self._clean(action, failure)

    def _clean(self, action: Callable[[], T], failure: Callable[[Exception, str], Exception]) -> T:
        try:
            return action()
        except Exception as problem:
            text = reason(problem).split("\n\nDebug source", 1)[0]
            clean = failure(problem, self._secrets.clean(text))
        raise clean  # outside of the except block: a chained exception would show its text with credentials


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
        provider = _boto3_credentials()
        if provider is not None:
            options["credential_provider"] = provider
    return options


def _boto3_credentials() -> Any:
    """Return boto3's credentials (profiles, single sign-on) if it is installed: obstore looks in fewer places."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):
        return None


_ATTEMPT = re.compile(r"step_(\d{1,19})/([0-9a-f]+)/")
_MANIFEST = re.compile(STEP.pattern.removesuffix("\\Z") + "/" + re.escape(manifests.NAME) + "\\Z")
_PART_BYTES = 16 << 20
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
        self.board: Board = self._objects

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
        if not size or self._objects.has_ranges(path):
            yield _RemoteSource(self._objects, path, size)
            return
        with tempfile.TemporaryFile(prefix="midepoch-checkpoint-", buffering=0) as file:
            for part in self._objects.stream(path):
                file.write(part)
            yield LocalSource(file.fileno())

    @contextmanager
    def local_copy(self, manifest: Manifest) -> Iterator[Path]:
        with _temporary_folder() as folder:
            for name, sums in manifest.files.items():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with self.source(manifest, name) as source, target.open("wb") as file:
                    verify_file(source, sums, name, partial(write_at, file.fileno()))
            yield folder

    def begin(self, step: int, token: str) -> None:
        self._sweep()
        self._claim(_claim_of(step, token))

    def _claim(self, note: str) -> None:
        self._objects.put(note, json.dumps(Process.current()).encode())

    def sink(self, step: int, token: str, name: str) -> AbstractContextManager[Sink]:
        return self._objects.writer(f"step_{step}/{token}/{name}")

    @contextmanager
    def scratch(self, step: int, token: str, part: str) -> Iterator[Path]:
        with _temporary_folder() as folder:
            yield folder / part
            for path in sorted(path for path in (folder / part).rglob("*") if path.is_file()):
                name = path.relative_to(folder).as_posix()
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
            if not being_made and self._current_token(step) == token:
                self._objects.delete(list(self._objects.list(f"step_{step}/{other}")))

    def abandon(self, step: int, token: str) -> None:
        """Remove an attempt unless it may have become the step: the response to a successful request can get lost."""
        with suppress(Exception):
            if self._current_token(step) not in (token, _UNKNOWN):
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
            if only is not None and (being_made or self._current_token(step) != only.folder):
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
            current = self._current_token(step)
            if current not in (token, _UNKNOWN):
                self._objects.delete([*files, claim])
            elif current == token and claim in names:
                self._objects.delete([claim])  # killed right after its commit

    def _current_token(self, step: int | str) -> str | None:
        """Return the token of the attempt that is the step; None if there is none, _UNKNOWN if it cannot be read."""
        try:
            return self.manifest(int(step)).folder
        except StepRemovedError:
            return None
        except CheckpointError:  # damaged, or of a newer version: nothing of it is touched
            return _UNKNOWN

    def _is_dead(self, claim: str) -> bool:
        data = self._objects.get(claim)
        return data is not None and Process(*json.loads(data)).is_dead()


def _manifest_of(step: int | str) -> str:
    return f"step_{step}/{manifests.NAME}"


def _claim_of(step: int | str, token: str) -> str:
    return f".attempts/step_{step}.{token}"


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

    def reopen(self) -> None:
        return None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="midepoch-checkpoint-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
