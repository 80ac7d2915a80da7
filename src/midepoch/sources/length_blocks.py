"""Row lengths of one column of a source, block by block: from Arrow offsets in place, or by decoding that column."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.processes import cores
from midepoch.errors import CorruptBlockError, DataChangedError, DataNotFoundError
from midepoch.sources.arrow_batches import BatchReader
from midepoch.sources.damage import is_damage
from midepoch.sources.dictionaries import holds_dictionary, plain_array, plain_type
from midepoch.sources.resources import retried
from midepoch.sources.source import Source

T = TypeVar("T")
Item = TypeVar("Item")
Compact = npt.NDArray[np.unsignedinteger[Any]]
"""Lengths in the smallest dtype that holds them."""

_PIECE = 1 << 16
"""Rows that are computed together: 256 KB of 32-bit offsets, which stay in the cache of a core."""
_RUN = 1 << 18
"""Rows of mapped blocks that are one task of a thread, so that the task itself (50 µs) is a small part of it."""
_THREADS_LOCAL, _THREADS_REMOTE = 4, 16  # at least: reading waits for the disk, or for the store
_DECODING_BYTES = 512 << 20
_log = logging.getLogger("midepoch")


@dataclass(frozen=True)
class Measured:
    """Lengths of consecutive rows, in pieces. ``unreadable``: rows of damaged blocks, whose length is 0."""

    pieces: tuple[Compact, ...]
    rows: int
    total: int
    longest: int
    unreadable: int = 0

    @staticmethod
    def join(parts: Sequence[Measured]) -> Measured:
        """Concatenate the rows of several parts."""
        return Measured(
            tuple(piece for part in parts for piece in part.pieces),
            sum(part.rows for part in parts),
            sum(part.total for part in parts),
            max((part.longest for part in parts), default=0),
            sum(part.unreadable for part in parts),
        )


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
    kind = plain_type(kind)
    return _storage(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def _offset_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    if pt.is_string(kind) or pt.is_binary(kind) or pt.is_list(kind) or pt.is_map(kind):
        return np.dtype("<i4")
    large = pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind)
    return np.dtype("<i8") if large else None


def _is_view(kind: pa.DataType) -> bool:
    of_lists = pt.is_list_view(kind) or pt.is_large_list_view(kind)
    return bool(of_lists or pt.is_string_view(kind) or pt.is_binary_view(kind))


def changed(path: str, difference: str) -> DataChangedError:
    """Return the error for a file that is no longer as it was indexed."""
    return DataChangedError(
        f"{path} has changed since it was indexed ({difference}). Open the dataset again to use the new contents; "
        "a state saved before will then be refused."
    )


def measured_blocks(source: Source, column: str, *, skip_corrupt: bool) -> Iterator[Measured]:
    """Yield the lengths of all rows, in order. Threads compute them, a few blocks ahead.

    Raise CorruptBlockError for a damaged block, unless ``skip_corrupt`` is set, and other errors of the data.
    """
    measure = partial(_readable, source, column, skip_corrupt)
    if source.access is None:
        yield from _ordered(measure, _runs(source), max(_THREADS_LOCAL, cores()))
        return
    blocks = len(source.layout.block_starts) - 1
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


def _readable(source: Source, column: str, skip_corrupt: bool, run: tuple[int, int]) -> Measured:
    """Return the lengths of a range of blocks. Those of damaged blocks are 0 with ``skip_corrupt``, else an error."""
    first, stop = run
    try:
        return (_mapped if source.access is None else _fetched)(source, column, first, stop)
    except CorruptBlockError as problem:
        if stop - first > 1:  # find the damaged block
            parts = [_readable(source, column, skip_corrupt, (block, block + 1)) for block in range(first, stop)]
            return Measured.join(parts)
        if not skip_corrupt:
            raise
        rows = int(source.layout.block_starts[stop] - source.layout.block_starts[first])
        _log.warning("the lengths of %d rows are 0: %s", rows, problem)
        return Measured((np.zeros(rows, "<u1"),), rows, 0, 0, rows)


def _mapped(source: Source, column: str, first: int, stop: int) -> Measured:
    starts, builder = source.layout.block_starts, _Builder(source.schema.field(column).type)
    file: _MappedFile | None = None
    for block in range(first, stop):
        number = int(source.file_blocks.searchsorted(block, side="right")) - 1
        if file is None or file.number != number:
            file = _MappedFile(source, column, number)
        try:
            builder.add(file.column(int(source.offsets[block]), int(starts[block + 1] - starts[block])))
            if block == stop - 1:
                return builder.finish()
        except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError) as problem:
            if not is_damage(problem, file.size):
                raise
            raise CorruptBlockError(
                f"the record batch at byte {source.offsets[block]} of {file.path} (rows {starts[block]} to "
                f"{starts[block + 1] - 1} of the data) cannot be read: {problem}. Restore the file, or pass "
                'on_error="skip" to leave it out.'
            ) from None
    raise AssertionError("unreachable: a run has blocks")


def _fetched(source: Source, column: str, first: int, stop: int) -> Measured:
    builder = _Builder(source.schema.field(column).type)
    for block in range(first, stop):
        try:
            for chunk in source.fetch(block, [column]).column(0).chunks:
                builder.add(chunk)
        except pa.ArrowInvalid as problem:
            raise CorruptBlockError(f"{source.place(int(source.layout.block_starts[block]))}: {problem}") from None
    return builder.finish()


class _MappedFile:
    """One column of the record batches of a mapped file. Only the pages of its offsets are read."""

    def __init__(self, source: Source, column: str, number: int) -> None:
        self.number, self._file = number, source.files[number]
        self.path = self._file.path
        try:
            self._buffer = retried(lambda: pa.memory_map(self.path).read_buffer(), self.path)
        except FileNotFoundError:
            raise DataNotFoundError(f"{self.path} was removed after the dataset was opened.") from None
        self.size = self._buffer.size
        if self.size != self._file.size:
            raise changed(self.path, f"it has {self.size} bytes and had {self._file.size}")
        self._schema, self._number = source.schema, source.schema.get_field_index(column)
        self._reader: BatchReader | None = None
        if any(holds_dictionary(each.type) for each in source.schema):
            view = memoryview(self._buffer)
            self._reader = BatchReader(lambda size, at: view[at : at + size], self.size)

    def column(self, offset: int, rows: int) -> pa.Array:
        """Return the column of the record batch at an offset. Raise ``pa.ArrowException`` if it is damaged."""
        if self._reader is not None:
            batch = self._reader.read(offset, None, self._file.dictionaries)
        else:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(self._buffer.slice(offset)), self._schema)
        if batch.num_rows != rows:
            raise pa.ArrowInvalid(f"{batch.num_rows} rows where the index says {rows}")
        column = batch.column(self._number)
        column.validate()
        return column


class _Builder:
    """Builder of Measured. Lengths of small blocks are collected in one array, and made compact together."""

    def __init__(self, kind: pa.DataType) -> None:
        kind = _storage(kind)
        wide = np.dtype("<i8") if pt.is_large_list_view(kind) else np.dtype("<i4")
        self._room = np.empty(_PIECE, _offset_dtype(kind) or wide)
        self._filled = self._rows = self._total = self._longest = 0
        self._pieces: list[Compact] = []

    def add(self, column: pa.Array) -> None:
        """Add the lengths of a column. Raise ``pa.ArrowInvalid`` if its offsets are damaged."""
        column, rows, done = _stored(column), len(column), 0
        if not rows:
            return
        nulls = _nulls(column) if column.null_count else None
        offsets = _offset_dtype(column.type) is not None
        values = _ends(column) if offsets else _sizes(column)
        self._total += int(values[-1]) - int(values[0]) if offsets else int(values.sum(dtype=np.int64))
        while done < rows:
            stop = min(rows, done + _PIECE - self._filled)
            part = self._room[self._filled : self._filled + stop - done]
            if offsets:
                np.subtract(values[done + 1 : stop + 1], values[done:stop], out=part)
            else:
                part[:] = values[done:stop]
            if nulls is not None:
                self._total -= int(part[nulls[done:stop]].sum(dtype=np.int64))
                part[nulls[done:stop]] = 0
            self._filled, done = self._filled + stop - done, stop
            if self._filled == _PIECE:
                self._flush()

    def finish(self) -> Measured:
        """Return everything that was added. Raise ``pa.ArrowInvalid`` if some offsets are damaged."""
        if self._filled:
            self._flush()
        return Measured(tuple(self._pieces), self._rows, self._total, self._longest)

    def _flush(self) -> None:
        # As an unsigned number, a negative length is larger than any other: one pass checks the lengths.
        lengths = self._room[: self._filled].view(f"<u{self._room.itemsize}")
        longest = int(lengths.max())
        if longest > np.iinfo(self._room.dtype).max:
            raise pa.ArrowInvalid("its offsets decrease")
        self._pieces.append(lengths.astype(smallest_dtype(longest)))
        self._longest, self._rows, self._filled = max(self._longest, longest), self._rows + self._filled, 0


def _stored(column: pa.Array) -> pa.Array:
    column = plain_array(column)
    return _stored(column.storage) if isinstance(column, pa.ExtensionArray) else column


def _nulls(column: pa.Array) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    nulls: npt.NDArray[np.bool_] = bits[column.offset : column.offset + len(column)] == 0
    return nulls


def _ends(column: pa.Array) -> npt.NDArray[Any]:
    """Return the offsets of a column, one more than rows. None is negative, so that no difference overflows."""
    buffers, dtype = column.buffers(), _offset_dtype(column.type)
    assert dtype is not None
    nested = pt.is_nested(column.type)
    items = len(column.values) if nested else 0 if buffers[2] is None else buffers[2].size
    ends = _part(buffers[1], dtype, column.offset, len(column) + 1)
    if int(ends.view(f"<u{dtype.itemsize}").max()) > items:
        raise pa.ArrowInvalid("its offsets point outside its data")
    return ends


def _sizes(column: pa.Array) -> npt.NDArray[Any]:
    """Return the lengths of a column that stores them, or that has a constant one."""
    kind, rows = column.type, len(column)
    if (constant := constant_length(kind)) is not None:
        return np.full(rows, constant, np.int32)
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        dtype = np.dtype("<i8" if pt.is_large_list_view(kind) else "<i4")
        return _part(column.buffers()[2], dtype, column.offset, rows)
    return _part(column.buffers()[1], np.dtype("<i4"), 4 * column.offset, 4 * rows)[::4]  # 16 bytes, the length first


def _part(buffer: pa.Buffer | None, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
    if buffer is None or buffer.size < (start + count) * dtype.itemsize:
        raise pa.ArrowInvalid("its buffers are too small")
    return np.frombuffer(buffer, dtype, count, start * dtype.itemsize)
