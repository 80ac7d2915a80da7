"""The units and cursors of lanes in a ledger: written for many steps in one record, and read back.

If positions cannot be computed, a record for each lane of the rank follows some steps. It has the *place* of the lane
after each step since the last one: the outputs that it has taken, and its cursor, such as ``[640, [17, 3]]``. They are
written when a lane reaches another chunk, and before a state is saved, so that a run can resume only at a recorded
cursor. The cursors are those of the state, with two more integers if rows may yield no output: the number of rows
before it that did, and the number that did in the first pass, if a mix iterates the source again.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.journal import Record
from midepoch.order import Shard
from midepoch.pipeline.chunk import at_mark
from midepoch.pipeline.cursor import NO_LANES, Cursor, FlowAt, LaneCursor, listed
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.mixed import BORROWING, ENDED, FIRST, place_of
from midepoch.pipeline.node import Concat, Local, Mix, Node, Slice, Zip
from midepoch.transforms.packing import PackSpec

Int64Array = npt.NDArray[np.int64]
CURSORS = b"curs"
"""The kind of the records. The number of a record is that of its lane."""
LaneMarks = tuple[Sequence[Any], Sequence[int]]
"""The lanes of a rank after a step: a mark of each, from which its cursor is computed, and the outputs it has taken."""
At = Any
"""Cursor of a lane as nested lists of numbers (``listed``), which a record has."""


def _place(taken: int, at: FlowAt | None) -> list[Any]:
    return [taken, listed(at, counts=True)]  # type: ignore[arg-type]


class LaneRecorder:
    """The steps of a pass that are delivered and not written yet, of the lanes of a rank.

    A cursor is computed from the chunk that its last output is of. So steps are kept as marks (a chunk, and a number of
    its outputs) until a lane comes to another chunk. Without lanes, nothing is recorded: units follow from positions.
    """

    def __init__(
        self, lanes: Mapping[int, LaneCursor] = NO_LANES, numbers: Sequence[int] = (), start: FlowAt | None = None
    ) -> None:
        fresh = LaneCursor(0, start)
        known = [(number, lanes.get(number, fresh)) for number in numbers]
        self.numbers = numbers
        self.begin = [(number, _place(lane.taken, lane.at)) for number, lane in known]
        self._written = 0
        self.pending: list[LaneMarks] = []
        """The lanes after each step that is not written yet."""
        self.last: StepOutputs | Cursor | None = None
        """The last of these steps."""

    def marks(self, at: Cursor) -> LaneMarks:
        """Return where a cursor has the lanes."""
        lanes = [at.lanes[number] for number in self.numbers]
        return [lane.at for lane in lanes], [lane.taken for lane in lanes]

    def records(self, delivered: int) -> list[tuple[int, bytes]]:
        """Return what is to be written for the steps that are delivered: numbers of lanes, and contents of records.

        They are pending until ``written`` is called: an interrupt may come before.
        """
        first, pending = self._written + 1, self.pending[: max(0, delivered - self._written)]
        lanes = enumerate(self.numbers if pending else ())
        return [(number, content) for lane, number in lanes for content in _records(lane, first, pending)]

    def written(self, delivered: int) -> LaneMarks | None:
        """Note that the records of all delivered steps are written. Return the end of the epoch, if one came to it."""
        last, count = self.last, max(0, delivered - self._written)
        done = self.pending[:count]
        # No call from here on, so that no interrupt comes between. A step that is about to be delivered stays: the loop
        # may add it at this moment, if a thread saves a state.
        del self.pending[:count]
        self._written += count
        ended = last.ended if isinstance(last, StepOutputs) else last is not None and last.lanes_ended
        return done[-1] if ended and done and not self.pending else None

    def end(self, marks: LaneMarks) -> list[Any]:
        """Return the record of the end of the epoch: the place of each lane there."""
        lanes = zip(self.numbers, *marks, strict=True)
        return [[number, _place(taken, at_mark(mark))] for number, mark, taken in lanes]


def _records(lane: int, first: int, pending: Sequence[LaneMarks]) -> Iterator[bytes]:
    """Yield the records of a lane: one, unless the shape of its cursors changes. ``first``: the first of the steps."""
    marks, taken = [marks[lane] for marks, _ in pending], [counts[lane] for _, counts in pending]
    values = _in_one_call(marks)
    if values is not None:
        yield _encoded(first, _place(taken[0], at_mark(marks[0])), np.array(taken), values)
        return
    places = [_place(count, at_mark(mark)) for count, mark in zip(taken, marks, strict=True)]
    for _, group in groupby(map(_split, places), itemgetter(0)):
        values = np.array([numbers for _, numbers in group])
        yield _encoded(first, places[0], values[:, 0], values[:, 1:])
        first, places = first + len(values), places[len(values) :]


def _in_one_call(marks: Sequence[Any]) -> Int64Array | None:
    """Return the numbers of the cursors at marks of one chunk, if it has a table of them."""
    chunk = marks[0][0] if isinstance(marks[0], tuple) else None
    if chunk is None or chunk.table is None:
        return None
    if not all(isinstance(mark, tuple) and mark[0] is chunk for mark in marks):
        return None
    found: Int64Array | None = chunk.table(np.array([outputs for _, outputs in marks]), False)
    return found


def _encoded(first: int, place: At, taken: Int64Array, values: Int64Array) -> bytes:
    """Return a record: the place after the first step, and the increases of its numbers that change."""
    increases = np.empty((len(values) - 1, values.shape[1] + 1), np.int64)
    np.subtract(taken[1:], taken[:-1], out=increases[:, 0])
    np.subtract(values[1:], values[:-1], out=increases[:, 1:])
    columns = np.flatnonzero(increases.any(axis=0))
    increases = increases[:, columns]
    most = int(abs(increases).max(initial=0))
    size = next(size for size in (1, 2, 4, 8) if most < 1 << (8 * size - 1))
    head = json.dumps([first, len(values), place, columns.tolist(), size], separators=(",", ":"))
    return head.encode() + b"\n" + increases.astype(f"<i{size}").tobytes()


def _is_number(value: Any) -> bool:
    """Return True for the integers of a cursor. Changed weights, which are floats, are a part of its shape."""
    return isinstance(value, int) and value < 1 << 62


def _split(place: At) -> tuple[At, list[int]]:
    """Return the shape of a place, which is all but its numbers, and these."""
    shape, numbers = [], []
    for value in place:
        if isinstance(value, list):
            inner, found = _split(value)
            shape.append(inner)
            numbers += found
        elif _is_number(value):
            numbers.append(value)
            shape.append(0)
        else:
            shape.append(value)
    return shape, numbers


def _filled(place: At, values: Iterator[int]) -> At:
    """Return a place with other numbers."""
    return [
        _filled(value, values) if isinstance(value, list) else next(values) if _is_number(value) else value
        for value in place
    ]


class _Steps(NamedTuple):
    """The places of a lane after some steps, from ``first`` on: numbers that belong in a place like the first one."""

    first: int
    place: At
    values: Int64Array

    @staticmethod
    def decoded(content: bytes) -> _Steps:
        head, _, data = content.partition(b"\n")
        first, count, place, columns, size = json.loads(head)
        values = np.tile(np.array(_split(place)[1]), (count, 1))
        increases = np.frombuffer(data, f"<i{size}").reshape(count - 1, len(columns))
        values[1:, columns] += np.cumsum(increases, axis=0, dtype=np.int64)
        return _Steps(first, place, values)

    def after(self, step: int) -> At:
        values = self.values[min(step - self.first, len(self.values) - 1)]
        return _filled(self.place, iter(values.tolist()))


@dataclass(frozen=True)
class LaneTrack:
    """The lanes of a rank over the steps of a pass.

    ``begin``: the place of each lane. ``ended``: lanes that were at their end then. ``end``: the places at the end of
    the epoch, if the pass came to it; it counts as one additional step.
    """

    begin: Mapping[int, At]
    ended: frozenset[int]
    delivered: int
    records: Sequence[Record] = field(repr=False)
    end: Mapping[int, At] | None = None

    @cached_property
    def _steps(self) -> dict[int, list[_Steps]]:
        """By lane, the records of its steps."""
        found = {number: [_Steps(0, at, np.array([_split(at)[1]]))] for number, at in self.begin.items()}
        for record in self.records:
            found[record.number].append(_Steps.decoded(bytes(record.content)))
        return found

    @cached_property
    def recorded(self) -> int:
        """Delivered steps whose cursors are recorded: a killed process may have left out the last."""
        last = (steps[-1].first + len(steps[-1].values) - 1 for steps in self._steps.values())
        return min(self.delivered, min(last, default=0))

    def at(self, lane: int, step: int) -> At:
        """Return the cursor of a lane after a number of steps."""
        return self._place(lane, step)[1]

    def taken(self, lane: int, step: int) -> int:
        """Return the outputs that a lane has taken after a number of steps."""
        return int(self._place(lane, step)[0])

    def ends_after(self, steps: int) -> bool:
        """Return True if the pass came to the end of the epoch, and these are all of its steps."""
        return self.end is not None and steps == self.delivered

    def _place(self, lane: int, step: int) -> At:
        if self.end is not None and step > self.delivered:
            return self.end[lane]
        steps = self._steps[lane]
        return steps[bisect_right(steps, step, key=lambda some: some.first) - 1].after(step)


def tree_of(node: Node, first: int = 0) -> dict[str, Any]:
    """Return the shape of a pipeline, as far as its cursors depend on it: enough to read them without its functions.

    ``drops``: rows may be left over at the end of an epoch; then they are dropped, not filtered. ``again``: a mix draws
    rows again and again, to the end of a schedule or without end, so an epoch is not over when all rows were drawn.
    """
    base = node.base
    drops = any(
        isinstance(stage, Slice)
        or getattr(stage, "drop_last", False)
        or getattr(stage, "drop_remainder", False)
        or getattr(stage, "schedule", None) is not None
        or (isinstance(stage, Local) and any(getattr(step, "drop_last", False) for step in stage.steps))
        for stage in node.stages
    )
    tree: dict[str, Any] = {"stages": [_kind(stage) for stage in node.remembering], "drops": drops, "again": False}
    if isinstance(base, Leaf):
        tree["drops"] |= any(getattr(step, "drop_last", False) for step in base.steps)
        kept, grouped = base.may_drop_rows and not node.plain, base.group is not None
        return {**tree, "leaf": first, "kept": kept, "grouped": grouped}
    parts, number = [], first
    for part in base.parts:
        parts.append(tree_of(part, number))
        number += len(part.leaves)
    stops = isinstance(base, Zip) or (isinstance(base, Mix) and base.stop != "all")
    endless = isinstance(base, Mix) and (base.schedule is not None or base.stop == "never")
    tree["drops"] |= stops or any(part["drops"] for part in parts)
    tree["again"] = endless or any(part["again"] for part in parts)
    return {**tree, "mix" if isinstance(base, Mix) else "concat" if isinstance(base, Concat) else "zip": parts}


def _kind(stage: Any) -> str:
    if isinstance(stage, PackSpec) and stage.strategy == "concat":
        return "tokens"
    if isinstance(stage, Slice):
        return "number"
    return "outputs" if isinstance(stage, Local) and not stage.grouped else "group"


class PassOver(NamedTuple):
    """A pass over a part of a mix: the epoch and lane of the mix, and the number and stage of the pass."""

    epoch: int
    lane: Shard
    run: int
    stage: int
    scheduled: bool = False
    """True if the mix has a schedule, which may end a part before all of its passes."""


class StagePart(NamedTuple):
    """A stage of which a part is delivered: the number of stages after it, its kind, and its sources.

    ``rows``: rows that become one of its inputs, one of each source that are side by side.
    """

    depth: int
    kind: str
    leaves: range
    rows: int = 1


class LeafPlace(NamedTuple):
    """Position of a lane in one source: the epoch and lane of the source, the row, and the delivered part of the row.

    ``kept``: rows that have yielded outputs since the pass began, if some may not. ``part``: delivered part of the row,
    or of the group that begins with it, by the kind of stage.
    """

    leaf: int
    epoch: int
    lane: Shard
    row: int
    kept: int | None
    part: tuple[tuple[str, int], ...]
    run: int = 0
    """Number of times the source was iterated before, in this epoch of the mix."""
    inside: bool = False
    """True if some of the outputs of the row itself have been delivered."""
    first: int = -1
    """Rows that yielded outputs in the first pass over the source, if it is iterated again; -1 if unknown."""
    passes: tuple[PassOver, ...] = ()
    """The passes over the parts of mixes that it is in, from the outermost mix to the innermost."""
    stages: tuple[StagePart, ...] = ()
    """The stages of which a part is delivered, from the outermost to the innermost."""

    @property
    def scope(self) -> range:
        """The sources that have a part in common: what is in progress is of one of them."""
        return self.stages[0].leaves if self.stages else range(self.leaf, self.leaf + 1)

    @property
    def spot(self) -> tuple[Any, ...]:
        """The place itself, without counts of rows before it, which begin again with every pass of a loader."""
        return self.passes, self.row, self.part

    def below(self, depth: int) -> LeafPlace:
        """Return the place before a stage and those after it: where a group in progress begins."""
        inner = tuple(each for each in self.stages if each.depth > depth)
        part = self.part[: len(self.part) - len(self.stages) + len(inner)]
        return self._replace(part=part, stages=inner)

    def passes_until(self, later: LeafPlace) -> Iterator[tuple[int, Shard]]:
        """Yield epoch and lane of the passes over the source between this place and one in a later pass."""
        last, first = later.passes[-1] if later.passes else PassOver(0, self.lane, 0, FIRST), 0
        if last.scheduled and (last.run >= ENDED or not (later.row or later.part)):
            return
        if self.passes[:-1] == later.passes[:-1] and (last.stage == BORROWING) == (self.passes[-1].stage == BORROWING):
            first = self.passes[-1].run + 1
        for run in range(first, last.run):
            yield place_of(run, last.stage, last.epoch, last.lane)


def places(tree: Mapping[str, Any], at: At, epoch: int, lane: Shard) -> list[LeafPlace]:
    """Return the place of a cursor in each source of a pipeline."""
    return list(_places(tree, at, LeafPlace(0, epoch, lane, 0, None, ()), 0))


def _places(tree: Mapping[str, Any], at: At, place: LeafPlace, depth: int) -> Iterator[LeafPlace]:
    """Yield the place in each source. ``place``: that in the pipeline around it.

    ``at``: a cursor, or the row of all sources of a part that has not begun (0) or is complete (-1).
    """
    is_whole = isinstance(at, int)
    for kind in () if is_whole else reversed(tree["stages"]):
        (at, count, *_), depth = at, depth + 1
        if count and kind != "number":
            stage = StagePart(depth, kind, _leaves(tree), _rows_of_input(tree))
            place = place._replace(part=((kind, int(count)), *place.part), stages=(*place.stages, stage))
    if "leaf" in tree:
        place = place._replace(leaf=tree["leaf"])
        yield place._replace(row=at, kept=None if at else 0, part=()) if is_whole else _in_leaf(tree, at, place, depth)
    elif "mix" in tree:
        entries = [(0, FIRST, at)] * len(tree["mix"]) if is_whole else at[2]
        for inner, (again, stage, cursor) in zip(tree["mix"], entries, strict=True):
            over = PassOver(place.epoch, place.lane, int(again), int(stage), not is_whole and len(at) > 4)
            epoch, lane = place_of(over.run, over.stage, place.epoch, place.lane)
            run, passes = place.run + over.run + (stage == BORROWING), (*place.passes, over)
            yield from _places(inner, cursor, place._replace(epoch=epoch, lane=lane, run=run, passes=passes), depth)
    elif "concat" in tree and not is_whole:
        number, cursor, *counts = at
        kept = iter(counts[0] if counts else ())
        for other, inner in enumerate(tree["concat"]):
            for each in _places(inner, cursor if other == number else -(other < number), place, depth):
                count = next(kept, -1) if other < number else -1
                yield each._replace(kept=count) if count >= 0 else each
    else:
        parts = tree.get("concat") or tree["zip"]
        for inner, cursor in zip(parts, [at] * len(parts) if is_whole else at, strict=True):
            yield from _places(inner, cursor, place, depth)


def _in_leaf(tree: Mapping[str, Any], at: At, place: LeafPlace, depth: int) -> LeafPlace:
    """Return the place of a cursor in the rows of a source."""
    row, outputs, *counts = at
    kept, first = counts or (0, -1)  # a cursor of a state has no counts
    part, stages = place.part, place.stages
    if outputs and tree["grouped"]:  # outputs of a batched function: each may be of any row of its group
        part, stages = (("group", outputs), *part), (*stages, StagePart(depth + 1, "group", _leaves(tree)))
    elif outputs:
        part = (("outputs", outputs), *part)
    kept = kept if tree["kept"] else None
    return place._replace(row=row, kept=kept, part=part, inside=outputs > 0, first=first, stages=stages)


def _rows_of_input(tree: Mapping[str, Any]) -> int:
    """Return the number of rows that become one output below the stages of a pipeline."""
    return sum(map(_rows_of_input, tree["zip"])) if "zip" in tree else 1


def _leaves(tree: Mapping[str, Any]) -> range:
    """Return the numbers of the sources of a pipeline."""
    if "leaf" in tree:
        return range(tree["leaf"], tree["leaf"] + 1)
    parts = next(tree[kind] for kind in ("mix", "concat", "zip") if kind in tree)
    return range(_leaves(parts[0]).start, _leaves(parts[-1]).stop)
