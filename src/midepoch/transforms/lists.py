"""Columns of lists of numbers: the lengths of the lists, and all numbers one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.values import loaded
from midepoch.errors import ColumnError, MapError
from midepoch.transforms.arrow_values import flat_numbers, is_list, is_number, items
from midepoch.transforms.batch import Encoded
from midepoch.transforms.formats import array_of

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

_EMPTY = np.zeros(0, np.int64)


class NumberLists(NamedTuple):
    """The lists of a column. Null is an empty list. ``typed``: False if all are empty lists of Python or null, which
    have no type.
    """

    lengths: Int64Array
    values: Values
    typed: bool = True

    @staticmethod
    def of(name: str, column: Any, rows: Int64Array, advice: str, dtype: str | None = None) -> NumberLists | None:
        """Return the lists of a column, or None if it does not contain lists of numbers.

        ``rows``, ``advice``: for messages. ``dtype``: of the result.
        """
        if isinstance(column, pa.Array):
            lists = _of_arrow(name, column, rows)
        elif isinstance(column, (Encoded, dict)):
            return None
        else:
            column = _from_torch(name, column, 2, advice)
            is_array = isinstance(column, np.ndarray) and column.dtype != object
            lists = _of_array(column) if is_array else _of_rows(name, column, rows, advice, dtype)
        if lists is None or dtype is None:
            return lists
        return lists._replace(values=lists.values.astype(dtype, copy=False))


def _of_arrow(name: str, column: pa.Array, rows: Int64Array) -> NumberLists | None:
    kind = column.type
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        column, kind = column.cast(pa.large_list(kind.value_field)), pa.large_list(kind.value_field)
    if not is_list(kind) or not (is_number(kind.value_type) or pt.is_boolean(kind.value_type)):
        return None
    if pt.is_fixed_size_list(kind):
        lengths = np.full(len(column), kind.list_size, np.int64)
    else:
        lengths = np.diff(flat_numbers(column.offsets).astype(np.int64))
    values = items(column)
    if column.null_count:  # values at null lists are arbitrary
        lengths, values = np.where(flat_numbers(column.is_null()), 0, lengths), column.flatten()
    if values.null_count:
        of_lists = np.repeat(rows, lengths)
        raise _null_among(name, of_lists[flat_numbers(values.is_null())][0])
    return NumberLists(lengths, flat_numbers(values))


def _of_array(column: Values) -> NumberLists | None:
    if column.ndim != 2 or column.dtype.kind not in "biuf":
        return None
    values = np.ascontiguousarray(column, column.dtype.newbyteorder("=")).reshape(-1)
    return NumberLists(np.full(len(column), column.shape[1], np.int64), values)


def _of_rows(name: str, column: Any, rows: Int64Array, advice: str, dtype: str | None) -> NumberLists | None:
    """Return the lists of a column that a map returned, one value per row."""
    values = [_from_torch(name, value, 1, advice) for value in column]
    parts = [_numbers(value) for value in values]
    full = [part for part in parts if part is not None and len(part)]
    others = [i for i, part in enumerate(parts) if part is None]
    for i in others:
        if isinstance(values[i], (list, tuple)) and None in values[i]:
            numbers = _numbers([number for number in values[i] if number is not None])
            if numbers is not None and len(numbers):
                raise _null_among(name, rows[i])
    if others and not full:
        return None
    if others:
        raise MapError(
            f"column {name!r} has lists of numbers, but not in row {rows[others[0]]} of the dataset. {advice}"
        )
    if dtype is not None:  # before they are joined, which would make floats of int64 and uint64
        full = [part.astype(dtype, copy=False) for part in full]
    kinds = sorted({str(part.dtype) for part in full})
    if len(kinds) > 1:
        raise of_two_types(name, kinds[0], kinds[1], advice)
    lengths = np.array([0 if part is None else len(part) for part in parts], np.int64)
    typed = full or [part for part in parts if part is not None and part is not _EMPTY]
    if not typed:
        return NumberLists(lengths, _EMPTY, typed=False)
    found = np.concatenate(typed)
    return NumberLists(lengths, found.astype(found.dtype.newbyteorder("="), copy=False))


def _numbers(value: Any) -> Values | None:
    """Return the numbers of one row, or None for anything else."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return _EMPTY
    array = array_of(value) if isinstance(value, (list, tuple)) else value
    return array if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "biuf" else None


def _from_torch(name: str, value: Any, dimensions: int, advice: str) -> Any:
    """Return a tensor with so many dimensions as an array, anything else unchanged."""
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.ndim != dimensions:
        return value
    try:
        return value.detach().cpu().numpy()
    except TypeError:
        raise ColumnError(f"column {name!r} is {value.dtype}, which numpy does not have. {advice}") from None


def _null_among(name: str, row: int) -> MapError:
    return MapError(f"column {name!r} has a null among the numbers of row {row} of the dataset.")


def of_two_types(name: str, first: str, second: str, advice: str) -> ColumnError:
    return ColumnError(f"column {name!r} comes as {first} and as {second}. {advice}")
