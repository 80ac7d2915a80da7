"""The documents of each step, recorded in a journal beside the ledger of a process.

There are two kinds of records. A record of documents has the number of its pass, and many sequences that were packed
together. It is written before the first step that has some of them: two bytes of format, then for each document its
source (2 bytes, with a bit for the first document of a sequence) and row (4 bytes, or 8 from 2**32 on). Packed
documents also have a first token and a length (4 bytes each). So a document takes 14 bytes, and a row 6.

The record of a step is written before the step. It has the number of the step in its pass, and the first and last of
its sequences in the record of documents before it. A step with sequences of two such records has a record after each,
with the highest bit of the step set in the first. It counts if all are complete, and if the ledger has the step.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midepoch.audit.journal import Journal, Record, records_in
from midepoch.transforms.provenance import DocumentTable, PieceTable

_log = logging.getLogger("midepoch")
SUFFIX = ".documents"
_DOCUMENTS, _STEP = b"docs", b"step"
_NUMBERS = struct.Struct("<II")
_CONTINUED = 1 << 31
_GROWTH = 1 << 16
_BEGINS = np.int16(-(1 << 15))
"""The bit of a source that marks the first document of a sequence."""


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


def _format(packed: bool, wide: bool) -> list[tuple[str, str]]:
    """Return the columns of documents in a record."""
    columns = [("source", "<i2"), ("row", "<i8" if wide else "<u4")]
    return [*columns, ("start", "<i4"), ("length", "<i4")] if packed else columns


def encoded(table: DocumentTable) -> bytes:
    """Return documents as bytes."""
    rows = table.columns[1]
    wide = bool(len(rows)) and int(rows.max()) >= 1 << 32
    found = np.empty(len(rows), _format(table.packed, wide))
    for (name, _), column in zip(_format(table.packed, wide), table.columns, strict=False):
        found[name] = column
    if table.packed:
        found["source"][table.bounds[:-1]] |= _BEGINS
    return bytes((table.packed, wide)) + found.tobytes()


def decoded(payload: bytes) -> DocumentTable:
    """Return the documents from the bytes that ``encoded`` returned."""
    packed, wide = bool(payload[0]), bool(payload[1])
    found = np.frombuffer(payload, _format(packed, wide), offset=2)
    sources, rows = found["source"], found["row"].astype(np.int64)
    if not packed:
        return DocumentTable.of_rows(rows, sources)
    edges = np.append(np.flatnonzero(sources < 0), len(found))
    return DocumentTable.of_columns(edges, (sources & ~_BEGINS, rows, found["start"], found["length"]))


class DocumentRecorder:
    """The journal of one process, beside its ledger.

    A write that fails ends the records of a pass.
    """

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._number = 0
        self._written: PieceTable | None = None

    def begin(self, ledger: Path, number: int) -> None:
        """Record the steps of another pass. Raises OSError."""
        path = ledger.with_suffix(SUFFIX)
        if self._journal is None or not self._journal.is_open or self._journal.path != path:
            self.close()
            self._journal = Journal(path, _GROWTH)
        self._number, self._written = number, None

    def write(self, step: int, table: DocumentTable) -> None:
        """Record the documents of a step, before the step itself."""
        journal = self._journal
        if journal is None or not journal.is_open:
            return
        try:
            for part in table.parts[:-1]:
                self._write_part(journal, step | _CONTINUED, part)
            self._write_part(journal, step, table.parts[-1] if table.parts else table)
        except OSError as problem:
            _log.warning("%s cannot be written (%s): the next steps of this pass are not recorded there.",
                         journal.path, problem.strerror or problem)  # fmt: skip
            self.close()

    def _write_part(self, journal: Journal, step: int, part: DocumentTable) -> None:
        """Write the sequences of a step. If they are the first of many that were made together, write all of those."""
        whole = part.whole
        if whole is not self._written:
            self._written = None
            journal.append(_DOCUMENTS, encoded(DocumentTable(whole, 0, whole.count)), self._number)
            self._written = whole
        journal.append(_STEP, _NUMBERS.pack(part.begin, part.end), step)

    def trim(self) -> None:
        """Cut the file to its records. It grows again with the next one."""
        if self._journal is not None:
            self._journal.trim()

    def sync(self) -> None:
        """Write the records to disk. Raises OSError."""
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        """Close the file."""
        journal, self._journal, self._written = self._journal, None, None
        if journal is not None:
            journal.close()


class RecordedDocuments:
    """The records of one process, beside its ledger."""

    def __init__(self, ledger: Path) -> None:
        self._path = ledger.with_suffix(SUFFIX)
        self._read: tuple[int, DocumentTable | None] = (-1, None)

    @cached_property
    def _steps(self) -> Mapping[tuple[int, int], list[tuple[Record, int, int]]]:
        """By pass and step: a record of documents, and the first and last of the step's sequences in it.

        The last record of a step counts.
        """
        found: dict[tuple[int, int], list[tuple[Record, int, int]]] = {}
        try:
            data: Any = np.memmap(self._path, np.uint8, "r") if self._path.stat().st_size else b""
        except OSError:
            data = b""
        documents, parts = None, []
        for record in records_in(data):
            if record.kind == _DOCUMENTS:
                documents = record
            elif documents is not None and record.is_intact:
                parts.append((documents, *_NUMBERS.unpack(record.content)))
                if not record.number & _CONTINUED:
                    found[documents.number, record.number], parts = parts, []
        return found

    def _table(self, record: Record) -> DocumentTable | None:
        """Return all documents of a record, or None if it is damaged. Those of the last one are kept."""
        if self._read[0] != record.place:
            self._read = record.place, decoded(bytes(record.content)) if record.is_intact else None
        return self._read[1]

    def of(self, number: int, step: int) -> DocumentTable | None:
        """Return the documents of a step of a pass, or None if they are not recorded."""
        parts = []
        for record, begin, end in self._steps.get((number, step), ()):
            if (table := self._table(record)) is None or end > len(table):
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
