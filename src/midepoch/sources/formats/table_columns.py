"""Columns of a table in its Parquet files: found by id or by name, with the fields and types that the table has now.

A field of a table's schema has metadata that says how files name it: ``id`` (the Parquet field id) and ``names`` (a
JSON list). Files from before a column was added, renamed, moved or widened are converted when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from midepoch.sources.dictionaries import plain_type, with_children

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
    return [kind.field(i) for i in range(kind.num_fields)] if pt.is_nested(kind) else []


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
    inner = [held.field(i) for i in range(held.num_fields)]
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
