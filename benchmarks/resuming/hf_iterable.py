"""`datasets.IterableDataset` with a shuffle buffer, split by node, under torchdata's StatefulDataLoader.

24 shards, so that every number of ranks and workers measured here divides them, as its manual asks for. The buffer is
filled from 3 of them: a worker with fewer shards than that (10 by default) raises an IndexError at a resume in 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.common import BUFFER
from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology, own

SHARDS = 24
BUFFER_SHARDS = 3


class Loader:
    def __init__(self, data: Data, topology: Topology, rank: int) -> None:
        self.rank = rank
        stored = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in data.text.arrow])
        shuffled = stored.to_iterable_dataset(num_shards=SHARDS).shuffle(
            seed=SEED, buffer_size=BUFFER, max_buffer_input_shards=BUFFER_SHARDS
        )
        dataset = split_dataset_by_node(shuffled, rank=rank, world_size=topology.world_size)
        self.loader = StatefulDataLoader(dataset, batch_size=topology.batch_size, num_workers=topology.workers)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(own(states, self.rank))


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(data, topology, rank)
