"""Schema of an Iceberg table as Arrow fields, with the ids and names that its files use."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.table_columns import described

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", "UTC"),
    "string": pa.string(),
    "uuid": pa.uuid(),
    "binary": pa.binary(),
    "unknown": pa.null(),
}


def described_fields(table: str, fields: Sequence[Any], mapping: Iterable[Any] | None) -> list[pa.Field]:
    """Return the columns of a table. ``mapping``: names in files without field ids."""
    names = {each.field_id: each for each in mapping or ()}
    found = []
    for field in fields:
        mapped = names.get(field.field_id)
        kind = _type(table, field.name, field.field_type, mapped)
        inner = list(mapped.names) if mapped is not None else []
        found.append(described(pa.field(field.name, kind), number=field.field_id, names=inner))
    return found


def _type(table: str, column: str, kind: Any, mapped: Any) -> pa.DataType:
    inside = list(mapped.fields) if mapped is not None else None
    if kind.is_struct:
        for field in kind.fields:
            if field.initial_default is not None:
                raise FormatError(
                    f"the Iceberg table {table} has a default for the field {field.name!r} inside of {column!r}, which "
                    "is not supported."
                )
        return pa.struct(described_fields(table, kind.fields, inside))
    if hasattr(kind, "element_type"):
        return pa.list_(pa.field("element", _type(table, column, kind.element_type, _inner(inside, kind.element_id))))
    if hasattr(kind, "key_type"):
        key = _type(table, column, kind.key_type, _inner(inside, kind.key_id))
        return pa.map_(key, _type(table, column, kind.value_type, _inner(inside, kind.value_id)))
    text = str(kind)
    if match := re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", text):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"fixed\[(\d+)\]", text):
        return pa.binary(int(match[1]))
    if text not in _TYPES:
        raise FormatError(
            f"the Iceberg table {table} has a column {column!r} of type {text}, which is not supported. "
            "Leave it out of the table."
        )
    return _TYPES[text]


def _inner(mapped: Sequence[Any] | None, number: int) -> Any:
    return next((each for each in mapped or () if each.field_id == number), None)


def partition_values(table: Any, schema: Any, spec: int, partition: tuple[Any, ...]) -> dict[str, Any]:
    """Return values for columns that a data file lacks: of identity partitions, and defaults."""
    values = {field.name: _plain(field.initial_default) for field in schema.fields if field.initial_default is not None}
    names = {field.field_id: field.name for field in schema.fields}
    for field, value in zip(table.specs()[spec].fields, partition, strict=False):
        if str(field.transform) == "identity" and field.source_id in names:
            values[names[field.source_id]] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    return value.bytes if isinstance(value, uuid.UUID) else value
