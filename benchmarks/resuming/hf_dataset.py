"""`datasets.Dataset` under torchdata's StatefulDataLoader, sharded by its StatefulDistributedSampler.

Each rank saves its own state and loads it again. Neither library describes a resume on another number of ranks: ranks
that had no state load that of rank 0, which is the same but for the random generator of the workers.
"""

from __future__ import annotations

from pathlib import Path

import datasets
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.data import Data
from benchmarks.resuming import SEED, StatefulLoader, Topology


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> StatefulLoader:
    dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in data.text.arrow])
    sampler = StatefulDistributedSampler(dataset, num_replicas=topology.world_size, rank=rank, shuffle=True, seed=SEED)
    loader = StatefulDataLoader(dataset, batch_size=topology.batch_size, sampler=sampler, num_workers=topology.workers)
    return StatefulLoader(loader, rank)
