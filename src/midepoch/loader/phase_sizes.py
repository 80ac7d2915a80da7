"""Batch sizes by the phases of a schedule: a batch has the size of the phase of its outputs, and those of one phase."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.order.schedule import OPEN, Schedule
from midepoch.pipeline.lanes import Lanes

Int64Array = npt.NDArray[np.int64]


class PhaseSizes:
    """The size of the next batch from some lanes.

    It follows from the outputs so far, not from the number of steps: every epoch begins with the first phase. Lanes may
    be at different phases, if ranks with leases went at their own pace. Then the first of these phases is completed.
    """

    def __init__(self, schedule: Schedule, lanes: Lanes) -> None:
        self._lanes, self._shards = lanes, lanes.share.shard.count
        groups = lanes.share.lanes.count
        ranks, count = groups * self._shards, groups * len(lanes.numbers)
        self._sizes = [(phase.global_batch_size or 0) // ranks for phase in schedule.plan]
        self._ends = np.array([schedule.lengths(Shard(lane, count))[0] for lane in lanes.numbers], np.int64)
        self._last: tuple[int, int, int, list[bool] | None] = (0, 0, 0, None)

    def next(self) -> tuple[int, int]:
        """Return the size of the next batch, and the outputs of its phase that are left and not done.

        They are counted again only when the batch might be the last of its phase, or another lane has ended: that
        takes a tenth of the time of a batch.
        """
        size, left, total, live = self._last
        now = int(self._lanes.outputs.sum())
        if live == self._lanes.live and (left := left - (now - total)) >= size * self._shards:
            return size, left
        size, left = self._count()
        self._last = size, left, now, list(self._lanes.live)
        return size, left

    def _count(self) -> tuple[int, int]:
        live = np.flatnonzero(self._lanes.live)
        outputs = self._lanes.outputs[live]
        ended = (self._ends[live] <= outputs[:, None]).sum(axis=1)
        for phase in range(int(ended.min(initial=len(self._sizes))), len(self._sizes)):
            ends = self._ends[live, phase]
            if ends[0] >= OPEN:
                return self._sizes[phase], OPEN
            if left := int(np.maximum(ends - outputs, 0).sum()) - self._done(live, outputs, ends):
                return self._sizes[phase], left
        return self._sizes[-1], OPEN

    def _done(self, live: Int64Array, outputs: Int64Array, ends: Int64Array) -> int:
        """Return the number of outputs up to the ends that are done."""
        done = self._lanes.done
        if done is None:
            return 0
        return sum(done[lane].count(*some) for lane, *some in np.stack([live, outputs, ends], axis=1).tolist())
