"""The units and cursors of lanes in a ledger: written as differences from step to step, and read back.

If positions cannot be computed, some steps are followed by ``{4,12,,-340;4,35,,143}``: for each step since the last
such record, the outputs that a lane has taken, and the increase of each integer of its cursor, if any. Lanes of the
rank are separated by ``|``, and ``=[…]`` is a complete record: the outputs taken so far, and the cursor. They are
written when a lane reaches another chunk, and before a state is saved, so that a run can resume only at a recorded
cursor. The cursors are those of the state, with two more integers if rows may yield no output: the number of rows
before it that did, and the number that did in the first pass, if a mix iterates the source again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.pipeline.chunk import at_mark
from midepoch.pipeline.cursor import FlowAt, LaneCursor, flatten, listed
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.mixed import BORROWING, place_of
from midepoch.pipeline.node import Concat, Local, Mix, Node, Slice, Zip
from midepoch.transforms.packing import PackSpec

Int64Array = npt.NDArray[np.int64]


At = Any
"""Cursor of a lane as nested lists of numbers (``listed``), which a record has."""


Values = tuple[list[Any], list[int]]
"""The numbers of a record, and what of its shape may change from step to step."""


class Places(NamedTuple):
    """Places of the lanes of a rank after a step: a mark of each, and the outputs that it has taken.

    ``ended``: all of them are known to be at their end.
    """

    marks: Sequence[Any]
    taken: Sequence[int]
    ended: bool

    @staticmethod
    def of(at: Any, numbers: Sequence[int]) -> Places:
        """Return where a step, or a cursor, has the lanes with these numbers."""
        if isinstance(at, StepOutputs):
            return Places(at.marks, at.after, at.ended)
        lanes = [at.lanes[number] for number in numbers]
        return Places([lane.at for lane in lanes], [lane.taken for lane in lanes], at.lanes_ended)


class LaneRecorder:
    """Writes the units and cursors of the lanes of a rank as differences, those of many steps in one call.

    A cursor is computed from the chunk that its last output is of. So steps are kept as marks (a chunk, and a number of
    its outputs) until a lane comes to another chunk. Without numbers of lanes, nothing is recorded: units follow from
    positions.
    """

    def __init__(
        self,
        lanes: Mapping[int, LaneCursor] = MappingProxyType({}),
        numbers: Sequence[int] = (),
        start: FlowAt | None = None,
    ) -> None:
        fresh = LaneCursor(0, start)
        known = {number: lanes.get(number, fresh) for number in numbers}
        self.numbers = numbers
        self.begin = {number: [lane.taken, listed(lane.at, counts=True)] for number, lane in known.items()}
        self.ended = [number for number, lane in known.items() if lane.ended]
        self.before: list[Values | None] = [None] * len(numbers)
        self.pending: list[Places] = []
        """For each step that is not written yet, where the lanes are, in the order of their numbers."""

    def is_due(self, places: Places) -> bool:
        """Return True if the pending steps are to be written before a step that ends at these places."""
        pending = self.pending
        if not pending:
            return False
        if len(pending) >= _MOST_PENDING:
            return True
        for mark, other in zip(pending[0].marks, places.marks, strict=True):  # for every step: half the time of any(…)
            if not (isinstance(mark, tuple) and isinstance(other, tuple) and mark[0] is other[0]):
                return True
        return False

    def record(self) -> tuple[bytes, list[Values | None]]:
        """Return the bytes to write for all pending steps, and what the next ones are compared with.

        Both take effect when the bytes are written: an interrupt may come before.
        """
        before = list(self.before)
        marks, taken = (zip(*columns, strict=True) for columns in list(zip(*self.pending, strict=True))[:2])
        texts = [";".join(_texts(before, lane, *both)) for lane, both in enumerate(zip(marks, taken, strict=True))]
        return b"{%b}" % "|".join(texts).encode(), before


def _texts(befores: list[Values | None], lane: int, marks: Sequence[Any], taken: Sequence[int]) -> list[str]:
    """Return the records of a lane over some steps. ``befores``: the values before, which are replaced."""
    before, table = befores[lane], None
    if before is not None and isinstance(marks[0], tuple) and all(mark[0] is marks[0][0] for mark in marks):
        table = marks[0][0].table
    values = None
    if before is not None and table is not None and not before[1]:
        values = table(np.array([outputs for _, outputs in marks], dtype=np.int64), False)
    if before is None or values is None or values.shape[1] + 1 != len(before[0]):
        return [_text(befores, lane, count, at_mark(mark)) for mark, count in zip(marks, taken, strict=True)]
    values = np.concatenate([np.array(taken, np.int64)[:, None], values], axis=1)
    befores[lane] = (values[-1].tolist(), [])
    differences = np.diff(values, axis=0, prepend=np.array([before[0]], dtype=np.int64)).tolist()
    return [",".join([str(value) if value else "" for value in row]) for row in differences]


def _text(befores: list[Values | None], lane: int, taken: int, at: FlowAt) -> str:
    shape: list[int] = []
    values = [taken, *flatten(at, shape)]
    before, befores[lane] = befores[lane], (values, shape)
    if before is None or len(before[0]) != len(values) or before[1] != shape:
        return "=" + json.dumps([taken, listed(at, counts=True)], separators=(",", ":"))
    return ",".join([str(a - b) if a != b else "" for a, b in zip(values, before[0], strict=True)])


_MOST_PENDING = 256
_STEP = re.compile(rb"-(\d+)\.|(\.)|\{([^}]*)\}|(#)")


@dataclass(frozen=True)
class LaneTrack:
    """The lanes of a rank over the steps of a pass.

    ``begin``: for each lane the outputs that it had taken, and its cursor.
    """

    begin: Mapping[int, At]
    record: bytes
    ended: frozenset[int] = frozenset()
    """Lanes that were at their end when the pass began."""

    @cached_property
    def _segments(self) -> dict[int, list[tuple[int, At, Int64Array]]]:
        """By lane: (first step, a cursor as a template, the values of the cursor after each step from there on)."""
        numbers = sorted(self.begin)
        rows: dict[int, list[list[Any]]] = {}
        found: dict[int, list[tuple[int, At, list[list[Any]]]]] = {}
        for number in numbers:
            rows[number] = [_numbers(self.begin[number])]
            found[number] = [(0, self.begin[number], rows[number])]
        step = waiting = 0
        for skipped, dot, cursors, end in _STEP.findall(self.record):
            if skipped or dot or end:
                waiting += 1
                continue
            columns = [text.split(";") for text in cursors.decode().split("|")]
            if not cursors or len(columns) != len(numbers) or any(len(one) != waiting for one in columns):
                break  # damaged: what follows cannot be read
            for texts in zip(*columns, strict=True):
                step, waiting = step + 1, 0
                for number, text in zip(numbers, texts, strict=True):
                    if text.startswith("="):
                        template = json.loads(text[1:])
                        rows[number] = [_numbers(template)]
                        found[number].append((step, template, rows[number]))
                    elif text:
                        rows[number].append(_sums(rows[number][-1], text.split(",")))
                    else:
                        rows[number].append(rows[number][-1])
        return {
            number: [
                (first, template, np.array(values, dtype=object if _has_floats(values) else np.int64))
                for first, template, values in segments
            ]
            for number, segments in found.items()
        }

    @cached_property
    def delivered(self) -> int:
        """Steps delivered."""
        return sum(1 for skipped, dot, _, _ in _STEP.findall(self.record) if skipped or dot)

    @cached_property
    def recorded(self) -> int:
        """Steps, and the end of the epoch, whose cursors are recorded: a killed process may have left out the last."""
        return max((segments[-1][0] + len(segments[-1][2]) - 1 for segments in self._segments.values()), default=0)

    @property
    def finished(self) -> bool:
        """True if the end of the epoch was reached: its cursors are those of one additional step."""
        return b"#" in self.record

    def at(self, lane: int, step: int) -> At:
        """Return the cursor of a lane after a number of steps."""
        return self._filled(lane, step)[1]

    def taken(self, lane: int, step: int) -> int:
        """Return the outputs that a lane has taken after a number of steps."""
        return int(self._filled(lane, step)[0])

    def _filled(self, lane: int, step: int) -> At:
        for first, template, values in reversed(self._segments[lane]):
            if first <= step:
                return _filled(template, iter(values[min(step - first, len(values) - 1)].tolist()))
        raise AssertionError(step)


def _sums(values: list[Any], differences: list[str]) -> list[Any]:
    return [a + int(b or 0) for a, b in zip(values, differences, strict=True)]


def _numbers(at: At) -> list[Any]:
    return [number for inner in at for number in (_numbers(inner) if isinstance(inner, list) else [inner])]


def _has_floats(values: list[list[Any]]) -> bool:
    return any(isinstance(value, float) for value in values[0])


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


def tree_of(node: Node, first: int = 0) -> dict[str, Any]:
    """Return the shape of a pipeline, as far as its cursors depend on it: enough to read them without its functions."""
    stages = [_kind(stage) for stage in node.remembering]
    base = node.base
    if isinstance(base, Leaf):
        return {"stages": stages, "leaf": first, "kept": base.may_drop_rows and not node.plain}
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


def places(tree: Mapping[str, Any], at: At, epoch: int, lane: Shard) -> list[LeafPlace]:
    """Return the place of a cursor in each source of a pipeline."""
    return list(_places(tree, at, epoch, lane, (), 0))


def _places(
    tree: Mapping[str, Any], at: At, epoch: int, lane: Shard, part: tuple[tuple[str, int], ...], run: int
) -> Iterator[LeafPlace]:
    for kind in reversed(tree["stages"]):
        at, count, *_ = at
        if count and kind != "number":
            part = ((kind, int(count)), *part)
    if "leaf" in tree:
        row, outputs, *kept = at
        if outputs:
            part = (("outputs", int(outputs)), *part)
        count, first = (int(kept[0]), int(kept[1])) if kept else (0, -1)  # a cursor of a state has no counts
        yield LeafPlace(
            tree["leaf"], epoch, lane, int(row), count if tree["kept"] else None, part, run, outputs > 0, first
        )
    elif "mix" in tree:
        for inner, (again, stage, cursor) in zip(tree["mix"], at[2], strict=True):
            where = place_of(int(again), int(stage), epoch, lane)
            yield from _places(inner, cursor, *where, part, run + int(again) + (stage == BORROWING))
    elif "concat" in tree:
        number, cursor, *before = at
        kept = iter(before[0] if before else ())
        for other, inner in enumerate(tree["concat"]):
            if other == number:
                yield from _places(inner, cursor, epoch, lane, part, run)
            else:
                yield from _whole(inner, epoch, lane, other < number, run, kept)
    else:
        for inner, cursor in zip(tree["zip"], at, strict=True):
            yield from _places(inner, cursor, epoch, lane, part, run)


def _whole(
    tree: Mapping[str, Any], epoch: int, lane: Shard, over: bool, run: int, kept: Iterator[int]
) -> Iterator[LeafPlace]:
    """Yield the sources of a part that is complete or has not begun. A row of -1 is the end."""
    if "leaf" in tree:
        count = int(next(kept, -1)) if over else 0
        yield LeafPlace(tree["leaf"], epoch, lane, -1 if over else 0, count if count >= 0 else None, (), run)
    for kind in ("mix", "concat", "zip"):
        for inner in tree.get(kind, ()):
            yield from _whole(inner, epoch, lane, over, run, kept)
