"""Scan of the Parquet files of a snapshot of a table, the packages that read tables, and the options of object stores
under the names of pyarrow and of these packages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.progress import Progress
from midepoch.errors import DataNotFoundError, MidepochError
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.table_parquet import SnapshotFile, TableFormat, plain
from midepoch.sources.index import for_all
from midepoch.sources.lake import Files
from midepoch.sources.schemas import children, has_large_text
from midepoch.storage.addresses import s3_options
from midepoch.storage.damage import expired
from midepoch.storage.open_files import options_of
from midepoch.storage.stores import Entry, Store


def package(module: str, noun: str, name: str, extra: str) -> Any:
    """Return a package that reads tables. Raise MidepochError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise MidepochError(
            f"{noun} tables are read with the package {name}: `pip install midepoch[{extra}]`."
        ) from None


_DROPPED = ("allow_http", "aws_allow_http", "aws_s3_allow_unsafe_rename", "aws_conditional_put", "conditional_put")


def store_options(uri: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return options as ``from_files`` takes them. Those of ``deltalake`` and ``lance`` are accepted, too."""
    if not options:
        return None
    if not uri.startswith("s3"):
        return dict(options)
    return {name: value for name, value in options.items() if name.lower() not in _DROPPED}


def reader_of(store: Store, path: str, address: str, options: Mapping[str, Any] | None) -> tuple[str, dict[str, str]]:
    """Return the address of a table without credentials, and the options of ``deltalake`` to read it."""
    if store.local:
        return path, {}
    if not address.startswith("s3://"):
        return address, {name: str(value) for name, value in (options or {}).items()}
    return f"s3://{path}", reader_options(store)


_NAMES = {
    "access_key": ("aws_access_key_id", "s3.access-key-id"),
    "secret_key": ("aws_secret_access_key", "s3.secret-access-key"),
    "session_token": ("aws_session_token", "s3.session-token"),
    "region": ("aws_region", "s3.region"),
}
"""Options of pyarrow's S3, under the names of ``lance`` and ``deltalake``, and as properties of ``pyiceberg``."""


def reader_options(store: Store) -> dict[str, str]:
    """Return the options of a store under the names of ``lance`` and ``deltalake``."""
    if store.local or store.given.type_name != "s3":
        return {}
    options = options_of(store.given)
    found = {name: str(options[own]) for own, (name, _) in _NAMES.items() if options.get(own)}
    if endpoint := options.get("endpoint_override"):
        scheme = options.get("scheme") or "https"
        found["aws_endpoint"] = f"{scheme}://{endpoint}"
        found |= {"allow_http": "true"} if scheme == "http" else {}
    if options.get("anonymous"):
        found["aws_skip_signature"] = "true"
    if options.get("force_virtual_addressing"):
        found["aws_virtual_hosted_style_request"] = "true"
    return found


def iceberg_properties(uri: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options as properties of ``pyiceberg``, to read metadata in a store."""
    if not uri.startswith("s3://") and not options:
        return {}
    found = s3_options(store_options("s3://", options) or {})
    given = {name: str(found[own]) for own, (_, name) in _NAMES.items() if found.get(own)}
    if endpoint := found.get("endpoint_override"):
        given["s3.endpoint"] = f"{found.get('scheme', 'https')}://{endpoint}"
    return given | ({"s3.anonymous": "true"} if found.get("anonymous") else {})


def options_of_iceberg(location: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of the store in which a table of ``pyiceberg`` is."""
    if not location.startswith(("s3://", "s3a://", "s3n://")):
        return None
    found = {own: properties[name] for own, (_, name) in _NAMES.items() if properties.get(name)}
    found |= {"endpoint_override": properties["s3.endpoint"]} if properties.get("s3.endpoint") else {}
    return found | ({"anonymous": True} if str(properties.get("s3.anonymous")).lower() == "true" else {})


def described_type(kind: pa.DataType, field_of: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a type with text and lists of 32-bit offsets, and with the fields of structs that ``field_of`` returns."""
    inner = partial(described_type, field_of=field_of)
    if pt.is_struct(kind):
        return pa.struct(list(map(field_of, children(kind))))
    if pt.is_list(kind) or pt.is_large_list(kind):
        return pa.list_(pa.field("element", inner(kind.value_type)))
    if pt.is_map(kind):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


def scanned_files(
    store: Store,
    table: str,
    snapshot: str,
    schema: pa.Schema,
    files: Sequence[tuple[Entry, SnapshotFile]],
    progress: Progress,
) -> Files:
    """Scan the Parquet files of a snapshot. ``schema``: its columns, as described in ``formats.table_parquet``."""
    if not files:
        raise DataNotFoundError(f"there are no rows in {table} ({snapshot}). Check the table, and its version.")
    found = for_all(partial(_scanned, store), files, lambda done: progress(done, len(files)))
    shown = [plain(field) for field in schema]
    for i, field in enumerate(shown):
        large = (scan.schema.field(i) for _, scan in found if has_large_text(scan.schema.field(i).type))
        shown[i] = next(large, field)
    return Files.of_snapshot(store, "table", found, pa.schema(shown), snapshot)


def _scanned(store: Store, file: tuple[Entry, SnapshotFile]) -> tuple[Entry, Scanned]:
    entry, contents = file
    try:
        if store.local:  # a log has modification times, too, but copies of a table do not keep those of its files
            entry = entry._replace(mtime_ns=os.stat(entry.path).st_mtime_ns)
        return entry, store.persist(entry.path, "indexed", lambda: TableFormat().scan_file(store, entry, contents))
    except (FileNotFoundError, DataNotFoundError):
        raise expired(store.name(entry.path)) from None
