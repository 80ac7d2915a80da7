"""Chunks: outputs of a flow, each of which knows the cursor behind it; and taking any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from midepoch.engine import Engine
from midepoch.read.columns import Located
from midepoch.transforms import Batch, join
from midepoch.transforms.batch import told_apart

Int64Array = npt.NDArray[np.int64]
At = Any
"""A cursor: nested lists of whole numbers."""


@dataclass(frozen=True)
class Refs:
    """Rows of sources that nobody has read yet: by source and number, and where in memory they lie if that is known."""

    engines: Sequence[Engine]
    leaves: Int64Array
    rows: Int64Array
    located: dict[str, Located] | None = None
    ordinals: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> Refs:
        return self._at(slice(start, stop))

    def keep(self, places: Int64Array) -> Refs:
        return self._at(places)

    def _at(self, places: Any) -> Refs:
        located = None
        if self.located is not None:
            located = {name: column.at(places) for name, column in self.located.items()}
        ordinals = None if self.ordinals is None else self.ordinals[places]
        return Refs(self.engines, self.leaves[places], self.rows[places], located, ordinals)

    def told_apart(self, number: int) -> Refs:
        """As ``Batch.told_apart``."""
        if not number:
            return self
        ordinals = np.zeros(len(self), np.int64) if self.ordinals is None else self.ordinals
        return replace(self, ordinals=told_apart(ordinals, number))

    def read(self) -> Batch:
        """The rows, read."""
        found = self._read()
        return found if self.ordinals is None else replace(found, ordinals=self.ordinals)

    def _read(self) -> Batch:
        found: list[Int64Array] = []
        parts: list[Batch] = []
        for leaf in np.unique(self.leaves).tolist():
            places = np.flatnonzero(self.leaves == leaf)
            parts.append(self.engines[leaf].read(self.rows[places]))
            found.append(places)
        if len(parts) == 1:
            return parts[0]
        order = np.empty(len(self), dtype=np.int64)
        order[np.concatenate(found)] = np.arange(len(self))
        return join(parts).keep(order)


Items = Batch | Refs


def joined(parts: Sequence[Items]) -> Items:
    """Outputs one after the other: references as long as all are."""
    if len(parts) == 1:
        return parts[0]
    refs = [part for part in parts if isinstance(part, Refs)]
    if len(refs) < len(parts):
        return join([real(part) for part in parts])
    leaves, rows = (np.concatenate(arrays) for arrays in zip(*((p.leaves, p.rows) for p in refs), strict=True))
    ordinals = None
    if any(part.ordinals is not None for part in refs):
        zeros = [np.zeros(len(part), np.int64) if part.ordinals is None else part.ordinals for part in refs]
        ordinals = np.concatenate(zeros)
    return Refs(refs[0].engines, leaves, rows, _join_located([part.located for part in refs]), ordinals)


def _join_located(parts: Sequence[dict[str, Located] | None]) -> dict[str, Located] | None:
    first, found = parts[0], [part for part in parts if part is not None]
    if first is None or len(found) < len(parts):
        return None
    if any(part.keys() != first.keys() or not all(part[n].alike(first[n]) for n in first) for part in found):
        return None
    return {name: Located.join([part[name] for part in found]) for name in first}


def real(items: Items) -> Batch:
    """Outputs as rows that have been read."""
    return items.read() if isinstance(items, Refs) else items


@dataclass(frozen=True)
class Chunk:
    """Some outputs. ``at(j)`` is the cursor behind the first j of them; ``before(j)`` the one right before the next,
    with nothing in between that becomes nothing: the same, unless it is told.
    """

    items: Items
    at: Callable[[int], At]
    before_: Callable[[int], At] | None = None

    def before(self, outputs: int) -> At:
        return self.at(outputs) if self.before_ is None else self.before_(outputs)


class Flow(Protocol):
    """Outputs from a cursor on, in chunks; None at the end, and again whenever it is asked after that."""

    def pull(self) -> Chunk | None: ...


class Taken:
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


class Intake:
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

    def take(self, count: int) -> Taken:
        """The next outputs: fewer only at the end."""
        before = self.mark()
        pieces: list[tuple[Chunk, int, int]] = []
        while count:
            if self._next >= self._length:
                chunk = self._flow.pull()
                if chunk is None:
                    break
                self._chunk, self._next, self._length = chunk, 0, len(chunk.items)
                continue
            assert self._chunk is not None
            step = min(count, self._length - self._next)
            pieces.append((self._chunk, self._next, self._next + step))
            self._next, count = self._next + step, count - step
        return Taken(pieces, before)
