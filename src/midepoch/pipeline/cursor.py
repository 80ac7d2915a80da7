"""The cursor: the only value that advances.

A run delivers *units*: rows, outputs of a pipeline, or batches by tokens. They are numbered in *lanes*. Where positions
can be computed there is one lane, number 0, and unit n is the row at position n of the epoch. After step 3 of batches
of 64 rows the cursor is ``Cursor(epoch=0, lanes={0: LaneCursor(taken=192)}, steps=3)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from midepoch.order.intervals import EMPTY, Intervals

At = Any
"""Cursor of a lane in its stages: nested lists of integers, one level for each stage (see ``midepoch.pipeline``)."""


class RowAt(list[int]):
    """Cursor of a lane in the rows of a leaf that may drop rows: [row, outputs].

    ``kept``: number of rows before it that yielded outputs, since the lane was opened. ``first``: number of rows that
    did in the first pass over the lane, if a mix iterates it again; -1 before that. Both are for the ledger, not saved.
    """

    def __init__(self, at: Iterable[int], kept: int, first: int = -1) -> None:
        super().__init__(at)
        self.kept, self.first = kept, first


class PartsAt(list[Any]):
    """Cursor of a lane in concatenated parts: [number of the part, its cursor].

    ``kept``: for each leaf of the parts before it, the rows that yielded outputs; -1 if unknown. For the ledger.
    """

    def __init__(self, at: Iterable[Any], kept: Sequence[int]) -> None:
        super().__init__(at)
        self.kept = kept


def flatten(at: At, values: list[Any], shape: list[int]) -> None:
    """Append the numbers of a cursor, with the counts of rows that yielded outputs.

    ``shape``: receives what may change from step to step besides numbers: parts of a concatenation, and changed mixes.
    """
    for inner in at:
        if isinstance(inner, list):
            flatten(inner, values, shape)
        else:
            values.append(inner)
    if isinstance(at, RowAt):
        values += (at.kept, at.first)
    elif isinstance(at, PartsAt):
        shape += (at[0], len(at.kept))
        values += at.kept
    elif len(at) > 3:
        shape.append(len(at))


@dataclass(frozen=True)
class LaneCursor:
    """Progress of one lane.

    ``taken``: units before it, all of which are delivered or excluded. ``at``: the cursor of its stages, or None where
    ``taken`` says it all. ``excluded``, ``ahead``: later units that are not delivered any more, because they were
    excluded, or delivered before earlier ones (acknowledged leases). ``ended``: the lane is known to have no more.
    ``spared``: rows of the sources that were excluded when outputs in progress had them already, by ``spared_key``.
    They form windows and groups as before.
    """

    taken: int = 0
    at: At = None
    excluded: Intervals = EMPTY
    ahead: Intervals = EMPTY
    ended: bool = False
    spared: Mapping[str, Intervals] = field(default_factory=dict)

    @property
    def done(self) -> Intervals:
        """Later units that are not delivered, for either reason."""
        return self.excluded.union(self.ahead)

    def moved(self, taken: int, at: At = None, *, ended: bool = False) -> LaneCursor:
        """Return the cursor after more units."""
        return LaneCursor(taken, at, self.excluded.from_(taken), self.ahead.from_(taken), ended, self.spared)


def spared_key(leaf: int, epoch: int, lane: int) -> str:
    """Return the key of the rows of a source in one pass over one of its lanes."""
    return f"{leaf}/{epoch}/{lane}"


class WindowAt(NamedTuple):
    """Cursor of a lane of batches by tokens, planned window by window.

    ``rows``: the progress in rows when the window began; later rows that were done then are in no batch. ``first``:
    batches before the window. ``checksum``: of its batches, 0 before the first of them is delivered.
    """

    rows: LaneCursor = LaneCursor()
    first: int = 0
    checksum: int = 0


NO_LANES: Mapping[int, LaneCursor] = {}


class Cursor(NamedTuple):
    """The progress of a run: an epoch, its known lanes, and the steps since the run began.

    A *step* is one global batch. ``first``: steps before this epoch. ``lanes`` is empty at the beginning of an epoch. A
    rank with lanes of its own knows only those.
    """

    epoch: int = 0
    lanes: Mapping[int, LaneCursor] = NO_LANES
    steps: int = 0
    first: int = 0

    @staticmethod
    def start(epoch: int, steps: int = 0) -> Cursor:
        """Return the beginning of an epoch, after some steps of the run."""
        return Cursor(epoch, NO_LANES, steps, steps)

    @staticmethod
    def at_row(epoch: int, lane: LaneCursor, steps: int = 0, first: int = 0) -> Cursor:
        """Return a cursor with one lane, or at the beginning of an epoch if the lane is there."""
        rows = lane.at.rows if isinstance(lane.at, WindowAt) else lane
        begun = lane.taken or lane.done or rows.taken or rows.done
        return Cursor(epoch, {0: lane} if begun else NO_LANES, steps, first)

    @property
    def begun(self) -> bool:
        """True unless this is the beginning of an epoch."""
        return bool(self.lanes)

    @property
    def lane(self) -> LaneCursor:
        """The only lane, where positions can be computed."""
        return self.lanes.get(0, _FIRST)

    @property
    def position(self) -> int:
        """Units of the known lanes before the cursor."""
        return sum(lane.taken for lane in self.lanes.values())

    @property
    def has_done(self) -> bool:
        """True if something after this cursor is not delivered."""
        return any(lane.excluded or lane.ahead for lane in self.lanes.values())

    @property
    def lanes_ended(self) -> bool:
        """True if the lanes are known to have ended."""
        return bool(self.lanes) and all(lane.ended for lane in self.lanes.values())

    def next_epoch(self) -> Cursor:
        """Return the beginning of the next epoch."""
        return Cursor.start(self.epoch + 1, self.steps)

    def without_stages(self) -> Cursor:
        """Return this cursor without those of the stages of its lanes."""
        return self._replace(lanes={number: replace(lane, at=None) for number, lane in self.lanes.items()})

    def at_end(self) -> Cursor:
        """Return this cursor with all lanes ended. Units that are left are omitted."""
        ended = {number: replace(lane, ended=True, excluded=EMPTY, ahead=EMPTY) for number, lane in self.lanes.items()}
        return self._replace(lanes=ended)


_FIRST = LaneCursor()
