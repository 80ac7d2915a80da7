"""Which store an address means, and the path in it.

What is secret stays in memory: paths are kept without user names, passwords and queries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote

import pyarrow.fs as fs

from midepoch.errors import DataNotFoundError, MidepochError
from midepoch.sources.fsspec_files import Handler
from midepoch.sources.stores import Retry, Store

_NATIVE = {"s3", "gs", "gcs", "az", "abfs", "abfss"}


def resolve(
    path: str, storage_options: Mapping[str, Any] | None = None, filesystem: Any = None, retry: Retry | None = None
) -> tuple[Store, str]:
    """The store that a path or URL means, and the path in it, without credentials."""
    retry = retry or Retry()
    if filesystem is not None:
        return _given(filesystem, path, retry)
    if "://" not in path:
        if storage_options:
            raise ValueError(f"storage_options were given, but {path!r} is a local path: it needs a scheme like s3://")
        return Store(fs.LocalFileSystem(), retry=retry), os.path.abspath(os.path.expanduser(path))
    scheme = path.split("://", 1)[0].lower()
    if scheme == "file":
        return Store(fs.LocalFileSystem(), retry=retry), os.path.abspath(unquote(path.split("://", 1)[1]))
    options = dict(storage_options or {})
    if scheme in ("http", "https"):
        _refuse_credentials(path)
    if scheme not in _NATIVE:
        return _fsspec(scheme, path, options, retry)
    try:
        return _native(scheme, path, options, retry)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"storage_options for {scheme}:// cannot be used: {_without(problem, options)}") from None


def _refuse_credentials(path: str) -> None:
    """A signed address is its own credential, and would land in the index."""
    shown = path.split("?", 1)[0]
    host = shown.split("://", 1)[1].split("/", 1)[0]
    if "?" in path or "@" in host:
        shown = shown.replace(host, host.rsplit("@", 1)[-1])
        raise ValueError(
            f"{shown} comes with a query or a user name, which may be a credential and is not written to an index: "
            "give the plain address, and what it takes to be let in by storage_options (of fsspec's http file system)."
        )


def _given(filesystem: Any, path: str, retry: Retry) -> tuple[Store, str]:
    scheme = path.split("://", 1)[0] + "://" if "://" in path else ""
    inner = path.split("://", 1)[-1]
    if isinstance(filesystem, fs.PyFileSystem) and type(filesystem.handler) is fs.FSSpecHandler:
        filesystem = filesystem.handler.fs
    if not isinstance(filesystem, fs.FileSystem):
        filesystem = fs.PyFileSystem(Handler(filesystem))
    if isinstance(filesystem, fs.LocalFileSystem):
        return Store(filesystem, retry=retry), os.path.abspath(os.path.expanduser(inner))
    return Store(filesystem, scheme, _secrets_of(filesystem), retry), inner.rstrip("/")


def _secrets_of(filesystem: fs.FileSystem) -> tuple[str, ...]:
    try:
        options = filesystem.__reduce__()[1]
    except Exception:
        return ()
    return _values([each for each in options if isinstance(each, dict)])


def _native(scheme: str, path: str, options: dict[str, Any], retry: Retry) -> tuple[Store, str]:
    # By hand, because a key may hold all that means something in other addresses: # ? @ %
    host, slash, key = path.split("://", 1)[1].partition("/")
    if "@" in host:
        user, host = host.rsplit("@", 1)
        name, _, password = user.partition(":")
        options = {"access_key": unquote(name), "secret_key": unquote(password), **options}
    elif ":" in host and "@" in key:
        raise ValueError("the address holds a secret with a '/': write it as %2F, or use storage_options")
    inner = host + slash + key
    before, mark, query = inner.rpartition("?")
    given = dict(parse_qsl(query)) if mark else {}
    if given and all(name in _URL_OPTIONS for name in given):  # s3://bucket/folder?endpoint_override=…
        inner, options = before, {**given, **options}
    inner = inner.rstrip("/")
    if scheme == "s3":
        made = _s3(tuple(sorted(_s3_options(options).items())))
    elif scheme in ("gs", "gcs"):
        made = fs.GcsFileSystem(**options)
    else:
        account = options.pop("account_name", None) or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise ValueError("account_name is missing: give it, or set AZURE_STORAGE_ACCOUNT_NAME")
        made = fs.AzureFileSystem(account, **options)
    return Store(made, f"{scheme}://", _values([options]), retry), inner


_URL_OPTIONS = {"endpoint_override", "scheme", "region", "access_key", "secret_key", "session_token", "anonymous"}


@lru_cache(maxsize=16)
def _s3(options: tuple[tuple[str, Any], ...]) -> fs.S3FileSystem:
    """One file system for equal options: it keeps connections."""
    # The waiting is done in Store.persist, where it has a budget; the SDK only tries again at once.
    return fs.S3FileSystem(**{"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1), **dict(options)})


_S3_NAMES = {
    "key": "access_key",
    "aws_access_key_id": "access_key",
    "secret": "secret_key",
    "aws_secret_access_key": "secret_key",
    "token": "session_token",
    "aws_session_token": "session_token",
    "anon": "anonymous",
    "endpoint_url": "endpoint_override",
    "endpoint": "endpoint_override",
    "region_name": "region",
    "aws_region": "region",
}


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under pyarrow's names; fsspec's and boto's are understood as well."""
    given = {**options, **options.get("client_kwargs", {})}
    given.pop("client_kwargs", None)
    found = {_S3_NAMES.get(name.lower(), name): value for name, value in given.items() if value is not None}
    endpoint = (
        found.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint:
        found["endpoint_override"] = endpoint.split("://", 1)[-1].rstrip("/")
        if "://" in endpoint:
            found.setdefault("scheme", endpoint.split("://", 1)[0])
        found.setdefault("region", os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1")
    found.setdefault("connect_timeout", 10.0)
    found.setdefault("request_timeout", 30.0)
    for name in ("connect_timeout", "request_timeout"):
        found[name] = float(found[name])
    return found


def _fsspec(scheme: str, path: str, options: dict[str, Any], retry: Retry) -> tuple[Store, str]:
    try:
        import fsspec
    except ImportError:
        raise MidepochError(f"{scheme}:// needs fsspec: `pip install fsspec` and the package for {scheme}.") from None
    try:
        filesystem, inner = fsspec.core.url_to_fs(path, **options)
    except FileNotFoundError as problem:  # the archive that the files are in
        raise DataNotFoundError(f"{_without(problem, options)}, in which {path} is to be found.") from None
    except (ImportError, ValueError) as problem:
        raise MidepochError(
            f"{scheme}:// cannot be opened: {_without(problem, options)}. s3://, gs:// and az:// are read natively, "
            "others by fsspec, which needs the package for them."
        ) from None
    keep = scheme in ("http", "https")  # there the path is the whole address
    return Store(fs.PyFileSystem(Handler(filesystem)), "" if keep else f"{scheme}://", _values([options]), retry), inner


def _without(problem: Exception, options: Mapping[str, Any]) -> str:
    text = str(problem)
    for secret in _values([dict(options)]):
        text = text.replace(secret, "***")
    return text


_PUBLIC = {
    "region",
    "region_name",
    "aws_region",
    "scheme",
    "endpoint_override",
    "endpoint_url",
    "endpoint",
    "account_name",
}


def _values(options: list[dict[str, Any]]) -> tuple[str, ...]:
    """All texts in the options that may be secret."""
    found: list[str] = []
    for each in options:
        for name, value in each.items():
            if isinstance(value, dict):
                found += _values([value])
            elif isinstance(value, str) and len(value) > 3 and name not in _PUBLIC:
                found.append(value)
    return tuple(found)
