"""Rows that the outputs of a lane have drawn from its sources: outputs done ahead, and those of groups in progress.

A stage that delivers only a part of a group at a time (a window of a shuffle, a document of a pack) makes the whole
group again after a resume. An edit must not change the rows of such a group: it applies to the rows after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from midepoch.errors import StateError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import Bunches, Flow, Pulled, Puller, all_in_each, are_of, materialize
from midepoch.pipeline.cursor import (
    ConcatAt,
    FlowAt,
    LaneCursor,
    MixAt,
    PartAt,
    RowAt,
    StageAt,
    ZipAt,
    below,
    spared_key,
)
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.mixed import BORROWING, Concatenated, Mixed, Zipped, place_of
from midepoch.pipeline.node import Buckets, Concat, Local, Mix, Node, Slice, StageSpec, Zip, path_below
from midepoch.pipeline.rows import Bundles, LazyRows, LeafRows, bundle_unit, excluded_rows
from midepoch.pipeline.scheduled import Scheduled
from midepoch.pipeline.stages import Packing, stage
from midepoch.transforms import RunContext
from midepoch.transforms.generators import Generators
from midepoch.transforms.packing import PackSpec


def open_flow(
    spec: Node,
    bundles: Bundles,
    packing: Packing,
    epoch: int,
    lane: Shard,
    cursor: FlowAt,
    spared: Mapping[str, Intervals],
    leaf: int = 0,
    path: int = 0,
) -> Flow:
    """Open one lane of a flow at a cursor. ``leaf``: number of its first source among all.

    ``spared``: excluded rows that outputs in progress have (``LaneCursor.spared``).
    """
    if spec.stages:

        def source(inner: FlowAt) -> Flow:
            return open_flow(spec.before, bundles, packing, epoch, lane, inner, spared, leaf, path)

        base_seed = bundles.engines[leaf].leaf.global_seed or 0
        run = RunContext(spec.seed, epoch, path=path, generators=Generators(spec.seed, base_seed, path))
        gone = bundles.excluded if spared and not spec.joins_rows else ()
        return stage(spec.stages[-1], source, cursor, run, packing, lane, gone)
    base = spec.base
    if isinstance(base, Leaf):
        assert isinstance(cursor, RowAt)
        if packing.opened is not None:
            packing.opened.append((leaf, epoch, lane))
        if spec.plain and not (bundles.excluded and bundles.excluded[leaf]):
            return LazyRows(bundles, leaf, epoch, lane, cursor)
        return LeafRows(bundles, leaf, epoch, lane, cursor, spared.get(spared_key(leaf, epoch, lane.index), EMPTY))
    firsts = [leaf]
    for part in base.parts:
        firsts.append(firsts[-1] + len(part.leaves))

    def open_part(number: int, of_epoch: int, of_lane: Shard, inner: FlowAt) -> Flow:
        below = path_below(path, base.tags[number])
        return open_flow(base.parts[number], bundles, packing, of_epoch, of_lane, inner, spared, firsts[number], below)

    if isinstance(base, Mix):
        assert isinstance(cursor, MixAt)
        mixed = Mixed if base.schedule is None else Scheduled
        return mixed(base, open_part, start_of_mix(base), epoch, lane, cursor)
    if isinstance(base, Concat):
        assert isinstance(cursor, ConcatAt)
        starts = [start(part) for part in base.parts]

        def kept(number: int) -> tuple[int, ...]:
            passes = (bundles.first_passes.get((leaf, lane.index)) for leaf in range(firsts[0], firsts[number]))
            return tuple(-1 if one is None else one.kept for one in passes)

        return Concatenated(base, lambda number, inner: open_part(number, epoch, lane, inner), starts, kept, cursor)
    assert isinstance(cursor, ZipAt)
    return Zipped(lambda number, inner: open_part(number, epoch, lane, inner), cursor)


def start(spec: Node) -> FlowAt:
    """Return the cursor at the beginning of an epoch."""
    base = spec.base
    cursor: FlowAt = RowAt()
    if isinstance(base, Mix):
        cursor = start_of_mix(base)
    elif isinstance(base, Concat):
        cursor = ConcatAt(0, start(base.parts[0]))
    elif isinstance(base, Zip):
        cursor = ZipAt(tuple(map(start, base.parts)))
    for stage_spec in spec.remembering:
        cursor = StageAt(cursor, 0, 0 if _has_key(stage_spec) else None)
    return cursor


def start_of_mix(mix: Mix) -> MixAt:
    """Return the cursor of a mix at the beginning of an epoch."""
    parts = tuple(PartAt(at=start(part)) for part in mix.parts)
    return MixAt(0, 0, parts, clock=None if mix.schedule is None else 0)


def _has_key(spec: StageSpec) -> bool:
    return isinstance(spec, Buckets) or (isinstance(spec, PackSpec) and spec.schedule is not None)


def check_cursor(spec: Node, cursor: Any) -> None:
    """Raise StateError unless the cursor fits the flow."""
    if not _fits(spec, cursor):
        raise StateError(
            "the cursor of a lane does not fit this pipeline: its stages have changed since the state was saved, or "
            "the state is damaged. Resume with the same pipeline."
        )


def _fits(spec: Node, at: Any) -> bool:
    for stage_spec in reversed(spec.remembering):
        if not isinstance(at, StageAt) or (at.key is not None) != _has_key(stage_spec):
            return False
        at = at.before
    base = spec.base
    if isinstance(base, Leaf):
        return isinstance(at, RowAt) and at.row <= base.rows
    if isinstance(base, Concat):
        return isinstance(at, ConcatAt) and at.number < len(base.parts) and _fits(base.parts[at.number], at.at)
    if isinstance(base, Zip):
        whole = isinstance(at, ZipAt) and len(at.parts) == len(base.parts)
        return whole and all(map(_fits, base.parts, at.parts))
    if not isinstance(at, MixAt) or len(at.parts) != len(base.parts):
        return False
    held = at.held
    if held is not None and base.schedule is not None and (held.parts or len(held.weights) != len(base.parts)):
        return False
    if held is not None and base.schedule is None:
        numbered = len(held.parts) == len(held.weights) and max(held.parts) < len(base.parts)
        if not numbered or held.rows != -1:
            return False
    timed = (at.clock is not None) == (base.schedule is not None)
    parts = zip(base.parts, at.parts, strict=True)
    return timed and all(entry.stage <= BORROWING and _fits(part, entry.at) for part, entry in parts)


class Drawn(NamedTuple):
    """Rows of a source before ``row`` of a lane are drawn, in the last pass over it that has begun."""

    leaf: int
    epoch: int
    lane: Shard
    row: int


_MOST_CHUNKS = 4
"""Chunks after which groups of several stages, one of which is always in progress, are left as they are."""


def up_to_done(
    node: Node,
    bundles: Bundles,
    packing: Packing,
    epoch: int,
    lane: Shard,
    cursor: LaneCursor,
    excluded: Sequence[Intervals] | None = None,
) -> Pulled:
    """Return the outputs up to the last that is done. The pipeline runs up to it.

    ``excluded``: rows of each source. If given, also return the outputs of groups that are in progress there, to their
    ends, or those that consist of excluded rows only, if there is nothing in progress but a document that is packed.
    """
    if not (cursor.done or (excluded is not None and _in_progress(node, cursor.at))):
        return Pulled([], cursor.at)
    flow = open_flow(node, bundles, packing, epoch, lane, cursor.at, cursor.spared)
    intake = Puller(flow, cursor.at)
    taken = intake.take(int(cursor.done.stops[-1]) - cursor.taken if cursor.done else 0)
    if excluded is not None and _only_packs(node, intake.cursor) and not node.joins_rows:
        return taken.joined(_of_excluded(intake, excluded))
    for _ in range(_MOST_CHUNKS if excluded is not None else 0):
        if not _in_progress(node, intake.cursor) or not intake.has_more():
            break
        taken = taken.joined(intake.take(intake.left_of_chunk))
    return taken


def _of_excluded(intake: Puller, rows: Sequence[Intervals]) -> Pulled:
    """Take outputs as long as they are made only of excluded rows. They cut no document but the one in progress."""
    began, taken, others = intake.cursor, intake.take(0), np.zeros(0, np.intp)
    while not len(others) and intake.has_more():
        following = intake.take(intake.left_of_chunk)
        others = np.flatnonzero(~are_of(materialize(following.items()), rows))
        taken = taken.joined(following.first(int(others[0])) if len(others) else following)
    counts = range(taken.count, 0, -1)
    return taken.first(next((count for count in counts if not _cuts_another(taken.at(count), began)), 0))


def _cuts_another(at: FlowAt, began: FlowAt) -> bool:
    """Return True if another document is in progress at a cursor than at the one before."""
    assert isinstance(at, StageAt)
    assert isinstance(began, StageAt)
    return at.delivered > 0 and at.before != began.before


def _in_progress(node: Node, at: FlowAt) -> bool:
    """Return True if a group of the stages, or of the one source, is delivered in part."""
    for spec in reversed(node.remembering):
        assert isinstance(at, StageAt)
        if _inputs_in_progress(spec, at.delivered):
            return True
        at = at.before
    return isinstance(at, RowAt) and isinstance(node.base, Leaf) and at.outputs > 0


def _only_packs(node: Node, at: FlowAt) -> bool:
    """Return True if the last stage joins and cuts documents, and no group before it is in progress."""
    last = node.remembering[-1] if node.remembering else None
    if not isinstance(last, PackSpec) or last.strategy != "concat":
        return False
    assert isinstance(at, StageAt)
    before = [(Node(node.base, node.stages[: -1 - node.stages[::-1].index(last)]), at.before)]
    while before:
        each, inner = before.pop()
        if _in_progress(each, inner):
            return False
        inner = below(inner)
        if isinstance(each.base, Mix):
            before += [(part, entry.at) for part, entry in zip(each.base.parts, inner.parts, strict=True)]
        elif isinstance(each.base, Concat):
            before.append((each.base.parts[inner.number], inner.at))
        elif isinstance(each.base, Zip):
            before += zip(each.base.parts, inner.parts, strict=True)
    return True


def outputs_of_rows(pulled: Pulled, rows: Sequence[Intervals], first: int) -> Intervals:
    """Return the outputs that are made only of some rows. ``rows``: of each source. ``first``: the first output."""
    if not pulled.count:
        return EMPTY
    items = pulled.items()
    found = are_of(materialize(items), rows)
    if isinstance(items, Bunches):
        found = all_in_each(found, items.batches.bounds - items.batches.bounds[0])
    return Intervals.from_positions(first + np.flatnonzero(found))


class Reach:
    """Finds the rows that are drawn at a cursor of a lane, where groups are in progress.

    ``again``: without those that a resume makes again.
    """

    def __init__(self, bundles: Bundles, packing: Packing, cursor: LaneCursor, *, again: bool = False) -> None:
        self._bundles, self._packing, self._spared, self._again = bundles, packing, cursor.spared, again

    def drawn(self, node: Node, at: FlowAt, epoch: int, lane: Shard, first_leaf: int = 0) -> Iterator[Drawn]:
        """Yield the rows of each source that are drawn. Groups in progress are run to their ends."""
        if node.stages:
            stage, before = node.stages[-1], node.before
            if not (isinstance(stage, Local) and stage.keeps_rows):
                assert isinstance(at, StageAt)
                count, at = _inputs_in_progress(stage, at.delivered), at.before
                if count and not self._again:
                    inner = at
                    flow = open_flow(before, self._bundles, self._packing, epoch, lane, inner, self._spared, first_leaf)
                    taken = Puller(flow, inner, groups=True).take(count)
                    at = taken.at(taken.count)
            yield from self.drawn(before, at, epoch, lane, first_leaf)
            return
        base = node.base
        if isinstance(base, Leaf):
            assert isinstance(at, RowAt)
            yield Drawn(first_leaf, epoch, lane, self._row_after(base, first_leaf, epoch, lane, at.row, at.outputs))
            return
        for number, part in enumerate(base.parts):
            if isinstance(at, MixAt):
                entry = at.parts[number]
                yield from self.drawn(part, entry.at, *place_of(entry.run, entry.stage, epoch, lane), first_leaf)
            elif isinstance(at, ZipAt):
                yield from self.drawn(part, at.parts[number], epoch, lane, first_leaf)
            elif isinstance(at, ConcatAt) and number == at.number:
                yield from self.drawn(part, at.at, epoch, lane, first_leaf)
            elif isinstance(at, ConcatAt):  # it has ended, or has not begun
                for leaf, one in enumerate(part.leaves, first_leaf):
                    yield Drawn(leaf, epoch, lane, lane.before(one.rows) if number < at.number else 0)
            first_leaf += len(part.leaves)

    def _row_after(self, leaf: Leaf, number: int, epoch: int, lane: Shard, row: int, outputs: int) -> int:
        """Return the row of a lane after those of its first outputs from a row on, and after their groups."""
        total = lane.before(leaf.rows)
        if leaf.group is None or not outputs or self._again:
            return min(row + (outputs > 0 and not self._again), total)
        excluded, bundles = EMPTY, self._bundles
        if bundles.excluded and bundles.excluded[number]:
            spared = self._spared.get(spared_key(number, epoch, lane.index), EMPTY)
            excluded = excluded_rows(bundles.engines[number], bundles.excluded[number], epoch, lane).minus(spared)
        while row < total:
            stop, made = bundles.take(number, epoch, lane, row, total, excluded)
            if outputs <= len(made):
                group = leaf.group if leaf.has_fixed_groups else bundle_unit(leaf)
                return min(row + (int(made.places[outputs - 1]) // group + 1) * group, total)
            row, outputs = stop, outputs - len(made)
        return total


def _inputs_in_progress(stage: StageSpec, skip: int) -> int:
    """Return how many of its next inputs a stage needs again, because it has delivered a part of what they become."""
    if isinstance(stage, Slice):
        return 0
    if isinstance(stage, PackSpec):
        if stage.strategy != "concat":
            return stage.window if skip else 0
        return 1 if skip else 0
    if isinstance(stage, Buckets):
        return stage.budget.window if skip else 0
    if isinstance(stage, Local) and not stage.grouped:
        return 1 if skip else 0
    return stage.size if skip else 0
