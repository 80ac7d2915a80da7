"""Parquet files of a snapshot of a table: their rows without the deleted ones, with the columns of the table.

A block is a row group. What the table knows about a file is saved before its footer: the columns of the table and their
names in files, the values of columns that are the same for all rows, and the deleted rows.

Columns are found by id or by name, and have the fields and types that the table has now. A field of a table's schema
has metadata that says how files name it: ``id`` (the Parquet field id) and ``names`` (a JSON list). Files from before a
column was added, renamed, moved or widened are converted when they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.formats import Block, Format, Scanned, table_of
from midepoch.sources.formats.parquet import ParquetFormat, footer_of
from midepoch.sources.schemas import as_arrow, children, has_large_text, large_text, plain_type, with_children
from midepoch.storage.stores import Entry, Store

ID, NAMES = b"id", b"names"
_FILE_ID = b"PARQUET:field_id"


def described(field: pa.Field, *, number: int | None = None, names: Sequence[str] = ()) -> pa.Field:
    """Return a field of a table with its id and its names in files."""
    metadata = {} if number is None else {ID: str(number)}
    return field.with_metadata({**metadata, NAMES: json.dumps(list(names or [field.name]))})


def has_ids(schema: pa.Schema) -> bool:
    """Return True if any field of a file, at any depth, has a Parquet field id."""
    return any(map(_has_id, schema))


def _has_id(field: pa.Field) -> bool:
    return _FILE_ID in (field.metadata or {}) or any(map(_has_id, _children(field.type)))


def find(field: pa.Field, among: Sequence[pa.Field], *, by_id: bool) -> int | None:
    """Return the number of the field of a file that contains a field of the table, or None."""
    about = field.metadata or {}
    if by_id and ID in about:
        ids = ((i, (each.metadata or {}).get(_FILE_ID)) for i, each in enumerate(among))
        return next((i for i, number in ids if number == about[ID]), None)
    for name in json.loads(about[NAMES]) if NAMES in about else [field.name]:
        for i, each in enumerate(among):
            if each.name == name:
                return i
    return None


def plain(field: pa.Field) -> pa.Field:
    """Return a field as users see it: nullable at every depth, without metadata."""
    kind, inner = field.type, [plain(each) for each in _children(field.type)]
    if pt.is_map(kind):
        kind = pa.map_(inner[0].type, inner[1].type)
    elif inner:
        kind = with_children(kind, inner)
    return pa.field(field.name, kind)


def _children(kind: pa.DataType) -> list[pa.Field]:
    if pt.is_map(kind):
        return [kind.key_field, kind.item_field]
    return list(children(kind)) if pt.is_nested(kind) else []


def null_paths(
    wanted: pa.Field, held: pa.Field, nulls: set[tuple[str, ...]], *, by_id: bool
) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a column of the table at which a file has nulls. ``nulls``: paths in the file."""
    yield from _null_paths(plain(wanted).type, wanted.type, held.type, (wanted.name,), (held.name,), nulls, by_id)


def _null_paths(
    shown: pa.DataType, wanted: pa.DataType, held: pa.DataType,
    path: tuple[str, ...], at: tuple[str, ...], nulls: set[tuple[str, ...]], by_id: bool,
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    if at in nulls:
        yield path
    if not pt.is_nested(wanted) or pt.is_map(wanted):
        yield from ((*path, *each[len(at) :]) for each in nulls if each[: len(at)] == at and len(each) > len(at))
        return
    inner = list(children(held))
    for i in range(wanted.num_fields):
        field, name = wanted.field(i), shown.field(i).name
        number = find(field, inner, by_id=by_id) if pt.is_struct(wanted) else 0
        if number is None:
            yield (*path, name)
            continue
        theirs = inner[number]
        below = (*path, name), (*at, theirs.name)
        yield from _null_paths(shown.field(i).type, field.type, theirs.type, *below, nulls, by_id)


def converted(
    column: pa.ChunkedArray, held: pa.Field, wanted: pa.Field, kind: pa.DataType, *, by_id: bool
) -> pa.ChunkedArray:
    """Return a column of a file as the table has it now. ``kind``: its type for users."""
    kind = plain_type(kind)
    if not _same_fields(held.type, wanted.type, by_id):
        chunks = [_rebuilt(chunk, held.type, wanted.type, by_id) for chunk in column.chunks]
        empty = pa.nulls(0, plain(wanted).type)
        column = pa.chunked_array(chunks or [empty])
    if column.type.equals(kind, check_metadata=True):
        return column
    # Timestamps of Spark have nanoseconds (INT96) or microseconds; tables have microseconds.
    return pc.cast(column, options=pc.CastOptions(kind, allow_time_truncate=True))


def _same_fields(held: pa.DataType, wanted: pa.DataType, by_id: bool) -> bool:
    """Return True if a cast converts one type to the other: the same fields of structs, in the same order."""
    theirs, own = _children(held), _children(wanted)
    if not own or not theirs:
        return True
    if pt.is_struct(wanted):
        names = [field.name for field in own] == [field.name for field in theirs]
        if not names or [find(field, theirs, by_id=by_id) for field in own] != list(range(len(own))):
            return False
    return all(_same_fields(a.type, b.type, by_id) for a, b in zip(theirs, own, strict=True))


def _rebuilt(array: pa.Array, held: pa.DataType, wanted: pa.DataType, by_id: bool) -> pa.Array:
    if not pt.is_nested(wanted) or _same_fields(held, wanted, by_id):
        return array
    if array.offset:
        array = pa.concat_arrays([array, array.slice(0, 0)])  # children and validity from their beginning
    missing = array.is_null() if array.null_count else None
    if pt.is_struct(wanted):
        inner = _children(held)
        arrays, fields = [], []
        for field in _children(wanted):
            number = find(field, inner, by_id=by_id)
            if number is None:
                arrays.append(pa.nulls(len(array), plain(field).type))
            else:
                arrays.append(_rebuilt(array.field(number), inner[number].type, field.type, by_id))
            fields.append(pa.field(field.name, arrays[-1].type))
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=missing)
    if pt.is_map(wanted):
        keys = _rebuilt(array.keys, held.key_type, wanted.key_type, by_id)
        items = _rebuilt(array.items, held.item_type, wanted.item_type, by_id)
        return pa.MapArray.from_arrays(array.offsets, keys, items, mask=missing)
    values = _rebuilt(array.values, held.value_type, wanted.value_type, by_id)
    if pt.is_fixed_size_list(held):
        return pa.FixedSizeListArray.from_arrays(values, held.list_size, mask=missing)
    made = pa.LargeListArray if pt.is_large_list(held) else pa.ListArray
    return made.from_arrays(array.offsets, values, mask=missing)


_COLUMNS, _DELETED = b"columns", b"deleted"


@dataclass(frozen=True, eq=False)
class SnapshotFile:
    """The rows and columns of one file that belong to a snapshot."""

    schema: pa.Schema
    """Columns of the table, with the metadata of ``table_columns``."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values of columns that are the same in all rows: partitions and defaults."""
    deleted: npt.NDArray[np.int64] | None = None
    """Numbers of the deleted rows, ascending, each once. None if there are none."""
    only_missing: bool = False
    """True if the constants are only for columns that the file lacks."""

    def of_file(self, schema: pa.Schema) -> SnapshotFile:
        """Return the contents without constants for columns that a file with this schema has."""
        if not self.only_missing or not self.constants:
            return self
        by_id, fields = has_ids(schema), list(schema)
        missing = {name for name in self.constants if find(self.schema.field(name), fields, by_id=by_id) is None}
        constants = {name: value for name, value in self.constants.items() if name in missing}
        return replace(self, constants=constants, only_missing=False)

    def serialised(self) -> bytes:
        """Return the contents as bytes: a table of the constants, with the rest as metadata."""
        names = [name for name in self.schema.names if name in self.constants]
        values = [pa.array([self.constants[name]], plain(self.schema.field(name)).type) for name in names]
        rows = np.empty(0, np.int64) if self.deleted is None else self.deleted
        deleted = np.packbits(np.bincount(rows).astype(np.bool_)).tobytes()
        table = pa.table(values, names=names)
        table = table.replace_schema_metadata({_COLUMNS: self.schema.serialize().to_pybytes(), _DELETED: deleted})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @staticmethod
    @lru_cache(maxsize=64)
    def deserialised(saved: bytes) -> SnapshotFile:
        """Return the contents from bytes. Its constants are Arrow scalars."""
        table = pa.ipc.open_stream(saved).read_all()
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[_COLUMNS]))
        deleted = np.flatnonzero(np.unpackbits(np.frombuffer(table.schema.metadata[_DELETED], np.uint8)))
        constants = {name: table.column(name)[0] for name in table.schema.names}
        return SnapshotFile(schema, constants, deleted if len(deleted) else None)

    def fingerprint(self, of_file: str) -> str:
        """Return the fingerprint of the rows: that of the file, the values that the table adds and the deleted rows."""
        digest = hashlib.blake2b(of_file.encode(), digest_size=16)
        for name, value in sorted(self.constants.items()):
            # Not its repr: that of a time zone differs between machines.
            digest.update(f"\n{name} = {type(value).__name__} {value}".encode())
        if self.deleted is not None:
            digest.update(b"\n" + np.ascontiguousarray(self.deleted, dtype="<i8").tobytes())
        return digest.hexdigest()


class TableFormat(Format):
    """Format of the Parquet files of a table. Spark's timestamps (INT96) are read in microseconds, as tables have."""

    def __init__(self) -> None:
        self._parquet = ParquetFormat(coerce_int96_timestamp_unit="us")

    def scan_file(self, store: Store, entry: Entry, contents: SnapshotFile) -> Scanned:
        """Find the blocks of a file, and the rows of each that are not deleted."""
        found = self._parquet.scan(store, entry, skip_damage=False)
        footer, name = found.footer, store.name(entry.path)
        groups, contents = footer_of(name, footer).rows, contents.of_file(found.schema)
        if contents.deleted is not None:
            last, ends = int(contents.deleted[-1]), np.cumsum([0, *groups])
            if last >= ends[-1]:
                raise FormatError(f"{name}: row {last} is deleted by the table, but the file has {ends[-1]} rows.")
            left = (groups - np.diff(np.searchsorted(contents.deleted, ends))).tolist()
            found.offsets = [i for i, rows in enumerate(left) if rows]
            found.rows = [rows for rows in left if rows]
        saved = contents.serialised()
        found.footer = len(saved).to_bytes(8, "little") + saved + footer
        found.fingerprint = contents.fingerprint(found.fingerprint)
        _show_columns(found, contents, footer_of(name, footer).large_columns)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        name = store.name(block.entry.path)
        saved, footer = _parts(block.footer)
        own, contents = footer_of(name, footer).schema, SnapshotFile.deserialised(saved)
        by_id, fields = has_ids(own), list(own)
        places = {each: find(contents.schema.field(each), fields, by_id=by_id) for each in columns}
        places = {each: at for each, at in places.items() if at is not None and each not in contents.constants}
        groups = footer_of(name, footer).rows
        rows = groups[block.offset]
        keep = None
        if contents.deleted is not None:
            start = sum(groups[: block.offset])
            first, stop = np.searchsorted(contents.deleted, [start, start + rows])
            keep = np.ones(rows, np.bool_)
            keep[contents.deleted[first:stop] - start] = False
            rows -= int(stop - first)
        arrays = {}
        if places:
            inner = replace(block, footer=footer)
            read = pa.schema(
                [own.field(at).with_type(_as_large(own.field(at), schema, each)) for each, at in places.items()]
            )
            names = list(dict.fromkeys(read.names))
            table = self._parquet.decode(store, inner, read, names)
            if keep is not None:
                table = table.filter(as_arrow(keep))
            for each, at in places.items():
                wanted, held = contents.schema.field(each), own.field(at)
                arrays[each] = converted(table.column(held.name), held, wanted, schema.field(each).type, by_id=by_id)
        for each in columns:
            if each not in arrays:
                value = contents.constants.get(each)
                kind = schema.field(each).type
                arrays[each] = pa.nulls(rows, kind) if value is None else pa.repeat(value, rows).cast(kind)
        return table_of(list(columns), [arrays[each] for each in columns], rows)

    def excluded(
        self, block: Block, expression: Any, schema: pa.Schema, partition: Any, columns: Sequence[str]
    ) -> bool:
        saved, footer = _parts(block.footer)
        own, contents = footer_of(block.entry.path, footer).schema, SnapshotFile.deserialised(saved)
        by_id, fields = has_ids(own), list(own)
        for name in columns:
            at = find(contents.schema.field(name), fields, by_id=by_id)
            if name in contents.constants or at is None or not fields[at].equals(schema.field(name)):
                return False  # its statistics are of another column, or of other values
        return self._parquet.excluded(replace(block, footer=footer), expression, schema, partition, columns)


def _parts(footer: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(footer[:8], "little")
    return footer[8:end], footer[end:]


def _as_large(held: pa.Field, schema: pa.Schema, name: str) -> pa.DataType:
    """Return the type to read a column of a file as: with 64-bit offsets if the table has a file that needs them."""
    return large_text(held.type) if has_large_text(schema.field(name).type) else held.type


def _show_columns(found: Scanned, contents: SnapshotFile, large: set[str]) -> None:
    """Replace the columns and nulls of a file by those of the table."""
    by_id, fields = has_ids(found.schema), list(found.schema)
    shown: list[pa.Field] = []
    nullable: set[tuple[str, ...]] = set()
    for wanted in contents.schema:
        column = plain(wanted)
        at = find(wanted, fields, by_id=by_id)
        if wanted.name in contents.constants:
            nullable |= {(wanted.name,)} if contents.constants[wanted.name] is None else set()
        elif at is None:
            nullable.add((wanted.name,))
        else:
            nullable |= set(null_paths(wanted, fields[at], found.nullable, by_id=by_id))
            if fields[at].name in large:
                column = column.with_type(large_text(column.type))
        shown.append(column)
    found.schema, found.nullable = pa.schema(shown), nullable
