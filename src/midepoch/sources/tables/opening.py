"""Index of a snapshot of a table. Snapshots never change: an existing index is used without checking the files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from midepoch._internal.progress import Progress
from midepoch.errors import DataNotFoundError
from midepoch.sources.dictionaries import has_large_text
from midepoch.sources.filters import Filter
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.table_columns import plain
from midepoch.sources.formats.table_parquet import SnapshotFile, TableFormat
from midepoch.sources.index import Index, default_index_dir, read_index
from midepoch.sources.lake import Files, indexed, save
from midepoch.sources.spread import for_all
from midepoch.sources.storage import locked
from midepoch.sources.stores import Entry, Store
from midepoch.sources.table_folders import expired


class TableFile(NamedTuple):
    """One Parquet file of a snapshot."""

    path: str
    size: int
    contents: SnapshotFile


@dataclass(frozen=True, eq=False)
class TableRequest:
    """A snapshot to open. ``key`` identifies it without secrets; ``scan`` finds and scans its files when needed."""

    store: Store
    key: tuple[str, ...]
    filter: Filter | None
    skip_damage: bool
    scan: Callable[[Progress], Files]

    def index_path(self, index_dir: Path | None) -> Path:
        """Return the path of the index file."""
        chosen = [self.filter.text, self.filter.digest] if self.filter else []
        parts = ["table", self.store.identity, *self.key, str(self.skip_damage), *chosen]
        name = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        return (index_dir or default_index_dir()) / f"{name}.midepoch-index"


def open_table(request: TableRequest, *, index_dir: Path | None, force: bool, progress: Progress) -> Index:
    """Return the index of a snapshot: read, or built by one process at a time and saved."""
    path = request.index_path(index_dir)
    index = None if force else read_index(path)
    if index is not None:
        return index
    with locked(path, "the index") as place:
        index = None if force else read_index(path)
        if index is not None:  # another process has built it
            return index
        files = request.scan(progress)
        built = indexed(files, request.filter, skip_damage=request.skip_damage, report=progress)
        if not place.keep(lambda: save(built, path)):
            return built
    return read_index(path) or built


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
