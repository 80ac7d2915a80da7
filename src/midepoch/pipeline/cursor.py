"""The cursor: the only thing that advances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from midepoch.order import Shard

At = Any
"""Where a lane is in its stages: nested lists of integers, one level for each stage (see ``midepoch.pipeline``)."""


class RowAt(list[int]):
    """Where a lane is in the rows of a leaf that may drop some: [row, outputs].

    ``kept``: how many rows before it became something, since the lane was opened. ``first``: how many did in the first
    pass over the lane, where a mix iterates it again; -1 before that. Both are for the ledger, and not saved.
    """

    def __init__(self, at: Iterable[int], kept: int, first: int = -1) -> None:
        super().__init__(at)
        self.kept, self.first = kept, first


class PartsAt(list[Any]):
    """Where a lane is in parts that come one after the other: [number of the part, its cursor].

    ``kept``: for each leaf of the parts before it, how many rows became something; -1 if not known. For the ledger.
    """

    def __init__(self, at: Iterable[Any], kept: Sequence[int]) -> None:
        super().__init__(at)
        self.kept = kept


@dataclass(frozen=True)
class LaneCursor:
    """One lane: the outputs it has delivered in this epoch, whether it is known to have ended, and where it is."""

    outputs: int
    ended: bool
    cursor: At


@dataclass(frozen=True)
class LaneCursors:
    """The lanes that are known, by number: those that are ``known.index`` modulo ``known.count``."""

    by_lane: Mapping[int, LaneCursor]
    known: Shard = field(default_factory=Shard)

    @property
    def ended(self) -> bool:
        """True if nothing is left of any of them."""
        return all(lane.ended for lane in self.by_lane.values())


class Cursor(NamedTuple):
    """An epoch, how much of it all shards together have consumed, and where each lane is.

    ``position`` counts rows where positions can be computed: then the lanes follow from it, and ``lanes`` is None.
    Elsewhere it counts outputs, and ``lanes`` is None only at the beginning of an epoch.
    """

    epoch: int = 0
    position: int = 0
    lanes: LaneCursors | None = None

    @property
    def begun(self) -> bool:
        """True unless this is the beginning of an epoch."""
        return self.position > 0 or self.lanes is not None

    @property
    def lanes_ended(self) -> bool:
        """True if the lanes are known to have nothing left."""
        return self.lanes is not None and self.lanes.ended

    def at_end(self) -> Cursor:
        """Return the same cursor with all lanes ended: what is left of them is left out."""
        if self.lanes is None:
            return self
        ended = {lane: replace(at, ended=True) for lane, at in self.lanes.by_lane.items()}
        return self._replace(lanes=replace(self.lanes, by_lane=ended))
