"""Provenance: the source and the number of each row of a batch, and the documents of packed sequences.

A document is a row that ``pack`` got. Its tokens are counted as ``pack`` has them, with the end of sequence that it
adds. A sequence has a piece of each of its documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int16Array = npt.NDArray[np.int16]

SOURCE, ROW, DOCUMENTS = "source", "row", "doc_ids"
START, BOUNDS = "start", "cu_docs"
MOST_SOURCES = np.iinfo(np.int16).max


class Pieces(NamedTuple):
    """Pieces of documents in packed sequences, in order. Those of sequence k are ``bounds[k]`` to ``bounds[k + 1]``.

    ``documents``: numbers of the documents among those that are packed together.
    """

    bounds: Int64Array
    documents: Int64Array
    starts: Int64Array
    lengths: Int64Array


class DocumentTable(NamedTuple):
    """The pieces of documents in sequences ``begin`` to ``end`` of some. Those of sequence k begin at ``edges[k]``.

    A piece is ``length`` tokens of a document, from ``start`` on. A length of -1 is all of a row that was not packed.
    """

    edges: npt.NDArray[np.int32]
    begin: int
    end: int
    source: Int16Array
    row: Int64Array
    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]

    @staticmethod
    def of_columns(edges: npt.NDArray[Any], columns: Iterable[npt.NDArray[Any]]) -> DocumentTable:
        """Return the table of all sequences. ``columns``: source, row, start and length of the pieces."""
        source, row, start, length = columns
        return DocumentTable(_small(edges), 0, len(edges) - 1, source, row, _small(start), _small(length))

    @staticmethod
    def of(pieces: Pieces, rows: Int64Array, leaves: int | Int16Array) -> DocumentTable:
        """Return the table of packed sequences. ``rows``, ``leaves``: of the documents that are packed together."""
        bounds, documents, starts, lengths = pieces
        sources = np.full(len(documents), leaves, np.int16) if isinstance(leaves, int) else leaves[documents]
        return DocumentTable.of_columns(bounds, (sources, rows[documents], starts, lengths))

    @staticmethod
    def of_rows(rows: Int64Array, leaves: int | Int16Array) -> DocumentTable:
        """Return the table of rows that were not packed: each is one document."""
        count = len(rows)
        sources = np.full(count, leaves, np.int16) if isinstance(leaves, int) else leaves
        return DocumentTable.of_columns(np.arange(count + 1), (sources, rows, np.zeros(count), np.full(count, -1)))

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.end - self.begin

    @property
    def bounds(self) -> npt.NDArray[np.int32]:
        """The first piece of each sequence, and the end of the last, counted from the first of all."""
        bounds: npt.NDArray[np.int32] = self.edges[self.begin : self.end + 1] - self.edges[self.begin]
        return bounds

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Source, row, start and length of the pieces of all of these sequences."""
        first, stop = self.edges[self.begin], self.edges[self.end]
        return self.source[first:stop], self.row[first:stop], self.start[first:stop], self.length[first:stop]

    def slice(self, start: int, stop: int) -> DocumentTable:
        """Return the table of some of the sequences."""
        return DocumentTable(self.edges, self.begin + start, self.begin + stop, *self[3:])

    def keep(self, places: Int64Array) -> DocumentTable:
        """Return the table of only the sequences at these places."""
        places = places + self.begin
        firsts = self.edges[places]
        counts = self.edges[places + 1] - firsts
        edges = np.append(0, np.cumsum(counts))
        chosen = np.arange(edges[-1]) + np.repeat(firsts - edges[:-1], counts)
        return DocumentTable.of_columns(edges, (column[chosen] for column in self[3:]))

    def as_one(self) -> DocumentTable:
        """Return the table of all sequences as one."""
        return DocumentTable.of_columns(self.bounds[[0, -1]], self.columns)

    @staticmethod
    def join(parts: Sequence[DocumentTable]) -> DocumentTable:
        """Concatenate tables."""
        counts = np.concatenate([np.diff(part.bounds) for part in parts])
        columns = (np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True))
        return DocumentTable.of_columns(np.append(0, np.cumsum(counts)), columns)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the table as it is delivered: arrays of all pieces, and the first piece of each sequence."""
        source, row, start, _ = self.columns
        return {SOURCE: source, ROW: row, START: start, BOUNDS: self.bounds}


def _small(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return values.astype(np.int32, copy=False)


class Traced(NamedTuple):
    """The provenance of the rows of a batch. ``documents``: None unless they are packed."""

    rows: Int64Array
    leaves: int | Int16Array = 0
    documents: DocumentTable | None = None

    def slice(self, start: int, stop: int) -> Traced:
        """Return that of some of the rows."""
        leaves = self.leaves if isinstance(self.leaves, int) else self.leaves[start:stop]
        documents = None if self.documents is None else self.documents.slice(start, stop)
        return Traced(self.rows[start:stop], leaves, documents)

    def first(self, count: int) -> Traced:
        """Return that of the first rows."""
        return self if count == len(self.rows) else self.slice(0, count)

    @property
    def table(self) -> DocumentTable:
        """The documents, or the rows as documents."""
        return DocumentTable.of_rows(self.rows, self.leaves) if self.documents is None else self.documents

    def arrays(self, packed: bool) -> dict[str, Any]:
        """Return the columns of provenance as numpy arrays. ``packed``: with the documents of each row."""
        if packed:
            return {DOCUMENTS: self.table.arrays()}
        leaves = self.leaves
        source = np.full(len(self.rows), leaves, np.int16) if isinstance(leaves, int) else leaves.copy()
        return {SOURCE: source, ROW: self.rows.copy()}


def added_columns(packed: bool) -> tuple[str, ...]:
    """Return the names of the columns that provenance adds to a batch."""
    return (DOCUMENTS,) if packed else (SOURCE, ROW)


def concatenated_pieces(ends: Int64Array, bounds: Int64Array, before: int) -> Pieces:
    """Return the pieces of documents that follow each other.

    ``ends``: the token at which each document ends. ``bounds``: the tokens at which sequences begin, and the end of the
    last. ``before``: tokens of the first document that are in earlier sequences.
    """
    total = min(int(ends[-1]), int(bounds[-1]))
    edges = np.unique(np.concatenate([[0], ends[:-1], bounds[:-1]]))
    edges = edges[: np.searchsorted(edges, total)]
    documents = np.searchsorted(ends, edges, side="right")
    starts = edges - np.where(documents > 0, ends[documents - 1], -before)
    return Pieces(np.searchsorted(edges, bounds), documents, starts, np.diff(edges, append=total))


def sorted_pieces(
    sequences: Int64Array, numbers: Int64Array, documents: Int64Array, starts: Int64Array, lengths: Int64Array
) -> Pieces:
    """Return pieces in the order of their sequences, and of their numbers in them."""
    order = np.lexsort((numbers, sequences))
    counts = np.bincount(sequences) if len(sequences) else np.zeros(0, np.int64)
    return Pieces(np.append(0, np.cumsum(counts)), documents[order], starts[order], lengths[order])
