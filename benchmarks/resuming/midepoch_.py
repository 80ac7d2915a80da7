"""midepoch on the Arrow files in place. The state of rank 0 restores every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import midepoch
import midepoch.loader
import midepoch.open
from benchmarks.data import Data
from benchmarks.resuming import SEED, Topology


class Loader:
    def __init__(self, data: Data, topology: Topology) -> None:
        dataset = midepoch.from_files(list(data.text.arrow)).shuffle(seed=SEED, scope="rows")
        self.loader = dataset.loader(topology.batch_size, num_workers=topology.workers)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> Loader:
    return Loader(data, topology)
