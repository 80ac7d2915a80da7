"""Rows that the outputs of a lane have drawn from its sources: outputs done ahead, and those of groups in progress.

A stage that delivers only a part of a group at a time (a window of a shuffle, a document of a pack) makes the whole
group again after a resume. An edit must not change the rows of such a group: it applies to the rows after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import Bunches, Pulled, Puller, materialize
from midepoch.pipeline.cursor import At, LaneCursor, spared_key
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Concat, Mix, Node, Zip
from midepoch.pipeline.open import open_flow
from midepoch.pipeline.passes import place_of
from midepoch.pipeline.rows import Bundles, bundle_unit, excluded_rows
from midepoch.pipeline.stage_specs import DELIVERED_BITS, Buckets, Local, Slice, StageSpec
from midepoch.pipeline.stages import Packing
from midepoch.transforms.packing import PackSpec


class Drawn(NamedTuple):
    """Rows of a source before ``row`` of a lane, in one pass over it, are drawn."""

    leaf: int
    epoch: int
    lane: Shard
    row: int


def up_to_done(node: Node, bundles: Bundles, epoch: int, lane: Shard, cursor: LaneCursor) -> Pulled:
    """Return the outputs up to the last that is done, with their provenance. The pipeline runs up to it."""
    if not cursor.done:
        return Pulled([], cursor.at)
    packing = Packing(traced=True)
    intake = Puller(open_flow(node, bundles, packing, epoch, lane, cursor.at, cursor.spared), cursor.at)
    return intake.take(int(cursor.done.stops[-1]) - cursor.taken)


def outputs_of_rows(pulled: Pulled, rows: Sequence[Intervals], first: int) -> Intervals:
    """Return the outputs that are made only of some rows. ``rows``: of each source. ``first``: the first output."""
    if not pulled.count:
        return EMPTY
    items = pulled.items()
    made = materialize(items).traced
    bounds = made.bounds[items.batches.bounds - items.batches.bounds[0]] if isinstance(items, Bunches) else made.bounds
    found = np.zeros(int(bounds[-1]), np.bool_)
    for source, these in enumerate(rows):
        found |= (made.columns[0] == source) & these.contains(made.columns[1])
    others = np.append(0, np.cumsum(~found))[bounds]
    return Intervals.from_positions(first + np.flatnonzero((others[1:] == others[:-1]) & (bounds[1:] > bounds[:-1])))


class Reach:
    """Finds the rows that are drawn at a cursor of a lane, where groups are in progress."""

    def __init__(self, bundles: Bundles, cursor: LaneCursor) -> None:
        self._bundles, self._spared = bundles, cursor.spared

    def drawn(self, node: Node, at: At, epoch: int, lane: Shard, first_leaf: int = 0) -> Iterator[Drawn]:
        """Yield the rows of each source that are drawn. Groups in progress are run to their ends."""
        if node.stages:
            stage, before = node.stages[-1], node.before
            if not (isinstance(stage, Local) and stage.keeps_rows):
                inner, skip = at
                at = inner
                if count := _inputs_in_progress(stage, skip):
                    flow = open_flow(before, self._bundles, Packing(), epoch, lane, inner, self._spared, first_leaf)
                    taken = Puller(flow, inner, groups=True).take(count)
                    at = taken.at(taken.count)
            yield from self.drawn(before, at, epoch, lane, first_leaf)
            return
        base = node.base
        if isinstance(base, Leaf):
            yield Drawn(first_leaf, epoch, lane, self._row_after(base, first_leaf, epoch, lane, *at[:2]))
            return
        for number, part in enumerate(base.parts):
            if isinstance(base, Mix):
                run, stage_of_part, inner = at[2][number]
                yield from self.drawn(part, inner, *place_of(run, stage_of_part, epoch, lane), first_leaf)
            elif isinstance(base, Concat):
                inner = at[1] if number == at[0] else None
                if inner is not None:
                    yield from self.drawn(part, inner, epoch, lane, first_leaf)
            elif isinstance(base, Zip):
                yield from self.drawn(part, at[number], epoch, lane, first_leaf)
            first_leaf += len(part.leaves)

    def _row_after(self, leaf: Leaf, number: int, epoch: int, lane: Shard, row: int, outputs: int) -> int:
        """Return the row of a lane after those of its first outputs from a row on, and after their groups."""
        total = lane.before(leaf.rows)
        if leaf.group is None or not outputs:
            return min(row + (outputs > 0), total)
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
        return 1 if stage.delivered(skip)[0] else 0
    if isinstance(stage, Buckets):
        return stage.budget.window if skip % (1 << DELIVERED_BITS) else 0
    if isinstance(stage, Local) and not stage.grouped:
        return 1 if skip else 0
    return stage.size if skip else 0
