"""Runs with leases that are killed at random points: nothing is skipped, and nothing is acknowledged twice.

A kill is what it leaves behind: the states that were saved last. What was acknowledged after them is delivered again,
on another number of ranks. ``-m slow`` for 10,000 kills.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.loader.leases import Lease
from midepoch.loader.leasing import LeaseItems
from test_conformance import IN_LANES, PIPELINES, SHARDS, unrepeated

ONE_LANE = ["take", "skip", "zip"]  # and all that follow are split among ranks, whatever the number of lanes
NAMES = [name for name in PIPELINES if name not in SHARDS]
TOKENS = {"batch_size": None, "max_tokens": 60, "bucket_window": 12, "length": "tokens"}


def keys_of(batch: Any, name: str) -> list[str]:
    """Return a name of each output in a batch. Rows are known by their number, other outputs by all they have."""
    columns = batch if isinstance(batch, dict) else {name: batch[name] for name in batch.schema.names}
    lists = {name: column.tolist() if hasattr(column, "tolist") else list(column) for name, column in columns.items()}
    if name not in IN_LANES:
        return [str(int(i)) for i in lists.get("id", lists.get("n", ()))]
    rows = zip(*(lists[column] for column in sorted(lists)), strict=True)
    return [repr(row) for row in rows]


class Rank:
    """One rank of a run, in its lease() block."""

    def __init__(self, loader: midepoch.Loader, name: str) -> None:
        self.loader, self.name, self.stack = loader, name, ExitStack()
        self.held: list[Lease] = []
        self.over = loader.epoch > 0  # the state was that after the last acknowledgement of the epoch
        if not self.over:
            self.items = self._enter()

    def _enter(self) -> LeaseItems:
        return self.stack.enter_context(self.loader.lease())

    def take(self) -> None:
        lease = None if self.over else next(self.items, None)
        self.over = lease is None or (not self.held and self.loader.epoch > 0)  # the first of the next epoch
        if lease is not None and not self.over:
            self.held.append(lease)

    def ack(self, draw: random.Random) -> list[str]:
        """Acknowledge one of those that are held, in some way. Return its outputs."""
        lease = self.held.pop(draw.randrange(len(self.held)))
        rejected = draw.random() < 0.2
        by_id = draw.random() < 0.5
        assert self.loader.ack(lease.id if by_id else lease, rejected=rejected)
        assert not (lease.reject() if rejected else lease.ack())  # a retry
        return keys_of(lease.batch, self.name)

    def leave(self) -> None:
        """Leave the block and begin another one, which delivers what was held again."""
        self.stack.close()
        self.stack, self.over = ExitStack(), (self.over and not self.held) or self.loader.epoch > 0
        self.held = []
        if not self.over:
            self.items = self._enter()


def simulate(name: str, open_ds: Callable[[], midepoch.Dataset], seed: int, options: dict[str, Any]) -> int:
    """Kill a run several times, on changing numbers of ranks, and complete it. Return the number of kills."""
    draw = random.Random(f"{name} {seed}")
    lanes = 1 if name in ONE_LANE else draw.randint(1, 4)

    def make(size: int, rank: int, world: int) -> midepoch.Loader:
        ds = PIPELINES[name](open_ds())
        ds = ds.with_lanes(lanes) if name in IN_LANES else ds
        return ds.loader(**{"batch_size": size, **options}, rank=rank, world_size=world, last_batch="uneven")

    expected = Counter(key for batch in make(1, 0, 1) for key in keys_of(batch, name))
    states: Any = None
    kept: list[str] = []
    kills = draw.randint(2, 6)
    for attempt in range(kills + 1):
        world, last = draw.randint(1, 4), attempt == kills
        loaders = [make(draw.randint(1, 5), rank, world) for rank in range(world)]
        size = loaders[0].batch_size
        loaders = [make(size or 1, rank, world) for rank in range(world)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states if len(states) > 1 else states[0])
        ranks = [Rank(loader, name) for loader in loaders]
        acked = list(kept)
        for _ in range(draw.randint(0, 40)):
            rank, action = draw.choice(ranks), draw.random()
            if action < 0.5:
                rank.take()
            elif action < 0.85 and rank.held:
                acked += rank.ack(draw)
            elif action < 0.9:
                rank.leave()
            elif action > 0.93:
                states, kept = json.loads(json.dumps([one.state_dict() for one in loaders])), list(acked)
        while last and not all(rank.over and not rank.held for rank in ranks):
            rank = draw.choice(ranks)
            if rank.held and draw.random() < 0.6:
                acked += rank.ack(draw)
            else:
                rank.take()
        if last:
            assert Counter(acked) == expected, (name, seed)
        for rank in ranks:
            rank.stack.close()
        if last:
            assert {one.epoch for one in loaders} == {1}
    return kills


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    """A new dataset of the files, which are opened once: that is a fifth of the time of a resume."""
    pipeline = midepoch.from_files(small_files).pipeline
    return lambda: midepoch.Dataset(pipeline)


@pytest.mark.parametrize("name", unrepeated(NAMES, besides=["torch", "plain schedule"]))
def test_nothing_is_skipped_or_acknowledged_twice(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    assert simulate(name, open_ds, 0, {}) >= 2


@pytest.mark.parametrize("name", ["rows", "window", "map"])
def test_batches_by_tokens_are_leased(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    assert sum(simulate(name, open_ds, seed, TOKENS) for seed in range(2)) >= 4


@pytest.mark.parametrize("options", [{"batch_size": 4}, {**TOKENS, "max_tokens": 20}], ids=["rows", "tokens"])
@pytest.mark.parametrize("acks", [(2, 0), (0, 2), (99, 0), (0, 99), (2, 1), (0, 0)], ids=str)
def test_a_rank_that_has_acknowledged_nothing(
    acks: tuple[int, int], options: dict[str, Any], open_ds: Callable[[], midepoch.Dataset]
) -> None:
    def make(rank: int, ranks: int) -> midepoch.Loader:
        return open_ds().shuffle(seed=1).loader(**options, rank=rank, world_size=ranks, last_batch="uneven")

    acked, states = [], []
    for rank, count in enumerate(acks):
        loader = make(rank, 2)
        with loader.lease() as items:
            for lease in islice(items, count):
                acked += lease.batch["id"].tolist()
                assert lease.ack()
        states.append(loader.state_dict())
    assert 0 < len(acked) < 37 or acks == (0, 0)
    for ranks in (1, 2, 3):
        rest = []
        for rank in range(ranks):
            resumed = make(rank, ranks)
            resumed.load_state_dict(states)
            rest += [row for batch in resumed for row in batch["id"].tolist()]
        assert sorted(acked + rest) == list(range(37))


@pytest.mark.slow
def test_ten_thousand_kills(open_ds: Callable[[], midepoch.Dataset]) -> None:
    draw, kills, seed = np.random.default_rng(0), 0, 100
    while kills < 10_000:
        seed += 1
        kills += simulate(NAMES[draw.integers(len(NAMES))], open_ds, seed, {})
        kills += simulate(["rows", "window", "map"][seed % 3], open_ds, seed, TOKENS)
    assert kills >= 10_000
