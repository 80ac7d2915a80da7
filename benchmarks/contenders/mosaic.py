"""Mosaic Streaming: MDS shards, its own shuffle, its own loader; or plain indexing, which it also offers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import torchvision  # noqa: F401 - imported by streaming, which needs it for images only
except RuntimeError:
    # torchvision built for CUDA beside a CPU build of torch: declaring the operators it looks for lets it import.
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming
from streaming.base.util import clean_stale_shared_memory

from benchmarks.contenders.common import BATCH, chunk_bytes, cut, package_version, walk, walk_tensors
from benchmarks.data import TOKENS_PER_ROW, Data

NAME = "Mosaic Streaming"


def version() -> str:
    return package_version("mosaicml-streaming")


def prepare(data: Data, folder: Path) -> None:
    size = chunk_bytes(data.text)
    columns = {"id": "int", "text": "str"}
    with streaming.MDSWriter(out=str(folder / "text"), columns=columns, size_limit=size) as writer:
        for batch in data.text.batches():
            for row in batch.to_pylist():
                writer.write(row)
    columns = {"tokens": f"ndarray:int32:{TOKENS_PER_ROW}"}
    with streaming.MDSWriter(out=str(folder / "tokens"), columns=columns) as writer:
        for batch in data.tokens.batches():
            values = batch.column("tokens").flatten().to_numpy().reshape(-1, TOKENS_PER_ROW)
            for row in values:
                writer.write({"tokens": row})


def _open(folder: Path, name: str, *, shuffle: bool, batch_size: int = BATCH) -> streaming.StreamingDataset:
    clean_stale_shared_memory()
    return streaming.StreamingDataset(local=str(folder / name), shuffle=shuffle, shuffle_seed=1, batch_size=batch_size)


def _plain(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_open(folder, "text", shuffle=shuffle))


def _indexed(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    """`dataset[i]` in a loop: no thread that runs ahead, hence no switch per row."""
    dataset = _open(folder, "text", shuffle=False)
    order = range(len(dataset))
    if shuffle:
        order = np.random.default_rng(1).permutation(len(dataset)).tolist()
    return walk(dataset[i] for i in order)


def _shards(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    """The shard readers below the dataset, which skip its bookkeeping per row."""
    dataset = _open(folder, "text", shuffle=False)
    return walk(_shard_rows(dataset, shuffle=shuffle))


def _shard_rows(dataset: streaming.StreamingDataset, *, shuffle: bool) -> Iterator[Any]:
    rng = np.random.default_rng(1)
    shards = dataset.shards
    for number in rng.permutation(len(shards)) if shuffle else range(len(shards)):
        shard = shards[number]
        for row in rng.permutation(shard.size).tolist() if shuffle else range(shard.size):
            yield shard[row]


def _tokens_loader(data: Data, folder: Path, *, workers: int, size: int = BATCH) -> Iterator[int]:
    dataset = _open(folder, "tokens", shuffle=True, batch_size=size)
    loader = streaming.StreamingDataLoader(dataset, batch_size=size, num_workers=workers)
    return walk_tensors(cut(batch["tokens"] for batch in loader))


def _tokens_indexed(data: Data, folder: Path) -> Iterator[int]:
    dataset = _open(folder, "tokens", shuffle=False)
    order = np.random.default_rng(1).permutation(len(dataset)).tolist()
    return walk_tensors(
        torch.from_numpy(np.stack([dataset[i]["tokens"] for i in order[k : k + BATCH]]))
        for k in range(0, len(order), BATCH)
    )


class _Indexed:
    """The map-style face of a streaming dataset, for the ordinary DataLoader."""

    def __init__(self, folder: Path) -> None:
        self.dataset = _open(folder, "tokens", shuffle=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]["tokens"]


def _stack(rows: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


def _tokens_map_style(data: Data, folder: Path, *, workers: int, size: int = BATCH) -> Iterator[int]:
    loader = torch.utils.data.DataLoader(
        _Indexed(folder), batch_size=size, shuffle=True, num_workers=workers, collate_fn=_stack
    )
    return walk_tensors(cut(loader))


ROUTES = {
    "text_in_order": {
        "plain": partial(_plain, shuffle=False),
        "dataset[i]": partial(_indexed, shuffle=False),
        "shard[i]": partial(_shards, shuffle=False),
    },
    "text_shuffled": {
        "plain": partial(_plain, shuffle=True),
        "dataset[i]": partial(_indexed, shuffle=True),
        "shard[i], within shard": partial(_shards, shuffle=True),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens_loader, workers=0),
        "dataset[i], stacked": _tokens_indexed,
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens_loader, workers=2),
        "loader(1024), cut": partial(_tokens_loader, workers=2, size=1_024),
        "dataset[i] by DataLoader(1024), cut": partial(_tokens_map_style, workers=2, size=1_024),
    },
}
