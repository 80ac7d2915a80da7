"""Types inferred from text, block by block: the common type of all blocks, and the nullable paths."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.types as pt

from midepoch.errors import FormatError

MIXED_REMEDY = (
    'Write values of one type, or open it with midepoch.load_dataset("json", data_files=…), which reads mixed types.'
)


def nulls(table: pa.Table) -> set[tuple[str, ...]]:
    """Return the paths of columns, and of fields inside them, with a null."""
    found: set[tuple[str, ...]] = set()

    def look(path: tuple[str, ...], column: pa.Array) -> None:
        if column.null_count:
            found.add(path)
        if pa.types.is_struct(column.type):
            for i in range(column.type.num_fields):
                look((*path, column.type.field(i).name), column.field(i))
        elif pt.is_list(column.type) or pt.is_large_list(column.type) or pt.is_fixed_size_list(column.type):
            look((*path, column.type.field(0).name), column.flatten())

    for name, column in zip(table.schema.names, table.columns, strict=True):
        for chunk in column.chunks:
            look((name,), chunk)
    return found


def lacking(union: Iterable[pa.Field], part: Iterable[pa.Field], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the paths of the union's fields that one block lacks, and for which it has nulls."""
    mine, found = {field.name: field.type for field in part}, set()
    for field in union:
        here = (*path, field.name)
        if field.name not in mine:
            found.add(here)
        elif pa.types.is_struct(field.type) and pa.types.is_struct(mine[field.name]):
            found |= lacking(_fields(field.type), _fields(mine[field.name]), here)
    return found


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)]


def widest(name: str, schemas: list[pa.Schema], *, text: bool = False) -> pa.Schema:
    """Return one schema for all blocks: integers mixed with floats become floats, dates mixed with text become text.

    ``text``: all other mixed types become text (as in CSV, where every value is text).
    """
    types: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            before = types.get(field.name)
            types[field.name] = field.type if before is None else _wider(name, field.name, before, field.type, text)
    return pa.schema(list(types.items()))


def _wider(file: str, column: str, a: pa.DataType, b: pa.DataType, text: bool) -> pa.DataType:
    if a.equals(b):
        return a
    if pa.types.is_temporal(a) != pa.types.is_temporal(b) and pa.string() in (a, b):
        return pa.string()
    if pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(_wider(file, column, a.value_type, b.value_type, text))
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = {a.field(i).name: a.field(i).type for i in range(a.num_fields)}
        for other in (b.field(i) for i in range(b.num_fields)):
            mine = fields.get(other.name)
            fields[other.name] = other.type if mine is None else _wider(file, column, mine, other.type, text)
        return pa.struct(list(fields.items()))
    try:
        merged = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
        return merged.field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if text:
            return pa.string()
        raise FormatError(
            f"{file}: column {column!r} contains {a} in some rows and {b} in others. {MIXED_REMEDY}"
        ) from None
