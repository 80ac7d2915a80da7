"""Arrow types and schemas: the common schema of files that may differ, its nullable paths and row width, and the
decoding of dictionary-encoded columns, also inside lists, structs and extension types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch.errors import DifferentSchemasError, FormatError
from midepoch.sources.formats import Scanned, Values


def storage_of(kind: pa.DataType) -> pa.DataType:
    """Return the type as which an extension type is stored. Other types are returned as they are."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def holds(kind: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return True if a type, or any type inside it, is wanted."""
    kind = storage_of(kind)
    return is_wanted(kind) or any(holds(field.type, is_wanted) for field in children(kind))


def holds_dictionary(kind: pa.DataType) -> bool:
    """Return True if a type, or any type inside it, is dictionary-encoded."""
    return holds(kind, pt.is_dictionary)


def has_large_text(kind: pa.DataType) -> bool:
    """Return True if a type contains text or bytes with 64-bit offsets."""
    return holds(kind, lambda each: pt.is_large_string(each) or pt.is_large_binary(each))


def undecodable(kind: pa.DataType) -> pa.DataType | None:
    """Return the type inside this one that contains a dictionary and cannot be decoded, or None."""
    kind = storage_of(kind)
    if not holds_dictionary(kind):
        return None
    if pt.is_dictionary(kind):
        return kind if holds_dictionary(kind.value_type) else None
    if not (_is_nested(kind) or pt.is_map(kind)):
        return kind
    return next((each for field in children(kind) if (each := undecodable(field.type)) is not None), None)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values. Views, as Polars writes, become text or bytes: pyarrow cannot take from them."""
    if not holds_dictionary(kind):
        return kind
    kind = storage_of(kind)
    if pt.is_dictionary(kind):
        return without_views(kind.value_type)
    return _inside(kind, plain_type)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the values."""
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema], metadata=schema.metadata)


def plain_array(array: pa.Array) -> pa.Array:
    """Return the values, of ``plain_type``."""
    kind = array.type
    if not holds_dictionary(kind):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return plain_array(array.storage)
    if pt.is_dictionary(kind):
        values = array.dictionary.cast(plain_type(kind))
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if pt.is_struct(kind):
        arrays = [plain_array(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(arrays, fields=list(children(plain_type(kind))), mask=array.is_null())
    buffers = array.buffers()[: 1 if pt.is_fixed_size_list(kind) else 2]
    values = [plain_array(array.values)]
    return pa.Array.from_buffers(plain_type(kind), len(array), buffers, offset=array.offset, children=values)


def large_text(kind: pa.DataType) -> pa.DataType:
    """Return the type with 64-bit offsets for text and bytes at any depth."""
    if pt.is_string(kind) or pt.is_binary(kind):
        return pa.large_string() if pt.is_string(kind) else pa.large_binary()
    return _inside(kind, large_text)


def without_views(kind: pa.DataType) -> pa.DataType:
    """Return the type with text and bytes in place of views of them, at any depth."""
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        return pa.large_string() if pt.is_string_view(kind) else pa.large_binary()
    return _inside(kind, without_views)


def _inside(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a list, map or struct type with changed types inside. Other types are returned as they are."""
    if not (_is_nested(kind) or pt.is_map(kind)):
        return kind
    fields = [field.with_type(change(field.type)) for field in children(kind)]
    return kind if fields == list(children(kind)) else with_children(kind, fields)


def with_children(kind: pa.DataType, fields: list[pa.Field]) -> pa.DataType:
    """Return a list, map or struct type with other fields inside."""
    if pt.is_struct(kind):
        return pa.struct(fields)
    if pt.is_map(kind):
        return pa.map_(fields[0].type.field(0), fields[0].type.field(1), keys_sorted=kind.keys_sorted)
    if pt.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return pa.large_list(fields[0]) if pt.is_large_list(kind) else pa.list_(fields[0])


def children(kind: pa.DataType) -> Iterator[pa.Field]:
    """Yield the fields inside a type."""
    return (kind.field(i) for i in range(kind.num_fields))


Int64Array = npt.NDArray[np.int64]
_arrow_type = cache(pa.from_numpy_dtype)


def as_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers as an Arrow array: not by pa.array, which would import pandas.

    Nothing is copied but booleans, and numbers that are not aligned or not one after the other.
    """
    if values.dtype.kind == "b":
        bits = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    numbers = values if values.flags.aligned and values.flags.c_contiguous else values.copy()
    return pa.Array.from_buffers(_arrow_type(values.dtype), len(values), [None, pa.py_buffer(numbers)])


def taken(column: pa.Array, places: Int64Array) -> pa.Array:
    """Return the values at these places."""
    try:
        return column.take(as_arrow(places))
    except pa.ArrowNotImplementedError:
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(places)).tolist()
        runs = zip(places[starts].tolist(), lengths, strict=True)
        return pa.concat_arrays([column.slice(0, 0), *(column.slice(start, length) for start, length in runs)])


def usable(file: str, schema: pa.Schema) -> None:
    """Raise FormatError for columns that cannot be read, or told apart: columns or fields of a struct with one name."""
    paths = Counter(path for path, _ in nodes(schema))
    if twice := sorted({repr(".".join(path)) for path, count in paths.items() if count > 1}):
        raise FormatError(f"{file}: several columns are named {', '.join(twice)}. Rename them in the file.")
    for column in schema:
        if (inner := undecodable(column.type)) is not None:
            raise FormatError(
                f"{file}: column {column.name!r} contains dictionary-encoded values inside a {inner}, which cannot be "
                "read. Write them as plain values."
            )


def difference(files: Sequence[str], schemas: Sequence[pa.Schema]) -> str | None:
    """Return sentences about two files with different columns, or None if all have the same ones."""
    expected = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if expected.equals(schema):
            continue
        types, others = (dict(zip(each.names, each.types, strict=True)) for each in (expected, schema))
        for name in {**types, **others}:
            a, b = types.get(name, "missing"), others.get(name, "missing")
            if a != b:
                return (
                    f"the files do not have one schema: column {name!r} is {a} in {files[0]} but {b} in {file}. "
                    "Load them as separate datasets, or write one of them again."
                )
        if expected.names != schema.names:
            return f"the files list their columns in different orders: {files[0]} and {file}."
    return None


def unified(files: Sequence[str], scans: Sequence[Scanned], added: pa.Schema | None, *, text: bool) -> pa.Schema:
    """Return one schema for all files: the union of their columns."""
    if scans[0].inferred:
        schema = widest(files[0], [scan.schema for scan in scans], text=text)
        schema = pa.schema([field.with_type(pa.string()) if field.type == pa.null() else field for field in schema])
    else:
        schema = _joined(files, [scan.schema for scan in scans])
    if added is not None:
        known = [field for field in schema if field.name not in added.names]
        schema = pa.schema([*known, *added], metadata=schema.metadata)
    if not len(schema):
        raise FormatError(f"{files[0]}: no columns were found: is it empty? Check the program that wrote it.")
    return schema


def _joined(files: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the union of the columns of these files, each with a type that holds the values of all."""
    fields: dict[str, tuple[pa.Field, str]] = {}
    for i, (file, schema) in enumerate(zip(files, schemas, strict=True)):
        if i and schema.equals(schemas[i - 1]):
            continue
        usable(file, schema)
        for field in schema:
            plain = field.with_type(_free(plain_type(field.type)))
            before, where = fields.setdefault(field.name, (plain, file))
            if before.type == plain.type:
                continue
            kind = _common(before.type, plain.type)
            if kind is None:
                raise DifferentSchemasError(
                    f"the files do not have one schema: column {field.name!r} is {before.type} in {where} but "
                    f"{plain.type} in {file}. Load them as separate datasets, or write one again."
                )
            fields[field.name] = (before.with_type(kind), file if before.type == pa.null() else where)
    return pa.schema([field.with_nullable(True) for field, _ in fields.values()], metadata=schemas[0].metadata)


def _common(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds values of both, as pyarrow promotes them: the wider number, the larger offsets, the
    fields of both structs. None if there is none.
    """
    for a, b in ((first, second), (without_views(first), without_views(second))):
        try:
            return _free(_promoted(a, b))
        except pa.ArrowException:
            continue
    return None


def _promoted(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    schemas = [pa.schema([pa.field("", kind)]) for kind in (a, b)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _free(kind: pa.DataType) -> pa.DataType:
    """Return a type in which every inner field is nullable: files differ in this."""
    if not _is_nested(kind):
        return kind
    return with_children(kind, [each.with_type(_free(each.type)).with_nullable(True) for each in children(kind)])


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pt.is_struct(kind) or pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def nullable_paths(
    scans: Sequence[Scanned], schema: pa.Schema, values: Sequence[Values], added: pa.Schema | None
) -> frozenset[tuple[str, ...]]:
    """Return the paths at which any file has a null.

    A file that lacks a column or a field has nulls there, and so has a folder whose partition value is null.
    """
    constant = set(added.names) if added is not None else set()
    types = {field.name: field.type for field in schema if field.name not in constant}
    paths: set[tuple[str, ...]] = {(n,) for n in constant if any(dict(value)[n] is None for value in values)}
    for scan in scans:
        own = dict(zip(scan.schema.names, scan.schema.types, strict=True))
        paths.update((name,) for name in types.keys() - own.keys())
        other = {n for n, kind in own.items() if n in types and not kind.equals(types[n], check_metadata=True)}
        for name, *inner in scan.nullable:
            if name in types:
                paths.add((name, *(_renamed(inner, types[name]) if name in other else inner)))
        for name in other:
            paths.update(lacking(types[name], plain_type(own[name]), (name,)))
    return frozenset(paths)


def _renamed(path: Sequence[str], kind: pa.DataType) -> list[str]:
    """Return a path inside a column with the names of the common type: writers name the values of lists differently."""
    kind = storage_of(kind)
    if not path or not kind.num_fields:
        return list(path)
    inner = kind.field(path[0]) if pt.is_struct(kind) else kind.field(0)
    return [inner.name, *_renamed(path[1:], inner.type)]


def lacking(common: pa.DataType, own: pa.DataType, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of struct fields that a file or a block lacks, and for which it has nulls."""
    if not (_is_nested(own) and _is_nested(common)):
        return
    if not pt.is_struct(common):
        yield from lacking(common.field(0).type, own.field(0).type, (*path, common.field(0).name))
        return
    theirs = {field.name: field.type for field in children(own)}
    for field in children(common):
        inner = (*path, field.name)
        if field.name in theirs:
            yield from lacking(field.type, theirs[field.name], inner)
        else:
            yield inner


def row_bytes(scans: Sequence[Scanned], schema: pa.Schema) -> float:
    """Return the approximate bytes of a row in memory: the size that files report, and at least the fixed widths."""
    reported = sum(scan.decoded_bytes for scan in scans) / max(1, sum(sum(scan.rows) for scan in scans))
    return max(reported, float(sum(_width(field.type) for field in schema)))


def _width(kind: pa.DataType) -> float:
    kind = storage_of(kind)
    if pt.is_fixed_size_list(kind):
        return float(kind.list_size) * _width(kind.value_type)
    if pt.is_struct(kind):
        return sum(_width(field.type) for field in children(kind))
    try:
        return float(kind.bit_width) / 8
    except ValueError:  # text and lists
        return 4.0


MIXED_REMEDY = (
    'Write values of one type, or open it with midepoch.load_dataset("json", data_files=…), which reads mixed types.'
)


def nulls(table: pa.Table) -> set[tuple[str, ...]]:
    """Return the paths of columns, and of fields inside them, with a null."""
    found: set[tuple[str, ...]] = set()

    def look(path: tuple[str, ...], column: pa.Array) -> None:
        if column.null_count:
            found.add(path)
        if pt.is_struct(column.type):
            for i, field in enumerate(children(column.type)):
                look((*path, field.name), column.field(i))
        elif _is_nested(column.type):
            look((*path, column.type.field(0).name), column.flatten())

    for name, column in zip(table.schema.names, table.columns, strict=True):
        for chunk in column.chunks:
            look((name,), chunk)
    return found


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
    if pt.is_temporal(a) != pt.is_temporal(b) and pa.string() in (a, b):
        return pa.string()
    if pt.is_list(a) and pt.is_list(b):
        return pa.list_(_wider(file, column, a.value_type, b.value_type, text))
    if pt.is_struct(a) and pt.is_struct(b):
        fields = {field.name: field.type for field in children(a)}
        for other in children(b):
            mine = fields.get(other.name)
            fields[other.name] = other.type if mine is None else _wider(file, column, mine, other.type, text)
        return pa.struct(list(fields.items()))
    try:
        return _promoted(a, b)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if text:
            return pa.string()
        raise FormatError(
            f"{file}: column {column!r} contains {a} in some rows and {b} in others. {MIXED_REMEDY}"
        ) from None


def nodes(schema: pa.Schema) -> list[tuple[tuple[str, ...], int]]:
    """Return the field nodes of a record batch: columns and their children, depth first.

    A node is the path of names to it, and the size of the fixed-size list around it, or 0.
    """
    return [node for column in schema for node in _nodes(column, (), 0)]


def _nodes(field: pa.Field, above: tuple[str, ...], items: int) -> Iterator[tuple[tuple[str, ...], int]]:
    kind, path = storage_of(field.type), (*above, field.name)
    yield path, items
    if not pt.is_dictionary(kind):
        inside = kind.list_size if pt.is_fixed_size_list(kind) else 0
        for child in children(kind):
            yield from _nodes(child, path, inside)


def constant_length(kind: pa.DataType) -> int | None:
    """Return the length of all values of a type, or None if they differ."""
    kind = stored_type(kind)
    if pt.is_fixed_size_list(kind):
        return int(kind.list_size)
    return int(kind.byte_width) if pt.is_fixed_size_binary(kind) else None


def has_length(kind: pa.DataType) -> bool:
    """Return True for lists, maps, text and bytes."""
    kind = stored_type(kind)
    is_view = pt.is_list_view(kind) or pt.is_large_list_view(kind) or pt.is_string_view(kind) or pt.is_binary_view(kind)
    return bool(is_view) or constant_length(kind) is not None or offset_dtype(kind) is not None


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values, without dictionaries and extension types."""
    return storage_of(plain_type(kind))


def offset_dtype(kind: pa.DataType) -> np.dtype[np.signedinteger[Any]] | None:
    """Return the dtype of the offsets of lists, maps, text and bytes of any length. None for other types."""
    if pt.is_string(kind) or pt.is_binary(kind) or pt.is_list(kind) or pt.is_map(kind):
        return np.dtype("<i4")
    large = pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind)
    return np.dtype("<i8") if large else None
