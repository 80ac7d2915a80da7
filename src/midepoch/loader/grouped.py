"""Batches of rows that batched functions make in groups at fixed positions, in this process or in workers."""

from __future__ import annotations

from midepoch.loader.batches import BatchMaker, Read
from midepoch.loader.plans import Made
from midepoch.order import Shard
from midepoch.pipeline.groups import GroupedRows
from midepoch.pipeline.plans import StepPlan
from midepoch.pipeline.rows import Bundles


class GroupedBatches:
    """The batches of a plan, in order. Workers make bundles ahead, and the main process assembles batches."""

    def __init__(self, maker: BatchMaker, bundles: Bundles, plan: StepPlan, shard: Shard, groups: int) -> None:
        self._maker, self._plan, self._shard, self._step = maker, plan, shard, 0
        self._rows = GroupedRows(bundles, plan.epoch, groups)

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end."""
        plan, step = self._plan, self._step
        if not plan.has(step):
            return None
        wanted, _, genuine, _ = plan.ask([step], self._shard)
        if not len(wanted):
            made = Made(None, step, empty=True)
        else:
            read = Read(step, len(wanted), genuine=genuine)
            made = self._maker.present(plan, read, self._rows.read(wanted))
        self._step += 1
        return made

    def close(self) -> bool:
        """Leave the workers to their pool."""
        return True
