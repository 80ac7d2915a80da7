"""`datasets.IterableDataset`: the Arrow or Parquet files streamed, shuffled by a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader

from benchmarks.contenders.common import (
    BATCH,
    BUFFER,
    LARGE_BUFFER,
    arrow_tokens,
    cut,
    decoded_tokens,
    package_version,
    rows_of,
    walk,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import Data, Files

NAME = "datasets IterableDataset"
SHARDS = 16


def version() -> str:
    return package_version("datasets")


def prepare(data: Data, folder: Path) -> None:
    """Nothing to convert."""


def _open(files: Files, *, buffer: int = 0, shards: int = 1, streaming: bool = False) -> datasets.IterableDataset:
    if streaming:
        whole = datasets.load_dataset("arrow", data_files=list(files.arrow), split="train", streaming=True)
    else:
        stored = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files.arrow])
        whole = stored.to_iterable_dataset(num_shards=shards)
    return whole.shuffle(seed=1, buffer_size=buffer) if buffer else whole


def _plain(data: Data, folder: Path, *, buffer: int = 0) -> Iterator[int]:
    return walk(_open(data.text, buffer=buffer, shards=SHARDS if buffer else 1))


def _columns(data: Data, folder: Path, *, size: int, buffer: int = 0) -> Iterator[int]:
    dataset = _open(data.text, buffer=buffer, shards=SHARDS if buffer else 1)
    return walk_lists(rows_of(columns) for columns in dataset.iter(batch_size=size))


def _arrow(data: Data, folder: Path, *, size: int, buffer: int = 0, streaming: bool = False) -> Iterator[int]:
    dataset = _open(data.text, buffer=buffer, shards=SHARDS if buffer else 1, streaming=streaming)
    return walk_lists(table.to_pylist() for table in dataset.with_format("arrow").iter(batch_size=size))


def _arrow_columns(data: Data, folder: Path, *, size: int, buffer: int = 0) -> Iterator[int]:
    dataset = _open(data.text, buffer=buffer, shards=SHARDS if buffer else 1).with_format("arrow")
    return walk_lists(rows_of(table.to_pydict()) for table in dataset.iter(batch_size=size))


def _token_loader(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    dataset = _open(data.tokens, buffer=BUFFER, shards=SHARDS).select_columns(["tokens"])
    loader = DataLoader(
        dataset.with_format("torch"),
        batch_size=BATCH,
        num_workers=workers,
    )
    return walk_tensors(batch["tokens"].to(torch.int32) for batch in loader)


def _token_arrow(
    data: Data, folder: Path, *, size: int, workers: int = 0, buffer: int = BUFFER, streaming: bool = False
) -> Iterator[int]:
    dataset = _open(data.tokens, buffer=buffer, shards=SHARDS, streaming=streaming).select_columns(["tokens"])
    tables = dataset.with_format("arrow")
    if workers == 0:
        return walk_tensors(cut(map(arrow_tokens, tables.iter(batch_size=size))))
    # In the Arrow format `batch` hands over tables, which the collate function turns into one tensor.
    loader = DataLoader(tables.batch(size), batch_size=None, num_workers=workers, collate_fn=_one_list_column)
    return walk_tensors(cut(loader))


def _one_list_column(table: object) -> torch.Tensor:
    """A batched table has one row whose `tokens` is the list of all rows of the batch."""
    import pyarrow as pa

    assert isinstance(table, pa.Table)
    column = table.column("tokens").combine_chunks()
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    values = column.to_numpy()
    return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(-1, 1_024)


def _open_parquet(data: Data, *, buffer: int, shards: int, read: int | None) -> datasets.IterableDataset:
    """Files in random order into a buffer, `shards` at once; `read` rows are decoded at a time (None: a row group)."""
    # At the end of a pass over several shards it sleeps 5 s, four times as long as the pass takes by its fastest route:
    # what is measured here is its speed, so no sleep.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    files = list(data.tokens.parquet)
    whole = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, columns=["tokens"], batch_size=read
    )
    return whole.shuffle(seed=1, buffer_size=buffer, max_buffer_input_shards=shards)


def _parquet_plain(data: Data, folder: Path, *, workers: int) -> Iterator[int]:
    dataset = _open_parquet(data, buffer=BUFFER, shards=10, read=None).with_format("torch")  # 10 is its default
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers)
    return walk_tensors(batch["tokens"].to(torch.int32) for batch in loader)


def _parquet_arrow(
    data: Data,
    folder: Path,
    *,
    size: int,
    workers: int = 0,
    buffer: int = BUFFER,
    shards: int = 10,
    read: int | None = None,
) -> Iterator[int]:
    """Fastest where `size` is what the buffer gives off, half of itself, and `read` divides a row group: no joining."""
    tables = _open_parquet(data, buffer=buffer, shards=shards, read=read).with_format("arrow")
    if workers == 0:
        return walk_tensors(cut(map(decoded_tokens, tables.iter(batch_size=size))))
    loader = DataLoader(tables.batch(size), batch_size=None, num_workers=workers, collate_fn=_one_list_column)
    return walk_tensors(cut(loader))


ROUTES = {
    "text_in_order": {
        "plain": _plain,
        "iter(1000)": partial(_columns, size=1_000),
        "arrow iter(1000).to_pylist": partial(_arrow, size=1_000),
        "arrow iter(1000), columns": partial(_arrow_columns, size=1_000),
        "arrow streaming iter(1000)": partial(_arrow, size=1_000, streaming=True),
    },
    "text_shuffled": {
        "plain": partial(_plain, buffer=BUFFER),
        "iter(1000)": partial(_columns, size=1_000, buffer=BUFFER),
        "arrow iter(1000), buffer 1000": partial(_arrow, size=1_000, buffer=BUFFER),
        "arrow iter(1000), buffer 10000": partial(_arrow, size=1_000, buffer=LARGE_BUFFER),
        "arrow iter(1000), buffer 10000, columns": partial(_arrow_columns, size=1_000, buffer=LARGE_BUFFER),
        "arrow streaming iter(1000), buffer 10000": partial(_arrow, size=1_000, buffer=LARGE_BUFFER, streaming=True),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_token_loader, workers=0),
        "arrow iter(64)": partial(_token_arrow, size=BATCH),
        "arrow iter(1024), cut": partial(_token_arrow, size=1_024),
        "arrow iter(1024), cut, buffer 10000": partial(_token_arrow, size=1_024, buffer=LARGE_BUFFER),
        "arrow streaming iter(1024), cut": partial(_token_arrow, size=1_024, streaming=True),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_token_loader, workers=2),
        "arrow batch(64)": partial(_token_arrow, size=BATCH, workers=2),
        "arrow batch(1024), cut": partial(_token_arrow, size=1_024, workers=2),
        "arrow batch(1024), cut, buffer 10000": partial(_token_arrow, size=1_024, workers=2, buffer=LARGE_BUFFER),
    },
    "parquet_window_w0": {
        "plain": partial(_parquet_plain, workers=0),
        "arrow iter(64)": partial(_parquet_arrow, size=BATCH),
        "arrow iter(500), cut, reads of 500": partial(_parquet_arrow, size=500, read=500),
        "arrow iter(500), cut, reads of 1000, a file at a time": partial(
            _parquet_arrow, size=500, read=1_000, shards=1
        ),
        "arrow iter(1024), cut, buffer 2048, reads of 1024": partial(
            _parquet_arrow, size=1_024, buffer=2_048, read=1_024
        ),
        "arrow iter(10000), cut, buffer 10000": partial(_parquet_arrow, size=10_000, buffer=LARGE_BUFFER),
    },
    "parquet_window_w2": {
        "plain": partial(_parquet_plain, workers=2),
        "arrow batch(500), cut, reads of 500": partial(_parquet_arrow, size=500, workers=2, read=500),
        "arrow batch(500), cut, reads of 1000, a file at a time": partial(
            _parquet_arrow, size=500, workers=2, read=1_000, shards=1
        ),
        "arrow batch(10000), cut, buffer 10000": partial(_parquet_arrow, size=10_000, workers=2, buffer=LARGE_BUFFER),
    },
}
