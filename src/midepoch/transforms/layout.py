"""Layout of a batch of rows of different lengths: padded to one length, or one after the other (varlen).

Every column of lists of numbers has a value for each token, as the column whose lengths count. It is laid out in the
same way. Columns named in ``other``, and those of other types, are as ``present`` gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.values import loaded
from midepoch._native import copy_ranges, fill_ranges, number_ranges
from midepoch.errors import ColumnError, MapError
from midepoch.transforms.arrow_values import flat_numbers
from midepoch.transforms.batch import Batch, check_columns
from midepoch.transforms.context import ContextSlice, pad_for, room, round_up
from midepoch.transforms.features import Encoded
from midepoch.transforms.formats import Allocate, present

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

LAYOUTS = ("padded", "varlen")
MASK = "attention_mask"
_ADDED = ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen")
_ADDED_BY_CONTEXT = ("cu_seqlens_global", "cu_seqlens_padded", "max_seqlen_global")


@dataclass(frozen=True)
class Layout:
    """Arrangement of the rows of a batch.

    - ``kind``: "padded" to arrays of shape [rows, longest], "varlen" to arrays of shape [total]
    - ``column``: the column whose lengths count, such as ``input_ids``
    - ``multiple``: the longest row (padded) or the total (varlen) is rounded up to a multiple of this
    - ``pads``: values for padding by column, by default -100 for labels and 0 otherwise
    - ``context``: the part of every sequence that this process gets
    - ``other``: columns of lists that have no value for each token
    """

    kind: str
    column: str
    multiple: int = 1
    pads: tuple[tuple[str, int | float], ...] = ()
    context: ContextSlice | None = None
    other: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {self.kind!r}")
        if self.multiple < 1:
            raise ValueError(f"lengths can be rounded up to a multiple of 1 or more, got {self.multiple}")
        if self.column in self.other:
            raise ValueError(f"{self.column!r} is the column whose lengths count and cannot be in other")

    def arrange(self, batch: Batch, allocate: Allocate | None = None, kind: str = "torch") -> dict[str, Any]:
        """Return the columns as numpy arrays, for ``finish``. ``kind``: the format of columns that stay as they are.

        With "numpy", "torch" or "jax" those are as ``present`` gives them.
        """
        tokens = self._tokens(batch)
        rest = {name: column for name, column in batch.columns.items() if name not in tokens}
        shown: Any = present(batch.with_columns(rest), kind, allocate)
        inner = None if self.context is not None else allocate
        added = self._padded(tokens, inner) if self.kind == "padded" else self._varlen(tokens, inner)
        columns = {name: added.pop(name) if name in tokens else shown[name] for name in batch.columns} | added
        if self.context is None:
            return columns
        names = [*tokens, *(name for name in (MASK, "position_ids", "segment_ids") if name in added)]
        pads = dict(self.pads)
        return self.context.cut(columns, tokens=names, pads=pads, multiple=self.multiple, allocate=allocate)

    def _tokens(self, batch: Batch) -> dict[str, Tokens]:
        """Return the columns with a value for each token."""
        named = [self.column, *self.other, *(name for name, _ in self.pads)]
        check_columns(list(dict.fromkeys(named)), list(batch.columns), f"{self.kind} layout")
        added = (*_ADDED * (self.kind == "varlen"), *_ADDED_BY_CONTEXT * (self.context is not None))
        if taken := [name for name in added if name in batch.columns]:
            raise ColumnError(
                f"{self.kind} layout: it adds {', '.join(map(repr, taken))}, which the batch already has. Remove or "
                "rename that column."
            )
        found = {n: Tokens.of(n, c, batch.rows) for n, c in batch.columns.items() if n not in self.other}
        first = found[self.column]
        if first is None:
            raise ColumnError(f"{self.kind} layout: column {self.column!r} does not contain lists of numbers.")
        tokens = {}
        for name, each in found.items():
            if each is None or (name != self.column and each.dtype is None and not each.may_match(first)):
                continue
            self._check_lengths(name, each.lengths, first.lengths, batch.rows)
            tokens[name] = each
        if unused := [name for name, _ in self.pads if name not in tokens]:
            raise ColumnError(
                f"{self.kind} layout: a padding value is given for {', '.join(map(repr, unused))}, which is not laid "
                "out: it is in other, or does not contain lists of numbers."
            )
        return tokens

    def _check_lengths(self, name: str, lengths: Int64Array, expected: Int64Array, rows: Int64Array) -> None:
        if different := np.flatnonzero(lengths != expected).tolist():
            bad = different[0]
            raise MapError(
                f"{self.kind} layout: column {name!r} has {lengths[bad]} numbers in row {rows[bad]} of the dataset, "
                f"but {self.column!r} has {expected[bad]}. Lists of numbers need one for each token. Remove the "
                f"column, or leave it as it is with pad_values={{{name!r}: None}}."
            )

    def _room(self, length: int, by_document: bool = False) -> int:
        context = 1 if self.context is None else self.context.multiple()
        return int(length if by_document else round_up(length, lcm(self.multiple, context)))

    def _padded(self, tokens: dict[str, Tokens], allocate: Allocate | None) -> dict[str, Any]:
        lengths = tokens[self.column].lengths
        width = self._room(int(lengths.max(initial=0)))
        starts = np.arange(len(lengths)) * width
        columns: dict[str, Any] = {}
        for name, each in tokens.items():
            columns[name] = out = room((len(lengths), width), each.type, allocate)
            flat = out.reshape(-1)
            each.copy(flat, starts)
            fill_ranges(flat, pad_for(name, out.dtype, dict(self.pads)), starts + lengths, width - lengths)
        if MASK not in tokens:
            columns[MASK] = out = room((len(lengths), width), np.dtype(np.int64), allocate)
            fill_ranges(out.reshape(-1), 1, starts, lengths)
            fill_ranges(out.reshape(-1), 0, starts + lengths, width - lengths)
        return columns

    def _varlen(self, tokens: dict[str, Tokens], allocate: Allocate | None) -> dict[str, Any]:
        lengths = tokens[self.column].lengths
        bounds = np.append(0, np.cumsum(lengths))
        total = int(bounds[-1])
        # Documents that the context parallel layout pads themselves are padded there, and the total after them.
        size = self._room(total, by_document=self.context is not None and self.context.layout == "per_document")
        columns: dict[str, Any] = {}
        for name, each in tokens.items():
            columns[name] = out = room((size,), each.type, allocate)
            each.copy(out, bounds[:-1])
            out[total:] = pad_for(name, out.dtype, dict(self.pads))
        ids = [room((size,), np.dtype(np.int32), allocate) for _ in range(2)]
        number_ranges(ids[0], ids[1], bounds[:-1], lengths, np.arange(1, len(lengths) + 1))
        for out in ids:
            out[total:] = 0
        longest = int(lengths.max(initial=0))
        return {**columns, **dict(zip(_ADDED, (*ids, bounds.astype(np.int32), longest), strict=True))}


_EMPTY = np.zeros(0, np.int64)
_EMPTY.flags.writeable = False


@dataclass(frozen=True)
class Tokens:
    """Numbers of a column, in one array with the start of each row, or in one array per row.

    ``dtype`` is None if all rows are empty lists of Python, which have no type.
    """

    lengths: Int64Array
    values: Values | list[Values]
    starts: Int64Array
    dtype: np.dtype[Any] | None

    def may_match(self, other: Tokens) -> bool:
        """Return True if lists without a type can be those of tokens: all are empty, as the others are."""
        return len(self.lengths) > 0 and np.array_equal(self.lengths, other.lengths)

    @property
    def type(self) -> np.dtype[Any]:
        return np.dtype(np.int64) if self.dtype is None else self.dtype

    def copy(self, out: Values, targets: Int64Array) -> None:
        """Copy the numbers of each row to its place."""
        if isinstance(self.values, list):
            for part, start in zip(self.values, targets.tolist(), strict=True):
                out[start : start + len(part)] = part
        else:
            copy_ranges(self.values, self.starts, self.lengths, out, targets)

    @staticmethod
    def of(name: str, column: Any, rows: Int64Array) -> Tokens | None:
        """Return the numbers of a column, or None if it does not contain lists of numbers. ``rows``: for messages."""
        if isinstance(column, pa.Array):
            return _of_arrow(name, column, rows)
        if isinstance(column, (Encoded, dict)):
            return None
        column = _from_torch(name, column, dimensions=2)
        if isinstance(column, np.ndarray) and column.dtype != object:
            if column.ndim != 2 or column.dtype.kind not in "biuf":
                return None
            count, length = column.shape
            values = np.ascontiguousarray(column, column.dtype.newbyteorder("=")).reshape(-1)
            return Tokens(np.full(count, length), values, np.arange(count) * length, values.dtype)
        return _of_rows(name, column, rows)


def _of_arrow(name: str, column: pa.Array, rows: Int64Array) -> Tokens | None:
    kind = column.type
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        column, kind = column.cast(pa.large_list(kind.value_field)), pa.large_list(kind.value_field)
    if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
        return None
    if not (pt.is_integer(kind.value_type) or pt.is_floating(kind.value_type) or pt.is_boolean(kind.value_type)):
        return None
    if pt.is_fixed_size_list(kind):
        ends = (np.arange(len(column) + 1) + column.offset) * kind.list_size
    else:
        ends = flat_numbers(column.offsets).astype(np.int64) if len(column) else np.zeros(1, np.int64)
    lengths, starts = np.diff(ends), ends[:-1] - ends[0]
    if column.null_count:
        lengths = np.where(flat_numbers(column.is_null()), 0, lengths)
    values = column.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
    if values.null_count:
        nulls = np.append(0, np.cumsum(flat_numbers(values.is_null())))
        _check_nulls(name, np.flatnonzero(nulls[starts + lengths] > nulls[starts]), rows)
    numbers = flat_numbers(values)
    return Tokens(lengths, numbers, starts, numbers.dtype)


def _check_nulls(name: str, bad: Any, rows: Int64Array) -> None:
    if len(bad):
        raise MapError(f"column {name!r} has a null among the numbers of row {rows[bad[0]]} of the dataset.")


def _of_rows(name: str, column: Any, rows: Int64Array) -> Tokens | None:
    """Return the numbers of a column that a map returned, one value per row."""
    values = [_from_torch(name, value, dimensions=1) for value in column]
    if all(value is None for value in values) and values:
        return None
    parts = [_part(value) for value in values]
    others = [i for i, part in enumerate(parts) if part is None]
    full = [part for part in parts if part is not None and len(part)]
    if others:
        _check_nulls(name, [i for i in others if _has_null(values[i])], rows)
        if not full:
            return None
        raise MapError(
            f"column {name!r} has lists of numbers, but not in row {rows[others[0]]} of the dataset. "
            "Map it to one type, or leave it as it is with pad_values={column: None}."
        )
    kinds = sorted({str(part.dtype) for part in full})
    if len(kinds) > 1:
        raise ColumnError(f"column {name!r} comes as {kinds[0]} and as {kinds[1]}. Map it to one type.")
    found = [part for part in parts if part is not None]
    typed = full or [part for part in found if part is not _EMPTY]
    dtype = typed[0].dtype.newbyteorder("=") if typed else None
    return Tokens(np.array([len(part) for part in found], np.int64), found, np.zeros(len(found), np.int64), dtype)


def _part(value: Any) -> Values | None:
    """Return the numbers of one row, or None for anything else. No list is an empty one."""
    if value is None:
        return _EMPTY
    if isinstance(value, (list, tuple)):
        if not value:
            return _EMPTY
        if not isinstance(value[0], (bool, int, float, np.number, np.bool_)):
            return None
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            return None
        if array.dtype.kind == "f" and all(type(number) is int for number in value):
            return None  # too large for numpy's integers: floats would change the values
    elif isinstance(value, np.ndarray):
        array = value
    else:
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _has_null(value: Any) -> bool:
    """Return True for a list of numbers and None."""
    if not isinstance(value, (list, tuple)):
        return False
    numbers = [number for number in value if number is not None]
    return len(numbers) < len(value) and bool(numbers) and _part(numbers) is not None


def _from_torch(name: str, value: Any, dimensions: int) -> Any:
    """Return a tensor with so many dimensions as an array, anything else unchanged."""
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.ndim != dimensions:
        return value
    try:
        return value.detach().cpu().numpy()
    except TypeError:
        raise ColumnError(
            f"column {name!r} is {value.dtype}, which numpy does not have. "
            "Map it to another type, or leave it as it is with pad_values={column: None}."
        ) from None
