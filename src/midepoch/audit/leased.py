"""Counting the leases of an epoch, over the passes of all starts of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from midepoch.audit.leases import LeaseCounter, LeaseCounts, RankPass
from midepoch.audit.passes import Generation
from midepoch.order import Shard
from midepoch.order.intervals import Intervals


def count_leases(passes: Sequence[Generation]) -> LeaseCounts:
    """Count the leases of an epoch. ``passes``: all of its passes.

    Each rank takes leases at its own pace. Their passes are matched by stretches: each start of the run, and each load
    of a state, begins another stretch on all ranks.
    """
    of_rank: dict[tuple[tuple[int, int], int], list[tuple[int, str, RankPass]]] = defaultdict(list)
    for one in passes:
        for rank, number in one.numbers.items():
            of_rank[one.beginning[:2], rank].append((number, one.hows[rank], _of_rank(one, rank)))
    stretches: dict[tuple[tuple[int, int], int], list[RankPass]] = defaultdict(list)
    for (start, _), own in sorted(of_rank.items(), key=lambda item: item[0]):
        stretch = 0
        for place, (_, how, rank_pass) in enumerate(sorted(own, key=lambda each: each[0])):
            stretch += how != "on" and place > 0
            stretches[start, stretch].append(rank_pass)
    counter = LeaseCounter()
    for _, together in sorted(stretches.items(), key=lambda item: item[0]):
        counter.begin()
        for rank_pass in together:
            counter.add(rank_pass)
    return counter.counts()


def _of_rank(one: Generation, rank: int) -> RankPass:
    shape, shard, record = one.shape, Shard(rank, one.shape.ranks), one.leases.get(rank)
    plain = None
    if record is None and not one.lanes:
        amid = shape.amid
        plain = Intervals.from_positions(
            shard.positions(shape.start, one.made(rank))
            if amid is None
            else amid.done.remaining(shard.positions(amid.start, amid.done.before(one.made(rank))))
        )
    return RankPass(shape.start, one.end, shard, shape.global_batch, record, plain, one.done, one.excluded_places)
