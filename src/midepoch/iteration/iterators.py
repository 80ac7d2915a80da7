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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import nearest
from midepoch._internal.resumable import Resumable
from midepoch.errors import StateError
from midepoch.order import Selection, Shard
from midepoch.order.intervals import Intervals
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import BundlesHere, GroupedRows
from midepoch.transforms import Batch, finish, present, present_rows

if TYPE_CHECKING:
    from midepoch.iteration.state import IterationState


class DeliveredRows(NamedTuple):
    """Some rows, and the cursor after the first n of them."""

    values: list[Any]
    at: Callable[[int], Cursor]


@dataclass(frozen=True)
class IterationStart:
    """The start of an iteration. ``late``: called once, before the first row, for another start."""

    cursor: Cursor
    source: RowSource
    round: int = 0
    batch: int = 0
    late: Callable[[], IterationStart | None] | None = None


class RowIterator(chain[Any], Resumable):
    """Iterator over rows from a cursor to the end of the epoch, or over batches of ``size`` rows as columns.

    ``next`` is that of ``itertools.chain`` over iterators of chunks: no Python code runs for a row, which would cost a
    tenth of the total. The delivered part of a chunk is known from its iterator. A batch is a chunk of one.
    """

    def __new__(cls, *_: Any) -> RowIterator:
        own: list[weakref.ref[RowIterator]] = []  # weakly, so that dropping the iterator frees everything
        self = cast(RowIterator, cls.from_iterable(_chunks(own)))  # an instance of cls, although its type says chain
        own.append(weakref.ref(self))
        return self

    def __init__(
        self, start: IterationStart, owner: IterationState, size: int | None = None, drop_last: bool = False
    ) -> None:
        self._owner, self._size, self._drop_last = owner, size, drop_last
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
                self._begin(replace(other, batch=self.batch))
        chunk = self._source.rows() if self._size is None else self._source.batch(self._size, self._drop_last)
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


def _chunks(own: list[weakref.ref[RowIterator]]) -> Iterator[Iterator[Any]]:
    """Yield the chunks of a RowIterator."""
    while (iterator := own[0]()) is not None:
        rows: Iterator[Any] | None
        try:
            rows = iterator.refill()
        except BaseException as problem:
            # Raised here, the error would end the chain, and a second `next` would report the end of the epoch. A
            # chunk that raises once does not: after it, the next chunk is tried again.
            rows = map(_raise, [problem])
        del iterator
        if rows is None:
            return
        yield rows
        del rows


def _raise(problem: BaseException) -> Any:
    raise problem


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

        def objects(batch: Batch) -> list[Any]:
            return present_rows(batch, self._format)

        try:
            chunk = self._take(self._size, objects)
        except Exception:
            if self._size == _FIRST:
                raise
            self._size = _FIRST  # the good ones before the one that fails are delivered first
            chunk = self._take(_FIRST, objects)
        self._size = min(2 * self._size, _MOST)
        return chunk

    def batch(self, size: int, drop_last: bool) -> DeliveredRows | None:
        """Return the next ``size`` outputs as columns, one value. Fewer or None at the end."""

        def columns(batch: Batch) -> list[Any]:
            return [] if drop_last and len(batch) < size else [finish(present(batch, self._format), self._format)]

        before, chunk = self._cursor, self._take(size, columns)
        return DeliveredRows(chunk.values, (before, self._cursor).__getitem__) if chunk and chunk.values else None

    def _take(self, count: int, made: Callable[[Batch], list[Any]]) -> DeliveredRows | None:
        """Take the next outputs of this process. After an error, the next call opens the lanes after the last ones."""
        lanes, self._lanes = self._lanes or self._reopen(self._cursor), None
        while (deal := lanes.take(count)) is not None and not len(deal.items):
            pass
        chunk = None
        if deal is not None:
            chunk, self._cursor = DeliveredRows(made(materialize(deal.items)), deal.cursor), deal.cursor()
        self._lanes = lanes
        return chunk


Int64Array = npt.NDArray[np.int64]
_FIRST_CHUNK = 32

_CHUNK_BYTES = 4 << 20
"""Bytes read in one call. With fewer, the cost of a call would matter."""

_SLOW = 0.02
"""Seconds: if the maps of a chunk take longer than this, fewer rows are mapped ahead of the delivered one."""

_AHEAD = 8192


class PositionRows:
    """The rows of one share of an epoch from a cursor on. After an error the same rows are tried again.

    Its rows have *own numbers*. If positions are done, those that remain are numbered and shared. ``done``: with those
    of excluded rows. Groups of batched functions are at fixed positions, independent of requests.
    """

    def __init__(self, leaf: Leaf, shard: Shard, cursor: Cursor, done: Intervals, groups: int) -> None:
        self._shard, self._epoch, self._lane = shard, cursor.epoch, cursor.lane
        self._start, self._rows, self._done = done.left(cursor.lane.taken, leaf.rows)
        self._first = self._next = shard.before(self._start)  # own numbers of the first row here, and of the next
        self._total = shard.before(self._rows)  # own rows of the epoch
        bundles = BundlesHere([leaf], shared=shard.count > 1)
        self._engine = bundles.engines[0]
        self._grouped = None if leaf.group is None else GroupedRows(bundles, cursor.epoch, groups)
        self._chosen, self._chosen_first, self._chosen_size = np.empty(0, np.int64), 0, 0
        self._pieces: list[tuple[Batch, int]] = []  # read and not yet delivered, the first one last
        self._size = 1 if leaf.has_map else _FIRST_CHUNK

    @property
    def end(self) -> Cursor:
        """The cursor of all shards when one of them has nothing left."""
        return self._at(self._rows)

    def _cursor(self, number: int) -> Cursor:
        """Return the cursor after own rows up to a number."""
        if number == self._first:
            return self._at(self._start)
        return self._at(min(self._start + (number - self._first) * self._shard.count, self._rows))

    def _at(self, number: int) -> Cursor:
        return Cursor.at_row(self._epoch, self._lane.moved(self._done.remaining(number)))

    def _positions(self, first: int, stop: int) -> Int64Array:
        """Return the positions of own rows."""
        own = self._shard.locals(first, stop)
        return self._done.remaining(own) if self._done else own

    def _source_rows(self, first: int, stop: int) -> Int64Array:
        """Return the rows of the dataset before shuffling that own rows are.

        They are computed thousands at a time: with fewer, the order would cost more than reading.
        """
        self._engine.reached(self._epoch, self._cursor(first).position)
        if not self._chosen_first <= first <= stop <= self._chosen_first + len(self._chosen):
            last = min(max(stop, first + self._chosen_size), self._total)
            self._chosen = self._engine.chosen(self._epoch, self._positions(first, last))
            self._chosen_first, self._chosen_size = first, min(_AHEAD, 4 * (last - first))
        return self._chosen[first - self._chosen_first : stop - self._chosen_first]

    def rows(self) -> DeliveredRows | None:
        """Return the next rows, at least one and as many as can be made quickly, or None at the end."""
        while self._next < self._total:
            chunk = self._chunk()
            if chunk is not None and chunk.values:
                return chunk
        return None

    def _chunk(self) -> DeliveredRows | None:
        first, pieces = self._next, self._pieces
        stop, started = min(first + self._size, self._total), time.perf_counter()
        if self._grouped is not None:
            batch = self._grouped.read(self._positions(first, stop))
            values = self._engine.rows(batch)
        else:
            if not pieces:
                pieces = self._pieces = self._engine.read_pieces(self._source_rows(first, stop))[::-1]
            (read, count), pieces = pieces[-1], pieces[:-1]
            stop, started = first + count, time.perf_counter()
            try:
                batch = self._engine.transform(self._epoch, read)
                values = self._engine.rows(batch)
            except Exception:
                if count < 2:
                    raise
                self._halve(read, count)
                return None
        if time.perf_counter() - started < _SLOW:
            self._size = min(2 * self._size, self._engine.chunk_rows(_CHUNK_BYTES))
        self._next, self._pieces = stop, pieces
        if len(batch) == stop - first:
            return DeliveredRows(values, lambda taken: self._cursor(first + taken))
        numbers = [first, *(batch.places + first + 1).tolist()]  # own numbers after each row: some are missing
        return DeliveredRows(values, lambda taken: self._cursor(numbers[taken]))

    def _halve(self, read: Batch, count: int) -> None:
        """Put rows of which one fails back as two pieces: those before it are delivered first."""
        half = count // 2
        middle = int(read.places.searchsorted(half))
        rest = read.slice(middle, len(read))
        halves = [(replace(rest, places=rest.places - half), count - half), (read.slice(0, middle), half)]
        self._pieces, self._size = [*self._pieces[:-1], *halves], 1

    def batch(self, size: int, drop_last: bool) -> DeliveredRows | None:
        """Return the next ``size`` rows as columns, one value. Fewer or None at the end.

        Batches without a row are omitted.
        """
        while True:
            first, stop = self._next, min(self._next + size, self._total)
            if stop - first < (size if drop_last else 1):
                return None
            if self._grouped is not None:
                batch = self._grouped.read(self._positions(first, stop))
            else:
                batch = self._engine.transform(self._epoch, self._engine.read(self._source_rows(first, stop)))
            columns = self._engine.columns(batch) if len(batch) else None
            self._next = stop
            if columns is not None:
                after = self._cursor(first + size)  # as if it were full: other shards may have had a full one
                return DeliveredRows([columns], (self._cursor(first), after).__getitem__)


RowSource: TypeAlias = PositionRows | LaneRows
"""Rows of this process from a cursor to the end of its epoch. After an error the same rows are tried again."""
