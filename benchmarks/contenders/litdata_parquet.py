"""LitData on Parquet files as they are, after an index has been written beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import ParquetLoader

from benchmarks.contenders.common import BATCH, cut, package_version, walk, walk_lists, walk_tensors
from benchmarks.data import Data

NAME = "LitData on Parquet"


def version() -> str:
    return package_version("litdata")


def prepare(data: Data, folder: Path) -> None:
    """The Parquet shards stay where they are (linked here, as LitData writes its index into their folder)."""
    for name, files in (("text", data.text), ("tokens", data.tokens)):
        (folder / name).mkdir()
        for path in map(Path, files.parquet):
            (folder / name / path.name).hardlink_to(path)
        litdata.index_parquet_dataset(str(folder / name))


def _open(folder: Path, name: str, *, shuffle: bool, low_memory: bool) -> litdata.StreamingDataset:
    columns = ["tokens"] if name == "tokens" else None
    loader = ParquetLoader(low_memory=low_memory, pre_load_chunk=not low_memory, columns=columns)
    return litdata.StreamingDataset(str(folder / name), item_loader=loader, shuffle=shuffle, seed=1)


def _rows(data: Data, folder: Path, *, shuffle: bool, low_memory: bool = True) -> Iterator[int]:
    return walk(_open(folder, "text", shuffle=shuffle, low_memory=low_memory))


def _identity(rows: list[Any]) -> list[Any]:
    return rows


def _loader(data: Data, folder: Path, *, shuffle: bool, low_memory: bool = True) -> Iterator[int]:
    dataset = _open(folder, "text", shuffle=shuffle, low_memory=low_memory)
    return walk_lists(litdata.StreamingDataLoader(dataset, batch_size=1_000, collate_fn=_identity))


def _stack(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.array([row["tokens"] for row in rows], dtype=np.int32))


def _tokens(data: Data, folder: Path, *, workers: int, low_memory: bool = True, size: int = BATCH) -> Iterator[int]:
    options: dict[str, Any] = {"multiprocessing_context": "spawn"} if workers else {}  # Polars and fork do not mix
    loader = litdata.StreamingDataLoader(
        _open(folder, "tokens", shuffle=True, low_memory=low_memory),
        batch_size=size,
        num_workers=workers,
        collate_fn=_stack,
        **options,
    )
    return walk_tensors(cut(loader))


ROUTES = {
    "text_in_order": {
        "plain": partial(_rows, shuffle=False),
        "whole file in memory": partial(_rows, shuffle=False, low_memory=False),
        "loader(1000)": partial(_loader, shuffle=False),
    },
    "text_shuffled": {
        "plain": partial(_rows, shuffle=True),
        "whole file in memory": partial(_rows, shuffle=True, low_memory=False),
        "loader(1000)": partial(_loader, shuffle=True),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens, workers=0),
        "whole file in memory": partial(_tokens, workers=0, low_memory=False),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens, workers=2),
        "whole file in memory(1024), cut": partial(_tokens, workers=2, low_memory=False, size=1_024),
    },
    "parquet_window_w0": {
        "plain": partial(_tokens, workers=0),
        "whole file in memory": partial(_tokens, workers=0, low_memory=False),
        "whole file in memory(1024), cut": partial(_tokens, workers=0, low_memory=False, size=1_024),
    },
    "parquet_window_w2": {
        "plain": partial(_tokens, workers=2),
        "whole file in memory": partial(_tokens, workers=2, low_memory=False),
        "whole file in memory(1024), cut": partial(_tokens, workers=2, low_memory=False, size=1_024),
    },
}
