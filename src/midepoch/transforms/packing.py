"""pack: documents of any length to sequences of one length. Arrays in, arrays out; the caller keeps the remainder.

A document that does not fit continues in the next sequence. Each sequence marks its documents with ``segment_ids``
(1, 2, … within a sequence, 0 for padding), ``position_ids`` (from 0 within each piece) and optionally ``cu_seqlens``
(the bounds of the pieces, as attention kernels for documents expect them).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import ColumnError, MapError
from midepoch.transforms.columns import check_columns

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

STRATEGIES = ("concat", "best_fit")


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

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be 'concat' or 'best_fit', got {self.strategy!r}")
        if self.column in self.extra:
            raise ValueError(f"{self.column!r} is the packed column and cannot be in extra")

    @property
    def text(self) -> str:
        """Description of all arguments that affect positions, for the state."""
        parts = [str(self.length), self.strategy, self.column]
        parts += [f"eos={self.eos}"] * (self.eos is not None) + [f"window={self.window}"] * (self.strategy != "concat")
        return f"pack[{' '.join([*parts, 'drop'] if self.drop_remainder else parts)}]"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a sequence."""
        return (*self.pads, "position_ids", "segment_ids", *["cu_seqlens"] * self.cu_seqlens)

    @property
    def pads(self) -> dict[str, int]:
        return {self.column: self.pad, **self.extra}


@dataclass
class Documents:
    """Concatenated tokens of documents, in one or more columns of equal lengths."""

    lengths: Int64Array
    values: dict[str, Values]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @staticmethod
    def of(columns: Mapping[str, Any], spec: PackSpec) -> Documents:
        """Return the documents of a batch, one per row. Null and empty documents have no tokens."""
        check_columns(list(spec.pads), list(columns), "pack")
        found = {name: _tokens(name, columns[name], spec.dtype if name == spec.column else None) for name in spec.pads}
        lengths = found[spec.column][0]
        for name, (_, tokens) in found.items():
            _check_fits(name, tokens, [spec.pads[name], *([spec.eos] if name == spec.column else [])])
        for name, (other, _) in found.items():
            if not np.array_equal(other, lengths):
                raise MapError(f"pack: columns {spec.column!r} and {name!r} are not equally long in every row.")
        if spec.eos is None:
            return Documents(lengths, {name: values for name, (_, values) in found.items()})
        ends = np.cumsum(lengths)[lengths > 0]
        values = {
            name: np.insert(values, ends, spec.eos if name == spec.column else spec.extra[name])
            for name, (_, values) in found.items()
        }
        return Documents(lengths + (lengths > 0), values)

    def joined(self, other: Documents) -> Documents:
        """Append other documents. The type of documents without tokens is ignored."""
        if not other.tokens or not self.tokens:
            values = self.values if self.tokens else other.values
        else:
            values = {}
            for name, mine in self.values.items():
                if mine.dtype != other.values[name].dtype:  # the result would depend on where reading began
                    raise _of_two_types(name, str(mine.dtype), str(other.values[name].dtype))
                values[name] = np.concatenate([mine, other.values[name]])
        return Documents(np.concatenate([self.lengths, other.lengths]), values)

    def cut_first(self, tokens: int) -> Documents:
        """Return the documents without the first tokens of the first document, which may become empty."""
        lengths = self.lengths.copy()
        tokens = min(tokens, int(lengths[0]))
        lengths[0] -= tokens
        return Documents(lengths, {name: values[tokens:] for name, values in self.values.items()})

    def without(self, tokens: int) -> tuple[Documents, int, int]:
        """Drop the first tokens. Return the rest, the number of dropped documents, and the dropped tokens of the next
        one.
        """
        ends = np.cumsum(self.lengths)
        dropped = int(np.searchsorted(ends, tokens, side="right"))
        into = tokens - (int(ends[dropped - 1]) if dropped else 0)
        lengths = self.lengths[dropped:].copy()
        if into:
            lengths[0] -= into
        return Documents(lengths, {name: values[tokens:] for name, values in self.values.items()}), dropped, into


def _of_two_types(name: str, first: str, second: str) -> ColumnError:
    return ColumnError(
        f"pack: column {name!r} comes as {first} and as {second}. Map it to one type, or pass pack(…, dtype=…)."
    )


def _check_fits(name: str, values: Values, numbers: list[int | None]) -> None:
    if values.dtype.kind in "iu" and len(values):
        limits = np.iinfo(values.dtype)
        for number in numbers:
            if number is not None and not limits.min <= number <= limits.max:
                raise ColumnError(f"pack: {number} does not fit into column {name!r}, which is {values.dtype}.")


def _tokens(name: str, column: Any, dtype: str | None) -> tuple[Int64Array, Values]:
    """Return the lengths of a column of lists of numbers, and all the numbers."""
    if isinstance(column, pa.Array):
        lengths, tokens = _arrow_tokens(name, column)
        return lengths, tokens if dtype is None else tokens.astype(dtype, copy=False)
    if isinstance(column, np.ndarray) and column.ndim == 2:
        flat = column.reshape(-1)
        return np.full(len(column), column.shape[1], dtype=np.int64), flat if dtype is None else flat.astype(dtype)
    try:
        parts = [np.zeros(0, np.int64) if value is None else np.asarray(value) for value in column]
        parts = parts if dtype is None else [part.astype(dtype, copy=False) for part in parts]
    except (TypeError, ValueError) as problem:
        raise MapError(f"pack: column {name!r} cannot be packed: {problem}") from None
    if any(part.ndim != 1 or (len(part) and part.dtype.kind not in "biuf") for part in parts):
        raise ColumnError(f"pack: column {name!r} does not contain lists of numbers.")
    full = [part for part in parts if len(part)]
    kinds = sorted({str(part.dtype) for part in full})
    if len(kinds) > 1:
        raise _of_two_types(name, *kinds[:2])
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    return lengths, np.concatenate(full) if full else np.zeros(0, np.int64)


def _arrow_tokens(name: str, column: pa.Array) -> tuple[Int64Array, Values]:
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        column, kind = column.cast(pa.list_(kind.value_type)), pa.list_(kind.value_type)
    plain = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_primitive(kind.value_type)
    if not plain:
        raise ColumnError(f"pack: column {name!r} is {kind}, not lists of numbers.")
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if values.null_count:
        raise MapError(f"pack: column {name!r} has nulls among its tokens.")
    tokens = values.to_numpy(zero_copy_only=False)
    lengths = np.diff(offsets)
    if not column.null_count:
        return lengths, tokens
    null = column.is_null().to_numpy(zero_copy_only=False)
    return np.where(null, 0, lengths), tokens[np.repeat(~null, lengths)]


def concatenated(documents: Documents, spec: PackSpec, packs: int) -> dict[str, Any]:
    """Return the first ``packs`` sequences of the concatenated documents. The last one is padded if necessary."""
    size, total = packs * spec.length, min(documents.tokens, packs * spec.length)
    ends = np.cumsum(documents.lengths)
    starts = np.concatenate([np.zeros(1, np.int64), ends[ends < total], np.arange(0, total, spec.length)])
    starts = np.unique(starts) if total else starts[:0]
    columns = {}
    for name, pad in spec.pads.items():
        values = documents.values[name][:total]
        if total < size:
            values = np.concatenate([values, np.full(size - total, pad, values.dtype)])
        columns[name] = values.reshape(packs, spec.length)
    return _as_arrow({**columns, **_bounds(starts, total, packs, spec)})


def _bounds(starts: Int64Array, total: int, packs: int, spec: PackSpec) -> dict[str, Any]:
    """Return segments and positions of sequences whose pieces begin at ``starts`` of ``total`` consecutive tokens."""
    size = packs * spec.length
    stops = np.append(starts[1:], total)
    # In an incomplete sequence the pieces end at the padding, which is a separate piece with number 0.
    of_pack = starts // spec.length
    lengths = stops - starts
    first = np.searchsorted(of_pack, of_pack)
    numbers = np.arange(len(starts)) - first + 1
    segments, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    segments[:total] = np.repeat(numbers, lengths)
    positions[:total] = np.arange(total) - np.repeat(starts, lengths)
    columns: dict[str, Any] = {
        "position_ids": positions.reshape(packs, spec.length),
        "segment_ids": segments.reshape(packs, spec.length),
    }
    if spec.cu_seqlens:
        edges = [starts[of_pack == pack] - pack * spec.length for pack in range(packs)]
        last = [min(spec.length, total - pack * spec.length) for pack in range(packs)]
        columns["cu_seqlens"] = [np.append(edge, end).astype(np.int32) for edge, end in zip(edges, last, strict=True)]
    return columns


def best_fit(documents: Documents, spec: PackSpec) -> tuple[dict[str, Any], Int64Array, int]:
    """Pack all documents by best-fit-decreasing. Documents that are too long are split first.

    Return the columns, for each sequence the number of its first document, and the number of packed tokens.
    """
    length = spec.length
    starts = np.cumsum(documents.lengths) - documents.lengths
    pieces = [  # (start, tokens, document)
        (int(start) + at, min(length, int(size) - at), number)
        for number, (start, size) in enumerate(zip(starts, documents.lengths, strict=True))
        for at in range(0, int(size), length)
    ]
    bins = _best_fit([size for _, size, _ in pieces], length)
    if spec.drop_remainder:
        bins = [each for each in bins if sum(pieces[i][1] for i in each) == length]
    bins = sorted((sorted(each) for each in bins), key=lambda each: each[0])
    packed = sum(pieces[i][1] for each in bins for i in each)
    shape = (len(bins), length)
    columns: dict[str, Any] = {
        name: np.full(shape, pad, documents.values[name].dtype) for name, pad in spec.pads.items()
    }
    positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    edges = []
    count = np.arange(length, dtype=np.int32)
    for row, each in enumerate(bins):
        at, bounds = 0, [0]
        for number, i in enumerate(each):
            start, size, _ = pieces[i]
            for name, values in documents.values.items():
                columns[name][row, at : at + size] = values[start : start + size]
            positions[row, at : at + size] = count[:size]
            segments[row, at : at + size] = number + 1
            at += size
            bounds.append(at)
        edges.append(np.array(bounds, np.int32))
    columns |= {"position_ids": positions, "segment_ids": segments}
    if spec.cu_seqlens:
        columns["cu_seqlens"] = edges
    return _as_arrow(columns), np.array([pieces[each[0]][2] for each in bins], dtype=np.int64), packed


def _as_arrow(columns: dict[str, Any]) -> dict[str, pa.Array]:
    """Return sequences as Arrow columns, like those that are read from files. Nothing is copied."""
    return {name: _lists(rows) if isinstance(rows, list) else _matrix(rows) for name, rows in columns.items()}


def _matrix(rows: Values) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(_values(np.ascontiguousarray(rows).reshape(-1)), rows.shape[1])


def _lists(rows: list[Values]) -> pa.Array:
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return pa.ListArray.from_arrays(_values(ends), _values(np.concatenate(rows) if rows else np.zeros(0, np.int32)))


def _values(values: Values) -> pa.Array:
    if values.dtype.kind == "b":
        bits = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Return bins of at most ``length``. Each size, in decreasing order, is put where it leaves the least room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, (sizes[i], -1))
        if place == len(rooms):
            bins.append([i])
            room, number = length - sizes[i], len(bins) - 1
        else:
            room, number = rooms.pop(place)
            bins[number].append(i)
            room -= sizes[i]
        if room:
            insort(rooms, (room, number))
    return bins
