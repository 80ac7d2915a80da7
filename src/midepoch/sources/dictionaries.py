"""Decoding of dictionary-encoded columns, also inside lists, structs and extension types."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt


def holds(kind: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return True if a type, or any type inside it, is wanted."""
    if isinstance(kind, pa.BaseExtensionType):
        return holds(kind.storage_type, is_wanted)
    return is_wanted(kind) or any(holds(field.type, is_wanted) for field in children(kind))


def holds_dictionary(kind: pa.DataType) -> bool:
    """Return True if a type, or any type inside it, is dictionary-encoded."""
    return holds(kind, pt.is_dictionary)


def has_large_text(kind: pa.DataType) -> bool:
    """Return True if a type contains text or bytes with 64-bit offsets."""
    return holds(kind, lambda each: pt.is_large_string(each) or pt.is_large_binary(each))


def undecodable(kind: pa.DataType) -> pa.DataType | None:
    """Return the type inside this one that contains a dictionary and cannot be decoded, or None."""
    if isinstance(kind, pa.BaseExtensionType):
        return undecodable(kind.storage_type)
    if not holds_dictionary(kind):
        return None
    if pt.is_dictionary(kind):
        return kind if holds_dictionary(kind.value_type) else None
    if not (_has_lists(kind) or pt.is_struct(kind)):
        return kind
    return next((each for field in children(kind) if (each := undecodable(field.type)) is not None), None)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values. Views, as Polars writes, become text or bytes: pyarrow cannot take from them."""
    if not holds_dictionary(kind):
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pt.is_dictionary(kind):
        return without_views(kind.value_type)
    return _inside(kind, plain_type)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the values."""
    for i, field in enumerate(schema):
        if holds_dictionary(field.type):
            schema = schema.set(i, field.with_type(plain_type(field.type)))
    return schema


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
    if not (_has_lists(kind) or pt.is_struct(kind)):
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


def _has_lists(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind) or pt.is_map(kind))


def children(kind: pa.DataType) -> Iterator[pa.Field]:
    """Yield the fields inside a type."""
    return (kind.field(i) for i in range(kind.num_fields))


Int64Array = npt.NDArray[np.int64]


def taken(column: pa.Array, places: Int64Array) -> pa.Array:
    """Return the values at these places."""
    try:
        # Not pa.array, which would import pandas.
        numbers = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(np.ascontiguousarray(places))])
        return column.take(numbers)
    except pa.ArrowNotImplementedError:
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(places)).tolist()
        runs = zip(places[starts].tolist(), lengths, strict=True)
        return pa.concat_arrays([column.slice(0, 0), *(column.slice(start, length) for start, length in runs)])
