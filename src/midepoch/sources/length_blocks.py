"""Row lengths of one column of a source, block by block: from Arrow offsets in place, or by decoding that column."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.processes import cores
from midepoch.errors import CorruptBlockError
from midepoch.sources.formats.arrow_ipc import BatchReader
from midepoch.sources.schemas import holds_dictionary, plain_array, plain_type, storage_of
from midepoch.sources.source import Source, in_place, view
from midepoch.storage.damage import changed, is_damage, refusal, removed, retried

T = TypeVar("T")
Item = TypeVar("Item")
Compact = npt.NDArray[np.unsignedinteger[Any]]
"""Lengths in the smallest dtype that holds them."""

_RUN = 1 << 18
"""Rows of mapped blocks that are one task of a thread, so that the task itself (50 µs) is a small part of it."""
_SMALL = 1 << 13
"""Rows of a block below which most of the time is Python's: threads would only wait for the interpreter lock."""
_THREADS_LOCAL, _THREADS_REMOTE = 2, 16  # at least: reading waits for the disk, or for the store
_DECODING_BYTES = 512 << 20
_MAPPED_FILES = 64
_log = logging.getLogger("midepoch")


@dataclass(frozen=True)
class Measured:
    """Lengths of consecutive rows, and their sum. ``unreadable``: rows of damaged blocks, whose length is 0."""

    lengths: Compact
    total: int
    unreadable: int = 0

    @staticmethod
    def join(parts: Sequence[Measured]) -> Measured:
        """Concatenate the rows of several parts."""
        return Measured(
            np.concatenate([np.empty(0, "<u1"), *(part.lengths for part in parts)]),
            sum(part.total for part in parts),
            sum(part.unreadable for part in parts),
        )


Measure = Callable[[int, int], Measured]
"""Function ``measure(first, stop)`` that returns the lengths of a range of blocks. It raises CorruptBlockError."""


def smallest_dtype(longest: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest unsigned dtype that holds a length, in little-endian order."""
    return np.dtype(f"<u{next(width for width in (1, 2, 4, 8) if longest < 1 << 8 * width)}")


def constant_length(kind: pa.DataType) -> int | None:
    """Return the length of all values of a type, or None if they differ."""
    kind = _storage(kind)
    if pt.is_fixed_size_list(kind):
        return int(kind.list_size)
    return int(kind.byte_width) if pt.is_fixed_size_binary(kind) else None


def has_length(kind: pa.DataType) -> bool:
    """Return True for lists, maps, text and bytes."""
    kind = _storage(kind)
    return constant_length(kind) is not None or _offset_dtype(kind) is not None or _is_view(kind)


def _storage(kind: pa.DataType) -> pa.DataType:
    return storage_of(plain_type(kind))


def _offset_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    if pt.is_string(kind) or pt.is_binary(kind) or pt.is_list(kind) or pt.is_map(kind):
        return np.dtype("<i4")
    large = pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind)
    return np.dtype("<i8") if large else None


def _is_view(kind: pa.DataType) -> bool:
    of_lists = pt.is_list_view(kind) or pt.is_large_list_view(kind)
    return bool(of_lists or pt.is_string_view(kind) or pt.is_binary_view(kind))


def measured_blocks(source: Source, column: str, *, skip_corrupt: bool) -> Iterator[Measured]:
    """Yield the lengths of all rows, in order. Threads compute them, a few blocks ahead.

    Raise CorruptBlockError for a damaged block, unless ``skip_corrupt`` is set, and other errors of the data.
    """
    blocks = len(source.layout.block_starts) - 1
    if source.access is None:
        files = lru_cache(_MAPPED_FILES)(partial(_mapping, source))  # a mapping of its own for each task costs 0.4 ms
        measure = partial(_readable, source, skip_corrupt, partial(_mapped, source, column, files))
        threads = max(_THREADS_LOCAL, cores()) if source.rows >= _SMALL * blocks else 1
        yield from _ordered(measure, _runs(source), threads)
        return
    measure = partial(_readable, source, skip_corrupt, partial(_fetched, source, column))
    least = _THREADS_LOCAL if source.access.store.local else _THREADS_REMOTE
    block_bytes = max(1.0, source.rows * source.bytes_per_row / max(1, blocks))
    threads = max(1, min(max(least, cores()), int(_DECODING_BYTES // block_bytes)))
    yield from _ordered(measure, [(block, block + 1) for block in range(blocks)], threads)


def _ordered(action: Callable[[Item], T], items: Sequence[Item], threads: int) -> Iterator[T]:
    """Yield the results of an action in order. At most ``2 * threads`` of them wait, so that memory is bounded."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="midepoch-lengths")
    waiting: deque[Future[T]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(action, item))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _runs(source: Source) -> list[tuple[int, int]]:
    """Return ranges of blocks, each of about ``_RUN`` rows, or of one larger block."""
    starts = source.layout.block_starts
    firsts = np.unique(starts[:-1] // _RUN, return_index=True)[1].tolist()
    return list(zip(firsts, [*firsts[1:], len(starts) - 1], strict=True)) if firsts else []


def _readable(source: Source, skip_corrupt: bool, measure: Measure, run: tuple[int, int]) -> Measured:
    """Return the lengths of a range of blocks. Those of damaged blocks are 0 with ``skip_corrupt``, else an error."""
    first, stop = run
    try:
        return measure(first, stop)
    except CorruptBlockError as problem:
        if stop - first > 1:  # find the damaged block
            blocks = range(first, stop)
            return Measured.join([_readable(source, skip_corrupt, measure, (block, block + 1)) for block in blocks])
        if not skip_corrupt:
            raise
        rows = int(source.layout.block_starts[stop] - source.layout.block_starts[first])
        _log.warning("the lengths of %d rows are 0: %s", rows, problem)
        return Measured(np.zeros(rows, "<u1"), 0, rows)


def _mapping(source: Source, number: int) -> pa.Buffer:
    """Map a file."""
    file = source.files[number]
    try:
        buffer = retried(lambda: pa.memory_map(file.path).read_buffer(), file.path)
    except FileNotFoundError:
        raise removed(file.path) from None
    except OSError as problem:
        raise refusal(problem, f"{file.path} could not be read: {problem}") from None
    if buffer.size != file.size:
        raise changed(file.path, f"it has {buffer.size} bytes and had {file.size}")
    return buffer


def _mapped(source: Source, column: str, files: Callable[[int], pa.Buffer], first: int, stop: int) -> Measured:
    starts = source.layout.block_starts[first : stop + 1].tolist()
    offsets = source.offsets[first:stop].tolist()
    numbers = (source.file_blocks.searchsorted(np.arange(first, stop), side="right") - 1).tolist()
    form, place = in_place(source), source.schema.get_field_index(column)
    encoded = any(holds_dictionary(each.type) for each in source.schema)
    builder = _Builder(source.schema.field(column).type, starts[-1] - starts[0])
    last = -1
    for i, (offset, number) in enumerate(zip(offsets, numbers, strict=True)):
        file, rows = files(number), starts[i + 1] - starts[i]
        if encoded and number != last:
            reader, last = BatchReader(partial(_read, memoryview(file)), file.size), number
        try:
            if form is not None:
                batch = view(source, form, first + i, files, partial(np.empty, dtype=np.uint8))
            elif encoded:
                batch = reader.read(offset, None, source.files[number].dictionaries)
            else:
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file.slice(offset)), source.schema)
            if batch.num_rows != rows:
                raise pa.ArrowInvalid(f"{batch.num_rows} rows where the index says {rows}")
            builder.add(batch.column(place))
            if i == len(offsets) - 1:
                return builder.measured()
        except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError) as problem:
            if not is_damage(problem, file.size):
                raise
            raise CorruptBlockError(
                f"the record batch at byte {offset} of {source.files.paths[number]} (rows {starts[i]} to "
                f"{starts[i + 1] - 1} of the data) cannot be read: {problem}. Restore the file, or pass "
                'on_error="skip" to leave it out.'
            ) from None
    return builder.measured()


def _read(data: memoryview, size: int, at: int) -> memoryview:
    return data[at : at + size]


def _fetched(source: Source, column: str, first: int, stop: int) -> Measured:
    starts = source.layout.block_starts
    builder = _Builder(source.schema.field(column).type, int(starts[stop] - starts[first]))
    for block in range(first, stop):
        try:
            for chunk in source.fetch(block, [column]).column(0).chunks:
                builder.add(chunk)
        except pa.ArrowInvalid as problem:
            raise CorruptBlockError(f"{source.place(int(starts[block]))}: {problem}") from None
    return builder.measured()


class _Builder:
    """Builder of Measured, for a number of rows.

    Offsets are in order if no difference is negative and none has overflowed. Overflows are off by 2³² (or 2⁶⁴), and
    so is then the sum of the differences. It is computed only if the lengths are so long that it could be: usually,
    the offsets are read once, and the longest length is all that is looked at.
    """

    def __init__(self, kind: pa.DataType, rows: int) -> None:
        self._encoded = _storage(kind) != kind
        self._kind = _storage(kind)
        self._offsets = _offset_dtype(self._kind)
        wide = np.dtype("<i8") if pt.is_large_list_view(self._kind) else np.dtype("<i4")
        self._lengths = np.empty(rows, self._offsets or wide)
        self._filled = self._total = 0

    def add(self, column: pa.Array) -> None:
        """Add the lengths of a column. Raise ``pa.ArrowInvalid`` if its offsets are damaged."""
        if self._encoded:
            column = _stored(column)
        room = self._lengths[self._filled : self._filled + len(column)]
        if self._offsets is None or column.null_count:
            room[:] = self._sizes(column)
            self._total += int(room.sum(dtype=np.int64))
        elif len(column):
            ends = self._ends(column)
            first, last = int(ends[0]), int(ends[-1])
            if not 0 <= first <= last <= self._items(column):
                raise pa.ArrowInvalid("its offsets point outside its data")
            np.subtract(ends[1:], ends[:-1], out=room)
            self._total += last - first
        self._filled += len(column)

    def measured(self) -> Measured:
        """Return everything that was added. Raise ``pa.ArrowInvalid`` if some offsets are damaged."""
        lengths = self._lengths.view(f"<u{self._lengths.itemsize}")  # negative ones become the longest
        longest, width = int(lengths.max(initial=0)), lengths.itemsize
        may_overflow = longest * len(lengths) >= 1 << 8 * width
        if longest >= 1 << 8 * width - 1 or (
            may_overflow and (width == 8 or int(lengths.sum(dtype=np.int64)) != self._total)
        ):
            raise pa.ArrowInvalid("its offsets are not in order")
        return Measured(lengths.astype(smallest_dtype(longest)), self._total)

    def _ends(self, column: pa.Array) -> npt.NDArray[Any]:
        assert self._offsets is not None
        return _part(column.buffers()[1], self._offsets, column.offset, len(column) + 1)

    def _items(self, column: pa.Array) -> int:
        if pt.is_nested(self._kind):
            return len(column.values)
        data = column.buffers()[2]
        return 0 if data is None else int(data.size)

    def _sizes(self, column: pa.Array) -> npt.NDArray[Any]:
        """Return the length of each row as a new array, for columns with nulls and for layouts without offsets."""
        column.validate()
        rows, start, dtype = len(column), column.offset, self._lengths.dtype
        if self._offsets is not None:
            ends = self._ends(column)
            if rows and not 0 <= int(ends.min()) <= int(ends.max()) <= self._items(column):
                raise pa.ArrowInvalid("its offsets point outside its data")
            sizes = np.diff(ends)
        elif (constant := constant_length(self._kind)) is not None:
            sizes = np.full(rows, constant, dtype)
        elif pt.is_nested(self._kind):  # a view of lists: offsets, sizes
            sizes = _part(column.buffers()[2], dtype, start, rows).copy()
        else:  # a view of text: 16 bytes each, the length first
            sizes = _part(column.buffers()[1], dtype, 4 * start, 4 * rows)[::4].copy()
        if rows and sizes.min() < 0:
            raise pa.ArrowInvalid("its offsets are not in order")
        if column.null_count:
            sizes[_nulls(column)] = 0
        return sizes


def _stored(column: pa.Array) -> pa.Array:
    column = plain_array(column)
    return _stored(column.storage) if isinstance(column, pa.ExtensionArray) else column


def _nulls(column: pa.Array) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    nulls: npt.NDArray[np.bool_] = bits[column.offset : column.offset + len(column)] == 0
    return nulls


def _part(buffer: pa.Buffer | None, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
    if buffer is None or buffer.size < (start + count) * dtype.itemsize:
        raise pa.ArrowInvalid("its buffers are too small")
    return np.frombuffer(buffer, dtype, count, start * dtype.itemsize)
