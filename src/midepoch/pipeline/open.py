"""Opening a flow at a cursor, its first cursor, and the check of a cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midepoch.errors import StateError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import Flow
from midepoch.pipeline.combined import Concatenated, Zipped
from midepoch.pipeline.cursor import At, spared_key
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.mixed import Mixed
from midepoch.pipeline.node import Concat, Mix, Node, path_below
from midepoch.pipeline.passes import AGAIN, BORROWING, FIRST
from midepoch.pipeline.rows import Bundles, LazyRows, Rows
from midepoch.pipeline.scheduled import Scheduled, is_held
from midepoch.pipeline.stages import Packing, stage
from midepoch.transforms import RunContext
from midepoch.transforms.generators import Generators


def open_flow(
    spec: Node,
    bundles: Bundles,
    packing: Packing,
    epoch: int,
    lane: Shard,
    cursor: At,
    spared: Mapping[str, Intervals],
    leaf: int = 0,
    path: int = 0,
) -> Flow:
    """Open one lane of a flow at a cursor. ``leaf``: number of its first source among all.

    ``spared``: excluded rows that outputs in progress have (``LaneCursor.spared``).
    """
    if spec.stages:

        def source(inner: At) -> Flow:
            return open_flow(spec.before, bundles, packing, epoch, lane, inner, spared, leaf, path)

        base_seed = bundles.engines[leaf].leaf.global_seed or 0
        run = RunContext(spec.seed, epoch, path=path, generators=Generators(spec.seed, base_seed, path))
        return stage(spec.stages[-1], source, cursor, run, packing, lane)
    base = spec.base
    if isinstance(base, Leaf):
        if spec.plain and not (bundles.excluded and bundles.excluded[leaf]):
            return LazyRows(bundles, leaf, epoch, lane, cursor)
        return Rows(bundles, leaf, epoch, lane, cursor, spared.get(spared_key(leaf, epoch, lane.index), EMPTY))
    firsts = [leaf]
    for part in base.parts:
        firsts.append(firsts[-1] + len(part.leaves))

    def open_part(number: int, of_epoch: int, of_lane: Shard, inner: At) -> Flow:
        below = path_below(path, base.tags[number])
        return open_flow(base.parts[number], bundles, packing, of_epoch, of_lane, inner, spared, firsts[number], below)

    if isinstance(base, Mix):
        mixed = Mixed if base.schedule is None else Scheduled
        return mixed(base, open_part, start(spec), epoch, lane, cursor)
    if isinstance(base, Concat):
        starts = [start(part) for part in base.parts]

        def kept(number: int) -> list[int]:
            passes = (bundles.first_passes.get((leaf, lane.index)) for leaf in range(firsts[0], firsts[number]))
            return [-1 if one is None else one.kept for one in passes]

        return Concatenated(base, lambda number, inner: open_part(number, epoch, lane, inner), starts, kept, cursor)
    return Zipped(lambda number, inner: open_part(number, epoch, lane, inner), cursor)


def start(spec: Node) -> At:
    """Return the cursor at the beginning of an epoch."""
    cursor: At = [0, 0]
    if isinstance(spec.base, Mix):
        cursor = [0, 0, [[0, 0, start(part)] for part in spec.base.parts]]
        cursor += [0] if spec.base.schedule is not None else []
    elif isinstance(spec.base, Concat):
        cursor = [0, start(spec.base.parts[0])]
    elif not isinstance(spec.base, Leaf):
        cursor = [start(part) for part in spec.base.parts]
    for _ in spec.remembering:
        cursor = [cursor, 0]
    return cursor


def check_cursor(spec: Node, cursor: Any) -> None:
    """Raise StateError unless the cursor fits the flow."""
    if not _fits(spec, cursor):
        raise StateError(
            "the cursor of a lane does not fit this pipeline: its stages have changed since the state was saved, or "
            "the state is damaged. Resume with the same pipeline."
        )


def _fits(spec: Node, cursor: Any) -> bool:
    for _ in spec.remembering:
        if not (_is_list(cursor, 2) and is_count(cursor[1])):
            return False
        cursor = cursor[0]
    base = spec.base
    if isinstance(base, Leaf):
        return _is_list(cursor, 2) and all(map(is_count, cursor)) and cursor[0] <= base.rows
    if isinstance(base, Mix):
        return (
            isinstance(cursor, list)
            and len(cursor) >= (3 if base.schedule is None else 4)
            and (len(cursor) == 3 or _is_continued(cursor[3:], base))
            and is_count(cursor[0])
            and is_count(cursor[1])
            and _is_list(cursor[2], len(base.parts))
            and all(_is_list(one, 3) and is_count(one[0]) and one[1] in (FIRST, AGAIN, BORROWING) for one in cursor[2])
            and all(_fits(part, one[2]) for part, one in zip(base.parts, cursor[2], strict=True))
        )
    if isinstance(base, Concat):
        inside = _is_list(cursor, 2) and is_count(cursor[0]) and cursor[0] < len(base.parts)
        return inside and _fits(base.parts[cursor[0]], cursor[1])
    return _is_list(cursor, len(base.parts)) and all(map(_fits, base.parts, cursor))


def _is_continued(rest: list[Any], base: Mix) -> bool:
    """Return True for the end of the cursor of a changed or scheduled mix."""
    if base.schedule is None:
        return len(rest) == 1 and _is_old(rest[0], len(base.parts))
    return is_count(rest[0]) and (len(rest) == 1 or (len(rest) == 2 and is_held(rest[1], len(base.parts))))


def _is_old(value: Any, parts: int) -> bool:
    """Return True for a changed mix's previous state: [position up to which it applies, [[weight, part], …]]."""
    if not (_is_list(value, 2) and is_count(value[0]) and isinstance(value[1], list) and value[1]):
        return False
    good = (_is_list(one, 2) and isinstance(one[0], (int, float)) and 0 <= one[0] < 1e300 for one in value[1])
    return (
        all(good)
        and any(one[0] for one in value[1])
        and all(isinstance(one[1], int) and -1 <= one[1] < parts for one in value[1])
    )


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def is_count(value: Any) -> bool:
    """Return True for an integer that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
