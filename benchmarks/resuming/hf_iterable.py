"""`datasets.IterableDataset` with a shuffle buffer, split by node, under torchdata's StatefulDataLoader.

24 shards, so that every number of ranks and workers measured here divides them, as its manual asks for. The buffer is
filled from 3 of them: a worker with fewer shards than that (10 by default) raises an IndexError at a resume in 5.2.
"""

from __future__ import annotations

from pathlib import Path

import datasets
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.contenders.common import BUFFER
from benchmarks.data import Data
from benchmarks.resuming import SEED, StatefulLoader, Topology

SHARDS = 24
BUFFER_SHARDS = 3


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> StatefulLoader:
    stored = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in data.text.arrow])
    shuffled = stored.to_iterable_dataset(num_shards=SHARDS).shuffle(
        seed=SEED, buffer_size=BUFFER, max_buffer_input_shards=BUFFER_SHARDS
    )
    dataset = split_dataset_by_node(shuffled, rank=rank, world_size=topology.world_size)
    loader = StatefulDataLoader(dataset, batch_size=topology.batch_size, num_workers=topology.workers)
    return StatefulLoader(loader, rank)
