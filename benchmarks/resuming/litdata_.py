"""LitData's StreamingDataLoader. Its state counts the rows of all ranks, and restores any topology."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import litdata

from benchmarks.data import Data
from benchmarks.resuming import SEED, StatefulLoader, Topology


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> StatefulLoader:
    dataset = litdata.StreamingDataset(str(folder / "text"), shuffle=True, seed=SEED)
    loader = litdata.StreamingDataLoader(dataset, batch_size=topology.batch_size, num_workers=topology.workers)
    return StatefulLoader(loader, rank)
