"""The cursor: the only value that advances.

A run delivers *units*: rows, outputs of a pipeline, or batches by tokens. They are numbered in *lanes*. Where positions
can be computed there is one lane, number 0, and unit n is the row at position n of the epoch. After step 3 of batches
of 64 rows the cursor is ``Cursor(epoch=0, lanes={0: LaneCursor(taken=192)}, steps=3)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from midepoch.order.intervals import EMPTY, Intervals


@dataclass(frozen=True, slots=True)
class RowAt:
    """Cursor in the rows of a lane of one source.

    ``row``: where a bundle of rows begins. ``outputs``: delivered ones of those that are made from it on.

    ``kept``: rows before it that yielded outputs, since the lane was opened, if some may not. ``first``: rows that did
    in the first pass over the lane, if a mix iterates it again; -1 before that. Both are for the ledger, and not saved.
    """

    row: int = 0
    outputs: int = 0
    kept: int | None = field(default=None, compare=False)
    first: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class StageAt:
    """Cursor in a stage: that before the group (or the document) in progress, and how much of it is delivered.

    ``delivered``: outputs, batches or tokens; of ``take`` and ``skip`` the outputs so far. ``key``: the checksum of a
    window of batches by tokens, or the number of the next sequence of a pack by a schedule; None in other stages.
    """

    before: FlowAt
    delivered: int = 0
    key: int | None = None


@dataclass(frozen=True, slots=True)
class PartAt:
    """Cursor in one part of a mix: the number of the pass over it, the kind of that pass, and the cursor there."""

    run: int = 0
    stage: int = 0
    at: FlowAt = RowAt()


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights of a mix before a change, which apply up to the draw ``until``: outputs in progress are made with them.

    ``parts``: the current number of each part, -1 if it was removed. ``rows``: draws of their stretch of a schedule, -1
    if they are not known.
    """

    until: int
    weights: tuple[float, ...]
    parts: tuple[int, ...] = ()
    rows: int = -1


@dataclass(frozen=True, slots=True)
class MixAt:
    """Cursor in a mix: the draws since the weights changed, the number of that change, and the cursor of each part.

    By a schedule, changes are numbered in each of its segments. ``clock``: the rows or tokens so far.
    """

    position: int
    change: int
    parts: tuple[PartAt, ...]
    segment: int = 0
    clock: int | None = None
    held: HeldWeights | None = None


@dataclass(frozen=True, slots=True)
class ConcatAt:
    """Cursor in concatenated parts: the number of the part, and its cursor.

    ``kept``: for each source of the parts before it, the rows that yielded outputs; -1 if unknown. For the ledger.
    """

    number: int
    at: FlowAt
    kept: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ZipAt:
    """Cursors of parts side by side."""

    parts: tuple[FlowAt, ...]


FlowAt = RowAt | StageAt | MixAt | ConcatAt | ZipAt
"""Cursor of a lane in its stages, from the last one to the rows of the sources."""


def below(at: FlowAt) -> Any:
    """Return the cursor below the stages: in the rows of a source, a mix, a concatenation or a zip."""
    while isinstance(at, StageAt):
        at = at.before
    return at


def listed(at: FlowAt, *, counts: bool = False) -> list[Any]:
    """Return a cursor as nested lists of numbers, as a state has it. ``counts``: with what only the ledger needs.

    A pack of the rows of one source, in the middle of its document 17, is ``[[17, 0], 512]``.
    """
    if isinstance(at, RowAt):
        return [at.row, at.outputs, at.kept, at.first] if counts and at.kept is not None else [at.row, at.outputs]
    if isinstance(at, StageAt):
        return [listed(at.before, counts=counts), at.delivered, *([] if at.key is None else [at.key])]
    if isinstance(at, ConcatAt):
        return [at.number, listed(at.at, counts=counts), *([list(at.kept)] if counts else [])]
    if isinstance(at, ZipAt):
        return [listed(part, counts=counts) for part in at.parts]
    found = [at.position, at.change, [[part.run, part.stage, listed(part.at, counts=counts)] for part in at.parts]]
    found += [] if at.clock is None else [at.segment, at.clock]
    held = at.held
    return found if held is None else [*found, [held.until, list(held.weights), list(held.parts), held.rows]]


_DEEPEST = 100
"""Levels of a cursor: one for each stage, and two for each mix in a mix."""


def flow_cursor(value: Any, depth: int = 0) -> FlowAt:
    """Return the cursor in nested lists. Raise ValueError if they are none."""
    if not isinstance(value, list) or depth > _DEEPEST:
        raise ValueError("not a cursor")
    match value:
        case [row, outputs] if is_count(row) and is_count(outputs):
            return RowAt(row, outputs)
        case [number, list(at)] if is_count(number):
            return ConcatAt(number, flow_cursor(at, depth + 1))
        case [list(before), delivered, *key] if is_count(delivered) and len(key) < 2 and all(map(is_count, key)):
            return StageAt(flow_cursor(before, depth + 1), delivered, *key)
        case [position, change, list(entries), *rest] if is_count(position) and is_count(change):
            segment, clock = rest[:2] if len(rest) > 1 and is_count(rest[0]) and is_count(rest[1]) else (0, None)
            held = rest if clock is None else rest[2:]
            if len(held) < 2:
                parts = tuple(_part(entry, depth) for entry in entries)
                return MixAt(position, change, parts, segment, clock, _held(held[0]) if held else None)
        case [list(), *_]:
            return ZipAt(tuple(flow_cursor(part, depth + 1) for part in value))
    raise ValueError("not a cursor")


def _part(value: Any, depth: int) -> PartAt:
    match value:
        case [run, stage, at] if is_count(run) and is_count(stage):
            return PartAt(run, stage, flow_cursor(at, depth + 1))
    raise ValueError("not a cursor")


def _held(value: Any) -> HeldWeights:
    match value:
        case [until, list(weights), list(parts), rows] if is_count(until) and are_weights(weights):
            if all(part == -1 or is_count(part) for part in parts) and (rows == -1 or is_count(rows)):
                return HeldWeights(until, tuple(weights), tuple(parts), rows)
    raise ValueError("not a cursor")


def is_count(value: Any) -> bool:
    """Return True for an integer that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def are_weights(weights: Sequence[Any]) -> bool:
    """Return True for weights of a mix."""
    return any(weights) and all(isinstance(weight, (int, float)) and 0 <= weight < 1e300 for weight in weights)


def flatten(value: Any) -> list[Any]:
    """Return the numbers in nested lists, in order."""
    return [number for inner in value for number in flatten(inner)] if isinstance(value, list) else [value]


@dataclass(frozen=True)
class LaneCursor:
    """Progress of one lane.

    ``taken``: units before it, all of which are delivered or excluded. ``at``: the cursor of its stages (``FlowAt``, or
    ``WindowAt`` of planned batches by tokens), or None where ``taken`` says it all. ``excluded``, ``ahead``: later
    units that are not delivered any more, because they were excluded, or delivered before earlier ones (acknowledged
    leases). ``ended``: the lane is known to have no more. ``spared``: rows of the sources that were excluded when
    outputs in progress had them already, by ``spared_key``. They form windows and groups as before.
    """

    taken: int = 0
    at: Any = None
    excluded: Intervals = EMPTY
    ahead: Intervals = EMPTY
    ended: bool = False
    spared: Mapping[str, Intervals] = field(default_factory=dict)

    @property
    def done(self) -> Intervals:
        """Later units that are not delivered, for either reason."""
        return self.excluded.union(self.ahead)

    def moved(self, taken: int, at: Any = None, *, ended: bool = False) -> LaneCursor:
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
