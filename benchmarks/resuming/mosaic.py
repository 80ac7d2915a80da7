"""Mosaic's StreamingDataLoader. The state of rank 0 restores every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contenders import mosaic as contender
from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology


class Loader:
    def __init__(self, folder: Path, topology: Topology) -> None:
        size = topology.batch_size
        contender.clean_stale_shared_memory()
        dataset = contender.streaming.StreamingDataset(
            local=str(folder / "text"), shuffle=True, shuffle_seed=SEED, batch_size=size
        )
        self.loader = contender.streaming.StreamingDataLoader(dataset, batch_size=size, num_workers=topology.workers)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(folder, topology)
