"""Iterating a dataset in one process: rows one by one, or batches, with a state that follows delivery."""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import length_hint
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from midepoch.engine import Engine
from midepoch.errors import StateError
from midepoch.order import Cut
from midepoch.resumable import HasState
from midepoch.state import Cursor
from midepoch.transforms import Batch

Int64Array = npt.NDArray[np.int64]

_FIRST_CHUNK = 32
_CHUNK_BYTES = 4 << 20
"""Read at once. Fewer would make the cost of a call count."""
_SLOW = 0.02
"""Seconds: while a chunk's maps take longer than this, fewer rows are mapped ahead of the one handed out."""


class Progress:
    """Where an iteration over one share of an epoch stands, in the share's own rows and as a global position."""

    def __init__(self, rows: int, cut: Cut, cursor: Cursor) -> None:
        self._rows, self.cut, self._start = rows, cut, cursor.position
        self.epoch = cursor.epoch
        self.first = cut.before(cursor.position)  # own rows already delivered
        self.total = cut.before(rows)  # own rows of the epoch

    def cursor(self, delivered: int) -> Cursor:
        """The cursor once own rows up to number ``delivered`` have been handed over."""
        if delivered == self.first:
            return Cursor(self.epoch, self._start)
        return Cursor(self.epoch, min(self._start + (delivered - self.first) * self.cut.count, self._rows))

    @property
    def end(self) -> Cursor:
        """Where all shards stand when one of them has found that nothing is left for it."""
        return Cursor(self.epoch, self._rows)


class Lookahead:
    """The rows at a share's own numbers, thousands at a time: fewer would make the order cost more than reading."""

    _MOST = 8192

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine, self._progress = engine, progress
        self._first, self._rows, self._size = 0, engine.chosen(progress.epoch, progress.cut.locals(0, 0)), 0

    def take(self, first: int, stop: int) -> Int64Array:
        """Row numbers of the dataset before it was shuffled, for own numbers first to stop."""
        if not self._first <= first <= stop <= self._first + len(self._rows):
            last = min(max(stop, first + self._size), self._progress.total)
            self._rows = self._engine.chosen(self._progress.epoch, self._progress.cut.locals(first, last))
            self._first, self._size = first, min(self._MOST, 4 * (last - first))
        return self._rows[first - self._first : stop - self._first]


@dataclass(frozen=True)
class Start:
    """Where an iteration begins. ``late``: asked once, before the first row, for another cursor and round."""

    engine: Engine
    cut: Cut
    cursor: Cursor
    round: int = 0
    batch: int = 0
    late: Callable[[], tuple[Cursor, int] | None] | None = None


class Follower(Protocol):
    """The dataset behind an iterator: makes and reads its states, and hears when an epoch has been gone through."""

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]: ...

    def start_at(self, state: Mapping[str, Any]) -> Start: ...

    def epoch_over(self, iterator: Any, cursor: Cursor) -> None: ...


class RowIterator(chain[Any], HasState):
    """Rows from a cursor to the end of the epoch, Stateful in the sense of torchdata.

    ``next`` is that of ``itertools.chain`` over iterators of chunks: no Python code runs for a row, which would cost a
    tenth of the whole. How far a chunk has been handed out, its iterator knows.
    """

    def __new__(cls, start: Start, owner: Follower) -> RowIterator:  # noqa: ARG004
        chunks = _Chunks()
        self = cast(RowIterator, cls.from_iterable(chunks))  # an instance of cls, though its type says chain
        chunks.iterator = weakref.ref(self)
        return self

    def __init__(self, start: Start, owner: Follower) -> None:
        self._owner = owner
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self._engine, self.round, self.batch, self._late = start.engine, start.round, start.batch, start.late
        self._progress = Progress(start.engine.pipeline.rows, start.cut, start.cursor)
        self._ahead = Lookahead(start.engine, self._progress)
        self._next = self._progress.first  # own number of the first row not yet in hand
        self._chunk_first = self._next  # own number of the first row in hand
        self._count = 0  # rows of the chunk in hand, which only its iterator holds: memory that is free is used again
        self._places: list[int] | None = None  # own numbers of the rows in hand, where some were skipped
        self._rows: Iterator[Any] = iter(())
        self._pieces: list[tuple[Batch, int]] = []  # read but not in hand, the first one last
        self._size = 1 if self._engine.pipeline.has_map else _FIRST_CHUNK
        self._ended = False
        self._saved = self._next  # own number of the row before which a state was last asked for

    def refill(self) -> Iterator[Any] | None:
        """The next chunk that has rows, or None at the end of the epoch."""
        if self._late is not None:
            other, self._late = self._late(), None
            if other is not None:
                self._begin(Start(self._engine, self._progress.cut, *other, self.batch))
        while self._next < self._progress.total:
            self._fill()
            if self._count:
                return self._rows
        self._ended = True
        self._owner.epoch_over(self, self.cursor)
        return None

    def _fill(self) -> None:
        """Take the next chunk in hand. Batched maps get their groups at fixed places of the epoch, also on resume."""
        group = self._engine.pipeline.group
        first = self._next if group is None else self._next - self._next % group
        if group is not None:
            stop = min(first + group, self._progress.total)
            self._engine.reached(self._progress.epoch, self._progress.cursor(first).position)
            read = self._engine.read(self._ahead.take(first, stop))
        else:
            if not self._pieces:
                last = min(first + self._size, self._progress.total)
                self._engine.reached(self._progress.epoch, self._progress.cursor(first).position)
                self._pieces = self._engine.read_pieces(self._ahead.take(first, last))[::-1]
            read, count = self._pieces.pop()
            stop = first + count
        started = time.perf_counter()
        try:
            batch = self._engine.transform(self._progress.epoch, read)
            rows = self._engine.rows(batch)
        except Exception:
            if group is not None or stop - first < 2:
                raise
            self._halve(read, stop - first)
            return
        if time.perf_counter() - started < _SLOW:
            self._size = min(2 * self._size, self._engine.chunk_rows(_CHUNK_BYTES))
        places: list[int] | None = None
        if len(batch) < stop - first:
            numbers = (batch.places + first).tolist()
            kept = [i for i, number in enumerate(numbers) if number >= self._next]
            rows, places = [rows[i] for i in kept], [numbers[i] for i in kept]
        elif self._next > first:
            rows = rows[self._next - first :]
        count, rest = len(rows), iter(rows)
        # No call among these: a signal handler that saves must not see half of them.
        self._chunk_first, self._count, self._rows, self._places = self._next, count, rest, places
        self._next = stop

    def _halve(self, read: Batch, count: int) -> None:
        """Put rows of which one fails back as two pieces: those before it are delivered first."""
        half = count // 2
        cut = int(read.places.searchsorted(half))
        rest = read.slice(cut, len(read))
        self._pieces += [(replace(rest, places=rest.places - half), count - half), (read.slice(0, cut), half)]
        self._chunk_first, self._count, self._rows, self._places, self._size = self._next, 0, iter(()), None, 1

    @property
    def cursor(self) -> Cursor:
        """Just behind the last row handed over."""
        return self._progress.end if self._ended else self._progress.cursor(self._delivered)

    @property
    def _delivered(self) -> int:
        """Own number of the row after the last one handed over."""
        taken = self._count - length_hint(self._rows)
        if self._places is None or not taken:
            return self._chunk_first + taken
        return self._places[taken - 1] + 1

    def state_dict(self) -> dict[str, Any]:
        """Also notes how many rows StatefulDataLoader takes between two states: the size of its batches."""
        delivered = self._delivered
        self.batch, self._saved = max(self.batch, delivered - self._saved), delivered
        return self._owner.save_at(self.cursor, self.round, self.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved (called by StatefulDataLoader)."""
        if self._ended:
            raise StateError("this iterator has ended: load the state into the dataset and iterate that.")
        start = self._owner.start_at(state)
        collections.deque(self._rows, maxlen=0)  # what is in hand is not handed out any more
        self._begin(start)


class _Chunks:
    """What a RowIterator chains together. It knows it only weakly, so that dropping it frees everything at once."""

    def __init__(self) -> None:
        self.iterator: Callable[[], RowIterator | None] = lambda: None

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> Iterator[Any]:
        iterator = self.iterator()
        try:
            rows = iterator.refill() if iterator is not None else None
        except BaseException as problem:
            return _Failed(problem)
        if rows is None:
            raise StopIteration
        return rows


class _Failed:
    """A chunk that could not be made: raises again and again. Raised here above, it would end the chain, and the error
    or the interrupt would look like the end of the epoch to whoever asks once more.
    """

    def __init__(self, problem: BaseException) -> None:
        self._problem = problem

    def __iter__(self) -> _Failed:
        return self

    def __next__(self) -> Any:
        raise self._problem


class BatchIterator(HasState):
    """Batches of a share's rows from a cursor to the end of the epoch, as columns."""

    round = batch = 0

    def __init__(self, start: Start, owner: Follower, size: int, drop_last: bool) -> None:
        self._owner, self._size, self._drop_last = owner, size, drop_last
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self._engine = start.engine
        self._progress = Progress(start.engine.pipeline.rows, start.cut, start.cursor)
        self._ahead = Lookahead(start.engine, self._progress)
        self._next = self._progress.first
        self._reached = self._next  # counting a short last batch as full: other shards may have had a full one
        self._ended = False

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        while True:
            stop = min(self._next + self._size, self._progress.total)
            if stop - self._next < (self._size if self._drop_last else 1):
                if not self._ended:
                    self._ended = True
                    self._owner.epoch_over(self, self.cursor)
                raise StopIteration
            self._engine.reached(self._progress.epoch, self._progress.cursor(self._next).position)
            batch = self._engine.transform(self._progress.epoch, self._engine.read(self._ahead.take(self._next, stop)))
            columns = self._engine.columns(batch) if len(batch) else None
            self._reached, self._next = self._next + self._size, stop  # the last thing, see Loader
            if columns is not None:
                return columns

    @property
    def cursor(self) -> Cursor:
        return self._progress.end if self._ended else self._progress.cursor(self._reached)

    def state_dict(self) -> dict[str, Any]:
        """Just behind the last batch handed over."""
        return self._owner.save_at(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved."""
        self._begin(self._owner.start_at(state))
