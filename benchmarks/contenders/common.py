"""What every route shares: counting rows one by one, checking tensors, cutting large batches."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.data import TOKENS_PER_ROW, Files

BATCH = 64
BUFFER = 1_000  # smallest shuffle buffer or window that counts as shuffled here
LARGE_BUFFER = 10_000
CHUNK_BYTES = 64 << 20
LEAST_CHUNKS = 8


def chunk_bytes(files: Files) -> int:
    """Size of the chunks that a contender writes: its default of 64 MB, and smaller where that would be few chunks."""
    return min(CHUNK_BYTES, sum(map(os.path.getsize, files.arrow)) // LEAST_CHUNKS)


def package_version(name: str) -> str:
    """Installed version of a distribution."""
    return importlib.metadata.version(name)


def walk(rows: Iterable[Any]) -> Iterator[int]:
    """Take rows one at a time, as a training loop does, and report every thousand of them."""
    iterator = iter(rows)
    for first in iterator:  # look at one row in a thousand: a route that hands over no text is no contender
        if not isinstance(first["text"], str):
            raise TypeError(f"expected a str in row['text'], got {type(first['text']).__name__}")
        count = 1
        for _row in islice(iterator, 999):
            count += 1
        yield count
        if count < 1_000:  # some iterators start a new epoch when asked again after their end
            return


def walk_lists(lists: Iterable[list[Any]]) -> Iterator[int]:
    """`walk` over lists of rows, a report per list."""
    for rows in lists:
        count = 0
        for _row in rows:
            count += 1
        if count and not isinstance(rows[0]["text"], str):
            raise TypeError(f"expected a str in row['text'], got {type(rows[0]['text']).__name__}")
        yield count


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows of a batch that came as columns of ids and texts."""
    return [{"id": i, "text": t} for i, t in zip(columns["id"], columns["text"], strict=True)]


def walk_tensors(batches: Iterable[Any]) -> Iterator[int]:
    """Count the rows of int32 token tensors [n, 1024], n at most 64; anything else is an error."""
    import torch

    for batch in batches:
        if (
            not isinstance(batch, torch.Tensor)
            or batch.dtype != torch.int32
            or batch.shape[0] > BATCH
            or batch.shape[1] != TOKENS_PER_ROW
        ):
            raise TypeError(f"expected an int32 tensor [{BATCH}, {TOKENS_PER_ROW}], got {type(batch)}")
        yield len(batch)


def cut(large: Iterable[Any]) -> Iterator[Any]:
    """Batches of 64 as views of larger tensors."""
    for tensor in large:
        yield from tensor.split(BATCH)


def decoded_tokens(batch: pa.RecordBatch | pa.Table) -> Any:
    """The token column as a torch tensor over the memory Parquet was decoded into: nobody else uses it, so no copy."""
    import torch

    column = batch.column("tokens")
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:  # numpy joins them: torch.cat shares 2 MB out to threads, 3 ms on two busy cores
            joined = np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])
            return torch.from_numpy(joined.reshape(-1, TOKENS_PER_ROW))
        column = column.chunk(0)
    return torch.from_dlpack(column.flatten()).reshape(-1, TOKENS_PER_ROW)


def arrow_tokens(table: pa.Table | pa.RecordBatch) -> Any:
    """The token column as a torch tensor, without a Python object per value."""
    import torch

    column = table.column("tokens")
    if isinstance(column, pa.ChunkedArray):
        chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
        values = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    else:
        values = column.flatten().to_numpy()
    if not values.flags.writeable:  # still a view of the file: a batch handed to training is the trainer's own
        values = values.copy()
    return torch.from_numpy(values.reshape(-1, TOKENS_PER_ROW))
