"""Provenance: the source and the number of each row of a batch, and the documents of packed sequences.

A document is a row that ``pack`` got. Its tokens are counted as ``pack`` has them, with the end of sequence that it
adds. A sequence has a piece of each of its documents.

The pieces of many sequences are computed in one call, and only if they are read: a batch whose provenance is not looked
at costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Int16Array = npt.NDArray[np.int16]
Leaves = int | Int16Array
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


class PieceColumns(NamedTuple):
    """Pieces of documents in sequences. Those of sequence k begin at ``edges[k]``.

    A piece is ``length`` tokens of a document, from ``start`` on. A length of -1 is all of a row that was not packed.
    """

    edges: Int32Array
    source: Int16Array
    row: Int64Array
    start: Int32Array
    length: Int32Array


Computed = Callable[[], tuple[npt.NDArray[Any], Iterable[npt.NDArray[Any]]]]
"""Returns the edges, and the source, row, start and length of the pieces, in integers of any width."""


class PieceTable:
    """The pieces of many sequences, or many rows that were not packed (``packed`` is False).

    Batches are slices of it. The columns are computed when they are first read. Rows need none to be identified.
    """

    def __init__(self, count: int, columns: Computed, rows: tuple[Leaves, Int64Array] | None = None) -> None:
        self.count, self.packed = count, rows is None
        self._columns, self._rows = columns, rows

    @cached_property
    def columns(self) -> PieceColumns:
        """All columns."""
        edges, (source, row, start, length) = self._columns()
        made = PieceColumns(_small(edges), source, row, _small(start), _small(length))
        self._columns = lambda: (made.edges, made[1:])  # without the arrays from which they are computed
        return made

    @cached_property
    def identified(self) -> tuple[Int16Array, Int64Array]:
        """The source and the row of each piece."""
        if self._rows is None:
            return self.columns.source, self.columns.row
        return _each(self._rows[0], self.count), self._rows[1]

    @cached_property
    def first_pieces(self) -> list[int]:
        """The first piece of each sequence, and the end of the last."""
        edges: list[int] = self.columns.edges.tolist()
        return edges

    @cached_property
    def copies(self) -> dict[Any, Any]:
        """Tensors of the columns of all pieces, by name, of which batches get parts. Users may write to them."""
        return {}


class DocumentTable:
    """The pieces of documents in sequences ``begin`` to ``end`` of many. ``parts``: the tables that were joined."""

    __slots__ = ("begin", "end", "parts", "whole")

    def __init__(self, whole: PieceTable, begin: int, end: int, parts: tuple[DocumentTable, ...] = ()) -> None:
        self.whole, self.begin, self.end, self.parts = whole, begin, end, parts

    @staticmethod
    def later(count: int, columns: Computed) -> DocumentTable:
        """Return the table of packed sequences, computed when it is read."""
        return DocumentTable(PieceTable(count, columns), 0, count)

    @staticmethod
    def of_columns(edges: npt.NDArray[Any], columns: Iterable[npt.NDArray[Any]]) -> DocumentTable:
        """Return the table of all sequences. ``columns``: source, row, start and length of the pieces."""
        return DocumentTable.later(len(edges) - 1, lambda: (edges, columns))

    @staticmethod
    def of(count: int, pieces: Callable[[], Pieces], rows: Int64Array, leaves: Leaves) -> DocumentTable:
        """Return the table of packed sequences. ``rows``, ``leaves``: of the documents that are packed together."""

        def columns() -> Any:
            bounds, documents, starts, lengths = pieces()
            return bounds, (_each(leaves, len(rows))[documents], rows[documents], starts, lengths)

        return DocumentTable.later(count, columns)

    @staticmethod
    def of_rows(rows: Int64Array, leaves: Leaves) -> DocumentTable:
        """Return the table of rows that were not packed: each is one document."""
        count = len(rows)

        def columns() -> Any:
            return np.arange(count + 1), (_each(leaves, count), rows, np.zeros(count), np.full(count, -1))

        return DocumentTable(PieceTable(count, columns, (leaves, rows)), 0, count)

    @property
    def packed(self) -> bool:
        """True if they are sequences, False if they are rows."""
        return self.whole.packed

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.end - self.begin

    @property
    def bounds(self) -> Int32Array:
        """The first piece of each sequence, and the end of the last, counted from the first of all."""
        edges = self.whole.columns.edges
        bounds: Int32Array = edges[self.begin : self.end + 1] - edges[self.begin]
        return bounds

    @property
    def pieces(self) -> tuple[int, int]:
        """The first piece of these sequences among all, and the end of the last."""
        if not self.whole.packed:
            return self.begin, self.end
        edges = self.whole.first_pieces
        return edges[self.begin], edges[self.end]

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Source, row, start and length of the pieces of all of these sequences."""
        first, stop = self.pieces
        return tuple(column[first:stop] for column in self.whole.columns[1:])

    def slice(self, start: int, stop: int) -> DocumentTable:
        """Return the table of some of the sequences."""
        if not start and stop == self.end - self.begin:
            return self
        return DocumentTable(self.whole, self.begin + start, self.begin + stop)

    def keep(self, places: Int64Array) -> DocumentTable:
        """Return the table of only the sequences at these places."""
        begin, whole = self.begin, self.whole
        if not whole.packed:
            source, row = whole.identified
            return DocumentTable.of_rows(row[places + begin], source[places + begin])

        def columns() -> Any:
            edges = whole.columns.edges.astype(np.int64)
            firsts = edges[places + begin]
            counts = edges[places + begin + 1] - firsts
            kept = np.append(0, np.cumsum(counts))
            chosen = np.arange(kept[-1]) + np.repeat(firsts - kept[:-1], counts)
            return kept, (column[chosen] for column in whole.columns[1:])

        return DocumentTable.later(len(places), columns)

    def as_one(self) -> DocumentTable:
        """Return the table of all sequences as one."""
        return DocumentTable.later(1, lambda: (self.bounds[[0, -1]], self.columns))

    @staticmethod
    def join(parts: Sequence[DocumentTable]) -> DocumentTable:
        """Concatenate tables."""

        def columns() -> Any:
            counts = np.concatenate([np.diff(part.bounds) for part in parts])
            joined = map(np.concatenate, zip(*(part.columns for part in parts), strict=True))
            return np.append(0, np.cumsum(counts)), joined

        count = sum(map(len, parts))
        return DocumentTable(PieceTable(count, columns), 0, count, tuple(parts))

    def arrays(self, packed: bool) -> dict[str, Any]:
        """Return numpy arrays as they are delivered. ``packed``: of each piece and its sequence, not of each row."""
        first, stop = self.pieces
        source, row = (column[first:stop].copy() for column in self.whole.identified)
        if not packed:
            return {SOURCE: source, ROW: row}
        return {SOURCE: source, ROW: row, START: self.whole.columns.start[first:stop].copy(), BOUNDS: self.bounds}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.whole.packed:
            return DocumentTable.of_columns, (self.bounds, self.columns)
        return DocumentTable.of_rows, (self.columns[1], self.columns[0])


def _small(values: npt.NDArray[Any]) -> Int32Array:
    return values.astype(np.int32, copy=False)


def _each(leaves: Leaves, count: int) -> Int16Array:
    return np.full(count, leaves, np.int16) if isinstance(leaves, int) else leaves


def concatenated_pieces(ends: Int64Array, bounds: Int64Array, before: int) -> Pieces:
    """Return the pieces of documents that follow each other.

    ``ends``: the token at which each document ends. ``bounds``: the tokens at which sequences begin, and the end of the
    last. ``before``: tokens of the first document that are in earlier sequences.
    """
    total = min(int(ends[-1]), int(bounds[-1]))
    edges = np.sort(np.concatenate([ends[:-1], bounds[:-1]]), kind="stable")  # two that ascend: they are merged
    edges = edges[: np.searchsorted(edges, total)]
    edges = edges[np.diff(edges, prepend=-1) > 0]
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
