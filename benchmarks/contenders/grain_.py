"""Grain on ArrayRecord files with one record per group, as it asks for; and on Parquet, which it reads in order only.

Reading one record costs more the larger its file (0.5 k rows/s from one file, 3 to 23 k from twenty), batched reads are
somewhat faster from one file: each route gets the layout that suits it, so the bytes shown are twice those of one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.contenders.common import (
    BATCH,
    BUFFER,
    LARGE_BUFFER,
    cut,
    package_version,
    walk,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import TOKENS_PER_ROW, Data

NAME = "Grain"
SHARDS = 20
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
ID = struct.Struct("<q")


def version() -> str:
    return package_version("grain")


def prepare(data: Data, folder: Path) -> None:
    """Records are an 8-byte id and UTF-8, or raw int32: the cheapest form to decode."""
    texts = [ID.pack(row["id"]) + row["text"].encode() for batch in data.text.batches() for row in batch.to_pylist()]
    _write(folder / "text", texts, files=SHARDS)
    _write(folder / "text-one", texts, files=1)
    tokens = [
        values.tobytes()
        for batch in data.tokens.batches()
        for values in batch.column("tokens").flatten().to_numpy().reshape(-1, TOKENS_PER_ROW)
    ]
    _write(folder / "tokens", tokens, files=SHARDS)
    _write(folder / "tokens-one", tokens, files=1)


def _write(folder: Path, records: list[bytes], *, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        writer = ArrayRecordWriter(str(folder / f"{number:05d}.array_record"), "group_size:1,uncompressed")
        for record in records[number * len(records) // files : (number + 1) * len(records) // files]:
            writer.write(record)
        writer.close()


def open_source(folder: Path, name: str) -> grain.sources.ArrayRecordDataSource:
    """Open the files of one dataset."""
    return grain.sources.ArrayRecordDataSource(sorted(str(path) for path in (folder / name).iterdir()))


def decode(record: bytes) -> dict[str, Any]:
    return {"id": ID.unpack_from(record)[0], "text": record[8:].decode()}


def tokens_of(record: bytes) -> Any:
    return np.frombuffer(record, np.int32)


def join(records: list[bytes]) -> Any:
    """One copy from records to a batch, instead of an array per row and a stack."""
    return np.frombuffer(bytearray().join(records), np.int32).reshape(-1, TOKENS_PER_ROW)


def _rows(folder: Path, *, shuffle: bool) -> grain.MapDataset[Any]:
    dataset = grain.MapDataset.source(open_source(folder, "text"))
    return (dataset.shuffle(seed=1) if shuffle else dataset).map(decode)


def _plain(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_rows(folder, shuffle=shuffle).to_iter_dataset())


def _no_threads(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    return walk(_rows(folder, shuffle=shuffle).to_iter_dataset(NO_THREADS))


def _indexed(data: Data, folder: Path, *, shuffle: bool) -> Iterator[int]:
    dataset = _rows(folder, shuffle=shuffle)
    return walk(dataset[i] for i in range(len(dataset)))


def _batched_reads(data: Data, folder: Path, *, shuffle: bool, size: int) -> Iterator[int]:
    """`__getitems__` of the data source: one call into C++ for many records."""
    source = open_source(folder, "text-one")
    order = np.random.default_rng(1).permutation(len(source)) if shuffle else np.arange(len(source))
    return walk_lists(
        [decode(record) for record in source.__getitems__(order[k : k + size].tolist())]
        for k in range(0, len(order), size)
    )


def _parquet(data: Data, folder: Path, *, window: int = 0) -> Iterator[int]:
    """One dataset per file, one after the other: given many files at once Grain interleaves them through threads."""
    return walk(chain.from_iterable(_windowed(path, window) for path in data.text.parquet))


def _windowed(path: str, window: int) -> Any:
    dataset = grain.experimental.ParquetIterDataset(path)
    if not window:
        return dataset
    return grain.experimental.WindowShuffleIterDataset(dataset, window_size=window, seed=1)


def _tokens(data: Data, folder: Path, *, threads: bool) -> Iterator[int]:
    dataset = grain.MapDataset.source(open_source(folder, "tokens")).shuffle(seed=1).map(tokens_of).batch(BATCH)
    batches = dataset.to_iter_dataset() if threads else dataset.to_iter_dataset(NO_THREADS)
    return walk_tensors(map(torch.from_numpy, batches))


def _tokens_joined(data: Data, folder: Path, *, size: int, workers: int = 0) -> Iterator[int]:
    shuffled = grain.MapDataset.source(open_source(folder, "tokens")).shuffle(seed=1)
    batches = shuffled.batch(size, batch_fn=join).to_iter_dataset(NO_THREADS)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4))
    return walk_tensors(cut(map(torch.from_numpy, batches)))


def _tokens_reads(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    source = open_source(folder, "tokens-one")
    order = np.random.default_rng(1).permutation(len(source))
    reads = (source.__getitems__(order[k : k + size].tolist()) for k in range(0, len(order), size))
    return walk_tensors(cut(torch.from_numpy(join(records)) for records in reads))


def as_tensor(records: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(join(records))


def _tokens_torch(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    """The data source under torch's DataLoader, which finds and uses `__getitems__`."""
    loader = torch.utils.data.DataLoader(
        open_source(folder, "tokens-one"), batch_size=size, shuffle=True, num_workers=2, collate_fn=as_tensor
    )
    return walk_tensors(cut(loader))


def _tokens_workers(data: Data, folder: Path) -> Iterator[int]:
    dataset = grain.MapDataset.source(open_source(folder, "tokens")).shuffle(seed=1).map(tokens_of).batch(BATCH)
    workers = grain.MultiprocessingOptions(num_workers=2)
    return walk_tensors(map(torch.from_numpy, dataset.to_iter_dataset().mp_prefetch(workers)))


def _tokens_parquet(data: Data, folder: Path, *, window: int) -> Iterator[int]:
    return walk_tensors(_parquet_stacks(data, window))


def _parquet_stacks(data: Data, window: int) -> Iterator[Any]:
    for path in data.tokens.parquet:
        dataset = grain.experimental.ParquetIterDataset(path).map(lambda row: row["tokens"])
        windowed = grain.experimental.WindowShuffleIterDataset(dataset, window_size=window, seed=1)
        for batch in windowed.batch(BATCH):
            yield torch.from_numpy(batch)


def row_tokens(row: dict[str, Any]) -> Any:
    return row["tokens"]


def _parquet_window(data: Data, folder: Path, *, workers: int = 0, in_turn: bool = False) -> Iterator[int]:
    """Grain mixes up to 16 files through threads of its own; `in_turn` reads one file after the other instead."""
    paths = np.random.default_rng(1).permutation(list(data.tokens.parquet)).tolist()
    dataset = grain.experimental.ParquetIterDataset(paths)
    if in_turn:
        files = [grain.experimental.ParquetIterDataset(path) for path in paths]
        dataset = grain.experimental.InterleaveIterDataset(files, cycle_length=1)
    windowed = grain.experimental.WindowShuffleIterDataset(dataset.map(row_tokens), window_size=BUFFER, seed=1)
    batches = windowed.batch(BATCH)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return walk_tensors(map(torch.from_numpy, batches))


ROUTES = {
    "text_in_order": {
        "plain": partial(_plain, shuffle=False),
        "no threads": partial(_no_threads, shuffle=False),
        "dataset[i]": partial(_indexed, shuffle=False),
        "source.__getitems__(1000)": partial(_batched_reads, shuffle=False, size=1_000),
        "Parquet": _parquet,
    },
    "text_shuffled": {
        "plain": partial(_plain, shuffle=True),
        "no threads": partial(_no_threads, shuffle=True),
        "dataset[i]": partial(_indexed, shuffle=True),
        "source.__getitems__(1000)": partial(_batched_reads, shuffle=True, size=1_000),
        "Parquet, window 1000": partial(_parquet, window=BUFFER),
        "Parquet, window 10000": partial(_parquet, window=LARGE_BUFFER),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens, threads=True),
        "no threads": partial(_tokens, threads=False),
        "no threads, joined": partial(_tokens_joined, size=BATCH),
        "source.__getitems__(64)": partial(_tokens_reads, size=BATCH),
        "source.__getitems__(1024), cut": partial(_tokens_reads, size=1_024),
        "Parquet, window 1000": partial(_tokens_parquet, window=BUFFER),
    },
    "tokens_shuffled_w2": {
        "plain": _tokens_workers,
        "joined(64)": partial(_tokens_joined, size=BATCH, workers=2),
        "joined(1024), cut": partial(_tokens_joined, size=1_024, workers=2),
        "source in DataLoader(1024), cut": partial(_tokens_torch, size=1_024),
    },
    "parquet_window_w0": {
        "plain": _parquet_window,
        "files in turn": partial(_parquet_window, in_turn=True),
        "a dataset per file, in turn": partial(_tokens_parquet, window=BUFFER),
    },
    "parquet_window_w2": {
        "plain": partial(_parquet_window, workers=2),
        "files in turn": partial(_parquet_window, workers=2, in_turn=True),
    },
}
