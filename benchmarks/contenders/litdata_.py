"""LitData in its own optimised format: shuffled chunks, and a permutation inside each chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

import litdata
import torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter

from benchmarks.contenders.common import BATCH, chunk_bytes, cut, package_version, walk, walk_lists, walk_tensors
from benchmarks.data import TOKENS_PER_ROW, Data

NAME = "LitData"


def version() -> str:
    return package_version("litdata")


def prepare(data: Data, folder: Path) -> None:
    """Chunks of 64 MB or less. Its writer is used directly: `optimize` starts processes around it."""
    text = BinaryWriter(str(folder / "text"), chunk_bytes=chunk_bytes(data.text))
    index = 0
    for batch in data.text.batches():
        for row in batch.to_pylist():
            text.add_item(index, row)
            index += 1
    text.done()
    text.merge()
    tokens = BinaryWriter(
        str(folder / "tokens"), chunk_size=TOKENS_PER_ROW * 16_384, item_loader=TokensLoader(TOKENS_PER_ROW)
    )
    index = 0
    for batch in data.tokens.batches():
        values = batch.column("tokens").flatten().to_numpy().reshape(-1, TOKENS_PER_ROW)
        for row in values:
            tokens.add_item(index, torch.from_numpy(row.copy()))
            index += 1
    tokens.done()
    tokens.merge()


def _open(folder: Path, *, shuffle: bool, **options: Any) -> litdata.StreamingDataset:
    return litdata.StreamingDataset(str(folder / "text"), shuffle=shuffle, seed=1, **options)


def _plain(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_open(folder, shuffle=shuffle))


def _decode(data: Data, folder: Path, *, shuffle: bool, rows: int | str) -> Iterator[int]:
    """Decode many rows at a time; with a shuffle LitData then permutes inside windows of that size."""
    return walk(_open(folder, shuffle=shuffle, batch_decode=rows))


def _identity(rows: list[Any]) -> list[Any]:
    return rows


def _loader(data: Data, folder: Path, *, shuffle: bool, size: int, rows: int | str = "auto") -> Iterator[int]:
    dataset = _open(folder, shuffle=shuffle, batch_decode=rows)
    return walk_lists(litdata.StreamingDataLoader(dataset, batch_size=size, collate_fn=_identity))


def _slices(data: Data, folder: Path) -> Iterator[int]:
    dataset = _open(folder, shuffle=False)
    return walk_lists(dataset[k : k + 1_000] for k in range(0, len(dataset), 1_000))


def _tokens(folder: Path) -> litdata.StreamingDataset:
    return litdata.StreamingDataset(
        str(folder / "tokens"), item_loader=TokensLoader(TOKENS_PER_ROW), shuffle=True, seed=1
    )


def _tokens_loader(data: Data, folder: Path, *, workers: int, size: int = BATCH) -> Iterator[int]:
    loader = litdata.StreamingDataLoader(_tokens(folder), batch_size=size, num_workers=workers)
    return walk_tensors(cut(loader))


def _tokens_stacked(data: Data, folder: Path) -> Iterator[int]:
    """Iterate the dataset and stack: no loader, no collate."""
    return walk_tensors(_stacks(_tokens(folder)))


def _stacks(dataset: litdata.StreamingDataset) -> Iterator[torch.Tensor]:
    rows: list[torch.Tensor] = []
    for row in dataset:
        rows.append(row)
        if len(rows) == BATCH:
            yield torch.stack(rows)
            rows = []
    if rows:
        yield torch.stack(rows)


ROUTES = {
    "text_in_order": {
        "plain": partial(_plain, shuffle=False),
        "batch_decode=all": partial(_decode, shuffle=False, rows="all"),
        "slices of 1000": _slices,
        "loader(1000)": partial(_loader, shuffle=False, size=1_000),
    },
    "text_shuffled": {
        "plain": partial(_plain, shuffle=True),
        "batch_decode=all": partial(_decode, shuffle=True, rows="all"),
        "loader(1000)": partial(_loader, shuffle=True, size=1_000),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens_loader, workers=0),
        "loader(1024), cut": partial(_tokens_loader, workers=0, size=1_024),
        "dataset, stacked": _tokens_stacked,
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens_loader, workers=2),
        "loader(1024), cut": partial(_tokens_loader, workers=2, size=1_024),
    },
}
