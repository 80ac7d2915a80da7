"""Mosaic's StreamingDataLoader. The state of rank 0 restores every rank."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contenders import mosaic as contender
from benchmarks.data import Data
from benchmarks.resuming import SEED, StatefulLoader, Topology


def open_loader(data: Data, folder: Path, topology: Topology, rank: int) -> StatefulLoader:
    size = topology.batch_size
    contender.clean_stale_shared_memory()
    dataset = contender.streaming.StreamingDataset(
        local=str(folder / "text"), shuffle=True, shuffle_seed=SEED, batch_size=size
    )
    loader = contender.streaming.StreamingDataLoader(dataset, batch_size=size, num_workers=topology.workers)
    return StatefulLoader(loader)
