"""Chunks: outputs of a flow, each of which knows the cursor behind it; and taking any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from midepoch.pipeline.cursor import At
from midepoch.pipeline.engine import Engine
from midepoch.read.columns import Located
from midepoch.transforms import Batch, join
from midepoch.transforms.batch import alike, with_ordinals

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowRefs:
    """Rows of sources that nobody has read yet: by source and number, and where in memory they lie if that is known."""

    engines: Sequence[Engine]
    leaves: Int64Array
    rows: Int64Array
    located: dict[str, Located] | None = None
    ordinals: Int64Array | None = None
    schema: Conform | None = None
    """The schema that rows are brought to when they are read, where sources differ."""

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> RowRefs:
        return self._at(slice(start, stop))

    def keep(self, places: Int64Array) -> RowRefs:
        return self._at(places)

    def _at(self, places: Any) -> RowRefs:
        located = None
        if self.located is not None:
            located = {name: column.at(places) for name, column in self.located.items()}
        ordinals = None if self.ordinals is None else self.ordinals[places]
        return replace(self, leaves=self.leaves[places], rows=self.rows[places], located=located, ordinals=ordinals)

    def with_ordinals(self, number: int) -> RowRefs:
        """As ``Batch.with_ordinals``."""
        if not number:
            return self
        ordinals = np.zeros(len(self), np.int64) if self.ordinals is None else self.ordinals
        return replace(self, ordinals=with_ordinals(ordinals, number))

    def read(self) -> Batch:
        """The rows, read."""
        found = self._read()
        return found if self.ordinals is None else replace(found, ordinals=self.ordinals)

    def _read(self) -> Batch:
        found: list[Int64Array] = []
        parts: list[Batch] = []
        for leaf in np.unique(self.leaves).tolist():
            places = np.flatnonzero(self.leaves == leaf)
            part = self.engines[leaf].read(self.rows[places])
            parts.append(part if self.schema is None else self.schema.conform(part))
            found.append(places)
        if len(parts) == 1:
            return parts[0]
        order = np.empty(len(self), dtype=np.int64)
        order[np.concatenate(found)] = np.arange(len(self))
        return join(parts).keep(order)


@dataclass(frozen=True)
class Pieces:
    """Rows of batches whose columns are not of one kind: one source reads numbers, a function makes lists of others.

    They are joined when it is known which rows make a batch, so that its types depend on no other row.
    """

    batches: tuple[Batch, ...]
    which: Int64Array
    places: Int64Array

    def __len__(self) -> int:
        return len(self.places)

    def slice(self, start: int, stop: int) -> Pieces:
        return replace(self, which=self.which[start:stop], places=self.places[start:stop])

    def keep(self, places: Int64Array) -> Pieces:
        return replace(self, which=self.which[places], places=self.places[places])

    def with_ordinals(self, number: int) -> Pieces:
        """As ``Batch.with_ordinals``."""
        return replace(self, batches=tuple(batch.with_ordinals(number) for batch in self.batches))

    def changed(self, change: Callable[[Batch], Batch]) -> Pieces:
        """With another row for each row, each batch for itself."""
        return replace(self, batches=tuple(change(batch) for batch in self.batches))

    def read(self) -> Batch:
        """The rows, joined."""
        used = np.unique(self.which).tolist() or [0]
        found = [np.flatnonzero(self.which == number) for number in used]
        parts = [self.batches[number].keep(self.places[rows]) for number, rows in zip(used, found, strict=True)]
        order = np.empty(len(self), dtype=np.int64)
        order[np.concatenate(found)] = np.arange(len(self))
        return join(parts).keep(order)


Items = Batch | RowRefs | Pieces


class Conform(Protocol):
    """Brings rows of different sources to one schema."""

    def conform(self, batch: Batch) -> Batch: ...


def joined(parts: Sequence[Items]) -> Items:
    """Outputs one after the other: references as long as all are, one batch where all are of one kind."""
    if len(parts) == 1:
        return parts[0]
    refs = [part for part in parts if isinstance(part, RowRefs)]
    if len(refs) < len(parts):
        batches = [part.read() if isinstance(part, RowRefs) else part for part in parts]
        plain = [batch for batch in batches if isinstance(batch, Batch)]
        return join(plain) if len(plain) == len(batches) and alike(plain) else _together(batches)
    leaves, rows = (np.concatenate(arrays) for arrays in zip(*((p.leaves, p.rows) for p in refs), strict=True))
    ordinals = None
    if any(part.ordinals is not None for part in refs):
        zeros = [np.zeros(len(part), np.int64) if part.ordinals is None else part.ordinals for part in refs]
        ordinals = np.concatenate(zeros)
    located = _join_located([part.located for part in refs])
    return RowRefs(refs[0].engines, leaves, rows, located, ordinals, refs[0].schema)


def _together(parts: Sequence[Batch | Pieces]) -> Pieces:
    batches: list[Batch] = []
    which, places = [], []
    for part in parts:
        if isinstance(part, Pieces):
            which.append(part.which + len(batches))
            places.append(part.places)
            batches += part.batches
        elif len(part):
            which.append(np.full(len(part), len(batches)))
            places.append(np.arange(len(part)))
            batches.append(part)
    return Pieces(tuple(batches), np.concatenate(which), np.concatenate(places))


def _join_located(parts: Sequence[dict[str, Located] | None]) -> dict[str, Located] | None:
    first, found = parts[0], [part for part in parts if part is not None]
    if first is None or len(found) < len(parts):
        return None
    if any(part.keys() != first.keys() or not all(part[n].alike(first[n]) for n in first) for part in found):
        return None
    return {name: Located.join([part[name] for part in found]) for name in first}


def bytes_in(items: Items) -> int:
    """About how much memory outputs take that were read."""
    if isinstance(items, RowRefs):
        return 0
    return sum(batch.nbytes for batch in (items.batches if isinstance(items, Pieces) else (items,)))


def materialize(items: Items) -> Batch:
    """Outputs as rows that have been read."""
    return items if isinstance(items, Batch) else items.read()


@dataclass(frozen=True)
class Chunk:
    """Some outputs. ``at(j)`` is the cursor behind the first j of them; ``before(j)`` the one right before the next,
    with nothing in between that becomes nothing: the same, unless it is told.
    """

    items: Items
    at: Callable[[int], At]
    before_: Callable[[int], At] | None = None
    table: Callable[[Int64Array, bool], Int64Array] | None = None
    """The numbers of many cursors in one call, a row for each: those of ``at``, or of ``before`` if that is True. It is
    for the ledger, to which a call for each step would cost a tenth of a cheap batch.
    """

    def before(self, outputs: int) -> At:
        return self.at(outputs) if self.before_ is None else self.before_(outputs)


class Flow(Protocol):
    """Outputs from a cursor on, in chunks; None at the end, and again whenever it is asked after that."""

    def pull(self) -> Chunk | None: ...


class Pulled:
    """Outputs that were taken together."""

    def __init__(self, pieces: list[tuple[Chunk, int, int]], before: At) -> None:
        self._pieces, self._before = pieces, before
        self.count = sum(stop - start for _, start, stop in pieces)

    def items(self) -> Items:
        return joined([chunk.items.slice(start, stop) for chunk, start, stop in self._pieces])

    def at(self, count: int) -> At:
        """The cursor behind the first ``count`` of them."""
        found, left = self._before, count
        if not left and self._pieces:  # not what lies before rows that nothing came of
            chunk, start, _ = self._pieces[0]
            return chunk.at(start)
        for chunk, start, stop in self._pieces:
            if left <= 0:
                break
            step = min(left, stop - start)
            found, left = (chunk, start + step), left - step
        return at_mark(found)

    def before(self, number: int) -> At:
        """The cursor from which one of them comes first."""
        for chunk, start, stop in self._pieces:
            if number < stop - start:
                return chunk.before(start + number)
            number -= stop - start
        return self.at(self.count)


def at_mark(mark: Any) -> At:
    """The cursor at a mark: a cursor, or a chunk and how many of its outputs lie before."""
    return mark[0].at(mark[1]) if isinstance(mark, tuple) else mark


class Puller:
    """Takes outputs of a flow, any number at a time. The cursor is that behind what was taken."""

    def __init__(self, flow: Flow, cursor: At) -> None:
        self._flow = flow
        self._chunk: Chunk | None = None
        self._length = self._next = 0
        self._cursor = cursor

    @property
    def cursor(self) -> At:
        return at_mark(self.mark())

    def mark(self) -> Any:
        """Where this is, to ask for the cursor later."""
        return self._cursor if self._chunk is None else (self._chunk, self._next)

    def has_more(self) -> bool:
        """Return whether anything is left. Makes the next chunk if it has to."""
        while self._next >= self._length:
            chunk = self._flow.pull()
            if chunk is None:
                return False
            self._chunk, self._next, self._length = chunk, 0, len(chunk.items)
        return True

    def take(self, count: int) -> Pulled:
        """The next outputs: fewer only at the end."""
        before = self.mark()
        pieces: list[tuple[Chunk, int, int]] = []
        while count and self.has_more():
            assert self._chunk is not None
            step = min(count, self._length - self._next)
            pieces.append((self._chunk, self._next, self._next + step))
            self._next, count = self._next + step, count - step
        return Pulled(pieces, before)
