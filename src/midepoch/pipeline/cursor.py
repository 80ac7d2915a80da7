"""The cursor: the only value that advances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from midepoch.order import Shard
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


@dataclass(frozen=True)
class LaneCursor:
    """One lane: its outputs delivered in this epoch, True if it is known to have ended, and its cursor.

    ``done``: numbers of later outputs that are not delivered (again).
    """

    outputs: int
    ended: bool
    cursor: At
    done: Intervals = EMPTY


@dataclass(frozen=True)
class LaneCursors:
    """The known lanes, by number: those that are ``known.index`` modulo ``known.count``."""

    by_lane: Mapping[int, LaneCursor]
    known: Shard = field(default_factory=Shard)

    @property
    def ended(self) -> bool:
        """True if all of them have ended."""
        return all(lane.ended for lane in self.by_lane.values())


class PlannedAt(NamedTuple):
    """The place of batches by a budget of tokens: the position at which the window in progress begins, and its legs.

    A leg is a budget, as text, the number of its batches that were delivered, and a checksum of all its batches. There
    is one for each budget that was used in the window, and none before its first batch.
    """

    start: int
    legs: tuple[tuple[str, int, int], ...] = ()


class Cursor(NamedTuple):
    """An epoch, the amount of it that all shards together have consumed, and the cursor of each lane.

    If positions can be computed, ``position`` counts rows, the lanes follow from it, and ``lanes`` is None. Otherwise
    ``position`` counts outputs, and ``lanes`` is None only at the beginning of an epoch. If batches are planned by a
    budget of tokens, ``position`` counts batches, and ``planned`` says which rows those were.

    ``steps``: steps delivered since the run began, counted only where something depends on it.

    ``done``: what ``position`` counts, at and after it, that is not delivered (again): it was excluded, or acknowledged
    before earlier positions were. Lanes have their own.

    ``dropped``: outputs of lanes, among those before ``position``, that were done. Ranks at one step differ in them if
    they had leases before: ``position`` without them is equal.
    """

    epoch: int = 0
    position: int = 0
    lanes: LaneCursors | None = None
    planned: PlannedAt | None = None
    steps: int = 0
    done: Intervals = EMPTY
    dropped: int = 0

    @property
    def begun(self) -> bool:
        """True unless this is the beginning of an epoch."""
        return self.position > 0 or self.lanes is not None or bool(self.done)

    @property
    def has_done(self) -> bool:
        """True if something after this cursor is not delivered."""
        return bool(self.done) or (self.lanes is not None and any(lane.done for lane in self.lanes.by_lane.values()))

    @property
    def lanes_ended(self) -> bool:
        """True if the lanes are known to have ended."""
        return self.lanes is not None and self.lanes.ended

    def at_end(self) -> Cursor:
        """Return this cursor with all lanes ended. Outputs that are left are omitted."""
        if self.lanes is None:
            return self
        ended = {lane: replace(at, ended=True, done=EMPTY) for lane, at in self.lanes.by_lane.items()}
        return self._replace(lanes=replace(self.lanes, by_lane=ended))
