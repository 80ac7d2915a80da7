"""The iterators of a dataset: rows one by one, or batches. Stateful in the sense of torchdata."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple, Protocol, cast

from midepoch._internal.resumable import Resumable
from midepoch.errors import StateError
from midepoch.pipeline.cursor import Cursor


class Rows(NamedTuple):
    """Some rows, and the cursor after the first n of them."""

    values: list[Any]
    at: Callable[[int], Cursor]


class RowSource(Protocol):
    """Rows of this process from a cursor to the end of its epoch. After an error the same rows are tried again."""

    @property
    def end(self) -> Cursor:
        """The cursor of all shards at the end of the epoch."""

    def rows(self) -> Rows | None:
        """Return the next rows, at least one and as many as can be made quickly, or None at the end."""

    def batch(self, size: int, drop_last: bool) -> tuple[Any, Cursor] | None:
        """Return the next ``size`` rows as columns, and the cursor after them. Fewer or None at the end."""


@dataclass(frozen=True)
class Start:
    """The start of an iteration. ``late``: called once, before the first row, for another source and round."""

    cursor: Cursor
    source: RowSource
    round: int = 0
    batch: int = 0
    late: Callable[[], tuple[Cursor, RowSource, int] | None] | None = None


class Owner(Protocol):
    """The dataset of an iterator: saves and loads its states, and is notified at the end of an epoch."""

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]: ...

    def start_at(self, state: Mapping[str, Any]) -> Start: ...

    def epoch_over(self, iterator: Any, cursor: Cursor) -> None: ...


class RowIterator(chain[Any], Resumable):
    """Iterator over rows from a cursor to the end of the epoch.

    ``next`` is that of ``itertools.chain`` over iterators of chunks: no Python code runs for a row, which would cost a
    tenth of the total. The delivered part of a chunk is known from its iterator.
    """

    def __new__(cls, start: Start, owner: Owner) -> RowIterator:  # noqa: ARG004
        chunks = _Chunks()
        self = cast(RowIterator, cls.from_iterable(chunks))  # an instance of cls, although its type says chain
        chunks.iterator = weakref.ref(self)
        return self

    def __init__(self, start: Start, owner: Owner) -> None:
        self._owner = owner
        self._begin(start)

    def _begin(self, start: Start) -> None:
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
                self._begin(Start(*other, self.batch))
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

    def __init__(self, start: Start, owner: Owner, size: int, drop_last: bool) -> None:
        self._owner, self._size, self._drop_last = owner, size, drop_last
        self._begin(start)

    def _begin(self, start: Start) -> None:
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
