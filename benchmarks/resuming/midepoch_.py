"""midepoch on the Arrow files in place. The state of rank 0 restores every rank."""

from __future__ import annotations

from pathlib import Path

import midepoch
import midepoch.loader
import midepoch.open
from benchmarks.data import Data
from benchmarks.resuming import SEED, StatefulLoader, Topology


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> StatefulLoader:
    dataset = midepoch.from_files(list(data.text.arrow)).shuffle(seed=SEED, scope="rows")
    return StatefulLoader(dataset.loader(topology.batch_size, num_workers=topology.workers))
