"""Index of a snapshot of a table. Snapshots never change: an existing index is used without checking the files.

Also the options of object stores, under the names of pyarrow and of the readers of tables.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from midepoch._internal.progress import Progress
from midepoch.errors import DataNotFoundError
from midepoch.sources.filters import Filter
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.table_parquet import SnapshotFile, TableFormat, plain
from midepoch.sources.index import Index, for_all, read_or_build
from midepoch.sources.lake import Files, indexed
from midepoch.sources.schemas import has_large_text
from midepoch.sources.tables.lance import reader_options
from midepoch.storage.addresses import s3_options
from midepoch.storage.cache_files import default_index_dir
from midepoch.storage.damage import expired
from midepoch.storage.stores import Entry, Store

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


_ICEBERG = {
    "access_key": "s3.access-key-id",
    "secret_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
}


def iceberg_properties(uri: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options as properties of ``pyiceberg``, to read metadata in a store."""
    if not uri.startswith("s3://") and not options:
        return {}
    found = s3_options(store_options("s3://", options) or {})
    given = {name: str(found[own]) for own, name in _ICEBERG.items() if found.get(own)}
    if endpoint := found.get("endpoint_override"):
        given["s3.endpoint"] = f"{found.get('scheme', 'https')}://{endpoint}"
    return given | ({"s3.anonymous": "true"} if found.get("anonymous") else {})


def options_of_iceberg(location: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of the store in which a table of ``pyiceberg`` is."""
    if not location.startswith(("s3://", "s3a://", "s3n://")):
        return None
    found = {own: properties[name] for own, name in _ICEBERG.items() if properties.get(name)}
    found |= {"endpoint_override": properties["s3.endpoint"]} if properties.get("s3.endpoint") else {}
    return found | ({"anonymous": True} if str(properties.get("s3.anonymous")).lower() == "true" else {})


class TableFile(NamedTuple):
    """One Parquet file of a snapshot."""

    path: str
    size: int
    contents: SnapshotFile


class TableAt(Protocol):
    """A table at a snapshot, which never changes."""

    @property
    def store(self) -> Store: ...

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the snapshot, without secrets."""

    def scan(self, progress: Progress) -> Files:
        """Find and scan the files of the snapshot."""


def open_table(
    table: TableAt,
    chosen: Filter | None,
    *,
    skip_damage: bool,
    index_dir: Path | None,
    force: bool,
    progress: Progress,
) -> Index:
    """Return the index of a snapshot: read, or built by one process at a time and saved."""
    parts = ["table", table.store.identity, *table.key, str(skip_damage)]
    parts += [chosen.text, chosen.digest] if chosen else []
    name = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    path = (index_dir or default_index_dir()) / f"{name}.midepoch-index"

    def build() -> Index:
        return indexed(table.scan(progress), chosen, skip_damage=skip_damage, report=progress)

    return read_or_build(path, build, force=force)


def scanned_files(
    store: Store, table: str, snapshot: str, schema: pa.Schema, files: Sequence[TableFile], progress: Progress
) -> Files:
    """Scan the Parquet files of a snapshot. ``schema``: its columns, with the metadata of ``table_columns``."""
    if not files:
        raise DataNotFoundError(f"there are no rows in {table} ({snapshot}). Check the table, and its version.")
    found = for_all(partial(_scanned, store), files, lambda done: progress(done, len(files)))
    entries, scans = [entry for entry, _ in found], [scan for _, scan in found]
    shown = [plain(field) for field in schema]
    for i, field in enumerate(shown):
        large = (scan.schema.field(i) for scan in scans if has_large_text(scan.schema.field(i).type))
        shown[i] = next(large, field)
    nullable = frozenset[tuple[str, ...]]().union(*(scan.nullable for scan in scans))
    return Files(store, "table", entries, scans, [()] * len(files), pa.schema(shown), nullable, snapshot)


def _scanned(store: Store, file: TableFile) -> tuple[Entry, Scanned]:
    # Logs have a modification time, too, but copies of a table do not keep that of its files.
    try:
        mtime = os.stat(file.path).st_mtime_ns if store.local else 0
    except FileNotFoundError:
        raise expired(store.name(file.path)) from None
    entry = Entry(file.path, file.size, mtime)
    try:
        return entry, store.persist(file.path, "indexed", lambda: TableFormat().scan_file(store, entry, file.contents))
    except DataNotFoundError:
        raise expired(store.name(file.path)) from None
