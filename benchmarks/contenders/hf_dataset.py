"""`datasets.Dataset`: map-style, on the Arrow files as they are.

`flatten_indices()` after a shuffle is left out: it writes the whole dataset again, and again for every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.contenders.common import (
    BATCH,
    arrow_tokens,
    cut,
    package_version,
    rows_of,
    walk,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import Data, Files

NAME = "datasets Dataset"


def version() -> str:
    return package_version("datasets")


def prepare(data: Data, folder: Path) -> None:
    """Nothing to convert."""


def _open(files: Files, *, shuffle: bool) -> datasets.Dataset:
    whole = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files.arrow])
    return whole.shuffle(seed=1, keep_in_memory=True) if shuffle else whole


def _plain(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_open(data.text, shuffle=shuffle))


def _columns(data: Data, folder: Path, *, shuffle: bool, size: int) -> Iterator[int]:
    return walk_lists(rows_of(columns) for columns in _open(data.text, shuffle=shuffle).iter(batch_size=size))


def _arrow(data: Data, folder: Path, *, shuffle: bool, size: int) -> Iterator[int]:
    tables = _open(data.text, shuffle=shuffle).with_format("arrow").iter(batch_size=size)
    return walk_lists(table.to_pylist() for table in tables)


def _arrow_columns(data: Data, folder: Path, *, shuffle: bool, size: int) -> Iterator[int]:
    tables = _open(data.text, shuffle=shuffle).with_format("arrow").iter(batch_size=size)
    return walk_lists(rows_of(table.to_pydict()) for table in tables)


def _getitems(data: Data, folder: Path) -> Iterator[int]:
    dataset = _open(data.text, shuffle=False)
    order = np.random.default_rng(1).permutation(len(dataset))
    return walk_lists(dataset.__getitems__(order[k : k + 1_000].tolist()) for k in range(0, len(order), 1_000))


def _arrow_index(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    dataset = _open(data.text, shuffle=False).with_format("arrow")
    order = np.random.default_rng(1).permutation(len(dataset))
    return walk_lists(dataset[order[k : k + size]].to_pylist() for k in range(0, len(order), size))


def _tokens(files: Files, form: str) -> datasets.Dataset:
    # The numpy format makes int64 of integers unless told otherwise.
    options = {"dtype": np.int32} if form == "numpy" else {}
    return _open(files, shuffle=False).select_columns(["tokens"]).with_format(form, **options)


def _token_iter(data: Data, folder: Path, *, form: str, size: int) -> Iterator[int]:
    batches = _tokens(data.tokens, form).shuffle(seed=1, keep_in_memory=True).iter(batch_size=size)
    if form == "arrow":
        return walk_tensors(cut(map(arrow_tokens, batches)))
    return walk_tensors(cut(torch.as_tensor(batch["tokens"]) for batch in batches))


def _token_loader(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    # The torch format makes int64 of integers unless told otherwise.
    dataset = _open(data.tokens, shuffle=False).select_columns(["tokens"]).with_format("torch", dtype=torch.int32)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
    return walk_tensors(batch["tokens"] for batch in loader)


def _stack_numpy(batch: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(batch["tokens"])


def _token_batches(data: Data, folder: Path, *, workers: int, form: str, size: int) -> Iterator[int]:
    """A batch sampler, so that a worker answers a whole batch with one `dataset[list]`."""
    dataset = _tokens(data.tokens, form)
    sampler = BatchSampler(RandomSampler(dataset), batch_size=size, drop_last=False)
    collate = arrow_tokens if form == "arrow" else _stack_numpy
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers, collate_fn=collate)
    return walk_tensors(cut(loader))


ROUTES = {
    "text_in_order": {
        "plain": partial(_plain, shuffle=False),
        "iter(1000)": partial(_columns, shuffle=False, size=1_000),
        "arrow iter(1000).to_pylist": partial(_arrow, shuffle=False, size=1_000),
        "arrow iter(1000), columns": partial(_arrow_columns, shuffle=False, size=1_000),
    },
    "text_shuffled": {
        "plain": partial(_plain, shuffle=True),
        "iter(1000)": partial(_columns, shuffle=True, size=1_000),
        "__getitems__(1000)": _getitems,
        "arrow iter(1000).to_pylist": partial(_arrow, shuffle=True, size=1_000),
        "arrow iter(20000).to_pylist": partial(_arrow, shuffle=True, size=20_000),
        "arrow [20000].to_pylist": partial(_arrow_index, size=20_000),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_token_loader, workers=0),
        "numpy iter(64)": partial(_token_iter, form="numpy", size=BATCH),
        "arrow iter(64)": partial(_token_iter, form="arrow", size=BATCH),
        "arrow iter(1024), cut": partial(_token_iter, form="arrow", size=1_024),
        "arrow iter(16384), cut": partial(_token_iter, form="arrow", size=16_384),
        "arrow batch sampler(1024), cut": partial(_token_batches, workers=0, form="arrow", size=1_024),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_token_loader, workers=2),
        "numpy batch sampler(64)": partial(_token_batches, workers=2, form="numpy", size=BATCH),
        "arrow batch sampler(64)": partial(_token_batches, workers=2, form="arrow", size=BATCH),
        "arrow batch sampler(1024), cut": partial(_token_batches, workers=2, form="arrow", size=1_024),
        "arrow batch sampler(8192), cut": partial(_token_batches, workers=2, form="arrow", size=8_192),
    },
}
