"""LanceDB tables: its StreamingDataset and its permutations, which the same package offers for map-style access.

Workers come from a fork server: the threads of its runtime do not survive a fork, and spawned ones start more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.permutation import Permutation, permutation_builder
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmarks.contenders.common import (
    BATCH,
    arrow_tokens,
    cut,
    package_version,
    walk,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import Data, Files

NAME = "LanceDB"
LARGE_READ = 1_000


def version() -> str:
    return package_version("lancedb")


def prepare(data: Data, folder: Path) -> None:
    for name, files in (("text", data.text), ("tokens", data.tokens)):
        lancedb.connect(str(folder / name)).create_table("rows", _reader(files))


def _reader(files: Files) -> pa.RecordBatchReader:
    """Rows without the metadata of `datasets` in their schema: with it, permutations of 0.40 panic."""
    schema = next(files.batches()).schema.remove_metadata()
    batches = (batch.replace_schema_metadata(None) for batch in files.batches())
    return pa.RecordBatchReader.from_batches(schema, batches)


def table(folder: Path, name: str) -> Any:
    """Open the table of one dataset."""
    return lancedb.connect(str(folder / name)).open_table("rows")


def worker_options(workers: int) -> dict[str, Any]:
    """Return the options of a torch loader over a table."""
    return {"num_workers": workers, **({"multiprocessing_context": "forkserver"} if workers else {})}


def _streamed(data: Data, folder: Path, *, shuffle: bool, **options: Any) -> Iterator[int]:
    return walk(StreamingDataset(table(folder, "text"), shuffle=shuffle, shuffle_seed=1, **options))


def _scan(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    """Iterate the table itself, in Arrow batches."""
    return walk_lists(batch.to_pylist() for batch in table(folder, "text").search().to_batches(size))


def _shuffled(folder: Path, name: str) -> Permutation:
    rows = table(folder, name)
    return Permutation.from_tables(rows, permutation_builder(rows).shuffle(seed=1).execute())


def _permuted(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    batches = _shuffled(folder, "text").with_format("arrow").iter(size, skip_last_batch=False)
    return walk_lists(batch.to_pylist() for batch in batches)


def rows_of_tokens(batch: pa.RecordBatch) -> Any:
    return list(arrow_tokens(batch))


def _tokens(data: Data, folder: Path, *, workers: int, **options: Any) -> Iterator[int]:
    dataset = StreamingDataset(
        table(folder, "tokens"),
        num_splits=2,
        shuffle_seed=1,
        columns=["tokens"],
        transform=rows_of_tokens,
        **options,
    )
    return walk_tensors(StreamingDataLoader(dataset, BATCH, **worker_options(workers)))


def _tokens_permuted(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    batches = _shuffled(folder, "tokens").select_columns(["tokens"]).with_format("arrow").iter(size)
    return walk_tensors(cut(map(arrow_tokens, batches)))


def as_tensor(batch: pa.RecordBatch) -> torch.Tensor:
    return arrow_tokens(batch)


def _tokens_map_style(data: Data, folder: Path, *, workers: int, size: int) -> Iterator[int]:
    """The unshuffled permutation under torch's DataLoader, which finds and uses `__getitems__`."""
    rows = Permutation.identity(table(folder, "tokens")).select_columns(["tokens"]).with_format("arrow")
    loader = torch.utils.data.DataLoader(
        rows, batch_size=size, shuffle=True, collate_fn=as_tensor, **worker_options(workers)
    )
    return walk_tensors(cut(loader))


def _taken(data: Data, folder: Path, *, size: int) -> Iterator[int]:
    """`take` of the Lance files below the table."""
    files = table(folder, "text").to_lance()
    order = np.random.default_rng(1).permutation(data.text.rows)
    return walk_lists(files.take(order[k : k + size]).to_pylist() for k in range(0, len(order), size))


ROUTES = {
    "text_in_order": {
        "plain": partial(_streamed, shuffle=False),
        "read_batch_size=1000": partial(_streamed, shuffle=False, read_batch_size=LARGE_READ),
        "search().to_batches(10000)": partial(_scan, size=10_000),
    },
    "text_shuffled": {
        "plain": partial(_streamed, shuffle=True),
        "read_batch_size=1000": partial(_streamed, shuffle=True, read_batch_size=LARGE_READ),
        "clumps of 64": partial(_streamed, shuffle=True, read_batch_size=LARGE_READ, shuffle_clump_size=64),
        "permutation, iter(10000)": partial(_permuted, size=10_000),
        "take(10000)": partial(_taken, size=10_000),
    },
    "tokens_shuffled_w0": {
        "plain": partial(_tokens, workers=0),
        "read_batch_size=1000": partial(_tokens, workers=0, read_batch_size=LARGE_READ),
        "permutation, iter(1024), cut": partial(_tokens_permuted, size=1_024),
        "map-style DataLoader(1024), cut": partial(_tokens_map_style, workers=0, size=1_024),
    },
    "tokens_shuffled_w2": {
        "plain": partial(_tokens, workers=2),
        "read_batch_size=1000": partial(_tokens, workers=2, read_batch_size=LARGE_READ),
        "map-style DataLoader(1024), cut": partial(_tokens_map_style, workers=2, size=1_024),
    },
}
