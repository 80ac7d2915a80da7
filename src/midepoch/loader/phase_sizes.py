"""Batch sizes by the phases of a schedule: a batch has the size of the phase of its outputs, and those of one phase."""

from __future__ import annotations

import numpy as np

from midepoch.order import Shard
from midepoch.order.schedule import OPEN, Schedule
from midepoch.order.sizes import BatchSizes
from midepoch.pipeline.lanes import Lanes


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
        self._by_step = BatchSizes.of(schedule.batch_sizes(ranks))

    @property
    def step(self) -> int:
        """The number of steps of the epoch that the outputs so far have filled."""
        return self._by_step.step_at(int(self._lanes.outputs.sum()) // self._shards)

    def next(self) -> tuple[int, int]:
        """Return the size of the next batch, and the outputs that are left of its phase."""
        lanes = self._lanes
        live = np.flatnonzero(lanes.live)
        outputs = lanes.outputs[live]
        ended = (self._ends[live] <= outputs[:, None]).sum(axis=1)
        phase = int(ended.min(initial=len(self._sizes)))
        if phase >= len(self._sizes) or self._ends[0, phase] >= OPEN:
            return self._sizes[min(phase, len(self._sizes) - 1)], OPEN
        ends = self._ends[live, phase]
        left = int(np.maximum(ends - outputs, 0).sum())
        if lanes.done is not None:
            places = zip(live.tolist(), outputs.tolist(), ends.tolist(), strict=True)
            left -= sum(lanes.done[lane].count(first, end) for lane, first, end in places)
        return self._sizes[phase], left
