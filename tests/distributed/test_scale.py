"""A cluster that nobody tests on: 1,024 ranks with 8 workers each over 10⁹ rows, in arithmetic, with the real parts."""

from __future__ import annotations

import numpy as np
import pytest

from midepoch.order import Order, Selection, Shard, Shuffle, SourceLayout
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.plans import Plan

ROWS, RANKS, WORKERS, BATCH = 10**9 + 7, 1024, 8, 16


def plan_of(start: int, ranks: int, ends: str) -> Plan:
    return Plan.of(Cursor.at_row(0, LaneCursor(start)), ROWS, BATCH, ranks, ends)


@pytest.mark.parametrize("ends", ["drop", "pad", "uneven"])
def test_steps_are_cut_disjoint_complete_and_balanced(ends: str) -> None:
    plan, draw = plan_of(123_456_789, RANKS, ends), np.random.default_rng(1)
    steps = {0, 1, len(plan) - 1, *draw.integers(0, len(plan), 12).tolist()}
    for step in steps:
        first, stop = plan._bounds(step)
        shares = [Shard(rank, RANKS).positions(first, plan._reach(step)) for rank in range(RANKS)]
        assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(first, plan._reach(step)))
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= (ends == "uneven")
        assert step < len(plan) - 1 or stop == plan.end
    # A worker makes whole steps, each of which is one worker's.
    owners = [len(range(worker, len(plan), WORKERS)) for worker in range(WORKERS)]
    assert sum(owners) == len(plan)
    assert max(owners) - min(owners) <= 1


def test_an_epoch_on_changing_clusters_is_cut_without_gap_or_overlap() -> None:
    """By counting: over all ranks of all worlds, every position of the epoch is somebody's, and one's only."""
    draw, start = np.random.default_rng(2), 0
    counted = 0
    for ranks in (1024, 768, 1000, 1, 17, 1024):
        plan = plan_of(start, ranks, "uneven")
        steps = len(plan) if ranks == 1024 and start else int(draw.integers(1, len(plan)))
        stop = plan._bounds(steps - 1)[1]
        shares = np.array([Shard(r, ranks).before(stop) - Shard(r, ranks).before(plan.start) for r in range(ranks)])
        assert shares.sum() == stop - plan.start == plan.cursor(steps - 1).position - start
        assert shares.max() - shares.min() <= 1
        counted, start = counted + int(shares.sum()), plan.cursor(steps - 1).position
    assert counted == start == ROWS


@pytest.mark.parametrize("scope", ["rows", "window"])
def test_each_rank_finds_its_first_batch_by_itself(scope: str) -> None:
    """No rank computes anything of the others' rows; together they are the rows of an uncut run, each found again."""
    blocks = np.append(np.arange(0, ROWS, 100_000), ROWS)
    layout = SourceLayout(blocks, np.array([0, ROWS // 2, ROWS]))
    order = Order(Selection.of_ranges([(0, ROWS)]), Shuffle(5, scope, 64), lanes=RANKS).at(3, layout)
    plan = plan_of(700_000_001, RANKS, "drop")
    first, stop = 700_000_001, 700_000_001 + RANKS * BATCH
    found = np.concatenate([order.rows(plan.ask([0], Shard(rank, RANKS)).positions) for rank in range(RANKS)])
    assert len(np.unique(found)) == RANKS * BATCH
    assert found.min() >= 0 and found.max() < ROWS
    whole = order.rows(np.arange(first, stop))
    assert np.array_equal(np.sort(found), np.sort(whole))
    some = range(0, len(whole), 997)
    assert [order.positions_of(int(whole[k])).tolist() for k in some] == [[first + k] for k in some]
