"""Resolution of an address to a store and a path in it.

Credentials in an address become options of the store. Paths, indexes and cache names contain none.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import pyarrow.fs as fs

from midepoch.errors import DataNotFoundError, FetchError, FormatError, MidepochError
from midepoch.storage.address import Address, Link, Secrets, is_mistyped
from midepoch.storage.hub import Hub
from midepoch.storage.hub_paths import is_hub_path, parse_hub_path, refuse_web_page
from midepoch.storage.open_files import FsspecHandler, is_foreign, options_of, redact_logs
from midepoch.storage.stores import Retry, Store

_NATIVE = {"s3", "gs", "gcs", "az", "abfs", "abfss"}
_CONNECT, _REQUEST = 10.0, 30.0
"""Seconds for a connection, and for the next bytes of an answer."""
_HUB_RETRY = Retry(budget=660.0)
"""The Hub counts requests in windows of 5 minutes, and a wait lasts until the window ends. Two such waits fit."""


def check_options(given: Any) -> None:
    """Raise TypeError for ``storage_options`` that are not a dict. Their value may hold a secret."""
    if not isinstance(given, Mapping | None):
        kind = type(given).__name__
        raise TypeError(f'storage_options takes a dict, as in storage_options={{"region": "eu-west-1"}}, got a {kind}.')


def resolve(
    path: str, storage_options: Mapping[str, Any] | None = None, filesystem: Any = None, retry: Retry | None = None
) -> tuple[Store, str]:
    """Return the store of a path or URL, and the path in it, without credentials."""
    given, address = retry, Address(path)
    if not isinstance(given, Retry | None):
        raise TypeError(f"retry takes a midepoch.Retry, as in retry=midepoch.Retry(attempts=10), got {given!r:.60}")
    check_options(storage_options)
    retry = given or Retry()
    check_utf8(path if "://" in path else os.path.abspath(path))
    if filesystem is not None:
        return _given(filesystem, address, retry)
    if "://" not in path:
        if is_mistyped(path) and not os.path.exists(path):
            raise ValueError(
                f"{address} is an address without '://' and not a local path. Write it as scheme://host/path"
            )
        if storage_options:
            raise ValueError(f"storage_options were given, but {address} is a local path. Add a scheme like s3://")
        return Store(fs.LocalFileSystem(), retry=retry), os.path.abspath(os.path.expanduser(path))
    scheme = path.split("://", 1)[0].lower()
    if scheme == "file":
        return Store(fs.LocalFileSystem(), retry=retry), os.path.abspath(unquote(path.split("://", 1)[1]))
    if scheme in ("s3a", "s3n"):  # as Spark writes it
        return resolve(f"s3{path[len(scheme) :]}", storage_options, filesystem, given)
    refuse_web_page(path)
    options = dict(storage_options or {})
    secrets = Secrets.of(address, options)
    try:
        if is_hub_path(path):
            store = Store(Hub.of_options(options), "hf://", secrets, given or _HUB_RETRY)
            return store, parse_hub_path(path.split("://", 1)[1]).given
        if scheme in _NATIVE:
            return _native(address, options, secrets, retry)
        return _by_fsspec(scheme, address, options, secrets, retry)
    except MidepochError:
        raise
    except Exception as problem:  # raised below, since chained errors are shown with their credentials
        text = secrets.clean(str(problem))
        if scheme in _NATIVE or is_hub_path(path):
            failure: Exception = ValueError(f"storage_options for {scheme}:// cannot be used: {text}")
        elif isinstance(problem, FileNotFoundError):  # the archive that contains the files
            failure = DataNotFoundError(
                f"{address} cannot be opened, because {text} does not exist. Check the address."
            )
        elif isinstance(problem, (ImportError, ValueError)):
            failure = MidepochError(
                f"{scheme}:// cannot be opened: {text}. s3://, gs:// and az:// are read natively, "
                "others by fsspec, which needs the package for them."
            )
        elif isinstance(problem, OSError) or is_foreign(problem):
            failure = FetchError(f"{address} could not be opened: {text}")
        else:
            failure = MidepochError(f"{address} cannot be opened: {type(problem).__name__}: {text}")
    raise failure


def check_utf8(*paths: str) -> None:
    """Raise FormatError for a path that is not UTF-8: pyarrow cannot open it, and a state cannot name it."""
    try:
        "".join(paths).encode()
    except UnicodeEncodeError:
        path = next(path for path in paths if path.encode(errors="replace") != path.encode(errors="surrogatepass"))
        raise FormatError(f"{path!r}: the name of the file is not UTF-8. Rename it.") from None


def _given(filesystem: Any, address: Address, retry: Retry) -> tuple[Store, str]:
    scheme, mark, inner = address.public.rpartition("://")
    if isinstance(filesystem, fs.PyFileSystem) and type(filesystem.handler) is fs.FSSpecHandler:
        filesystem = filesystem.handler.fs
    if not isinstance(filesystem, fs.FileSystem):
        filesystem = fs.PyFileSystem(FsspecHandler(filesystem))
    if isinstance(filesystem, fs.LocalFileSystem):
        return Store(filesystem, retry=retry), os.path.abspath(os.path.expanduser(inner))
    secrets = Secrets.of(address, options_of(filesystem))
    return Store(filesystem, scheme + mark, secrets, retry), inner.rstrip("/")


def _native(address: Address, options: dict[str, Any], secrets: Secrets, retry: Retry) -> tuple[Store, str]:
    (link,) = address.links
    inner, given = native_options(link)
    options = {**given, **options}
    if link.scheme == "s3":
        made = _s3(tuple(sorted(s3_options(options).items())))
    elif link.scheme in ("gs", "gcs"):
        made = fs.GcsFileSystem(**options)
    else:
        account = options.pop("account_name", None) or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise ValueError("account_name is missing: give it, or set AZURE_STORAGE_ACCOUNT_NAME")
        made = fs.AzureFileSystem(account, **options)
    return Store(made, f"{link.scheme}://", secrets, retry), inner.rstrip("/")


def native_options(link: Link) -> tuple[str, dict[str, str]]:
    """Return the path and the options of an object store address: ``s3://KEY:SECRET@bucket?region=…``."""
    if "/" in link.userinfo:
        raise ValueError("the address contains a secret with a '/'. Write it as %2F, or use storage_options")
    if link.holds_credentials:
        raise ValueError(
            "the query of the address contains a credential and names that are not options. Use storage_options"
        )
    name, password = link.user
    user = {"access_key": name, "secret_key": password} if link.userinfo else {}
    return link.path, {**{each.name: each.value for each in link.parameters}, **user}


@lru_cache(maxsize=16)
def _s3(options: tuple[tuple[str, Any], ...]) -> fs.S3FileSystem:
    """Return one file system for equal options, so that connections are reused."""
    # Store.persist waits and retries within a budget; the SDK makes a single attempt.
    return fs.S3FileSystem(**{"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1), **dict(options)})


_S3_NAMES = {
    alias: name
    for name, aliases in {
        "access_key": "key access_key_id aws_access_key_id",
        "secret_key": "secret secret_access_key aws_secret_access_key",
        "session_token": "token aws_session_token",
        "anonymous": "anon skip_signature aws_skip_signature",
        "endpoint_override": "endpoint endpoint_url aws_endpoint aws_endpoint_url",
        "region": "region_name aws_region aws_default_region",
    }.items()
    for alias in aliases.split()
}
"""Names of fsspec, boto, ``deltalake`` and ``lance`` for options of pyarrow."""


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError for an endpoint with a user or a password: stores do not use them to sign requests."""
    if "@" in endpoint:
        raise ValueError("the endpoint contains a user or a password. Use access_key and secret_key instead")


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under pyarrow's names. Those of other libraries are accepted, too."""
    given = {**options, **options.get("client_kwargs", {})}
    given.pop("client_kwargs", None)
    found = {_S3_NAMES.get(name.lower(), name): value for name, value in given.items() if value is not None}
    if isinstance(found.get("anonymous"), str):
        found["anonymous"] = found["anonymous"].lower() in ("true", "1", "yes")
    environment = os.environ
    endpoint = (
        found.get("endpoint_override") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    )
    if endpoint:
        check_endpoint(endpoint)
        scheme, mark, host = endpoint.rpartition("://")
        found["endpoint_override"] = host.rstrip("/")
        if mark:
            found.setdefault("scheme", scheme)
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        found.setdefault("region", region)
    timeouts = {"connect_timeout": _CONNECT, "request_timeout": _REQUEST}
    return found | {name: float(found.get(name, seconds)) for name, seconds in timeouts.items()}


def _by_fsspec(
    scheme: str, address: Address, options: dict[str, Any], secrets: Secrets, retry: Retry
) -> tuple[Store, str]:
    try:
        import fsspec
    except ImportError:
        raise MidepochError(f"{scheme}:// needs fsspec: `pip install fsspec` and the package for {scheme}.") from None
    parts: list[str] = []
    for link in address.links:
        own = _fsspec_options(link)
        if own:  # options without a scheme are for the first address of a chain
            plain = {name: options.pop(name) for name in own if not parts and name in options}
            options[link.scheme] = _merged(own, _merged(plain, options.get(link.scheme, {})))
        parts.append(link.text if own is None else link.target)
    redact_logs()
    filesystem, inner = fsspec.core.url_to_fs("::".join(parts), **options)
    if Address(inner).identity != inner:
        raise ValueError(f"{address} contains a credential that fsspec leaves in the path. Use storage_options for it")
    is_address = "://" in inner  # as for a web server
    return Store(
        fs.PyFileSystem(FsspecHandler(filesystem)), "" if is_address else f"{scheme}://", secrets, retry
    ), inner


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options recursively. The given ones take precedence."""
    merged = {**own, **given}
    for name in own.keys() & given.keys():
        if isinstance(own[name], Mapping) and isinstance(given[name], Mapping):
            merged[name] = _merged(own[name], given[name])
    return merged


def _fsspec_options(link: Link) -> dict[str, Any] | None:
    """Return the credentials of an address as options of fsspec. None if fsspec reads them from the address itself."""
    if link.scheme in ("s3", "s3a"):
        if link.query or link.holds_credentials:
            raise ValueError(
                f"{link.public} is part of a chain, in which options are not read. Use storage_options for them"
            )
        return dict(zip(("key", "secret"), link.user, strict=True)) if link.userinfo else {}
    if link.scheme not in ("http", "https"):
        return None
    if not all(each.is_credential for each in link.parameters):
        raise ValueError(
            f"{link._replace(query='').public} has a query that is not a signature, and queries are not saved in "
            "an index. Use the plain address, and storage_options (of fsspec's http file system) for the query"
        )
    from aiohttp import ClientTimeout

    # fsspec waits 300 s for each request, whether or not anything arrives, and makes several to look at a file.
    own: dict[str, Any] = {"client_kwargs": {"timeout": ClientTimeout(sock_connect=_CONNECT, sock_read=_REQUEST)}}
    if link.userinfo:
        user = base64.b64encode(":".join(link.user).encode()).decode()
        own["client_kwargs"]["headers"] = {"Authorization": f"Basic {user}"}
    if link.parameters:
        own["params"] = {each.name: each.value for each in link.parameters}
    return own
