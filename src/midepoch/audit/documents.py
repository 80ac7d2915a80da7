"""The documents of each step, recorded in a binary file beside the ledger of a process.

The record of a step is 16 bytes (the length of what follows, its CRC-32, the number of the pass, the number of the step
in the pass) and columns of integers: pieces of each sequence, sources, rows, first tokens and lengths. Each column has
as many bytes a value as its largest value needs, none if all are 0: about 9 bytes for a document in all. A record is
written before its step. It counts if it is complete, and if the ledger has the step.
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
import numpy.typing as npt

from midepoch.transforms.provenance import DocumentTable

_log = logging.getLogger("midepoch")

SUFFIX = ".documents"
_HEADER = struct.Struct("<IIII")
_COUNTS = struct.Struct("<II5B")


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


def encoded(table: DocumentTable) -> bytes:
    """Return the columns of a table as bytes."""
    source, row, start, length = table.columns
    arrays = (np.diff(table.bounds) - 1, source, row, start, length + 1)  # 0 for a row that was not packed
    widths = [_width(array) for array in arrays]
    parts = [_COUNTS.pack(table.sequences, len(row), *widths)]
    for array, width in zip(arrays, widths, strict=True):
        if width:
            parts.append(array.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return b"".join(parts)


def _width(array: npt.NDArray[Any]) -> int:
    """Return the number of bytes of the largest value, 0 if all are 0."""
    return (int(array.max()).bit_length() + 7) // 8 if len(array) else 0


def decoded(payload: bytes) -> DocumentTable:
    """Return the table of some bytes."""
    sequences, pieces, *widths = _COUNTS.unpack_from(payload)
    at, arrays = _COUNTS.size, []
    for count, width in zip([sequences, *[pieces] * 4], widths, strict=True):
        full = np.zeros((count, 8), np.uint8)
        if width:
            full[:, :width] = np.frombuffer(payload, np.uint8, count * width, at).reshape(count, width)
        arrays.append(full.reshape(-1).view("<i8").astype(np.int64))
        at += count * width
    counts, source, row, start, length = arrays
    columns = (source.astype(np.int16), row, start, length - 1)
    return DocumentTable.of_columns(np.append(0, np.cumsum(counts + 1)), columns)


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

    def write(self, step: int, table: DocumentTable) -> None:
        """Record the documents of a step, before the step itself."""
        if self._file < 0 or self._owner != os.getpid():
            return
        payload = encoded(table)
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
