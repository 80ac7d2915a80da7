"""pack: documents of any length to sequences of one length. Arrays in, arrays out; the caller keeps the remainder.

A document that does not fit continues in the next sequence. Each sequence marks its documents with ``segment_ids``
(1, 2, … within a sequence, 0 for padding), ``position_ids`` (from 0 within each piece) and optionally ``cu_seqlens``
(the bounds of the pieces, as attention kernels for documents expect them).

Documents come as columns of lists (``NumberLists``): their lengths, and all numbers one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.recycled import empty
from midepoch._internal.values import loaded
from midepoch._native import best_fit as fitted
from midepoch._native import copy_ranges, fill_ranges, number_concatenated, number_ranges
from midepoch.errors import ColumnError, MapError
from midepoch.order.schedule import Schedule
from midepoch.sources.schemas import as_arrow
from midepoch.transforms.arrow_values import flat_numbers, is_list, is_number, items, list_ends
from midepoch.transforms.batch import Encoded, check_columns
from midepoch.transforms.formats import array_of
from midepoch.transforms.provenance import Pieces, sorted_pieces

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
_EMPTY = np.zeros(0, np.int64)
STRATEGIES = ("concat", "best_fit")
TOKENIZE_FIRST = "Tokenize first, ds.tokenize(tokenizer).pack(…), or pass the name of the column of tokens."
LABELS, IGNORED = "labels", -100
"""The column for the loss, and the value that torch's cross entropy and the models of transformers leave out."""
_ADVICE = "Map it to one type, or pass pack(…, dtype=…)."


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
            lists = _of_values(name, column, rows, advice, dtype)
        if lists is None or dtype is None:
            return lists
        return lists._replace(values=lists.values.astype(dtype, copy=False))


def _of_arrow(name: str, column: pa.Array, rows: Int64Array) -> NumberLists | None:
    kind = column.type
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        column, kind = column.cast(pa.large_list(kind.value_field)), pa.large_list(kind.value_field)
    if not is_list(kind) or not (is_number(kind.value_type) or pt.is_boolean(kind.value_type)):
        return None
    lengths, values = np.diff(list_ends(column).astype(np.int64)), items(column)
    if column.null_count:  # values at null lists are arbitrary
        lengths, values = np.where(flat_numbers(column.is_null()), 0, lengths), column.flatten()
    if values.null_count:
        of_lists = np.repeat(rows, lengths)
        raise _null_among(name, of_lists[flat_numbers(values.is_null())][0])
    return NumberLists(lengths, flat_numbers(values))


def _of_values(name: str, column: Any, rows: Int64Array, advice: str, dtype: str | None) -> NumberLists | None:
    """Return the lists of a column that a map returned: one array, or one value per row."""
    column = _from_torch(name, column, 2, advice)
    if isinstance(column, np.ndarray) and column.dtype != object:
        if column.ndim != 2 or column.dtype.kind not in "biuf":
            return None
        flat = np.ascontiguousarray(column, column.dtype.newbyteorder("=")).reshape(-1)
        return NumberLists(np.full(len(column), column.shape[1], np.int64), flat)
    values = [_from_torch(name, value, 1, advice) for value in column]
    parts: list[Any] = [_numbers(value) for value in values]
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
    lengths = np.array([len(part) for part in parts], np.int64)
    typed = full or [part for part in parts if part is not _EMPTY]
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


@dataclass(frozen=True)
class PackSpec:
    """One call of ``pack``. ``extra``: other columns with a value for each token, and their padding values."""

    length: int
    column: str = "input_ids"
    strategy: str = "concat"
    eos: int | None = None
    pad: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    drop_remainder: bool = False
    cu_seqlens: bool = False
    window: int = 1024
    dtype: str | None = None
    labels: bool = False
    mask_first: bool = False
    schedule: Schedule | None = None
    """Gives the length of each sequence, by its number. Then ``length`` is the largest."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be 'concat' or 'best_fit', got {self.strategy!r}")
        if self.column in self.extra:
            raise ValueError(f"{self.column!r} is the packed column and cannot be in extra")
        if self.labels and LABELS in self.pads:
            raise ValueError(f"labels=True makes the column {LABELS!r}, which is packed itself. Omit one of them.")
        if self.mask_first and not self.labels and LABELS not in self.extra:
            raise ValueError("mask_first=True masks labels: add labels=True, or extra={'labels': -100}.")

    @property
    def text(self) -> str:
        """Description of all arguments that affect positions, for the state."""
        parts = ["schedule" if self.schedule else str(self.length), self.strategy, self.column]
        parts += [f"eos={self.eos}"] * (self.eos is not None) + [f"window={self.window}"] * (self.strategy != "concat")
        return f"pack[{' '.join([*parts, 'drop'] if self.drop_remainder else parts)}]"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a sequence."""
        made = ["position_ids", "segment_ids", *["cu_seqlens"] * self.cu_seqlens, *[LABELS] * self.labels]
        return (*self.pads, *made)

    @property
    def pads(self) -> dict[str, int]:
        return {self.column: self.pad, **self.extra}


def nested(column: Any) -> str:
    """Return what to do about lists of lists, or "" if a column has none."""
    kind = str(getattr(column, "type", ""))
    if not re.search(r"list.*list", kind) and not any(np.ndim(value) > 1 for value in column[:1]):
        return ""
    return "A tokenizer that is called with one text returns one list: omit return_tensors=…."


OWN_LABELS = (
    "pack(labels=True): the rows have a column 'labels' of their own. Pack it with extra={'labels': -100}, or remove "
    "it with remove_columns('labels')."
)
_EXTRA = "extra=… takes columns with a value for each token: make one by map(), or omit it."


@dataclass(frozen=True)
class Documents:
    """Tokens of documents one after the other, in one or more columns of equal lengths.

    ``lengths``: tokens of each document, with its end of sequence. ``ends``: for each column the token that is added to
    every document that has tokens. It is not among the ``values``: it is written when they are copied to sequences.
    """

    lengths: Int64Array
    values: dict[str, Values]
    ends: dict[str, int] | None = None

    @cached_property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @staticmethod
    def of(columns: Mapping[str, Any], spec: PackSpec, rows: Int64Array) -> Documents:
        """Return the documents of a batch, one per row. Null and empty documents have no tokens."""
        check_columns(list(spec.pads), list(columns), "pack", TOKENIZE_FIRST)
        if spec.labels and LABELS in columns:
            raise ColumnError(OWN_LABELS)
        found = {}
        for name, pad in spec.pads.items():
            lists = NumberLists.of(name, columns[name], rows, _ADVICE, spec.dtype if name == spec.column else None)
            if lists is None:
                kind = getattr(columns[name], "type", "of other values")
                remedy = nested(columns[name]) or (TOKENIZE_FIRST if name == spec.column else _EXTRA)
                raise ColumnError(f"pack: column {name!r} is {kind}, not lists of numbers. {remedy}")
            masked = [IGNORED] if spec.mask_first and name == LABELS else []
            _check_fits(name, lists.values, [pad, *([spec.eos] if name == spec.column else masked)])
            found[name] = lists
        lengths = found[spec.column].lengths
        for name in spec.extra:
            if not np.array_equal(found[name].lengths, lengths):
                row = int(np.flatnonzero(found[name].lengths != lengths)[0])
                raise MapError(
                    f"pack: {spec.column!r} has {lengths[row]} values in row {rows[row]} of the dataset, and {name!r} "
                    f"has {found[name].lengths[row]}. Give it one for each token, or omit it from extra."
                )
        values = {name: lists.values for name, lists in found.items()}
        if spec.eos is None:
            return Documents(lengths, values)
        return Documents(lengths + (lengths > 0), values, {spec.column: spec.eos, **spec.extra})

    def check_type(self, other: Documents) -> None:
        """Raise ColumnError if the columns of other documents have other types. Documents without tokens have none."""
        if self.tokens and other.tokens:
            for name, values in self.values.items():
                if values.dtype != other.values[name].dtype:  # the result would depend on where reading began
                    raise of_two_types(name, str(values.dtype), str(other.values[name].dtype), _ADVICE)

    def cut_first(self, tokens: int) -> Documents:
        """Return the documents without the first tokens of the first document, which may become empty."""
        rest, emptied = self.without(min(tokens, int(self.lengths[0])))
        return replace(rest, lengths=np.append(np.zeros(emptied, np.int64), rest.lengths))

    def without(self, tokens: int) -> tuple[Documents, int]:
        """Drop the first tokens. Return the rest, and the number of dropped documents."""
        ends = np.cumsum(self.lengths)
        dropped = int(np.searchsorted(ends, tokens, side="right"))
        lengths = self.lengths[dropped:].copy()
        if into := tokens - (int(ends[dropped - 1]) if dropped else 0):
            lengths[0] -= into
        stored = tokens - (0 if self.ends is None else np.count_nonzero(self.lengths[:dropped]))
        values = {name: each[stored:] for name, each in self.values.items()}
        return replace(self, lengths=lengths, values=values), dropped

    def copy(self, name: str, out: Values) -> None:
        """Write the first tokens of a column, as many as ``out`` holds."""
        values, total = self.values[name], len(out)
        if self.ends is None:
            out[:] = values[:total]
            return
        stops = np.cumsum(self.lengths)
        last = int(np.searchsorted(stops, total))  # the document that reaches the end of out
        stops, lengths = stops[: last + 1], self.lengths[: last + 1]
        sizes = lengths - (lengths > 0)
        if total < stops[-1]:
            sizes[-1] -= stops[-1] - 1 - total
        copy_ranges(values, np.cumsum(sizes) - sizes, sizes, out, stops - lengths)
        out[stops[(lengths > 0) & (stops <= total)] - 1] = self.ends[name]


def _check_fits(name: str, values: Values, numbers: list[int | None]) -> None:
    if values.dtype.kind in "iu" and len(values):
        limits = np.iinfo(values.dtype)
        for number in numbers:
            if number is not None and not limits.min <= number <= limits.max:
                raise ColumnError(f"pack: {number} does not fit into column {name!r}, which is {values.dtype}.")


def concatenated(parts: Sequence[Documents], spec: PackSpec, packs: int, length: int) -> dict[str, Any]:
    """Return the first ``packs`` sequences of documents one after the other. The last one is padded if necessary.

    Tokens are copied once, from where they were read.
    """
    size = packs * length
    total = min(sum(part.tokens for part in parts), size)
    parts = [part for part in parts if part.tokens]
    lengths = np.concatenate([part.lengths for part in parts])
    columns: dict[str, Any] = {}
    for name, pad in spec.pads.items():
        columns[name] = out = empty(size, parts[0].values[name].dtype)
        at = 0
        for part in parts:
            stop = min(total, at + part.tokens)
            part.copy(name, out[at:stop])
            at = stop
        out[total:] = pad
    columns["position_ids"], columns["segment_ids"] = ids = empty(size, np.int32), empty(size, np.int32)
    number_concatenated(ids[0][:total], ids[1][:total], lengths, length)
    for values in ids:
        values[total:] = 0
    if spec.cu_seqlens:
        stops = np.cumsum(lengths)
        starts = np.unique(np.concatenate([stops - lengths, np.arange(0, total, length)]))
        starts = starts[starts < total]
        used = np.minimum(total - np.arange(packs) * length, length)
        columns["cu_seqlens"] = _edges(starts // length, starts % length, used)
    return _sequences(columns, spec, length)


def _sequences(columns: dict[str, Any], spec: PackSpec, length: int) -> dict[str, pa.Array]:
    """Return sequences as Arrow columns, like those that are read from files. Nothing is copied.

    Labels are added, which the loss ignores where they are -100: at padding and, if requested, where a document begins.
    """
    if spec.labels:
        columns[LABELS] = labels = columns[spec.column].astype(np.int64)
        labels[columns["segment_ids"] == 0] = IGNORED
    if spec.mask_first:
        columns[LABELS][columns["position_ids"] == 0] = IGNORED
    return {
        name: values if isinstance(values, pa.Array) else pa.FixedSizeListArray.from_arrays(as_arrow(values), length)
        for name, values in columns.items()
    }


def best_fit(documents: Documents, spec: PackSpec) -> tuple[dict[str, Any], Int64Array, int, Callable[[], Pieces]]:
    """Pack all documents by best-fit-decreasing. Documents that are too long are split first.

    Return the columns of the sequences, the number of the first document of each, the number of packed tokens, and a
    function that returns the pieces of documents.
    """
    length, lengths = spec.length, documents.lengths
    counts = -(-lengths // length)
    owners = np.repeat(np.arange(len(lengths)), counts)
    into = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    sizes = np.minimum(lengths[owners] - into, length)
    rows, offsets, numbers, rooms = fitted(sizes, length)
    stored, is_last = sizes, np.zeros(len(sizes), np.bool_)
    if documents.ends is not None:
        is_last = into + sizes == lengths[owners]
        stored = sizes - is_last
    starts = np.cumsum(stored) - stored
    if spec.drop_remainder:
        kept = rooms == 0
        some = kept[rows]
        rows = (np.cumsum(kept) - 1)[rows]
        rooms = rooms[kept]
        arrays = (rows, offsets, numbers, owners, into, sizes, stored, is_last, starts)
        rows, offsets, numbers, owners, into, sizes, stored, is_last, starts = (array[some] for array in arrays)
    targets, size = rows * length + offsets, len(rooms) * length
    incomplete = np.flatnonzero(rooms)
    padding = (incomplete + 1) * length - rooms[incomplete], rooms[incomplete]
    columns: dict[str, Any] = {}
    for name, pad in spec.pads.items():
        values = documents.values[name]
        columns[name] = out = empty(size, values.dtype)
        copy_ranges(values, starts, stored, out, targets)
        if documents.ends is not None:
            out[(targets + stored)[is_last]] = documents.ends[name]
        fill_ranges(out, pad, *padding)
    columns["position_ids"], columns["segment_ids"] = ids = empty(size, np.int32), empty(size, np.int32)
    number_ranges(*ids, targets, sizes, numbers)
    for array in ids:
        fill_ranges(array, 0, *padding)
    if spec.cu_seqlens:
        order = np.argsort(rows, kind="stable")
        columns["cu_seqlens"] = _edges(rows[order], offsets[order], length - rooms)
    pieces = partial(sorted_pieces, rows, numbers, owners, into, sizes)
    return _sequences(columns, spec, length), owners[numbers == 1], int(sizes.sum()), pieces


def _edges(rows: Int64Array, starts: Int64Array, stops: Int64Array) -> pa.Array:
    """Return the bounds of the pieces of each sequence: ``starts`` in ``rows``, which ascend, and the end of each."""
    ends = np.cumsum(np.bincount(rows, minlength=len(stops)) + 1)
    bounds = np.empty(ends[-1] if len(ends) else 0, np.int32)
    bounds[np.arange(len(rows)) + rows] = starts
    bounds[ends - 1] = stops
    return pa.ListArray.from_arrays(as_arrow(np.append(0, ends).astype(np.int32)), as_arrow(bounds))
