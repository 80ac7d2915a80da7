"""The documents of each step, recorded in a binary file beside the ledger of a process.

The record of a step is 16 bytes (the length of what follows, its CRC-32, the number of the pass, the number of the step
in the pass), the number of documents and two bytes of format, and columns of integers: sources (2 bytes, with a bit for
the first document of a sequence), rows (4 bytes, more from 2**32 on) and, of packed documents, first tokens and lengths
(4 bytes each). So a document takes 14 bytes, and a row 6. A record is written before its step. It counts if it is
complete, and if the ledger has the step.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midepoch.transforms.provenance import DocumentTable, Traced

_log = logging.getLogger("midepoch")

SUFFIX = ".documents"
_HEADER = struct.Struct("<IIII")
_COUNTS = struct.Struct("<IBB")
_ROWS, _PACKED = 0, 1
_BEGINS = np.int16(-(1 << 15))
"""The bit of a source that marks the first document of a sequence."""


class Document(NamedTuple):
    """A document of a step: its tokens ``start`` to ``stop``, from ``offset`` on in a sequence.

    ``sequence``: number of the row in the batch of this rank. ``stop``: None if rows are not packed. ``source``,
    ``name``: number and name of the source. ``place``: the file of the row, and its number there, in words.
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


def encoded(traced: Traced) -> bytes:
    """Return the provenance of a batch as bytes."""
    if traced.documents is None:
        rows, kind = traced.rows, _ROWS
        sources = traced.leaves if not isinstance(traced.leaves, int) else np.full(len(rows), traced.leaves, np.int16)
        rest = b""
    else:
        table = traced.documents
        sources, rows, starts, lengths = table.columns
        kind, sources = _PACKED, sources.copy()
        sources[table.bounds[:-1]] |= _BEGINS
        rest = starts.tobytes() + lengths.tobytes()
    width = 4 if not len(rows) or rows.max() < 1 << 32 else 5 if rows.max() < 1 << 40 else 8
    numbers = rows.astype("<u4") if width == 4 else rows.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    return _COUNTS.pack(len(rows), kind, width) + sources.tobytes() + numbers.tobytes() + rest


def decoded(payload: bytes) -> DocumentTable:
    """Return the documents of some bytes."""
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

    A write that fails ends the records of a pass, and leaves nothing: the next record overwrites it.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file, self._owner, self._end, self._number = -1, 0, 0, 0

    def begin(self, ledger: Path, number: int) -> None:
        """Record the steps of another pass. Raises OSError."""
        path = ledger.with_suffix(SUFFIX)
        if self._path != path:
            self.close()
            self._path, self._end = path, 0
        if self._file < 0:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._owner, self._number = os.getpid(), number

    def write(self, step: int, traced: Traced) -> None:
        """Record the documents of a step, before the step itself."""
        if self._file < 0 or self._owner != os.getpid():
            return
        payload = encoded(traced)
        record = _HEADER.pack(len(payload), zlib.crc32(payload), self._number, step) + payload
        try:
            if os.pwrite(self._file, record, self._end) < len(record):
                raise OSError(28, "No space left on device")
        except OSError as problem:
            _log.warning("%s cannot be written (%s): the next steps of this pass are not recorded there.",
                         self._path, problem.strerror or problem)  # fmt: skip
            self.close()
            return
        self._end += len(record)

    def sync(self) -> None:
        """Write the records to disk. Raises OSError."""
        if self._file >= 0 and self._owner == os.getpid():
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, -1
        if file >= 0 and self._owner == os.getpid():
            os.close(file)


class RecordedDocuments:
    """The records of one process, beside its ledger."""

    def __init__(self, ledger: Path) -> None:
        self._path = ledger.with_suffix(SUFFIX)

    @cached_property
    def _bytes(self) -> Any:
        try:
            return np.memmap(self._path, np.uint8, "r") if self._path.stat().st_size else b""
        except OSError:
            return b""

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], tuple[int, int, int]]:
        """By pass and step, the place, the length and the checksum of its record. A later one counts."""
        found, at, size = {}, 0, len(self._bytes)
        while at + _HEADER.size <= size:
            length, checksum, number, step = _HEADER.unpack_from(self._bytes, at)
            at += _HEADER.size
            if not length or at + length > size:
                break
            found[number, step] = (at, length, checksum)
            at += length
        return found

    def of(self, number: int, step: int) -> DocumentTable | None:
        """Return the documents of a step of a pass, or None if they are not recorded."""
        if (number, step) not in self._places:
            return None
        at, length, checksum = self._places[number, step]
        payload = bytes(self._bytes[at : at + length])
        return decoded(payload) if zlib.crc32(payload) == checksum else None

    def steps_with(self, number: int, source: int, row: int) -> Iterator[int]:
        """Yield the steps of a pass that have a document."""
        for passed, step in self._places:
            table = self.of(passed, step) if passed == number else None
            if table is not None and ((table.row == row) & (table.source == source)).any():
                yield step


def documents_of(
    table: DocumentTable, step: int, epoch: int, rank: int, names: Sequence[str], place: Callable[[int, int], str]
) -> Iterator[Document]:
    """Yield the documents of a step of one rank. ``place``: where a row of a source is, in words."""
    lengths = np.maximum(table.length, 0).astype(np.int64)
    offsets = np.cumsum(lengths) - lengths
    for sequence, (first, stop) in enumerate(pairwise(table.bounds.tolist())):
        for number in range(first, stop):
            source, row, start, length = (int(column[number]) for column in table.columns)
            end, offset = None if length < 0 else start + length, int(offsets[number] - offsets[first])
            where = place(source, row)
            yield Document(step, epoch, rank, sequence, source, names[source], row, start, end, offset, where)
