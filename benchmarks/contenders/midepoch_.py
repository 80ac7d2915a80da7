"""midepoch itself, on the Arrow and the Parquet files as they are."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import midepoch
from benchmarks.contenders.common import BATCH, package_version, walk, walk_lists, walk_tensors
from benchmarks.data import Data

NAME = "midepoch"


def version() -> str:
    try:
        return package_version("midepoch")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "source tree"


def prepare(data: Data, folder: Path) -> None:
    """Nothing to convert; the first open builds the index."""
    midepoch.from_files(list(data.text.arrow))
    midepoch.from_files(list(data.tokens.arrow))


def _rows(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    dataset = midepoch.from_files(list(data.text.arrow))
    return walk(dataset.shuffle(seed=1, scope="rows") if shuffle else dataset)


def _arrow(data: Data, folder: Path, *, shuffle: bool, size: int) -> Iterator[int]:
    dataset = midepoch.from_files(list(data.text.arrow)).with_format("arrow")
    ordered = dataset.shuffle(seed=1, scope="rows") if shuffle else dataset
    return walk_lists(table.to_pylist() for table in ordered.iter(size))


def token_dataset(data: Data) -> Any:
    """The shuffled token dataset all loader measurements share."""
    dataset = midepoch.from_files(list(data.tokens.arrow)).select_columns(["tokens"])
    return dataset.shuffle(seed=1, scope="rows").with_format("torch")


def _loader(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    loader = token_dataset(data).loader(batch_size=BATCH, num_workers=workers)
    return walk_tensors(batch["tokens"] for batch in loader)


def burn(batch: dict[str, Any]) -> dict[str, Any]:
    """A map that costs 1 ms of CPU per batch and changes nothing."""
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return batch


def _mapped(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    dataset = token_dataset(data).map(burn, batched=True, batch_size=BATCH)
    loader = dataset.loader(batch_size=BATCH, num_workers=workers)
    return walk_tensors(batch["tokens"] for batch in loader)


def _parquet(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    # A new folder each time: blocks that an earlier run left decoded would be a head start.
    os.environ["MIDEPOCH_CACHE"] = cache = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    dataset = midepoch.from_files(list(data.tokens.parquet)).select_columns(["tokens"])
    loader = dataset.shuffle(seed=1, scope="window").with_format("torch").loader(BATCH, num_workers=workers)
    return walk_tensors(batch["tokens"] for batch in loader)


ROUTES = {
    "text_in_order": {
        "plain": partial(_rows, shuffle=False),
        "arrow iter(1000).to_pylist": partial(_arrow, shuffle=False, size=1_000),
    },
    "text_shuffled": {
        "plain": partial(_rows, shuffle=True),
        "arrow iter(1000).to_pylist": partial(_arrow, shuffle=True, size=1_000),
    },
    "tokens_shuffled_w0": {"plain": partial(_loader, workers=0)},
    "tokens_shuffled_w2": {"plain": partial(_loader, workers=2)},
    "tokens_map1ms_w0": {"plain": partial(_mapped, workers=0)},
    "tokens_map1ms_w2": {"plain": partial(_mapped, workers=2)},
    "parquet_window_w0": {"plain": partial(_parquet, workers=0)},
    "parquet_window_w2": {"plain": partial(_parquet, workers=2)},
}
