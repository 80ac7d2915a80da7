"""Chunks: outputs of a flow, with the cursor after each of them; and a puller that takes any number of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from midepoch.order.budget import Batches
from midepoch.order.intervals import Intervals
from midepoch.pipeline.cursor import FlowAt
from midepoch.pipeline.engine import Engine
from midepoch.read.columns import Located
from midepoch.transforms import Batch, join
from midepoch.transforms.batch import alike, with_ordinals
from midepoch.transforms.provenance import DocumentTable, Int16Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowRefs:
    """Rows of sources that are not read yet: their sources and row numbers, and their locations in memory if known."""

    engines: Sequence[Engine]
    leaves: Int16Array
    rows: Int64Array
    located: dict[str, Located] | None = None
    ordinals: Int64Array | None = None
    schema: Conform | None = None
    """The schema to which rows are converted when they are read, if sources differ."""
    draws: bool = False
    """True if some of the rows are ids of draws by weight."""
    whole: RowRefs | None = None
    """The rows of which these are a slice from ``begin`` on, if they are: all slices share their provenance."""
    begin: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> RowRefs:
        whole, begin = (self, start) if self.whole is None else (self.whole, self.begin + start)
        return self._at(slice(start, stop), whole, begin)

    def keep(self, places: Int64Array) -> RowRefs:
        return self._at(places, None, 0)

    def _at(self, places: Any, whole: RowRefs | None, begin: int) -> RowRefs:
        located = None
        if self.located is not None:
            located = {name: column.at(places) for name, column in self.located.items()}
        ordinals = None if self.ordinals is None else self.ordinals[places]
        leaves, rows = self.leaves[places], self.rows[places]
        return RowRefs(self.engines, leaves, rows, located, ordinals, self.schema, self.draws, whole, begin)

    def with_ordinals(self, number: int) -> RowRefs:
        """Number the rows as ``Batch.with_ordinals`` does."""
        if not number:
            return self
        ordinals = np.zeros(len(self), np.int64) if self.ordinals is None else self.ordinals
        return replace(self, ordinals=with_ordinals(ordinals, number))

    @property
    def traced(self) -> DocumentTable:
        """The provenance of the rows."""
        return self._traced if self.whole is None else self.whole._traced.slice(self.begin, self.begin + len(self.rows))

    @cached_property
    def _traced(self) -> DocumentTable:
        rows = self.rows
        if self.draws:
            for number, engine in enumerate(self.engines):
                rows = np.where(self.leaves == number, engine.row_numbers(rows), rows)
        return DocumentTable.of_rows(rows, self.leaves)

    def read(self) -> Batch:
        """Read the rows."""
        batch = self._read()
        return batch if self.ordinals is None else replace(batch, ordinals=self.ordinals)

    def _read(self) -> Batch:
        found: list[Int64Array] = []
        parts: list[Batch] = []
        for leaf in np.unique(self.leaves).tolist():
            places = np.flatnonzero(self.leaves == leaf)
            part = self.engines[leaf].read(self.rows[places])
            part = replace(part, leaves=leaf) if leaf else part
            parts.append(part if self.schema is None else self.schema.conform(part))
            found.append(places)
        if len(parts) == 1:
            return parts[0]
        order = np.empty(len(self), dtype=np.int64)
        order[np.concatenate(found)] = np.arange(len(self))
        return join(parts).keep(order)


@dataclass(frozen=True)
class MixedRows:
    """Rows of batches whose columns differ in kind: Arrow arrays of one source, lists from a function of another.

    They are joined once the rows of a batch are known, so that its types depend on no other row.
    """

    batches: tuple[Batch, ...]
    which: Int64Array
    places: Int64Array

    def __len__(self) -> int:
        return len(self.places)

    def slice(self, start: int, stop: int) -> MixedRows:
        return replace(self, which=self.which[start:stop], places=self.places[start:stop])

    def keep(self, places: Int64Array) -> MixedRows:
        return replace(self, which=self.which[places], places=self.places[places])

    def with_ordinals(self, number: int) -> MixedRows:
        """Number the rows as ``Batch.with_ordinals`` does."""
        return replace(self, batches=tuple(batch.with_ordinals(number) for batch in self.batches))

    def changed(self, change: Callable[[Batch], Batch]) -> MixedRows:
        """Apply a function that keeps the number of rows to each batch separately."""
        return replace(self, batches=tuple(change(batch) for batch in self.batches))

    def read(self) -> Batch:
        """Join the rows."""
        used = np.unique(self.which).tolist() or [0]
        places_of = [np.flatnonzero(self.which == number) for number in used]
        parts = [self.batches[number].keep(self.places[rows]) for number, rows in zip(used, places_of, strict=True)]
        order = np.empty(len(self), dtype=np.int64)
        order[np.concatenate(places_of)] = np.arange(len(self))
        return join(parts).keep(order)


@dataclass(frozen=True)
class Bunches:
    """Outputs that are batches of rows each: those of bunch k are ``places[bounds[k]:bounds[k + 1]]`` of ``rows``."""

    rows: Batch | RowRefs | MixedRows
    batches: Batches

    def __len__(self) -> int:
        return len(self.batches)

    def slice(self, start: int, stop: int) -> Bunches:
        places, bounds = self.batches
        return replace(self, batches=Batches(places, bounds[start : stop + 1]))

    def keep(self, numbers: Int64Array) -> Bunches:
        return replace(self, batches=self.batches.in_order(numbers))

    def with_ordinals(self, number: int) -> Bunches:
        """Number the rows as ``Batch.with_ordinals`` does."""
        return replace(self, rows=self.rows.with_ordinals(number))

    @property
    def row_count(self) -> int:
        """The number of rows of all of them."""
        return int(self.batches.bounds[-1] - self.batches.bounds[0])

    @property
    def chosen(self) -> Batch | RowRefs | MixedRows:
        """The rows of all of them, in their order."""
        places, bounds = self.batches
        return self.rows.keep(places[int(bounds[0]) : int(bounds[-1])])

    def read(self) -> Batch:
        """Read the rows of all of them."""
        chosen = self.chosen
        return chosen if isinstance(chosen, Batch) else chosen.read()


Items = Batch | RowRefs | MixedRows | Bunches


class Conform(Protocol):
    """A schema to which rows of different sources are converted."""

    def conform(self, batch: Batch) -> Batch: ...


def joined(parts: Sequence[Items]) -> Items:
    """Join outputs: references if all are references, one batch if all batches have columns of the same kind."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Bunches):
        return _joined_bunches([part for part in parts if isinstance(part, Bunches)])
    refs = [part for part in parts if isinstance(part, RowRefs)]
    if len(refs) < len(parts):
        batches = [part if isinstance(part, (Batch, MixedRows)) else part.read() for part in parts]
        plain = [batch for batch in batches if isinstance(batch, Batch)]
        return join(plain) if len(plain) == len(batches) and alike(plain) else _together(batches)
    leaves, rows = (np.concatenate(arrays) for arrays in zip(*((p.leaves, p.rows) for p in refs), strict=True))
    ordinals = None
    if any(part.ordinals is not None for part in refs):
        zeros = [np.zeros(len(part), np.int64) if part.ordinals is None else part.ordinals for part in refs]
        ordinals = np.concatenate(zeros)
    located = _join_located([part.located for part in refs])
    draws = any(part.draws for part in refs)
    return RowRefs(refs[0].engines, leaves, rows, located, ordinals, refs[0].schema, draws)


def _joined_bunches(parts: Sequence[Bunches]) -> Bunches:
    """Join batches of rows. Only the rows of these are kept."""
    rows = joined([part.chosen for part in parts])
    assert not isinstance(rows, Bunches)
    sizes = np.concatenate([part.batches.sizes() for part in parts])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Bunches(rows, Batches(np.arange(bounds[-1]), bounds))


def _together(parts: Sequence[Batch | MixedRows]) -> MixedRows:
    batches: list[Batch] = []
    which, places = [], []
    for part in parts:
        if isinstance(part, MixedRows):
            which.append(part.which + len(batches))
            places.append(part.places)
            batches += part.batches
        elif len(part):
            which.append(np.full(len(part), len(batches)))
            places.append(np.arange(len(part)))
            batches.append(part)
    return MixedRows(tuple(batches), np.concatenate(which), np.concatenate(places))


def _join_located(parts: Sequence[dict[str, Located] | None]) -> dict[str, Located] | None:
    first, known = parts[0], [part for part in parts if part is not None]
    if first is None or len(known) < len(parts):
        return None
    if any(part.keys() != first.keys() or not all(part[n].alike(first[n]) for n in first) for part in known):
        return None
    return {name: Located.join([part[name] for part in known]) for name in first}


def are_of(batch: Batch, rows: Sequence[Intervals]) -> npt.NDArray[np.bool_]:
    """Return which rows of a batch, or packed sequences, are made only of some rows of the data, by their sources."""
    source, row = batch.traced.columns[:2]
    found = np.zeros(len(row), np.bool_)
    for number, these in enumerate(rows):
        found |= (source == number) & these.contains(row)
    return all_in_each(found, batch.traced.bounds)


def all_in_each(found: npt.NDArray[np.bool_], bounds: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each span between two bounds whether it has something, and all of it is found."""
    others = np.append(0, np.cumsum(~found))[bounds]
    whole: npt.NDArray[np.bool_] = (others[1:] == others[:-1]) & (bounds[1:] > bounds[:-1])
    return whole


def bytes_in(items: Items) -> int:
    """Return the approximate memory of outputs that have been read."""
    if isinstance(items, Bunches):
        return bytes_in(items.rows)
    if isinstance(items, RowRefs):
        return 0
    return sum(batch.nbytes for batch in (items.batches if isinstance(items, MixedRows) else (items,)))


def materialize(items: Items) -> Batch:
    """Read outputs that are only referenced."""
    return items if isinstance(items, Batch) else items.read()


@dataclass(frozen=True)
class Chunk:
    """Some outputs. ``at(j)`` is the cursor after the first j of them.

    ``before(j)`` is the cursor right before the next output, after all rows that yield no output. It equals ``at(j)``
    unless ``before_`` is given.
    """

    items: Items
    at: Callable[[int], FlowAt]
    before_: Callable[[int], FlowAt] | None = None
    table: Callable[[Int64Array, bool], Int64Array | None] | None = None
    """The numbers of many cursors in one call, a row for each: those of ``at``, or of ``before`` if that is True. It is
    for the ledger, to which a call for each step would cost a tenth of a cheap batch.
    """
    is_barrier: bool = False
    """True if it has no outputs, and a group of outputs ends before it: what follows is mixed in another way."""

    def before(self, outputs: int) -> FlowAt:
        return self.at(outputs) if self.before_ is None else self.before_(outputs)


class Flow(Protocol):
    """Outputs from a cursor on, in chunks. ``pull`` returns None at the end, and on every later call."""

    def pull(self) -> Chunk | None: ...


class Pulled:
    """Outputs that were taken together."""

    def __init__(self, pieces: list[tuple[Chunk, int, int]], before: FlowAt) -> None:
        self._pieces, self._before = pieces, before
        self.count = sum(stop - start for _, start, stop in pieces)

    def items(self) -> Items:
        return joined([chunk.items.slice(start, stop) for chunk, start, stop in self._pieces])

    def joined(self, following: Pulled) -> Pulled:
        """Return these and those that were taken right after them."""
        return Pulled([*self._pieces, *following._pieces], self._before)

    def first(self, count: int) -> Pulled:
        """Return the first ``count`` of them."""
        kept, pieces = count, []
        for chunk, start, stop in self._pieces:
            if kept > 0:
                pieces.append((chunk, start, min(stop, start + kept)))
            kept -= stop - start
        return Pulled(pieces, self._before)

    def at(self, count: int) -> FlowAt:
        """Return the cursor after the first ``count`` of them."""
        mark: Any = self._before
        left = count
        if not left and self._pieces:  # not the cursor before rows that yielded no output
            chunk, start, _ = self._pieces[0]
            return chunk.at(start)
        for chunk, start, stop in self._pieces:
            if left <= 0:
                break
            step = min(left, stop - start)
            mark, left = (chunk, start + step), left - step
        return at_mark(mark)

    @property
    def pieces(self) -> list[tuple[Chunk, int, int]]:
        """The chunks that they are of, with the first and the last of each."""
        return self._pieces

    def pieces_after(self, count: int) -> list[tuple[Chunk, int, int]]:
        """Return the pieces of all but the first ``count`` of them."""
        pieces = []
        for chunk, start, stop in self._pieces:
            if count < stop - start:
                pieces.append((chunk, start + count, stop))
            count = max(0, count - (stop - start))
        return pieces

    def before(self, number: int) -> FlowAt:
        """Return the cursor right before one of them."""
        for chunk, start, stop in self._pieces:
            if number < stop - start:
                return chunk.before(start + number)
            number -= stop - start
        return self.at(self.count)


def at_mark(mark: tuple[Chunk, int] | FlowAt) -> FlowAt:
    """Return the cursor at a mark: a cursor, or a chunk and the number of its outputs before the mark."""
    return mark[0].at(mark[1]) if isinstance(mark, tuple) else mark


class Puller:
    """Takes outputs of a flow, any number at a time. ``cursor`` is the cursor after the outputs that were taken.

    ``groups``: they are taken in groups, which end at a barrier.
    """

    def __init__(self, flow: Flow, cursor: FlowAt, *, groups: bool = False) -> None:
        self._flow, self._groups = flow, groups
        self._chunk: Chunk | None = None
        self._length = self._next = 0
        self._returned: list[tuple[Chunk, int, int]] = []  # outputs that come before the next chunk
        self._cursor = cursor

    @property
    def cursor(self) -> FlowAt:
        return at_mark(self.mark())

    def mark(self) -> Any:
        """Return a mark of the current position, from which ``at_mark`` computes the cursor."""
        return self._cursor if self._chunk is None else (self._chunk, self._next)

    def has_more(self) -> bool:
        """Return True if outputs are left. Pull the next chunk if necessary."""
        while self._next >= self._length:
            if self._returned:
                self._chunk, self._next, self._length = self._returned.pop(0)
                continue
            chunk = self._flow.pull()
            if chunk is None or (chunk.is_barrier and self._groups):
                return False
            if chunk.is_barrier:
                continue
            self._chunk, self._next, self._length = chunk, 0, len(chunk.items)
        return True

    @property
    def left_of_chunk(self) -> int:
        """Outputs left of the chunk that was pulled last."""
        return self._length - self._next

    def take(self, count: int) -> Pulled:
        """Take the next outputs, fewer only at the end."""
        before = self.mark()
        pieces: list[tuple[Chunk, int, int]] = []
        while count and self.has_more():
            assert self._chunk is not None
            step = min(count, self._length - self._next)
            pieces.append((self._chunk, self._next, self._next + step))
            self._next, count = self._next + step, count - step
        return Pulled(pieces, before)

    def give_back(self, pulled: Pulled, keep: int) -> None:
        """Take back all but the first ``keep`` of the outputs that were taken last. They come again."""
        if pieces := pulled.pieces_after(keep):
            if self._chunk is not None and self._next < self._length:
                pieces.append((self._chunk, self._next, self._length))
            self._returned[:0] = pieces
            self._chunk, self._next, self._length = self._returned.pop(0)
