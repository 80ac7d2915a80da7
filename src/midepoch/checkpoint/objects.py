"""An object store, by obstore: what a folder of checkpoints needs of it.

Objects appear whole or not at all, and a list shows what was written before it. Passing faults are tried again by
obstore. (pyarrow, which reads the data, is no good here: it puts an empty object where the last one of a "folder" was
removed, which some servers take for a file where a folder should be.)

Errors of obstore end here: what is raised has their text without credentials, and is chained to none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from midepoch.address import Address
from midepoch.errors import FetchError
from midepoch.reasons import reason
from midepoch.redaction import Secrets
from midepoch.sources.addresses import check_endpoint, native_options

T = TypeVar("T")
_PART_BYTES = 16 << 20
# The names that from_files takes, which are pyarrow's; anything else is handed to obstore as it is.
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


class Objects:
    """Objects below an address like ``s3://bucket/run``. Raises FetchError when all tries have failed."""

    def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
        given, options = Address(address.rstrip("/")), dict(storage_options or {})
        self._secrets = Secrets.of(given, options)
        self.name, target = given.public, given.reveal()
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
            lambda _, text: ValueError(f"checkpoints cannot be kept in {self.name}: {text}"),
        )
        self._ranges: bool | None = None

    def list(self, below: str = "") -> dict[str, Object]:
        """All objects below a name, by their names."""
        found = self._call("list", prefix=below or None)
        return {entry["path"]: Object(entry["size"], entry["last_modified"].timestamp()) for entry in found}

    def size(self, name: str) -> int | None:
        """The size of an object, or None if there is none."""
        try:
            return int(self._call("head", name)["size"])
        except FileNotFoundError:
            return None

    def get(self, name: str) -> bytes | None:
        """A small object, or None."""
        try:
            return bytes(self._call("get", name))
        except FileNotFoundError:
            return None

    def has_ranges(self, name: str) -> bool:
        """Check that the server can send a part of an object; asked once, with an object that is not empty."""
        if self._ranges is None:
            try:
                self._call("get_range", name, start=0, length=1)
                self._ranges = True
            except FetchError as problem:
                if "non-partial response" not in str(problem):
                    raise
                self._ranges = False
        return self._ranges

    def read_into(self, name: str, data: memoryview, at: int) -> int:
        """A range of an object; how many bytes came."""
        came = self._call("get_range", name, start=at, length=len(data))
        data[: len(came)] = memoryview(came)
        return len(came)

    def stream(self, name: str) -> Iterator[memoryview]:
        """All of an object, in parts."""
        parts = self._do(name, lambda: iter(self._obstore.get(self._store, name).stream(min_chunk_size=1 << 20)))
        while (part := self._do(name, lambda: next(parts, None))) is not None:
            yield memoryview(part)

    def put(self, name: str, data: bytes) -> None:
        self._call("put", name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        """A function that adds to a new object, in parts; there when the context is left without an error."""
        writer = self._call("open_writer", name, buffer_size=_PART_BYTES)

        def write(data: memoryview) -> None:
            self._do(name, lambda: writer.write(data))

        yield write
        self._do(name, writer.close)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, as far as they are there."""
        if names:
            with suppress(FileNotFoundError):
                self._call("delete", list(names))

    def _call(self, what: str, *arguments: Any, **options: Any) -> Any:
        def call() -> Any:
            found = getattr(self._obstore, what)(self._store, *arguments, **options)
            # Lists and bodies come when they are asked for, and so do their errors.
            return found.collect() if what == "list" else found.bytes() if what == "get" else found

        return self._do(arguments[0] if arguments and isinstance(arguments[0], str) else "", call)

    def _do(self, name: str, action: Callable[[], T]) -> T:
        """Do something with an object. Raises FileNotFoundError or FetchError."""

        def failure(problem: Exception, text: str) -> Exception:
            kind = FileNotFoundError if isinstance(problem, FileNotFoundError) else FetchError
            return kind(f"{self.name}/{name}: {text}")

        return self._clean(action, failure)

    def _clean(self, action: Callable[[], T], failure: Callable[[Exception, str], Exception]) -> T:
        try:
            return action()
        except Exception as problem:
            text = reason(problem).split("\n\nDebug source", 1)[0]
            clean = failure(problem, self._secrets.clean(text))
        raise clean  # not where it was caught: errors that are chained are shown as they are


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
    """What boto3 finds (profiles, single sign-on), where it is installed: obstore knows fewer places."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):
        return None
