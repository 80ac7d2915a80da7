"""One file per contender, all of the same shape.

`NAME`, `version()`, `prepare(data, folder)` (conversion: its time and bytes are reported, its speed is not charged) and
`ROUTES`: workload → route → a function of `(data, folder)` that yields how many rows each step handed over. The route
called `plain` is what a reader of the peer's manual would write; the others are the fastest its API offers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from benchmarks.data import Data

Route = Callable[[Data, Path], Iterator[int]]
Routes = Mapping[str, Mapping[str, Route]]

MODULES = {
    "limit": "limit",
    "midepoch": "midepoch_",
    "hf_dataset": "hf_dataset",
    "hf_iterable": "hf_iterable",
    "mosaic": "mosaic",
    "litdata": "litdata_",
    "litdata_parquet": "litdata_parquet",
    "grain": "grain_",
    "lancedb": "lancedb_",
    "tdu": "tdu",
    "webdataset": "webdataset_",
}
REFERENCES = ("limit", "midepoch")
PEERS = tuple(key for key in MODULES if key not in REFERENCES)


class Contender(Protocol):
    """What every module in this folder provides."""

    NAME: str
    ROUTES: Routes

    def version(self) -> str:
        """Released version of the package that was measured."""

    def prepare(self, data: Data, folder: Path) -> None:
        """Convert the data into `folder`, where the format of the package asks for it."""


def find(key: str) -> Contender:
    """The contender of this key; an ImportError from its package is left to the caller to show."""
    if key not in MODULES:
        raise ValueError(f"unknown contender {key!r}, expected one of {', '.join(MODULES)}")
    module: ModuleType = importlib.import_module(f"benchmarks.contenders.{MODULES[key]}")
    return cast(Contender, module)
