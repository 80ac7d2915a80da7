"""Lengths of the rows of a source: of one column of lists, text or bytes, computed once and kept beside the index.

They are read block by block: from Arrow offsets in place, or by decoding that column.

A sidecar of an index has a header, then one unsigned number for each row. The numbers have the smallest width that
holds the longest, so that 10⁸ lengths of tokens take 200 MB. A sidecar is opened by its header and a sample of its
numbers, then mapped: the cost does not depend on the rows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.processes import cores
from midepoch._internal.progress import shown
from midepoch.errors import ColumnError, CorruptBlockError, FormatError
from midepoch.sources.formats.arrow_ipc import BatchReader
from midepoch.sources.index import IndexedFile
from midepoch.sources.schemas import (
    constant_length,
    has_length,
    holds_dictionary,
    offset_dtype,
    plain_array,
    stored_type,
)
from midepoch.sources.source import Source, fingerprint_of, in_place, view
from midepoch.storage.cache_files import CacheSlot, atomic_file, default_index_dir, read_or_make
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
            raise source.unreadable(first + i, problem) from None
    return builder.measured()


def _read(data: memoryview, size: int, at: int) -> memoryview:
    return data[at : at + size]


def _fetched(source: Source, column: str, block: int, stop: int) -> Measured:
    starts = source.layout.block_starts
    builder = _Builder(source.schema.field(column).type, int(starts[stop] - starts[block]))
    try:
        for chunk in source.fetch(block, [column]).column(0).chunks:
            builder.add(chunk)
        return builder.measured()
    except pa.ArrowInvalid as problem:
        raise CorruptBlockError(f"{source.place(int(starts[block]))}: {problem}") from None


class _Builder:
    """Builder of Measured, for a number of rows.

    Offsets are in order if no difference is negative and none has overflowed. Overflows are off by 2³² (or 2⁶⁴), and
    so is then the sum of the differences. It is computed only if the lengths are so long that it could be: usually,
    the offsets are read once, and the longest length is all that is looked at.
    """

    def __init__(self, kind: pa.DataType, rows: int) -> None:
        self._encoded = stored_type(kind) != kind
        self._kind = stored_type(kind)
        self._offsets = offset_dtype(self._kind)
        wide = np.dtype("<i8") if pt.is_large_list_view(self._kind) else np.dtype("<i4")
        self._lengths = np.empty(rows, self._offsets or wide)
        self._filled = self._total = 0

    def add(self, column: pa.Array) -> None:
        """Add the lengths of a column. Raise ``pa.ArrowInvalid`` if its offsets are damaged."""
        if not len(column):
            return
        column = _stored(column) if self._encoded else column
        rows, start = len(column), column.offset
        room = self._lengths[self._filled : self._filled + rows]
        if self._offsets is not None:
            ends = _part(column.buffers()[1], self._offsets, start, rows + 1)
            first, last = int(ends[0]), int(ends[-1])
            if not 0 <= first <= last <= self._items(column):
                raise pa.ArrowInvalid("its offsets point outside its data")
            np.subtract(ends[1:], ends[:-1], out=room)
            self._total += last - first
        else:
            column.validate()
            if (constant := constant_length(self._kind)) is not None:
                room[:] = constant
            elif pt.is_nested(self._kind):  # a view of lists: offsets, sizes
                room[:] = _part(column.buffers()[2], room.dtype, start, rows)
            else:  # a view of text: 16 bytes each, the length first
                room[:] = _part(column.buffers()[1], room.dtype, 4 * start, 4 * rows)[::4]
            self._total += int(room.sum(dtype=np.int64))
        if column.null_count:
            nulls = _nulls(column)
            hidden = room[nulls]
            if hidden.min() < 0:
                raise pa.ArrowInvalid("its offsets are not in order")
            self._total -= int(hidden.sum(dtype=np.int64))
            room[nulls] = 0
        self._filled += rows

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

    def _items(self, column: pa.Array) -> int:
        if pt.is_nested(self._kind):
            return len(column.values)
        data = column.buffers()[2]
        return 0 if data is None else int(data.size)


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


SUFFIX = ".midepoch-lengths"
VERSION = 1
KEY_BYTES = 16
_MAGIC = b"MIDLENGT"
_FIELDS = struct.Struct(f"<8sII4Q{KEY_BYTES}sII")
"""Magic, version, bytes of a number, rows, total, longest, unreadable rows, key, checksums of the sample and of all
fields before."""
_START = 4096  # of the numbers: one page
_SAMPLES, _SAMPLE = 64, 512
_COPY = 1 << 20
_KEPT_SECONDS = 7 * 24 * 3600
_log = logging.getLogger("midepoch")


Int64Array = npt.NDArray[np.int64]
Stamps = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, eq=False)
class RowLengths:
    """One length for each row of a source, mapped from a file. Pickles to the path of the file.

    Lists count their items, text and bytes the bytes as stored (UTF-8, not characters). A null has length 0.
    """

    rows: int
    total: int
    """The sum of all lengths."""
    longest: int
    unreadable: int = 0
    """Rows of damaged blocks, whose length is 0."""
    _lengths: npt.NDArray[Any] | None = field(default=None, repr=False)
    """None if all rows have the length ``longest``."""
    _path: str | None = None
    _key: bytes = field(default=b"", repr=False)

    def __len__(self) -> int:
        return self.rows

    def of(self, rows: Int64Array) -> Int64Array:
        """Return the lengths of these source rows."""
        if self._lengths is None:
            return np.full(len(rows), self.longest, np.int64)
        return self._lengths[rows].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None:
            return _reopened, (Path(self._path), self._key)
        return RowLengths, (self.rows, self.total, self.longest, self.unreadable, self._lengths)


def read_lengths(path: Path, key: bytes) -> RowLengths | None:
    """Return the contents of a sidecar, or None if it is missing, damaged or of another key."""
    try:
        with path.open("rb") as file:
            head = file.read(_FIELDS.size)
            magic, version, width, rows, total, longest, unreadable, found, sample, checksum = _FIELDS.unpack(head)
            if magic != _MAGIC or version != VERSION or zlib.crc32(head[:-4]) != checksum:
                raise ValueError("its header is damaged, or of another version")
            if found != key:
                raise ValueError("it belongs to other data")
            dtype = smallest_dtype(longest)
            if dtype.itemsize != width or os.fstat(file.fileno()).st_size != _START + rows * width:
                raise ValueError("it has another size")
            lengths = np.asarray(np.memmap(file, dtype, "r", _START, (rows,)) if rows else np.empty(0, dtype))
        if _sample(lengths) != sample:
            raise ValueError("its numbers are damaged")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error, OverflowError) as problem:
        _log.info("the row lengths %s cannot be used and are made again: %s", path, problem)
        return None
    return RowLengths(rows, total, longest, unreadable, lengths, str(path), key)


def _reopened(path: Path, key: bytes) -> RowLengths:
    if (found := read_lengths(path, key)) is None:
        raise FormatError(
            f"the row lengths {path} were changed or removed since they were opened. Create the dataset again."
        )
    return found


def write_lengths(path: Path, key: bytes, parts: Iterable[Measured]) -> None:
    """Write a sidecar atomically, part by part. Raise OSError, and leave nothing, if it cannot be written."""
    dtype = smallest_dtype(0)
    rows = total = longest = unreadable = 0
    with atomic_file(path) as file:
        file.seek(_START)
        for part in parts:
            longest = max(longest, int(part.lengths.max(initial=0)))
            if (needed := smallest_dtype(longest)) != dtype:
                _widen(file, rows, dtype, needed)
                dtype = needed
            _put(file, part.lengths.astype(dtype, copy=False))
            rows, total, unreadable = rows + len(part.lengths), total + part.total, unreadable + part.unreadable
        file.truncate(_START + rows * dtype.itemsize)
        sample = _sample(np.asarray(np.memmap(file, dtype, "r", _START, (rows,)))) if rows else 0
        head = _FIELDS.pack(_MAGIC, VERSION, dtype.itemsize, rows, total, longest, unreadable, key, sample, 0)[:-4]
        file.seek(0)
        file.write(head + struct.pack("<I", zlib.crc32(head)))


def _put(file: BinaryIO, numbers: Compact) -> None:
    file.write(np.ascontiguousarray(numbers).view(np.uint8).data)


def _widen(file: BinaryIO, rows: int, dtype: np.dtype[Any], wider: np.dtype[Any]) -> None:
    """Write the numbers so far in a wider dtype, from the last to the first, so that none is overwritten unread."""
    for stop in range(rows, 0, -_COPY):
        start = max(0, stop - _COPY)
        file.seek(_START + start * dtype.itemsize)
        numbers = np.frombuffer(file.read((stop - start) * dtype.itemsize), dtype)
        file.seek(_START + start * wider.itemsize)
        _put(file, numbers.astype(wider))
    file.seek(_START + rows * wider.itemsize)


def _sample(lengths: npt.NDArray[Any]) -> int:
    """Return a checksum of up to 64 ranges of numbers, spread evenly, the first and the last among them."""
    last = max(0, len(lengths) - _SAMPLE)
    starts = np.unique(np.linspace(0, last, _SAMPLES).astype(np.int64)) if last else np.zeros(1, np.int64)
    checksum = 0
    for start in starts.tolist():
        checksum = zlib.crc32(np.ascontiguousarray(lengths[start : start + _SAMPLE]).data, checksum)
    return checksum


def lengths_of(source: Source, column: str, *, skip_corrupt: bool = False) -> RowLengths:
    """Return the lengths of the rows of a column of the source, read from their file if there is one, else computed.

    Offsets of mapped Arrow files are read in place. Otherwise the column is read once. With ``skip_corrupt``, rows of
    blocks that cannot be read have length 0. Otherwise, such a block raises CorruptBlockError.
    """
    if column not in source.schema.names:
        raise ColumnError(f"lengths: no column {column!r}. There are: {', '.join(source.schema.names)}.")
    kind = source.schema.field(column).type
    if not has_length(kind):
        raise ColumnError(
            f"lengths: column {column!r} contains {kind}, whose values have no length. Name a column of lists, text or "
            "bytes."
        )
    constant = constant_length(kind)
    if constant is not None and () not in source.nullable[column]:
        return RowLengths(source.rows, source.rows * constant, constant)
    access, index, stamps = source.access, source.index, _stamps(source)
    chosen = access.filter if access is not None else None
    key = _digest(
        source.fingerprint,
        column,
        kind,
        access.store.identity if access is not None else "",
        chosen.digest if chosen is not None else "",
        *stamps,
    )
    folder = default_index_dir() if index.path is None else Path(index.path).parent
    of_index = _digest(index.fingerprint if index.path is None else Path(index.path).stem)
    stem = f"{of_index.hex()}.{_digest(column).hex()[:8]}"
    path = folder / f"{stem}.{key.hex()}{SUFFIX}"

    def usable() -> RowLengths | None:
        found = read_lengths(path, key)
        return found if found is not None and (skip_corrupt or not found.unreadable) else None

    def make(slot: CacheSlot) -> RowLengths:
        parts = partial(_parts, source, column, skip_corrupt, stamps)
        if slot.keep(lambda: write_lengths(path, key, parts())):
            for old in folder.glob(f"{stem}.*{SUFFIX}"):  # for earlier contents: a week later no process uses them
                with suppress(OSError):
                    if old != path and old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                        old.unlink()
            if (found := usable()) is not None:
                return found
        made = Measured.join(list(parts()))
        return RowLengths(source.rows, made.total, int(made.lengths.max(initial=0)), made.unreadable, made.lengths)

    return read_or_make(folder / f"{stem}{SUFFIX}", "the row lengths", usable, make)


def _parts(source: Source, column: str, skip_corrupt: bool, stamps: Stamps) -> Iterator[Measured]:
    """Yield the lengths of all blocks, and show the progress. The files must not change meanwhile."""
    done = 0
    with shown(f"lengths of {column}", "rows") as report:
        for part in measured_blocks(source, column, skip_corrupt=skip_corrupt):
            yield part
            done += len(part.lengths)
            report(done, source.rows)
    for file, before, after in zip(source.files, stamps, _stamps(source), strict=True):
        if before != after:
            raise changed(file.path, "while the lengths of its rows were read")


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=KEY_BYTES).digest()


def _stamps(source: Source) -> Stamps:
    """Return what changes whenever the contents of a file change, for each file.

    A fingerprint does not suffice: it samples the values, and offsets between the samples may have changed. Nor does
    the modification time, which tools set back. Nobody can set the time of the last change (ctime) of a local file.
    """
    if source.access is not None and not source.access.store.local:
        return tuple((file.path, file.size, file.mtime_ns, file.etag) for file in source.files)
    return tuple(_local_stamp(source, file) for file in source.files)


def _local_stamp(source: Source, file: IndexedFile) -> tuple[object, ...]:
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise removed(file.path) from None
    if stat.st_size != file.size:
        raise changed(file.path, f"it has {stat.st_size} bytes and had {file.size}")
    if stat.st_mtime_ns != file.mtime_ns:
        if source.access is not None:
            raise changed(file.path, "its modification time differs")
        if fingerprint_of(source, file) != file.fingerprint:
            raise changed(file.path, "its contents differ")
    return file.path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
