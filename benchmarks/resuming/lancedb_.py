"""LanceDB's StreamingDataset under its StreamingDataLoader; the states of all ranks are merged, as its manual says.

24 splits: the ranks and workers measured here divide them, and the splits of a worker divide the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmarks.contenders import lancedb_ as contender
from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology

SPLITS = 24


class Loader:
    def __init__(self, folder: Path, topology: Topology, rank: int) -> None:
        self.dataset = StreamingDataset(
            contender.table(folder, "text"),
            num_splits=SPLITS,
            shuffle_seed=SEED,
            rank=rank,
            world_size=topology.world_size,
        )
        self.loader = StreamingDataLoader(
            self.dataset, topology.batch_size, **contender.worker_options(topology.workers)
        )

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.dataset.state_dict()

    def load(self, states: list[Any]) -> None:
        self.dataset.load_state_dict(StreamingDataset.merge_state_dicts(states))


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(folder, topology, rank)
