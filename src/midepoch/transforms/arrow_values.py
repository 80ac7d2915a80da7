"""Conversion of Arrow columns to Python and numpy, without a Python object per value where the layout allows.

Nulls are ``None`` in Python. In numpy, torch and JAX:

- A numeric or boolean column with a null *anywhere in the data* is float in every batch, with NaN for null (floats keep
  their width, others become float64). The dtype does not depend on the batch.
- A null date is NaT.
- Null strings, lists and structs are ``None`` in a list.

Values are read from the buffers and not with ``Array.to_numpy``, which imports pandas (0.4 s) the first time.
"""

from __future__ import annotations

import copyreg
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.values import loaded
from midepoch.read.columns import number_dtype
from midepoch.sources.schemas import as_arrow

_number_dtype = lru_cache(maxsize=64)(number_dtype)  # 5 µs otherwise

Paths = frozenset[tuple[str, ...]]
"""Paths inside a column at which the data has nulls: () for the column itself, (child, …) for a field inside it."""


def _interval(*parts: int) -> Any:
    return pa.MonthDayNano(parts)


# For batches of worker processes. The class has no name by which pickle could find it.
copyreg.pickle(pa.MonthDayNano, lambda interval: (_interval, tuple(interval)))


def to_python(column: pa.Array) -> list[Any]:
    """Return the values as ``to_pylist`` does, up to 10 times faster for numbers and lists of numbers."""
    column = without_extension(column)
    kind = column.type
    if is_number(kind) and not column.null_count:
        return _view(column).tolist()  # type: ignore[no-any-return]
    if is_list(kind) and not column.null_count:
        flat = items(column)
        if is_number(flat.type) and not flat.null_count:
            if pt.is_fixed_size_list(kind):
                return _view(flat).reshape(len(column), kind.list_size).tolist()  # type: ignore[no-any-return]
            values, ends = _view(flat).tolist(), list_ends(column).tolist()
            return [values[a:b] for a, b in pairwise(ends)]
    return column.to_pylist()  # type: ignore[no-any-return]


def to_numpy(column: pa.Array, nullable: Paths, *, owned: bool, times: bool = True) -> Any:
    """Return a numpy array (with one more dimension for lists of one shape), a dict of arrays for a struct, else a
    list.

    The result is writable: memory that the batch does not own is copied. The value of a row depends on that row and on
    the nullable paths of the data, never on its neighbours. Without ``times``, times are Python objects: tensors cannot
    hold them, and numpy has no time zones.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        paths = _inside(nullable, len(kind.shape)) if isinstance(kind, pa.FixedShapeTensorType) else nullable
        return to_numpy(without_extension(column), paths, owned=owned, times=times)
    if not nullable and pt.is_fixed_size_list(kind) and is_number(kind.value_type):  # fast path for the common case
        values = items(column)
        if not column.null_count and not values.null_count:
            view = _view(values).reshape(len(column), kind.list_size)
            return view if owned and view.flags.writeable else view.copy()
    if is_number(kind) or pt.is_boolean(kind):
        view = _bits(column.buffers()[1], column) if pt.is_boolean(kind) else _view(column)
        if () in nullable or column.null_count:
            out = view.astype(view.dtype if pt.is_floating(kind) else np.float64)
            if column.null_count:
                out[_invalid(column)] = np.nan
            return out
        if pt.is_boolean(kind):
            return view.astype(bool)
        return view if owned and view.flags.writeable else view.copy()
    if (unit := _time_unit(kind)) is not None:
        return _times(column, unit) if times else to_python(column)
    if pt.is_struct(kind) and () not in nullable:
        children = [kind.field(i).name for i in range(kind.num_fields)]
        inner = [(name, column.field(i), _below(nullable, name)) for i, name in enumerate(children)]
        return {name: to_numpy(child, paths, owned=owned, times=times) for name, child, paths in inner}
    if is_list(kind) and _is_array(kind.value_type):
        return _lists(column, nullable, owned)
    return to_python(column)


def without_extension(column: pa.Array) -> pa.Array:
    """Return a column of an extension type as one of plain types with the same values. UUIDs are unchanged."""
    kind = column.type
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.UuidType):
        return column
    if isinstance(kind, pa.Bool8Type):
        return column.storage.cast(pa.bool_())
    if isinstance(kind, pa.FixedShapeTensorType) and kind.shape and 0 not in kind.shape:
        return _nested(column)
    return without_extension(column.storage)


def type_without_extension(kind: pa.DataType) -> pa.DataType:
    """Return the type of ``without_extension`` for a column of this type, which may be dictionary-encoded."""
    kind = kind.value_type if pt.is_dictionary(kind) else kind
    if not isinstance(kind, pa.BaseExtensionType):
        return kind
    return without_extension(pa.ExtensionArray.from_storage(kind, pa.array([], kind.storage_type))).type


def _nested(column: pa.Array) -> pa.Array:
    """Return tensors of one shape as lists of lists, with the dimensions in the order of their type."""
    kind, storage, values = column.type, column.storage, items(column.storage)
    shape = list(kind.shape)
    if kind.permutation:
        places = np.arange(len(values)).reshape(len(column), *shape)
        places = places.transpose(0, *(place + 1 for place in kind.permutation)).reshape(-1)
        values = values.take(as_arrow(places.copy()))
        shape = [shape[place] for place in kind.permutation]
    for size in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    mask = storage.is_null() if storage.null_count else None
    return pa.FixedSizeListArray.from_arrays(values, shape[0], mask=mask)


def _inside(nullable: Paths, depth: int) -> Paths:
    """Return the nullable paths of tensors as lists of lists: the tensors themselves, or their values."""
    inner = frozenset({("item",) * depth}) if any(nullable - {()}) else frozenset()
    return (nullable & {()}) | inner


def _below(nullable: Paths, name: str) -> Paths:
    return frozenset(path[1:] for path in nullable if path and path[0] == name)


def _is_array(kind: pa.DataType) -> bool:
    """Return True for numbers and booleans, and for lists of them at any depth."""
    return _is_array(kind.value_type) if is_list(kind) else is_number(kind) or bool(pt.is_boolean(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return True for integers and floats."""
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return True for lists of any kind of offsets, and of a fixed size."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def flat_numbers(column: pa.Array) -> Any:
    """Return the values of a column without nulls. Arrow's own ``to_numpy`` imports pandas, which takes 0.2 s."""
    if pt.is_boolean(column.type):
        return _bits(column.buffers()[1], column).astype(bool) if len(column) else np.empty(0, bool)
    return _view(column) if is_number(column.type) else column.to_numpy(zero_copy_only=False)


def _view(column: pa.Array) -> Any:
    """Return a view of the values of a plain column, writeable if its memory is. Values at nulls are arbitrary."""
    return _plain(column, _number_dtype(column.type))


def _plain(column: pa.Array, dtype: Any) -> Any:
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _bits(bitmap: pa.Buffer, column: pa.Array) -> Any:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)]


def _invalid(column: pa.Array) -> Any:
    return _bits(column.buffers()[0], column) == 0


def _time_unit(kind: pa.DataType) -> str | None:
    if pt.is_timestamp(kind):
        return f"datetime64[{kind.unit}]"
    if pt.is_duration(kind):
        return f"timedelta64[{kind.unit}]"
    if pt.is_date32(kind):
        return "datetime64[D]"
    if pt.is_date64(kind):
        return "datetime64[ms]"
    return None


def _times(column: pa.Array, unit: str) -> Any:
    stored = np.dtype(np.int32 if pt.is_date32(column.type) else np.int64)
    out = _plain(column, stored).astype(np.int64).astype(unit)
    if column.null_count:
        out[_invalid(column)] = "NaT"
    return out


def items(column: pa.Array) -> pa.Array:
    """Return the concatenated values of the lists, like ``flatten``, but 10 times faster for a small column."""
    if pt.is_fixed_size_list(column.type):
        size = column.type.list_size
        return column.values.slice(column.offset * size, len(column) * size)
    ends = _view(column.offsets)
    return column.values.slice(int(ends[0]), int(ends[-1] - ends[0])) if len(ends) else column.values.slice(0, 0)


def list_ends(column: pa.Array) -> Any:
    """Return where each list of a column begins in its ``items``, and the end of the last one."""
    if pt.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1) * column.type.list_size
    ends = _view(column.offsets)
    return ends - ends[0] if len(ends) else np.zeros(1, np.int64)


def _lists(column: pa.Array, nullable: Paths, owned: bool) -> Any:
    kind = column.type
    inner = _below(nullable, kind.value_field.name)
    if () in nullable or column.null_count:
        rows = [_row(to_numpy(each.values, inner, owned=False)) if each.is_valid else None for each in column]
        return stacked(rows)
    values, ends = to_numpy(items(column), inner, owned=owned), list_ends(column)
    if isinstance(values, list):
        return stacked([_row(values[a:b]) for a, b in pairwise(ends.tolist())])
    if pt.is_fixed_size_list(kind):
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if values.ndim > 1:  # lists of lists: an empty one has no inner length
        return stacked([values[a:b] if b > a else [] for a, b in pairwise(ends.tolist())])
    lengths = ends[1:] - ends[:-1]
    if len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(column), int(lengths[0]))
    return [values[a:b] for a, b in pairwise(ends.tolist())]  # np.split takes ten times as long


def _row(values: Any) -> Any:
    return stacked(values) if isinstance(values, list) else values


def stacked(arrays: list[Any]) -> Any:
    """Stack arrays of the same shape. Otherwise return the list unchanged."""
    if arrays and all(isinstance(each, np.ndarray) and each.shape == arrays[0].shape for each in arrays):
        return np.stack(arrays)
    return arrays


def plain_values(column: Any) -> Any:
    """Return values that pyarrow accepts: no tensors, and one array per row for more than one dimension."""
    torch = loaded("torch")
    if torch is not None and isinstance(column, torch.Tensor):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray):
        return column if column.ndim < 2 else [_array_rows(row) for row in column]
    return [_plain_value(value, torch) for value in column]


def _plain_value(value: Any, torch: Any) -> Any:
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return _array_rows(value)
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float, str, bytes)):
        return [_plain_value(inner, torch) for inner in value]
    return value


def _array_rows(array: Any) -> Any:
    """Return an array as nested lists of one-dimensional arrays, which keep their type."""
    return array[()] if array.ndim < 2 else [_array_rows(row) for row in array]
