"""torch-dataloader-utils: Parquet as it is, shuffled by splits and a buffer of Arrow rows.

It hands a batch over in the order of the file, so a buffer no larger than a batch shuffles nothing: every buffer here
holds at least two batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.utils.data import DataLoader
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.splits import RoundRobinSplitStrategy

from benchmarks.contenders.common import (
    BATCH,
    BUFFER,
    LARGE_BUFFER,
    arrow_tokens,
    cut,
    decoded_tokens,
    package_version,
    rows_of,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import Data, Files

NAME = "torch-dataloader-utils"


def version() -> str:
    return package_version("torch-dataloader-utils")


def prepare(data: Data, folder: Path) -> None:
    """Nothing to convert."""


def _loader(files: Files, *, size: int, **options: Any) -> DataLoader[Any]:
    folder = str(Path(files.parquet[0]).parent)
    options.setdefault("num_workers", 0)
    loader, _dataset = StructuredDataset.create_dataloader(folder, "parquet", batch_size=size, **options)
    return loader


def _identity(batch: Any) -> Any:
    return batch


def _shuffle(buffer: int) -> dict[str, Any]:
    return {"shuffle": True, "shuffle_seed": 1, "shuffle_buffer_size": buffer} if buffer else {}


def _columns(data: Data, folder: Path, *, size: int, buffer: int = 0) -> Iterator[int]:
    loader = _loader(data.text, size=size, output_format="dict", collate_fn=_identity, **_shuffle(buffer))
    return walk_lists(rows_of(columns) for columns in loader)


def _arrow(data: Data, folder: Path, *, size: int, buffer: int = 0) -> Iterator[int]:
    loader = _loader(
        data.text, size=size, output_format="arrow", collate_fn=pa.RecordBatch.to_pylist, **_shuffle(buffer)
    )
    return walk_lists(loader)


def _tokens_plain(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    """Its torch format leaves list columns as Python lists, so the tensor has to be made of them."""
    import torch

    loader = _loader(data.tokens, size=BATCH, columns=["tokens"], num_workers=workers, **_shuffle(BUFFER))
    return walk_tensors(torch.tensor(batch["tokens"], dtype=torch.int32) for batch in loader)


def _tokens_arrow(data: Data, folder: Path, *, size: int, workers: int = 0, buffer: int = BUFFER) -> Iterator[int]:
    return _tokens(data, size, workers, arrow_tokens, _shuffle(buffer))


def _parquet_arrow(
    data: Data, folder: Path, *, size: int, buffer: int, workers: int = 0, whole_files: bool = False
) -> Iterator[int]:
    """Splits of files are read by `iter_batches`; whole files by a scanner, which decodes ahead in threads."""
    options = _shuffle(buffer)
    if whole_files:
        options["split_strategy"] = RoundRobinSplitStrategy(shuffle=True, seed=1)
    return _tokens(data, size, workers, decoded_tokens, options)


def _tokens(data: Data, size: int, workers: int, collate: Callable[..., Any], options: dict[str, Any]) -> Iterator[int]:
    """Batches of 64 cut from larger ones in the Arrow format."""
    given = {"columns": ["tokens"], "output_format": "arrow", "collate_fn": collate, "num_workers": workers}
    return walk_tensors(cut(_loader(data.tokens, size=size, **given, **options)))


ROUTES = {
    "text_in_order": {
        "plain": partial(_columns, size=1_000),
        "arrow(1000).to_pylist": partial(_arrow, size=1_000),
        "arrow(10000).to_pylist": partial(_arrow, size=10_000),
    },
    "text_shuffled": {
        "plain": partial(_columns, size=1_000, buffer=LARGE_BUFFER),
        "dict(500), buffer 1000": partial(_columns, size=500, buffer=BUFFER),
        "dict(1000), buffer 2000": partial(_columns, size=1_000, buffer=2 * BUFFER),
        "arrow(1000), buffer 2000": partial(_arrow, size=1_000, buffer=2 * BUFFER),
        "arrow(5000), buffer 10000": partial(_arrow, size=5_000, buffer=LARGE_BUFFER),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens_plain, workers=0),
        "arrow(64), buffer 1000": partial(_tokens_arrow, size=BATCH),
        "arrow(512), cut, buffer 1024": partial(_tokens_arrow, size=512, buffer=1_024),
        "arrow(1024), cut, buffer 2048": partial(_tokens_arrow, size=1_024, buffer=2_048),
        "arrow(4096), cut, buffer 8192": partial(_tokens_arrow, size=4_096, buffer=8_192),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens_plain, workers=2),
        "arrow(64), buffer 1000": partial(_tokens_arrow, size=BATCH, workers=2),
        "arrow(1024), cut, buffer 2048": partial(_tokens_arrow, size=1_024, workers=2, buffer=2_048),
        "arrow(4096), cut, buffer 8192": partial(_tokens_arrow, size=4_096, workers=2, buffer=8_192),
    },
    "parquet_window_w0": {
        "plain": partial(_tokens_plain, workers=0),
        "arrow(64), buffer 1000": partial(_parquet_arrow, size=BATCH, buffer=BUFFER),
        "arrow(512), cut, buffer 1024": partial(_parquet_arrow, size=512, buffer=1_024),
        "arrow(1024), cut, buffer 2048": partial(_parquet_arrow, size=1_024, buffer=2_048),
        "arrow(512), cut, buffer 1024, whole files": partial(_parquet_arrow, size=512, buffer=1_024, whole_files=True),
        "arrow(4096), cut, buffer 8192, whole files": partial(
            _parquet_arrow, size=4_096, buffer=8_192, whole_files=True
        ),
    },
    "parquet_window_w2": {
        "plain": partial(_tokens_plain, workers=2),
        "arrow(64), buffer 1000": partial(_parquet_arrow, size=BATCH, buffer=BUFFER, workers=2),
        "arrow(512), cut, buffer 1024": partial(_parquet_arrow, size=512, buffer=1_024, workers=2),
        "arrow(1024), cut, buffer 2048": partial(_parquet_arrow, size=1_024, buffer=2_048, workers=2),
        "arrow(512), cut, buffer 1024, whole files": partial(
            _parquet_arrow, size=512, buffer=1_024, workers=2, whole_files=True
        ),
    },
}
