"""Provenance: the source and the number of each row of a batch, and the documents of packed sequences.

A document is a row that ``pack`` got. Its tokens are counted as ``pack`` has them, with the end of sequence that it
adds. A sequence has a piece of each of its documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int16Array = npt.NDArray[np.int16]

SOURCE, ROW, DOCUMENTS = "source", "row", "doc_ids"
BOUNDS = "cu_docs"
MOST_SOURCES = np.iinfo(np.int16).max
PIECE = np.dtype([("row", "<i8"), ("start", "<i4"), ("length", "<i4"), ("source", "<i2")])
"""A piece of a document: ``length`` tokens from ``start`` on. A length of -1 is all of a row that was not packed."""


class Pieces(NamedTuple):
    """Pieces of documents in packed sequences, in order. Those of sequence k are ``bounds[k]`` to ``bounds[k + 1]``.

    ``documents``: numbers of the documents among those that are packed together.
    """

    bounds: Int64Array
    documents: Int64Array
    starts: Int64Array
    lengths: Int64Array


@dataclass(frozen=True)
class DocumentTable:
    """The pieces of documents in the sequences of a batch. Those of sequence k begin at ``bounds[k]``."""

    bounds: Int64Array
    pieces: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @staticmethod
    def of(pieces: Pieces, rows: Int64Array, leaves: int | Int16Array) -> DocumentTable:
        """Return the table of packed sequences. ``rows``, ``leaves``: of the documents that are packed together."""
        table = np.empty(len(pieces.documents), PIECE)
        table["row"], table["start"], table["length"] = rows[pieces.documents], pieces.starts, pieces.lengths
        table["source"] = leaves if isinstance(leaves, int) else leaves[pieces.documents]
        return DocumentTable(pieces.bounds, table)

    @staticmethod
    def of_rows(rows: Int64Array, leaves: int | Int16Array) -> DocumentTable:
        """Return the table of rows that were not packed: each is one document."""
        table = np.zeros(len(rows), PIECE)
        table["row"], table["length"], table["source"] = rows, -1, leaves
        return DocumentTable(np.arange(len(rows) + 1), table)

    @property
    def chosen(self) -> npt.NDArray[Any]:
        """The pieces of all of these sequences."""
        return self.pieces[int(self.bounds[0]) : int(self.bounds[-1])]

    def slice(self, start: int, stop: int) -> DocumentTable:
        return replace(self, bounds=self.bounds[start : stop + 1])

    def keep(self, places: Int64Array) -> DocumentTable:
        """Return the table of only the sequences at these places."""
        firsts = self.bounds[places]
        counts = self.bounds[places + 1] - firsts
        bounds = np.append(0, np.cumsum(counts))
        return DocumentTable(bounds, self.pieces[np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], counts)])

    def as_one(self) -> DocumentTable:
        """Return the table of all sequences as one."""
        return replace(self, bounds=self.bounds[[0, -1]])

    @staticmethod
    def join(parts: Sequence[DocumentTable]) -> DocumentTable:
        """Concatenate tables."""
        counts = np.concatenate([np.diff(part.bounds) for part in parts])
        return DocumentTable(np.append(0, np.cumsum(counts)), np.concatenate([part.chosen for part in parts]))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the table as it is delivered: arrays of all pieces, and the first piece of each sequence."""
        chosen = self.chosen
        columns = {name: chosen[name].copy() for name in (SOURCE, ROW, "start")}
        return {**columns, BOUNDS: (self.bounds - self.bounds[0]).astype(np.int32)}


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
        source = np.empty(len(self.rows), np.int16)
        source[:] = self.leaves
        return {SOURCE: source, ROW: self.rows.astype(np.int64)}


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
