"""Metadata of images, sounds and videos: tables named ``metadata`` that name the files beside them.

A column ``file_name`` names the file of each row, ``NAME_file_name`` further ones, and ``file_names`` lists of files,
as in the folders that ``datasets`` reads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.decode import decoder
from midepoch.sources.folders import Listing
from midepoch.sources.formats import Block, format_named
from midepoch.sources.formats.media import LOCATED
from midepoch.sources.media_rows import MediaTable, feature_of, hash_files, located
from midepoch.sources.schemas import unified
from midepoch.sources.stores import Entry, Store

_log = logging.getLogger("midepoch")
_NAMED = 10
"""Maximum number of missing files that are named in the log."""
_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}


def described_rows(
    store: Store, listing: Listing, described: Sequence[Entry], kind: str, *, skip_damage: bool
) -> MediaTable:
    """Return the rows of metadata files, in the order of their paths."""
    described = sorted(described)
    digest = hashlib.blake2b(digest_size=16)
    tables = _tables(store, described, digest, skip_damage)
    schema = tables[0].schema
    columns = {name: _column(name, kind) for name in schema.names if _holds_files(schema.field(name))}
    if not columns:
        found = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise FormatError(
            f"{store.name(described[0].path)} describes the files beside it, but has no column file_name with names "
            f"of files as text. Its columns are {found}. Add it, or pass format='csv' (or 'jsonl', 'parquet') to read "
            "the table alone."
        )
    delivered = [columns.get(name, name) for name in schema.names]
    for name in columns.values():
        if delivered.count(name) > 1:
            raise FormatError(
                f"{store.name(described[0].path)}: several of its columns ({', '.join(schema.names)}) become the "
                f"column {name!r}. Rename all but one of them."
            )
    files = _Files(store, listing, skip_damage)
    parts = [files.resolved(entry, table, list(columns)) for entry, table in zip(described, tables, strict=True)]
    table = pa.concat_tables(part for part, _ in parts)
    table = table.rename_columns(delivered)
    hash_files(digest, store, files.used, files.names, skip_damage)
    files.report()
    features: dict[str, Any] = {}
    for name, column in columns.items():
        is_list = pa.types.is_list(schema.field(name).type)
        features[column] = [feature_of(kind)] if is_list else feature_of(kind)
    return MediaTable(table, np.concatenate([sizes for _, sizes in parts]), digest.hexdigest(), features)


def _tables(store: Store, described: Sequence[Entry], digest: Any, skip_damage: bool) -> list[pa.Table]:
    suffixes = sorted({os.path.splitext(entry.path)[1] for entry in described})
    if len(suffixes) > 1:
        raise FormatError(
            f"{store.name(described[0].path)}: there are metadata files in several formats: {', '.join(suffixes)}. "
            "Keep one of them."
        )
    form = format_named(_FORMATS[suffixes[0]])
    scans = [
        store.persist(entry.path, "indexed", partial(form.scan, store, entry, skip_damage=skip_damage))
        for entry in described
    ]
    schema = unified(store, described, scans, None, text=suffixes == [".csv"]).remove_metadata()
    tables = []
    for entry, scan in zip(described, scans, strict=True):
        digest.update(scan.fingerprint.encode())
        blocks = [Block(entry, scan.offsets[i], scan.end(i), scan.footer_of(i)) for i in range(len(scan.rows))]
        read = [
            store.persist(entry.path, "read", decoder(store, form, block, (), schema, schema.names, rows))
            for block, rows in zip(blocks, scan.rows, strict=True)
        ]
        tables.append(pa.concat_tables(read) if read else schema.empty_table())
    return tables


def _holds_files(field: pa.Field) -> bool:
    texts = (pa.string(), pa.large_string())
    if field.name == "file_name" or field.name.endswith("_file_name"):
        return field.type in texts
    if field.name == "file_names" or field.name.endswith("_file_names"):
        return bool(pa.types.is_list(field.type)) and field.type.value_type in texts
    return False


def _column(name: str, kind: str) -> str:
    """Return the name of the column of files that a column of names becomes."""
    if name.endswith("file_names"):
        return name[: -len("_file_names")] or f"{kind}s"
    return name[: -len("_file_name")] or kind


class _Files:
    """Files of a listing by their paths. ``used`` and ``names``: those that were found, in order."""

    def __init__(self, store: Store, listing: Listing, skip_damage: bool) -> None:
        self._store, self._skips = store, skip_damage
        pairs = zip(listing.files, listing.names, strict=True)
        self._known = {entry.path: (entry, name) for entry, name in pairs}
        self._missing: list[str] = []
        self.used: list[Entry] = []
        self.names: list[str] = []

    def resolved(self, metadata: Entry, table: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Any]:
        """Return the table with files in place of their names, and the bytes of the files of each row."""
        folder = posixpath.dirname(metadata.path)
        values = {name: table.column(name).to_pylist() for name in columns}
        found = {
            name: [self._row(metadata, folder, i, value) for i, value in enumerate(each)]
            for name, each in values.items()
        }
        kept = [i for i in range(table.num_rows) if all(each[i] is not False for each in found.values())]
        sizes = np.zeros(len(kept), np.int64)
        table = table.take(pa.array(kept, pa.int64()))
        for name, each in found.items():
            rows = [each[i] for i in kept]
            sizes += np.array([sum(file[0].size for file in _flat(row)) for row in rows], np.int64)
            place = table.schema.get_field_index(name)
            is_list = pa.types.is_list(table.schema.field(name).type)
            table = table.set_column(place, name, _lists(rows) if is_list else _structs(rows))
        for i in kept:
            for each in found.values():
                self.used += [file[0] for file in _flat(each[i])]
                self.names += [file[1] for file in _flat(each[i])]
        return table, sizes

    def _row(self, metadata: Entry, folder: str, row: int, value: Any) -> Any:
        """Return the file, or the list of files, that a row names. None for a null, False for a missing file."""
        if isinstance(value, list):
            files = [self._row(metadata, folder, row, each) for each in value]
            return False if any(each is False for each in files) else files
        if value is None:
            return None
        place = f"{self._store.name(metadata.path)}: row {row} (the first is 0)"
        name = posixpath.normpath(value).replace("\\", "/")
        if "://" in value or name == ".." or name.startswith(("/", "../")):
            raise FormatError(f"{place} names the file {value!r}. Names must be relative, and below this folder.")
        found = self._known.get(posixpath.join(folder, name))
        if found is None and self._skips:
            self._missing.append(value)
            return False
        if found is None:
            raise FormatError(
                f"{place} names the file {value!r}, which does not exist in {self._store.name(folder)}. Restore it, or "
                'pass on_error="skip" to leave out such rows.'
            )
        return found

    def report(self) -> None:
        if self._missing:
            named = ", ".join(self._missing[:_NAMED]) + ", …" * (len(self._missing) > _NAMED)
            _log.warning("skipped %d rows whose files do not exist: %s", len(self._missing), named)


def _flat(row: Any) -> Iterable[tuple[Entry, str]]:
    if row is None:
        return []
    return [file for file in row if file is not None] if isinstance(row, list) else [row]


def _structs(rows: Sequence[Any]) -> pa.StructArray:
    blank = (Entry("", 0, 0), "")
    files = [blank if row is None else row for row in rows]
    array = located([entry for entry, _ in files], [name for _, name in files])
    if not any(row is None for row in rows):
        return array
    values = [None if row is None else value for row, value in zip(rows, array.to_pylist(), strict=True)]
    return pa.array(values, LOCATED)


def _lists(rows: Sequence[Any]) -> pa.ListArray:
    flat = _structs([file for row in rows for file in row or []])
    offsets = np.cumsum([0, *(len(row or []) for row in rows)]).astype(np.int32)
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=mask)
