"""Decoding of a block to a table of exactly the requested columns, whichever its file has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from midepoch.errors import CorruptBlockError
from midepoch.sources.formats import Block, Format
from midepoch.sources.indexed_files import Values
from midepoch.storage.damage import is_damage, refusal
from midepoch.storage.stores import Store


def partition_expression(values: Values) -> Any:
    """Return an expression that is true for all rows of a file, from its partition values. None if there are none."""
    import pyarrow.compute as pc

    known = None
    for name, value in values:
        condition = pc.field(name).is_null() if value is None else pc.field(name) == value
        known = condition if known is None else known & condition
    return known


def decoded(
    store: Store,
    form: Format,
    block: Block,
    values: Values,
    schema: pa.Schema,
    columns: Sequence[str],
    rows: int | None,
) -> pa.Table:
    """Decode a block to exactly these columns, in the types of the schema.

    Columns that the file lacks are null. ``rows``: the expected number of rows, None with a filter.
    """
    constants = dict(values)
    own = [name for name in columns if name not in constants]
    table = form.decode(store, block, schema, own) if own or rows is None else None
    count = rows if table is None else table.num_rows
    assert count is not None
    if rows is not None and count != rows and (table is None or table.num_columns):
        raise pa.ArrowInvalid(f"{count} rows where the index says {rows}")
    length = rows if rows is not None else count
    present = {} if table is None else dict(zip(table.schema.names, table.columns, strict=True))
    arrays, fields = [], [schema.field(name) for name in columns]
    for name, field in zip(columns, fields, strict=True):
        if name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[name], field.type), length))
        elif name not in present:
            arrays.append(pa.nulls(length, field.type))
        else:
            arrays.append(_cast(store, block, name, present[name], field.type))
    return pa.table(arrays, schema=pa.schema(fields))


def _cast(store: Store, block: Block, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type.equals(kind, check_metadata=True):
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as problem:
        text = f"{store.name(block.entry.path)}: column {name!r} is not {kind}: {problem}"
        raise CorruptBlockError(text) if is_damage(problem) else refusal(problem, text) from None
