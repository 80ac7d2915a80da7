"""Client of an object store, by obstore: the operations that a store of checkpoints needs.

Objects appear complete or not at all, and a listing shows everything written before it. obstore retries transient
faults. (pyarrow, which reads the data, does not work here: it writes an empty object where the last one of a "folder"
was removed, which some servers take for a file in place of the folder.)

Errors of obstore are replaced: errors raised here have their text without credentials, and no chained exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from midepoch._internal.address import Address
from midepoch._internal.redaction import Secrets
from midepoch._internal.values import reason
from midepoch.errors import FetchError
from midepoch.sources.addresses import check_endpoint, native_options

T = TypeVar("T")
_PART_BYTES = 16 << 20
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


class Objects:
    """Objects below an address like ``s3://bucket/run``. Raises FetchError when all retries have failed."""

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
    def writer(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        """Function that appends to a new object; it exists when the context is left without an error."""
        writer = self._call("open_writer", name, buffer_size=_PART_BYTES)

        def write(data: memoryview) -> None:
            self._do(name, lambda: writer.write(data))

        yield write
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
