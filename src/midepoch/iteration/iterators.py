"""The iterators of a dataset: rows one by one, or batches. Stateful in the sense of torchdata."""

from __future__ import annotations

import collections
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import nearest
from midepoch._internal.resumable import Resumable
from midepoch.errors import StateError
from midepoch.order import Selection, Shard
from midepoch.order.intervals import Intervals
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.lanes import Lanes, StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import BundlesHere, GroupedRows
from midepoch.transforms import Batch, finish, present, present_rows


class DeliveredRows(NamedTuple):
    """Some rows, and the cursor after the first n of them."""

    values: list[Any]
    at: Callable[[int], Cursor]


class RowSource(Protocol):
    """Rows of this process from a cursor to the end of its epoch. After an error the same rows are tried again."""

    @property
    def end(self) -> Cursor:
        """The cursor of all shards at the end of the epoch."""

    def rows(self) -> DeliveredRows | None:
        """Return the next rows, at least one and as many as can be made quickly, or None at the end."""

    def batch(self, size: int, drop_last: bool) -> tuple[Any, Cursor] | None:
        """Return the next ``size`` rows as columns, and the cursor after them. Fewer or None at the end."""


@dataclass(frozen=True)
class IterationStart:
    """The start of an iteration. ``late``: called once, before the first row, for another source and round."""

    cursor: Cursor
    source: RowSource
    round: int = 0
    batch: int = 0
    late: Callable[[], tuple[Cursor, RowSource, int] | None] | None = None


class Owner(Protocol):
    """The dataset of an iterator: saves and loads its states, and is notified at the end of an epoch."""

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]: ...

    def start_at(self, state: Mapping[str, Any]) -> IterationStart: ...

    def epoch_over(self, iterator: Any, cursor: Cursor) -> None: ...


class RowIterator(chain[Any], Resumable):
    """Iterator over rows from a cursor to the end of the epoch.

    ``next`` is that of ``itertools.chain`` over iterators of chunks: no Python code runs for a row, which would cost a
    tenth of the total. The delivered part of a chunk is known from its iterator.
    """

    def __new__(cls, start: IterationStart, owner: Owner) -> RowIterator:  # noqa: ARG004
        chunks = _Chunks()
        self = cast(RowIterator, cls.from_iterable(chunks))  # an instance of cls, although its type says chain
        chunks.iterator = weakref.ref(self)
        return self

    def __init__(self, start: IterationStart, owner: Owner) -> None:
        self._owner = owner
        self._begin(start)

    def _begin(self, start: IterationStart) -> None:
        self._source, self.round, self.batch, self._late = start.source, start.round, start.batch, start.late
        self._rest: Iterator[Any] = iter(())  # the rows of the current chunk: no other reference to them
        self._count = self._before = self._saved = 0
        self._at: Callable[[int], Cursor] = lambda _: start.cursor
        self._ended = False

    def refill(self) -> Iterator[Any] | None:
        """Return the next chunk, or None at the end of the epoch."""
        if self._late is not None:
            other, self._late = self._late(), None
            if other is not None:
                self._begin(IterationStart(*other, self.batch))
        chunk = self._source.rows()
        if chunk is None:
            self._ended = True
            self._owner.epoch_over(self, self.cursor)
            return None
        count, rest, before = len(chunk.values), iter(chunk.values), self._before + self._count
        # No call between these: a signal handler that saves must not see only some of them.
        self._before, self._count, self._rest, self._at = before, count, rest, chunk.at
        return rest

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last row delivered."""
        return self._source.end if self._ended else self._at(self._count - length_hint(self._rest))

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row delivered.

        It also records the number of rows that StatefulDataLoader takes between two states: its batch size.
        """
        delivered = self._before + self._count - length_hint(self._rest)
        self.batch, self._saved = max(self.batch, delivered - self._saved), delivered
        return self._owner.save_at(self.cursor, self.round, self.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved (called by StatefulDataLoader)."""
        if self._ended:
            raise StateError("this iterator has ended. Load the state into the dataset, and iterate that.")
        start = self._owner.start_at(state)
        collections.deque(self._rest, maxlen=0)  # the current chunk is not delivered any more
        self._begin(start)


class _Chunks:
    """The chunks of a RowIterator, which it references weakly, so that dropping the iterator frees everything."""

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
    """A chunk that could not be made: it raises once, then the chunk is tried again.

    Raised in the caller, the error would end the chain, and a second ``next`` would report the end of the epoch.
    """

    def __init__(self, problem: BaseException) -> None:
        self._problem: BaseException | None = problem

    def __iter__(self) -> _Failed:
        return self

    def __next__(self) -> Any:
        problem, self._problem = self._problem, None
        raise StopIteration if problem is None else problem


class BatchIterator(Resumable):
    """Iterator over batches of rows from a cursor to the end of the epoch, as columns."""

    round = batch = 0

    def __init__(self, start: IterationStart, owner: Owner, size: int, drop_last: bool) -> None:
        self._owner, self._size, self._drop_last = owner, size, drop_last
        self._begin(start)

    def _begin(self, start: IterationStart) -> None:
        self._source, self._cursor, self._ended = start.source, start.cursor, False

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        batch = None if self._ended else self._source.batch(self._size, self._drop_last)
        if batch is None:
            if not self._ended:
                self._ended, self._cursor = True, self._source.end
                self._owner.epoch_over(self, self._cursor)
            raise StopIteration
        value, self._cursor = batch  # the last statement before the return: no interrupt comes between the two
        return value

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last batch delivered."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered."""
        return self._owner.save_at(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved."""
        self._begin(self._owner.start_at(state))


class Columns(dict[str, Any]):
    """The columns of several rows, ``ds[:3]``."""

    def __missing__(self, key: object) -> Any:
        hint = (
            f"Use list(ds.take(3))[{key}], or ds[{key}]." if isinstance(key, int) else nearest(str(key), self, "{!r}")
        )
        raise KeyError(f"ds[:3] is a dict of columns, and has no {key!r}. {hint} There are: {', '.join(self)}.")


def _shown(columns: Any) -> Any:
    return Columns(columns) if type(columns) is dict else columns


class RandomAccess:
    """Random access to an epoch: ``get`` returns the same as ``list(ds)[key]``."""

    def __init__(self, leaf: Leaf, groups: int) -> None:
        self._bundles, self._groups = BundlesHere([leaf]), groups
        self._shard, self._engine = leaf.shard, self._bundles.engines[0]
        self._turn = (os.getpid(), threading.RLock())

    def get(self, key: Any, epoch: int, count: int) -> Any:
        """Return a row of ``count``, or the columns of several."""
        if np.ndim(key) == 0 and hasattr(key, "__index__") and not isinstance(key, (bool, np.bool_)):
            key = key.__index__()
            if not -count <= key < count:
                raise IndexError(f"row {key} is out of range: there are {count} rows")
            found = self._engine.rows(self.read(epoch, np.array([key % count])))
            if not found:
                raise IndexError(f"row {key} is skipped under on_error='skip'")
            return found[0]
        if isinstance(key, slice) and all(
            at is None or hasattr(at, "__index__") for at in (key.start, key.stop, key.step)
        ):
            return _shown(self._engine.columns(self.read(epoch, np.arange(*key.indices(count), dtype=np.int64))))
        names = isinstance(key, (list, tuple)) and any(isinstance(each, str) for each in key)
        if names or not (isinstance(key, (list, tuple, range)) or hasattr(key, "__array__")) or np.ndim(key) != 1:
            remedy = "Use ds.slice(None, '10%')" if isinstance(key, slice) else "Use ds[0], ds[:5] or ds[[0, 2]]"
            remedy += ", ds.select_columns([…]) for columns, and ds[0]['text'] for a value." if names else "."
            raise TypeError(f"rows are indexed by an integer, a slice or a list of integers, got {key!r:.60}. {remedy}")
        rows = Selection.of_ranges([(0, count)]).select(np.asarray(key))
        return _shown(self._engine.columns(self.read(epoch, rows.source_rows(np.arange(len(rows))))))

    def read(self, epoch: int, places: Any) -> Batch:
        """Return rows of the epoch by their numbers, after all functions."""
        if self._turn[0] != os.getpid():  # a fork: a thread that does not exist here may hold it
            self._turn = (os.getpid(), threading.RLock())
        engine, positions = self._engine, places * self._shard.count + self._shard.index
        if engine.leaf.group is not None and len(positions):
            with self._turn[1]:
                return GroupedRows(self._bundles, epoch, self._groups).read(positions)
        with self._turn[1]:  # not while functions of the user run, which may wait for other threads
            read = engine.read(engine.chosen(epoch, positions))
        return engine.transform(epoch, read)


_FIRST, _MOST = 1, 256


class LaneRows:
    """The outputs of a process from a cursor on. After an error the lanes are opened again at the last cursor."""

    def __init__(self, reopen: Callable[[Cursor], Lanes], cursor: Cursor, format: str) -> None:
        self._reopen, self._cursor, self._format = reopen, cursor, format
        self._lanes: Lanes | None = reopen(cursor)
        self._size = _FIRST

    @property
    def end(self) -> Cursor:
        """The cursor at the end of the epoch."""
        return self._cursor if self._lanes is None else self._lanes.cursor()

    def rows(self) -> DeliveredRows | None:
        """Return the next outputs, as many as can be made quickly, or None at the end."""
        try:
            return self._rows(self._size)
        except Exception:
            if self._size == _FIRST:
                raise
            return self._rows(_FIRST)  # the good ones before the one that fails are delivered first

    def _rows(self, count: int) -> DeliveredRows | None:
        deal, batch = self._take(count)
        if deal is None:
            return None
        values = present_rows(batch, self._format)
        self._delivered(deal)
        self._size = min(2 * count, _MOST)
        return DeliveredRows(values, deal.cursor)

    def batch(self, size: int, drop_last: bool) -> tuple[Any, Cursor] | None:
        """Return the next outputs as columns, and the cursor after them."""
        deal, batch = self._take(size)
        if deal is None:
            return None
        if drop_last and len(batch) < size:
            self._lanes = self._pending  # at its end
            return None
        columns = finish(present(batch, self._format), self._format)
        return columns, self._delivered(deal)

    def _take(self, count: int) -> tuple[StepOutputs | None, Any]:
        """Take the next outputs of this process. An error before delivery reopens the lanes after the last one."""
        lanes, self._lanes = self._lanes or self._reopen(self._cursor), None
        while (deal := lanes.take(count)) is not None and not len(deal.items):
            pass
        if deal is None:
            self._lanes = lanes
            return None, None
        batch = materialize(deal.items)
        self._pending = lanes
        return deal, batch

    def _delivered(self, deal: StepOutputs) -> Cursor:
        cursor = deal.cursor()
        self._lanes, self._cursor = self._pending, cursor
        return cursor


Int64Array = npt.NDArray[np.int64]
_FIRST_CHUNK = 32

_CHUNK_BYTES = 4 << 20
"""Bytes read in one call. With fewer, the cost of a call would matter."""

_SLOW = 0.02
"""Seconds: if the maps of a chunk take longer than this, fewer rows are mapped ahead of the delivered one."""

_AHEAD = 8192


class EpochShare:
    """The rows of one share of an epoch, by their own numbers, and the cursors after them.

    If positions are done, those that remain are numbered and shared. ``done``: with those of excluded rows.
    """

    def __init__(self, rows: int, shard: Shard, cursor: Cursor, done: Intervals) -> None:
        self.shard, self.epoch, self._lane = shard, cursor.epoch, cursor.lane
        self._start, self._rows, self._done = done.left(cursor.lane.taken, rows)
        self.first = shard.before(self._start)  # own rows already delivered
        self.total = shard.before(self._rows)  # own rows of the epoch

    def positions(self, first: int, stop: int) -> Int64Array:
        """Return the positions of own rows."""
        own = self.shard.locals(first, stop)
        return self._done.remaining(own) if self._done else own

    def cursor(self, delivered: int) -> Cursor:
        """Return the cursor after own rows up to number ``delivered``."""
        if delivered == self.first:
            return self._at(self._start)
        return self._at(min(self._start + (delivered - self.first) * self.shard.count, self._rows))

    def _at(self, number: int) -> Cursor:
        return Cursor.at_row(self.epoch, self._lane.moved(self._done.remaining(number)))

    @property
    def end(self) -> Cursor:
        """The cursor of all shards when one of them has nothing left."""
        return self._at(self._rows)


class Lookahead:
    """The rows at a share's own numbers, thousands at a time: with fewer, the order would cost more than reading."""

    def __init__(self, engine: Engine, share: EpochShare) -> None:
        self._engine, self._share = engine, share
        self._first, self._rows, self._size = 0, engine.chosen(share.epoch, share.positions(0, 0)), 0

    def take(self, first: int, stop: int) -> Int64Array:
        """Return row numbers of the dataset before shuffling, for own numbers ``first`` to ``stop``."""
        if not self._first <= first <= stop <= self._first + len(self._rows):
            last = min(max(stop, first + self._size), self._share.total)
            self._rows = self._engine.chosen(self._share.epoch, self._share.positions(first, last))
            self._first, self._size = first, min(_AHEAD, 4 * (last - first))
        return self._rows[first - self._first : stop - self._first]


class PositionRows:
    """The rows of one share. Groups of batched functions are at fixed positions, independent of requests."""

    def __init__(self, leaf: Leaf, shard: Shard, cursor: Cursor, done: Intervals, groups: int) -> None:
        self._share = EpochShare(leaf.rows, shard, cursor, done)
        self._grouped: GroupedRows | None = None
        if leaf.group is not None:
            bundles = BundlesHere([leaf], shared=shard.count > 1)
            self._engine = bundles.engines[0]
            self._grouped = GroupedRows(bundles, cursor.epoch, groups)
        else:
            self._engine = Engine(leaf, shared=shard.count > 1)
        self._ahead = Lookahead(self._engine, self._share)
        self._next = self._share.first  # own number of the next row
        self._pieces: list[tuple[Batch, int]] = []  # read and not yet delivered, the first one last
        self._size = 1 if leaf.has_map else _FIRST_CHUNK

    @property
    def end(self) -> Cursor:
        """The cursor of all shards at the end of the epoch."""
        return self._share.end

    def rows(self) -> DeliveredRows | None:
        """Return the next rows, as many as can be made quickly, or None at the end."""
        while self._next < self._share.total:
            chunk = self._chunk()
            if chunk is not None and chunk.values:
                return chunk
        return None

    def _chunk(self) -> DeliveredRows | None:
        first = self._next
        started = time.perf_counter()
        if self._grouped is not None:
            stop = min(first + self._size, self._share.total)
            batch = self._grouped.read(self._share.positions(first, stop))
            values = self._engine.rows(batch)
        else:
            if not self._pieces:
                last = min(first + self._size, self._share.total)
                self._engine.reached(self._share.epoch, self._share.cursor(first).position)
                self._pieces = self._engine.read_pieces(self._ahead.take(first, last))[::-1]
            (read, count), pieces = self._pieces[-1], self._pieces[:-1]
            stop, started = first + count, time.perf_counter()
            try:
                batch = self._engine.transform(self._share.epoch, read)
                values = self._engine.rows(batch)
            except Exception:
                if count < 2:
                    raise
                self._halve(read, count)
                return None
            self._pieces = pieces
        if time.perf_counter() - started < _SLOW:
            self._size = min(2 * self._size, self._engine.chunk_rows(_CHUNK_BYTES))
        self._next = stop
        if len(batch) == stop - first:
            return DeliveredRows(values, lambda taken: self._share.cursor(first + taken))
        numbers = (batch.places + first + 1).tolist()  # own numbers after each row: some are missing
        return DeliveredRows(values, lambda taken: self._share.cursor(numbers[taken - 1] if taken else first))

    def _halve(self, read: Batch, count: int) -> None:
        """Put rows of which one fails back as two pieces: those before it are delivered first."""
        half = count // 2
        middle = int(read.places.searchsorted(half))
        rest = read.slice(middle, len(read))
        halves = [(replace(rest, places=rest.places - half), count - half), (read.slice(0, middle), half)]
        self._pieces, self._size = [*self._pieces[:-1], *halves], 1

    def batch(self, size: int, drop_last: bool) -> tuple[Any, Cursor] | None:
        """Return the next ``size`` rows as columns, and the cursor after them. Batches without a row are omitted."""
        while True:
            first, stop = self._next, min(self._next + size, self._share.total)
            if stop - first < (size if drop_last else 1):
                return None
            if self._grouped is not None:
                batch = self._grouped.read(self._share.positions(first, stop))
            else:
                self._engine.reached(self._share.epoch, self._share.cursor(first).position)
                batch = self._engine.transform(self._share.epoch, self._engine.read(self._ahead.take(first, stop)))
            columns = self._engine.columns(batch) if len(batch) else None
            cursor = self._share.cursor(first + size)  # as if it were full: other shards may have had a full one
            self._next = stop
            if columns is not None:
                return columns, cursor
