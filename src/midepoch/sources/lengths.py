"""Lengths of the rows of a source: of one column of lists, text or bytes, computed once and kept beside the index.

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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from midepoch._internal.progress import shown
from midepoch.errors import ColumnError, FormatError
from midepoch.sources.index import IndexedFile
from midepoch.sources.length_blocks import (
    Compact,
    Measured,
    constant_length,
    has_length,
    measured_blocks,
    smallest_dtype,
)
from midepoch.sources.source import Source, fingerprint_of
from midepoch.storage.cache_files import CacheSlot, atomic_file, default_index_dir, read_or_make
from midepoch.storage.damage import changed, removed

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
    with atomic_file(path) as file:
        _write(file, key, parts)


def remove_old(path: Path, pattern: str) -> None:
    """Remove sidecars of the same column for earlier contents. A week later no process uses them."""
    for old in path.parent.glob(pattern):
        with suppress(OSError):
            if old != path and old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                old.unlink()


def _write(file: BinaryIO, key: bytes, parts: Iterable[Measured]) -> None:
    dtype = smallest_dtype(0)
    rows = total = longest = unreadable = 0
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
    stamps = _stamps(source)
    folder, stem, key = _sidecar(source, column, stamps)
    path = folder / f"{stem}.{key.hex()}{SUFFIX}"

    def usable() -> RowLengths | None:
        found = read_lengths(path, key)
        return found if found is not None and (skip_corrupt or not found.unreadable) else None

    def make(slot: CacheSlot) -> RowLengths:
        parts = partial(_parts, source, column, skip_corrupt, stamps)
        if slot.keep(lambda: write_lengths(path, key, parts())):
            remove_old(path, f"{stem}.*{SUFFIX}")
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


def _sidecar(source: Source, column: str, stamps: Stamps) -> tuple[Path, str, bytes]:
    """Return the folder and stem of the files for this column, and the key of the one for the present contents."""
    access, first = source.access, source.indexes[0].path
    key = _digest(
        source.fingerprint,
        column,
        source.schema.field(column).type,
        access.store.identity if access is not None else "",
        access.filter.digest if access is not None and access.filter is not None else "",
        *stamps,
    )
    indexes = _digest(*((index.path and Path(index.path).stem) or index.fingerprint for index in source.indexes))
    folder = Path(first).parent if first is not None else default_index_dir()
    return folder, f"{indexes.hex()}.{_digest(column).hex()[:8]}", key


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
