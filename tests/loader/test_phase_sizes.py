"""Batch sizes by phases: what is counted again only at times is what would be counted at every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midepoch import Phase, Schedule
from midepoch.loader.plans import PhaseSizes
from midepoch.order import Shard
from midepoch.order.intervals import Intervals

SCHEDULE = Schedule(
    [
        Phase("short", {"a": 1}, tokens=96 * 8, sequence_length=8, global_batch_size=24),
        Phase("long", tokens=240 * 16, sequence_length=16, global_batch_size=48),
        Phase("rest", tokens=480 * 16, global_batch_size=12),
    ]
)


@pytest.mark.parametrize(("lanes", "shards"), [(1, 1), (3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_sizes_are_those_of_a_fresh_count_at_every_step(lanes: int, shards: int, seed: int) -> None:
    """Lanes take outputs in turn, some end before the others, and some of their outputs are not delivered."""
    generator = np.random.default_rng(seed)
    state: Any = SimpleNamespace(
        outputs=np.zeros(lanes, np.int64),
        live=[True] * lanes,
        done=[Intervals.from_positions(np.flatnonzero(generator.random(400) < 0.3)) for _ in range(lanes)],
        numbers=list(range(lanes)),
        share=SimpleNamespace(lanes=Shard(0, 1), shard=Shard(0, shards)),
    )
    ends = generator.integers(10, 400 // lanes, lanes)
    ends[0] = 400 // lanes
    kept = PhaseSizes(SCHEDULE, state)
    seen = set()
    while any(state.live):
        fresh_size, fresh_left = PhaseSizes(SCHEDULE, state).next()
        size, left = kept.next()
        full = size * shards
        assert (size, min(full, left)) == (fresh_size, min(full, fresh_left))
        seen.add(size)
        wanted = min(full, left)
        while wanted and any(state.live):
            lane = min((one for one in state.numbers if state.live[one]), key=lambda one: int(state.outputs[one]))
            wanted -= not state.done[lane].contains(state.outputs[[lane]])[0]
            state.outputs[lane] += 1
            state.live[lane] = bool(state.outputs[lane] < ends[lane])
    assert len(seen) > 1
