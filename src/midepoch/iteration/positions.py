"""Rows of one share of an epoch, if positions can be computed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.iteration.iterators import Rows
from midepoch.order import Shard
from midepoch.order.intervals import Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.groups import GroupedRows
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import BundlesHere
from midepoch.transforms import Batch

Int64Array = npt.NDArray[np.int64]

_FIRST_CHUNK = 32
_CHUNK_BYTES = 4 << 20
"""Bytes read in one call. With fewer, the cost of a call would matter."""
_SLOW = 0.02
"""Seconds: if the maps of a chunk take longer than this, fewer rows are mapped ahead of the delivered one."""
_AHEAD = 8192


class Share:
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

    def __init__(self, engine: Engine, share: Share) -> None:
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
        self._share = Share(leaf.rows, shard, cursor, done)
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

    def rows(self) -> Rows | None:
        """Return the next rows, as many as can be made quickly, or None at the end."""
        while self._next < self._share.total:
            chunk = self._chunk()
            if chunk is not None and chunk.values:
                return chunk
        return None

    def _chunk(self) -> Rows | None:
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
            return Rows(values, lambda taken: self._share.cursor(first + taken))
        numbers = (batch.places + first + 1).tolist()  # own numbers after each row: some are missing
        return Rows(values, lambda taken: self._share.cursor(numbers[taken - 1] if taken else first))

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
