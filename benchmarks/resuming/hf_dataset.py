"""`datasets.Dataset` under torchdata's StatefulDataLoader, sharded by its StatefulDistributedSampler.

Each rank saves its own state and loads it again. Neither library describes a resume on another number of ranks: ranks
that had no state load that of rank 0, which is the same but for the random generator of the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology, own


class Loader:
    def __init__(self, data: Data, topology: Topology, rank: int) -> None:
        self.rank = rank
        dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in data.text.arrow])
        sampler = StatefulDistributedSampler(
            dataset, num_replicas=topology.world_size, rank=rank, shuffle=True, seed=SEED
        )
        self.loader = StatefulDataLoader(
            dataset, batch_size=topology.batch_size, sampler=sampler, num_workers=topology.workers
        )

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(own(states, self.rank))


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(data, topology, rank)
