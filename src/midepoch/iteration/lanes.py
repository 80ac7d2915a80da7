"""Outputs of one process, if positions cannot be computed: taken from its lanes in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.iteration.iterators import Rows
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes, StepOutputs
from midepoch.transforms import finish, present, present_rows

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

    def rows(self) -> Rows | None:
        """Return the next outputs, as many as can be made quickly, or None at the end."""
        try:
            return self._rows(self._size)
        except Exception:
            if self._size == _FIRST:
                raise
            return self._rows(_FIRST)  # the good ones before the one that fails are delivered first

    def _rows(self, count: int) -> Rows | None:
        deal, batch = self._take(count)
        if deal is None:
            return None
        values = present_rows(batch, self._format)
        self._delivered(deal)
        self._size = min(2 * count, _MOST)
        return Rows(values, deal.cursor)

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
