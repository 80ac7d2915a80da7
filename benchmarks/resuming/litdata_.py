"""LitData's StreamingDataLoader. Its state counts the rows of all ranks, and restores any topology."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import litdata

from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology, own


class Loader:
    def __init__(self, folder: Path, topology: Topology, rank: int) -> None:
        self.rank = rank
        dataset = litdata.StreamingDataset(str(folder / "text"), shuffle=True, seed=SEED)
        self.loader = litdata.StreamingDataLoader(dataset, batch_size=topology.batch_size, num_workers=topology.workers)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(own(states, self.rank))


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(folder, topology, rank)
