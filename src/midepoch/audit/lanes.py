"""The units and cursors of lanes in a ledger: written for many steps in one record, and read back.

If positions cannot be computed, a record for each lane of the rank follows some steps. It has, for each step since the
last one, the outputs that the lane has taken so far, and its cursor. They are written when a lane reaches another
chunk, and before a state is saved, so that a run can resume only at a recorded cursor. The cursors are those of the
state, with two more integers if rows may yield no output: the number of rows before it that did, and the number that
did in the first pass, if a mix iterates the source again.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.journal import Record
from midepoch.order import Shard
from midepoch.pipeline.chunk import at_mark
from midepoch.pipeline.cursor import NO_LANES, Cursor, FlowAt, LaneCursor, flatten, keeps_shape, listed
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.mixed import BORROWING, ENDED, FIRST, place_of
from midepoch.pipeline.node import Concat, Local, Mix, Node, Slice, Zip
from midepoch.transforms.packing import PackSpec

Int64Array = npt.NDArray[np.int64]
CURSORS, NUMBERS = b"curs", b"nums"
"""Kinds of records: the cursors of some steps, or only the numbers in them, if their shape is that of the last one."""
Places = tuple[Sequence[Any], Sequence[int]]
"""Places of the lanes of a rank after a step: a mark of each, and the outputs that it has taken."""


At = Any
"""Cursor of a lane as nested lists of numbers (``listed``), which a record has."""


class LaneRecord(NamedTuple):
    """A record of some steps of a lane. ``width``: the numbers of its cursors, or 0 if their shape can change."""

    kind: bytes
    content: bytes
    number: int
    width: int


class LaneRecorder:
    """The steps of a pass that are delivered and not written yet, of the lanes of a rank.

    A cursor is computed from the chunk that its last output is of. So steps are kept as marks (a chunk, and a number of
    its outputs) until a lane comes to another chunk. Without lanes, nothing is recorded: units follow from positions.
    """

    def __init__(
        self, lanes: Mapping[int, LaneCursor] = NO_LANES, numbers: Sequence[int] = (), start: FlowAt | None = None
    ) -> None:
        fresh = LaneCursor(0, start)
        known = {number: lanes.get(number, fresh) for number in numbers}
        self.numbers = numbers
        self.begin = {number: [lane.taken, listed(lane.at, counts=True)] for number, lane in known.items()}
        self.ended = [number for number, lane in known.items() if lane.ended]
        self._widths = [0] * len(numbers)  # of the cursors in the last record, if their shape cannot change
        self._written = 0
        self.pending: list[Places] = []
        """Places of the lanes after each step that is not written yet."""
        self.last: StepOutputs | Cursor | None = None
        """The last of these steps."""

    def places(self, at: Cursor) -> Places:
        """Return where a cursor has the lanes."""
        lanes = [at.lanes[number] for number in self.numbers]
        return [lane.at for lane in lanes], [lane.taken for lane in lanes]

    def records(self, delivered: int) -> list[LaneRecord]:
        """Return what is to be written for the steps that are delivered, in the order of the lanes.

        They are pending until ``written`` is called: an interrupt may come before.
        """
        first, pending = self._written + 1, self.pending[: max(0, delivered - self._written)]
        lanes = enumerate(self.numbers if pending else ())
        return [self._record(lane, number, first, pending) for lane, number in lanes]

    def written(self, delivered: int, records: Sequence[LaneRecord] = ()) -> Places | None:
        """Note that the records of all delivered steps are written. Return the end of the epoch, if one came to it."""
        last, widths = self.last, [record.width for record in records] or self._widths
        count = max(0, delivered - self._written)
        done = self.pending[:count]
        # No call from here on, so that no interrupt comes between. A step that is about to be delivered stays: the loop
        # may add it at this moment, if a thread saves a state.
        del self.pending[:count]
        self._written, self._widths = self._written + count, widths
        ended = last.ended if isinstance(last, StepOutputs) else last is not None and last.lanes_ended
        return done[-1] if ended and done and not self.pending else None

    def end(self, places: Places) -> list[Any]:
        """Return the record of places at the end of the epoch."""
        lanes = zip(self.numbers, *places, strict=True)
        return [[number, [taken, listed(at_mark(mark), counts=True)]] for number, mark, taken in lanes]

    def _record(self, lane: int, number: int, first: int, pending: Sequence[Places]) -> LaneRecord:
        marks, taken = [places[0][lane] for places in pending], [places[1][lane] for places in pending]
        table, width = None, self._widths[lane]
        if isinstance(marks[0], tuple) and all(isinstance(mark, tuple) and mark[0] is marks[0][0] for mark in marks):
            table = marks[0][0].table
        if width and table is not None:
            values = table(np.array([outputs for _, outputs in marks]), False)
            if values is not None and values.shape[1] == width:
                return LaneRecord(NUMBERS, _numbers(first, np.array(taken), values), number, width)
        cursors = [at_mark(mark) for mark in marks]
        places = [[count, listed(at, counts=True)] for count, at in zip(taken, cursors, strict=True)]
        content = zlib.compress(json.dumps([first, places], separators=(",", ":")).encode(), 1)
        return LaneRecord(CURSORS, content, number, len(flatten(places[-1][1])) if keeps_shape(cursors[-1]) else 0)


def _numbers(first: int, taken: Int64Array, values: Int64Array) -> bytes:
    """Return the numbers of steps: those of the first one, and the increases in the columns that change."""
    values = np.column_stack((taken, values))
    columns = np.flatnonzero((values != values[0]).any(axis=0))
    increases = np.diff(values[:, columns], axis=0)
    most = int(abs(increases).max(initial=0))
    size = next(size for size in (1, 2, 4, 8) if most < 1 << (8 * size - 1))
    head = json.dumps([first, len(values), values[0].tolist(), columns.tolist(), size], separators=(",", ":"))
    return head.encode() + b"\n" + increases.astype(f"<i{size}").tobytes()


class _Steps(NamedTuple):
    """The cursors of a lane after some steps, from ``first`` on. ``template``: one in whose places the numbers belong.

    Without a template they are not numbers, but complete.
    """

    first: int
    values: Any
    template: At = None

    def after(self, step: int) -> At:
        values = self.values[min(step - self.first, len(self.values) - 1)]
        return values if self.template is None else _filled(self.template, iter(values.tolist()))


@dataclass(frozen=True)
class LaneTrack:
    """The lanes of a rank over the steps of a pass.

    ``begin``: for each lane the outputs that it had taken, and its cursor. ``ended``: lanes that were at their end
    then. ``end``: the same at the end of the epoch, if the pass came to it; it counts as one additional step.
    """

    begin: Mapping[int, At]
    ended: frozenset[int]
    delivered: int
    records: Sequence[Record] = field(repr=False)
    end: Mapping[int, At] | None = None

    @cached_property
    def _steps(self) -> dict[int, list[_Steps]]:
        """By lane, the records of its steps."""
        found = {number: [_Steps(0, [at])] for number, at in self.begin.items()}
        for record in self.records:
            steps = found[record.number]
            if record.kind == CURSORS:
                steps.append(_Steps(*json.loads(zlib.decompress(record.content))))
                continue
            head, _, data = bytes(record.content).partition(b"\n")
            first, count, base, columns, size = json.loads(head)
            increases = np.frombuffer(data, f"<i{size}").reshape(count - 1, len(columns))
            values = np.tile(np.array(base, np.int64), (count, 1))
            values[1:, columns] += np.cumsum(increases, axis=0, dtype=np.int64)
            template = steps[-1].template or steps[-1].values[-1]
            steps.append(_Steps(first, values, template))
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

    def _place(self, lane: int, step: int) -> At:
        if self.end is not None and step > self.delivered:
            return self.end[lane]
        steps = self._steps[lane]
        return steps[bisect_right(steps, step, key=lambda some: some.first) - 1].after(step)


def _filled(template: At, values: Iterator[Any]) -> At:
    return [_filled(inner, values) if isinstance(inner, list) else next(values) for inner in template]


def may_drop(node: Node) -> bool:
    """Return True if rows may be left over at the end of an epoch: then they are dropped, not filtered."""
    base = node.base
    stages = any(
        isinstance(stage, Slice)
        or getattr(stage, "drop_last", False)
        or getattr(stage, "drop_remainder", False)
        or getattr(stage, "schedule", None) is not None
        or (isinstance(stage, Local) and any(getattr(step, "drop_last", False) for step in stage.steps))
        for stage in node.stages
    )
    if isinstance(base, Leaf):
        return stages or any(getattr(step, "drop_last", False) for step in base.steps)
    mixed = isinstance(base, Zip) or (isinstance(base, Mix) and base.stop != "all")
    return stages or mixed or any(map(may_drop, base.parts))


def draws_again(node: Node) -> bool:
    """Return True if a mix draws rows again and again, to the end of a schedule or without end.

    Then an epoch is not over when all rows were drawn.
    """
    base = node.base
    if isinstance(base, Leaf):
        return False
    again = isinstance(base, Mix) and (base.schedule is not None or base.stop == "never")
    return again or any(map(draws_again, base.parts))


def tree_of(node: Node, first: int = 0) -> dict[str, Any]:
    """Return the shape of a pipeline, as far as its cursors depend on it: enough to read them without its functions."""
    stages = [_kind(stage) for stage in node.remembering]
    base = node.base
    if isinstance(base, Leaf):
        kept, grouped = base.may_drop_rows and not node.plain, base.group is not None
        return {"stages": stages, "leaf": first, "kept": kept, "grouped": grouped}
    parts, number = [], first
    for part in base.parts:
        parts.append(tree_of(part, number))
        number += len(part.leaves)
    kind = "mix" if isinstance(base, Mix) else "concat" if isinstance(base, Concat) else "zip"
    return {"stages": stages, kind: parts}


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
    return list(_places(tree, at, epoch, lane, (), 0))


def _places(
    tree: Mapping[str, Any],
    at: At,
    epoch: int,
    lane: Shard,
    part: tuple[tuple[str, int], ...],
    run: int,
    passes: tuple[PassOver, ...] = (),
    stages: tuple[StagePart, ...] = (),
    depth: int = 0,
) -> Iterator[LeafPlace]:
    for kind in reversed(tree["stages"]):
        (at, count, *_), depth = at, depth + 1
        if count and kind != "number":
            part = ((kind, int(count)), *part)
            stages = (*stages, StagePart(depth, kind, _leaves(tree), _rows_of_input(tree)))
    if "leaf" in tree:
        row, outputs, *kept = at
        if outputs:
            kind = "group" if tree.get("grouped") else "outputs"
            part = ((kind, int(outputs)), *part)
            if kind == "group":  # outputs of a batched function: each may be of any row of its group
                stages = (*stages, StagePart(depth + 1, kind, _leaves(tree)))
        count, first = (int(kept[0]), int(kept[1])) if kept else (0, -1)  # a cursor of a state has no counts
        counted = count if tree["kept"] else None
        yield LeafPlace(tree["leaf"], epoch, lane, int(row), counted, part, run, outputs > 0, first, passes, stages)
    elif "mix" in tree:
        for inner, (again, stage, cursor) in zip(tree["mix"], at[2], strict=True):
            over = PassOver(epoch, lane, int(again), int(stage), scheduled=len(at) > 4)
            where = place_of(over.run, over.stage, epoch, lane)
            runs = run + over.run + (stage == BORROWING)
            yield from _places(inner, cursor, *where, part, runs, (*passes, over), stages, depth)
    elif "concat" in tree:
        number, cursor, *before = at
        kept = iter(before[0] if before else ())
        for other, inner in enumerate(tree["concat"]):
            if other == number:
                yield from _places(inner, cursor, epoch, lane, part, run, passes, stages, depth)
            else:
                yield from _whole(inner, epoch, lane, other < number, run, kept, passes, stages)
    else:
        for inner, cursor in zip(tree["zip"], at, strict=True):
            yield from _places(inner, cursor, epoch, lane, part, run, passes, stages, depth)


def _rows_of_input(tree: Mapping[str, Any]) -> int:
    """Return the number of rows that become one output below the stages of a pipeline."""
    return sum(map(_rows_of_input, tree["zip"])) if "zip" in tree else 1


def _leaves(tree: Mapping[str, Any]) -> range:
    """Return the numbers of the sources of a pipeline."""
    if "leaf" in tree:
        return range(tree["leaf"], tree["leaf"] + 1)
    parts = next(tree[kind] for kind in ("mix", "concat", "zip") if kind in tree)
    return range(_leaves(parts[0]).start, _leaves(parts[-1]).stop)


def _whole(
    tree: Mapping[str, Any],
    epoch: int,
    lane: Shard,
    over: bool,
    run: int,
    kept: Iterator[int],
    passes: tuple[PassOver, ...],
    stages: tuple[StagePart, ...],
) -> Iterator[LeafPlace]:
    """Yield the sources of a part that is complete or has not begun. A row of -1 is the end."""
    if "leaf" in tree:
        count, row = int(next(kept, -1)) if over else 0, -1 if over else 0
        counted = count if count >= 0 else None
        yield LeafPlace(tree["leaf"], epoch, lane, row, counted, (), run, passes=passes, stages=stages)
    for inner in tree.get("mix", ()):
        first = (*passes, PassOver(epoch, lane, 0, FIRST))
        yield from _whole(inner, *place_of(0, FIRST, epoch, lane), over, run, kept, first, stages)
    for inner in (*tree.get("concat", ()), *tree.get("zip", ())):
        yield from _whole(inner, epoch, lane, over, run, kept, passes, stages)
