"""Resuming beside the peers: one file per library, all of the same shape.

Each module has `open_loader(data, folder, topology, rank)`: the shuffled text rows as batches of ids, saved and
restored in the way that the library documents. The data is that of `contenders/`, converted by the contender of the
same key.

- `cases` lists the changes of topology and counts lost and repeated rows.
- `rank` is one rank in one process. `launch` starts the ranks of a leg.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.data import Data

SEED = 1
MODULES = {
    "midepoch": "midepoch_",
    "hf_dataset": "hf_dataset",
    "hf_iterable": "hf_iterable",
    "mosaic": "mosaic",
    "litdata": "litdata_",
    "grain": "grain_",
    "lancedb": "lancedb_",
}


@dataclass(frozen=True)
class Topology:
    """Cluster of one leg. `batch_size` is that of a rank; `workers` are those of each rank."""

    world_size: int
    workers: int
    batch_size: int

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size


class Resumable(Protocol):
    """Loader of one rank."""

    def batches(self) -> Iterator[list[int]]:
        """Iterate the ids of each batch, from the loaded state to the end of the epoch."""

    def state(self) -> Any:
        """Return the picklable state after the last batch that was delivered."""

    def load(self, states: list[Any]) -> None:
        """Restore from the states that all ranks of the leg before saved, in the order of ranks."""


class Module(Protocol):
    """Contents of each module in this folder."""

    def open_loader(self, data: Data, folder: Path, topology: Topology, rank: int) -> Resumable:
        """Open the text rows, shuffled by `SEED`, for one rank."""


def find(key: str) -> Module:
    """Return the module of this contender."""
    if key not in MODULES:
        raise ValueError(f"contender must be one of {', '.join(MODULES)}, got {key!r}")
    return cast(Module, importlib.import_module(f"benchmarks.resuming.{MODULES[key]}"))


@dataclass(frozen=True)
class StatefulLoader:
    """Loader with `state_dict` and `load_state_dict`, whose batches have a tensor `id`.

    `rank` loads its own state, or that of rank 0 where the leg before had fewer ranks. None: the state of rank 0
    restores every rank.
    """

    loader: Any
    rank: int | None = None

    def batches(self) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["id"].tolist()

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, states: list[Any]) -> None:
        own = self.rank is not None and self.rank < len(states)
        self.loader.load_state_dict(states[self.rank] if own else states[0])
