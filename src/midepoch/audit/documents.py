"""The documents of each step, recorded in a binary file beside the ledger of a process.

There are two kinds of records. A record of documents has many sequences that were packed together, and is written
before the first step that has some of them. It begins with 12 bytes: the length of what follows, its CRC-32, and the
number of the pass. The number of documents and two bytes of format follow, then columns of integers: sources (2 bytes,
with a bit for the first document of a sequence) and rows (4 bytes, more from 2**32 on). Packed documents also have
first tokens and lengths (4 bytes each). So a document takes 14 bytes, and a row 6.

The record of a step is 16 bytes, written before the step: a checksum with the highest bit set, the number of the step
in the pass, and the first and last of its sequences in the record of documents before it. A step with sequences of two
such records has a record after each, with the highest bit of the step set in the first. It counts if all of them are
complete, and if the ledger has the step.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midepoch.transforms.provenance import DocumentTable, PieceTable

_log = logging.getLogger("midepoch")
SUFFIX = ".documents"
_HEADER = struct.Struct("<III")
_STEP = struct.Struct("<IIII")
_IS_STEP = _CONTINUED = 1 << 31
_COUNTS = struct.Struct("<IBB")
_ROOM = 1 << 16
"""Minimum number of bytes by which the file grows. Unused bytes are zeros, and are cut off when it is closed."""
_ROWS, _PACKED = 0, 1
_BEGINS = np.int16(-(1 << 15))
"""The bit of a source that marks the first document of a sequence."""

_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems that cannot allocate space in advance."""


def mapped_room(file: int, end: int, room: int, first: int = 0) -> mmap.mmap | None:
    """Allocate the bytes of a file from ``end`` to ``room``, and map it from byte ``first``.

    A store into memory takes a tenth of the time of a system call, and survives the death of the process as well.
    Return None if the file has to be written to. Raise OSError if the disk is full: without an allocation, that would
    be a fatal signal when a page is stored.
    """
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        os.posix_fallocate(file, end, room - end)
    except OSError as problem:
        if problem.errno in _NO_ALLOCATION:
            return None
        raise
    try:
        return mmap.mmap(file, room - first, offset=first)
    except (OSError, ValueError):
        return None


class Document(NamedTuple):
    """A document of a step: its tokens ``start`` to ``stop``, from ``offset`` on in a sequence.

    ``sequence``: number of the row in the batch of this rank. ``stop``: None if rows are not packed. ``source``,
    ``name``: number and name of the source. ``place``: a description of the file of the row, and its number there.
    """

    step: int
    epoch: int
    rank: int
    sequence: int
    source: int
    name: str
    row: int
    start: int
    stop: int | None
    offset: int
    place: str = ""


def encoded(table: DocumentTable) -> bytes:
    """Return documents as bytes."""
    sources, rows, starts, lengths = table.columns
    kind, rest = _ROWS, b""
    if table.packed:
        kind, sources = _PACKED, sources.copy()
        sources[table.bounds[:-1]] |= _BEGINS
        rest = starts.tobytes() + lengths.tobytes()
    width = 4 if not len(rows) or rows.max() < 1 << 32 else 5 if rows.max() < 1 << 40 else 8
    numbers = rows.astype("<u4") if width == 4 else rows.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    return _COUNTS.pack(len(rows), kind, width) + sources.tobytes() + numbers.tobytes() + rest


def decoded(payload: bytes) -> DocumentTable:
    """Return the documents from the bytes that ``encoded`` returned."""
    count, kind, width = _COUNTS.unpack_from(payload)
    at = _COUNTS.size
    sources = np.frombuffer(payload, "<i2", count, at)
    numbers = np.zeros((count, 8), np.uint8)
    numbers[:, :width] = np.frombuffer(payload, np.uint8, count * width, at + 2 * count).reshape(count, width)
    rows = numbers.reshape(-1).view("<i8").astype(np.int64)
    if kind == _ROWS:
        return DocumentTable.of_rows(rows, sources.astype(np.int16))
    at += (2 + width) * count
    starts, lengths = (np.frombuffer(payload, "<i4", count, at + place) for place in (0, 4 * count))
    edges = np.append(np.flatnonzero(sources < 0), count)
    return DocumentTable.of_columns(edges, ((sources & ~_BEGINS).astype(np.int16), rows, starts, lengths))


class DocumentRecorder:
    """The file of one process, beside its ledger.

    A write that fails ends the records of a pass.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file, self._owner, self._end, self._number = -1, 0, 0, 0
        self._pages: mmap.mmap | None = None
        self._mapped = self._room = 0  # bounds of the mapped part of the file
        self._written: PieceTable | None = None

    def begin(self, ledger: Path, number: int) -> None:
        """Record the steps of another pass. Raises OSError."""
        path = ledger.with_suffix(SUFFIX)
        if self._path != path:
            self.close()
            self._path, self._end = path, 0
        if self._file < 0:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._pages, self._room = None, self._end
        self._owner, self._number, self._written = os.getpid(), number, None

    def write(self, step: int, table: DocumentTable) -> None:
        """Record the documents of a step, before the step itself."""
        if self._file < 0 or self._owner != os.getpid():
            return
        try:
            for part in table.parts[:-1]:
                self._write_part(step | _CONTINUED, part)
            self._write_part(step, table.parts[-1] if table.parts else table)
        except OSError as problem:
            _log.warning("%s cannot be written (%s): the next steps of this pass are not recorded there.",
                         self._path, problem.strerror or problem)  # fmt: skip
            self.close()

    def _write_part(self, step: int, part: DocumentTable) -> None:
        """Write the sequences of a step. If they are the first of many that were made together, write all of those."""
        whole = part.whole
        if whole is not self._written:
            self._written = None
            payload = encoded(DocumentTable(whole, 0, whole.count))
            self._append(_HEADER.pack(len(payload), zlib.crc32(payload), self._number) + payload)
            self._written = whole
        self._append(_step_record(step, part.begin, part.end))

    def _append(self, record: bytes) -> None:
        end = self._end + len(record)
        if end > self._room:
            self._grow(end)
        if self._pages is not None:
            self._pages[self._end - self._mapped : end - self._mapped] = record
        elif os.pwrite(self._file, record, self._end) < len(record):
            raise OSError(28, "No space left on device")
        self._end = end

    def _grow(self, end: int) -> None:
        """Allocate space on disk, and map it."""
        first, room = self._end // _GRANULE * _GRANULE, -(-(end + _ROOM) // _GRANULE) * _GRANULE
        self._pages = mapped_room(self._file, self._end, room, first)
        self._mapped, self._room = first, room

    def trim(self) -> None:
        """Cut the file to its records. It grows again with the next one."""
        if self._file >= 0 and self._owner == os.getpid():
            self._pages, self._room = None, self._end
            with suppress(OSError):
                os.ftruncate(self._file, self._end)

    def sync(self) -> None:
        """Write the records to disk. Raises OSError."""
        if self._file >= 0 and self._owner == os.getpid():
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        self.trim()
        file, self._file, self._pages, self._written = self._file, -1, None, None
        if file >= 0 and self._owner == os.getpid():
            os.close(file)


_GRANULE = mmap.ALLOCATIONGRANULARITY


def _step_record(step: int, begin: int, end: int) -> bytes:
    checksum = zlib.crc32(_STEP.pack(0, step, begin, end)) | _IS_STEP
    return _STEP.pack(checksum, step, begin, end)


class _Recorded(NamedTuple):
    """The sequences of a step: ``begin`` to ``end`` of those in a record of documents at a place of the file."""

    place: int
    begin: int
    end: int


class RecordedDocuments:
    """The records of one process, beside its ledger."""

    def __init__(self, ledger: Path) -> None:
        self._path = ledger.with_suffix(SUFFIX)
        self._read: tuple[int, DocumentTable | None] = (-1, None)

    @cached_property
    def _bytes(self) -> Any:
        try:
            return np.memmap(self._path, np.uint8, "r") if self._path.stat().st_size else b""
        except OSError:
            return b""

    @cached_property
    def _steps(self) -> Mapping[tuple[int, int], tuple[_Recorded, ...]]:
        """The sequences of each step, by pass and step. The last record of a step counts."""
        found: dict[tuple[int, int], tuple[_Recorded, ...]] = {}
        at, size = 0, len(self._bytes)
        parts: list[_Recorded] = []
        place = number = -1
        while at + _HEADER.size <= size:
            length, _, passed = _HEADER.unpack_from(self._bytes, at)
            if length & _IS_STEP:
                if at + _STEP.size > size:
                    break
                _, step, begin, end = _STEP.unpack_from(self._bytes, at)
                if place >= 0 and _step_record(step, begin, end) == bytes(self._bytes[at : at + _STEP.size]):
                    parts.append(_Recorded(place, begin, end))
                    if not step & _CONTINUED:
                        found[number, step], parts = tuple(parts), []
                at += _STEP.size
            elif not length or at + _HEADER.size + length > size:
                break
            else:
                place, number = at, passed
                at += _HEADER.size + length
        return found

    def _table(self, place: int) -> DocumentTable | None:
        """Return all documents of the record at a place, or None if it is damaged. The last one is kept."""
        if self._read[0] != place:
            length, checksum, _ = _HEADER.unpack_from(self._bytes, place)
            first = place + _HEADER.size
            payload = bytes(self._bytes[first : first + length])
            self._read = place, decoded(payload) if zlib.crc32(payload) == checksum else None
        return self._read[1]

    def of(self, number: int, step: int) -> DocumentTable | None:
        """Return the documents of a step of a pass, or None if they are not recorded."""
        parts = []
        for place, begin, end in self._steps.get((number, step), ()):
            if (table := self._table(place)) is None or end > len(table):
                return None
            parts.append(table.slice(begin, end))
        return None if not parts else parts[0] if len(parts) == 1 else DocumentTable.join(parts)

    def steps_with(self, number: int, source: int, row: int) -> Iterator[int]:
        """Yield the steps of a pass that have a document."""
        for passed, step in self._steps:
            table = self.of(passed, step) if passed == number else None
            if table is not None:
                sources, rows, *_ = table.columns
                if ((rows == row) & (sources == source)).any():
                    yield step


def documents_of(
    table: DocumentTable, step: int, epoch: int, rank: int, names: Sequence[str], place: Callable[[int, int], str]
) -> Iterator[Document]:
    """Yield the documents of a step of one rank. ``place``: function that describes the place of a row."""
    lengths = np.maximum(table.columns[3], 0).astype(np.int64)
    offsets = np.cumsum(lengths) - lengths
    for sequence, (first, stop) in enumerate(pairwise(table.bounds.tolist())):
        for number in range(first, stop):
            source, row, start, length = (int(column[number]) for column in table.columns)
            end, offset = None if length < 0 else start + length, int(offsets[number] - offsets[first])
            where = place(source, row)
            yield Document(step, epoch, rank, sequence, source, names[source], row, start, end, offset, where)
