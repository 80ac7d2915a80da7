"""pack: documents of any length into sequences of one length. Arrays in, arrays out; what is left over is the caller's.

A document that does not fit goes on in the next sequence. Each sequence says where its documents begin and end: by
``segment_ids`` (1, 2, … within a sequence, 0 for padding), ``position_ids`` (from 0 within each piece) and, if asked
for, ``cu_seqlens`` (the bounds of the pieces, as kernels for attention over documents take them).
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
    """One call of ``pack``. ``extra``: other columns with a value for each token, and what they are padded with."""

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
            raise ValueError(f"{self.column!r} is what is packed, it cannot be in extra as well")

    @property
    def text(self) -> str:
        """What moves positions, for the state."""
        parts = [str(self.length), self.strategy, self.column]
        parts += [f"eos={self.eos}"] * (self.eos is not None) + [f"window={self.window}"] * (self.strategy != "concat")
        return f"pack[{' '.join([*parts, 'drop'] if self.drop_remainder else parts)}]"

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of a sequence."""
        return (*self.pads, "position_ids", "segment_ids", *["cu_seqlens"] * self.cu_seqlens)

    @property
    def pads(self) -> dict[str, int]:
        return {self.column: self.pad, **self.extra}


@dataclass
class Documents:
    """Tokens of documents one after the other, in one or more columns of equal lengths."""

    lengths: Int64Array
    values: dict[str, Values]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @staticmethod
    def of(columns: Mapping[str, Any], spec: PackSpec) -> Documents:
        """The documents of a batch: one a row, null and empty ones without a token."""
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
        """These and others behind them. Of what has no tokens, not even the type counts."""
        if not other.tokens or not self.tokens:
            values = self.values if self.tokens else other.values
        else:
            values = {}
            for name, mine in self.values.items():
                if mine.dtype != other.values[name].dtype:  # which one comes out would depend on where work was begun
                    raise _of_two_types(name, str(mine.dtype), str(other.values[name].dtype))
                values[name] = np.concatenate([mine, other.values[name]])
        return Documents(np.concatenate([self.lengths, other.lengths]), values)

    def cut_first(self, tokens: int) -> Documents:
        """Without the first tokens of the first document, of which nothing is left if it has no more than those."""
        lengths = self.lengths.copy()
        tokens = min(tokens, int(lengths[0]))
        lengths[0] -= tokens
        return Documents(lengths, {name: values[tokens:] for name, values in self.values.items()})

    def without(self, tokens: int) -> tuple[Documents, int, int]:
        """Without the first tokens: what is left, how many documents are gone, and how much of the next one is."""
        ends = np.cumsum(self.lengths)
        gone = int(np.searchsorted(ends, tokens, side="right"))
        into = tokens - (int(ends[gone - 1]) if gone else 0)
        lengths = self.lengths[gone:].copy()
        if into:
            lengths[0] -= into
        return Documents(lengths, {name: values[tokens:] for name, values in self.values.items()}), gone, into


def _of_two_types(name: str, one: str, other: str) -> ColumnError:
    return ColumnError(f"pack: column {name!r} comes as {one} and as {other}: map it to one type, or pack(…, dtype=…).")


def _check_fits(name: str, values: Values, numbers: list[int | None]) -> None:
    if values.dtype.kind in "iu" and len(values):
        limits = np.iinfo(values.dtype)
        for number in numbers:
            if number is not None and not limits.min <= number <= limits.max:
                raise ColumnError(f"pack: {number} does not fit into column {name!r}, which is {values.dtype}.")


def _tokens(name: str, column: Any, dtype: str | None) -> tuple[Int64Array, Values]:
    """The lengths of a column of lists of numbers, and all the numbers."""
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
        raise ColumnError(f"pack: column {name!r} does not hold lists of numbers.")
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
    """The first ``packs`` sequences of the documents one after the other; the last one is padded if they end in it."""
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
    """Segments and positions of sequences whose pieces begin at ``starts`` of ``total`` tokens, all in one row."""
    size = packs * spec.length
    stops = np.append(starts[1:], total)
    # Pieces of a sequence that is not full end where its padding begins: it is a piece of its own, number 0.
    of_pack = starts // spec.length
    lengths = stops - starts
    first = np.searchsorted(of_pack, of_pack)
    numbers = np.arange(len(starts)) - first + 1
    segments, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    segments[:total] = np.repeat(numbers, lengths)
    positions[:total] = np.arange(total) - np.repeat(starts, lengths)
    found: dict[str, Any] = {
        "position_ids": positions.reshape(packs, spec.length),
        "segment_ids": segments.reshape(packs, spec.length),
    }
    if spec.cu_seqlens:
        edges = [starts[of_pack == pack] - pack * spec.length for pack in range(packs)]
        last = [min(spec.length, total - pack * spec.length) for pack in range(packs)]
        found["cu_seqlens"] = [np.append(edge, end).astype(np.int32) for edge, end in zip(edges, last, strict=True)]
    return found


def best_fit(documents: Documents, spec: PackSpec) -> tuple[dict[str, Any], Int64Array, int]:
    """All documents in as few sequences as best-fit-decreasing finds; what is too long is cut first.

    Returns the columns, for each sequence the number of its first document, and how many tokens were packed.
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
    """Sequences as columns like those that are read, which every format presents in its own way. Nothing is copied."""
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
    """Bins of at most ``length``: each size, the largest first, goes where it leaves the least room."""
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
