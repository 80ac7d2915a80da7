"""The cursors of lanes in a ledger: written as differences from step to step, and read back.

If positions cannot be computed, each step is followed by ``(12,0,-340)``: for each lane of the rank, the increase of
each integer of its cursor. Lanes are separated by ``|``, and ``=[[…]]`` is a complete cursor. The cursors are those of
the state (see ``midepoch.pipeline``), with two more integers if rows may yield no output: the number of rows before it
that did, and the number that did in the first pass, if a mix iterates the source again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.pipeline.cursor import At, LaneCursors, PartsAt, RowAt
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Concat, Local, Mix, Node, Slice
from midepoch.pipeline.passes import BORROWING, place_of
from midepoch.transforms.packing import PackSpec

Int64Array = npt.NDArray[np.int64]


def nested(at: At) -> At:
    """Return a cursor as lists of numbers, with the count of rows that yielded outputs."""
    if isinstance(at, RowAt):
        return [*at, at.kept, at.first]
    if isinstance(at, PartsAt):
        return [*map(nested, at), list(at.kept)]
    return [nested(inner) for inner in at] if isinstance(at, list) else at


def _flatten(at: At, values: list[Any], shape: list[int]) -> None:
    for inner in at:
        if isinstance(inner, list):
            shape.append(len(values))
            _flatten(inner, values, shape)
            shape.append(-1)
        else:
            values.append(inner)
    if isinstance(at, RowAt):
        values += (at.kept, at.first)
    elif isinstance(at, PartsAt):
        shape.append(len(values))
        values += at.kept
        shape.append(-1)


class LaneRecorder:
    """Writes the cursors of the lanes of a rank as differences."""

    def __init__(self, lanes: LaneCursors | None, numbers: Sequence[int], start: At) -> None:
        known = {} if lanes is None else lanes.by_lane
        self._numbers = numbers
        self.begin = {number: nested(known[number].cursor if number in known else start) for number in numbers}
        self._before: dict[int, tuple[list[Any], list[int]]] = {}
        for number, at in self.begin.items():
            values: list[Any] = []
            shape: list[int] = []
            _flatten(at, values, shape)
            self._before[number] = (values, shape)

    def record(self, lanes: LaneCursors) -> bytes:
        """Return the bytes to write after a step."""
        texts = []
        for number in self._numbers:
            at = lanes.by_lane[number].cursor
            values: list[Any] = []
            shape: list[int] = []
            _flatten(at, values, shape)
            before, shape_before = self._before[number]
            if values == before:
                texts.append("")
            elif shape == shape_before and len(values) == len(before):
                texts.append(",".join([str(a - b) for a, b in zip(values, before, strict=True)]))
            else:
                texts.append("=" + json.dumps(nested(at), separators=(",", ":")))
            self._before[number] = (values, shape)
        return f"({'|'.join(texts)})".encode()


_STEP = re.compile(rb"-(\d+)\.|(\.)|\(([^)]*)\)|(#)")


@dataclass(frozen=True)
class LaneTrack:
    """The cursors of the lanes of a rank over the steps of a pass. ``begin``: the first cursor of each lane."""

    begin: Mapping[int, At]
    record: bytes

    @cached_property
    def _segments(self) -> dict[int, list[tuple[int, At, Int64Array]]]:
        """By lane: (first step, a cursor as a template, the values of the cursor after each step from there on)."""
        numbers = sorted(self.begin)
        rows: dict[int, list[list[Any]]] = {}
        found: dict[int, list[tuple[int, At, list[list[Any]]]]] = {}
        for number in numbers:
            values: list[Any] = []
            _flatten(self.begin[number], values, [])
            rows[number] = [values]
            found[number] = [(0, self.begin[number], rows[number])]
        step, open_step = 0, False
        for skipped, dot, cursors, end in _STEP.findall(self.record):
            if skipped or dot or end:
                if open_step:
                    _repeat(rows)
                step, open_step = step + 1, True
            elif open_step:
                open_step = False
                for number, text in zip(numbers, cursors.decode().split("|"), strict=True):
                    if text.startswith("="):
                        template = json.loads(text[1:])
                        values = []
                        _flatten(template, values, [])
                        rows[number] = [values]
                        found[number].append((step, template, rows[number]))
                    elif text:
                        rows[number].append(
                            [a + int(b) for a, b in zip(rows[number][-1], text.split(","), strict=True)]
                        )
                    else:
                        rows[number].append(rows[number][-1])
        if open_step:
            _repeat(rows)
        return {
            number: [
                (first, template, np.array(values, dtype=np.float64 if _has_floats(values) else np.int64))
                for first, template, values in segments
            ]
            for number, segments in found.items()
        }

    @cached_property
    def delivered(self) -> int:
        """Steps delivered."""
        return sum(1 for skipped, dot, _, _ in _STEP.findall(self.record) if skipped or dot)

    @property
    def finished(self) -> bool:
        """True if the end of the epoch was reached: its cursors are those of one additional step."""
        return b"#" in self.record

    def at(self, lane: int, step: int) -> At:
        """Return the cursor of a lane after a number of steps."""
        for first, template, values in reversed(self._segments[lane]):
            if first <= step:
                row = iter(values[min(step - first, len(values) - 1)].tolist())
                return _filled(template, row)
        raise AssertionError(step)


def _repeat(rows: dict[int, list[list[Any]]]) -> None:
    for values in rows.values():
        values.append(values[-1])


def _has_floats(values: list[list[Any]]) -> bool:
    return any(isinstance(value, float) for value in values[0])


def _filled(template: At, values: Iterator[Any]) -> At:
    return [_filled(inner, values) if isinstance(inner, list) else next(values) for inner in template]


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
        at, count = at
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
