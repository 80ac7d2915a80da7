"""Grain's ElasticIterator over ArrayRecord files. The state of any shard restores every shard.

It batches by the *global* batch size, and leaves out a last batch that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain

from benchmarks.contenders import grain_ as contender
from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology


class Loader:
    def __init__(self, folder: Path, topology: Topology, rank: int) -> None:
        dataset = (
            grain.MapDataset.source(contender.open_source(folder, "text")).shuffle(seed=SEED).map(contender.decode)
        )
        workers = grain.MultiprocessingOptions(num_workers=topology.workers) if topology.workers else None
        elastic = grain.experimental.ElasticIterator(
            dataset,
            topology.global_batch,
            grain.sharding.ShardOptions(shard_index=rank, shard_count=topology.world_size),
            multiprocessing_options=workers,
        )
        self.iterator = iter(elastic)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.iterator:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.iterator.get_state()

    def load(self, states: list[Any]) -> None:
        self.iterator.set_state(states[0])


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(folder, topology, rank)
