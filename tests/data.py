"""Data of the tests: small tables whose rows are known by their numbers, and files of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from midepoch.sources.formats import Scanned, format_named
from midepoch.storage.addresses import resolve

Numbers = Callable[[int, int], midepoch.Dataset]
"""The fixture ``numbers``: a dataset with the numbers from the first up to the second in column n."""


def numbered(start: int, stop: int) -> pa.Table:
    """Rows that are known by their number, with the common kinds of column."""
    ids = np.arange(start, stop)
    return pa.table(
        {
            "id": ids,
            "text": [f"row {i} " + "é" * (i % 5) for i in ids],
            "score": ids / 2,
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.int32)), 4),
        }
    )


def calls_of(action: Callable[[], object]) -> int:
    """Return the number of calls that an action makes, of functions in Python and in C: work that time would blur."""
    calls = 0

    def count(_frame: object, event: str, _function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def documents(rows: int) -> pa.Table:
    """Rows with an id, a text and tokens: some empty, some null, one very long."""
    rng = np.random.default_rng(3)
    lengths = [0 if i % 11 == 0 else 500 if i == 77 else int(rng.integers(1, 40)) for i in range(rows)]
    tokens = [None if i % 29 == 5 else [i * 1000 + k for k in range(length)] for i, length in enumerate(lengths)]
    return pa.table(
        {
            "id": range(rows),
            "text": [f"row number {i} " * (i % 5) for i in range(rows)],
            "tokens": pa.array(tokens, pa.list_(pa.int64())),
        }
    )


def write_arrow(path: Path, table: pa.Table, block: int, *, file_format: bool = False, **options: Any) -> Path:
    """An Arrow IPC file with record batches of ``block`` rows."""
    make = pa.ipc.new_file if file_format else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=block)
    return path


def scan(path: Path, *, skip_damage: bool = False) -> Scanned:
    """The blocks of an Arrow IPC file."""
    store, place = resolve(str(path))
    entry = store.stat(place)
    assert entry is not None
    return format_named("arrow").scan(store, entry, skip_damage=skip_damage)


def write_parquet(path: Path, ids: Iterable[int], group: int | None = None, **columns: Any) -> Path:
    """A Parquet file of a column ``id`` and others, with row groups of ``group`` rows. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), **columns}), path, row_group_size=group)
    return path


def dataset_of(folder: Path, table: pa.Table, block: int = 50) -> midepoch.Dataset:
    """A dataset of one Arrow file in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return midepoch.from_files(write_arrow(folder / "a.arrow", table, block, file_format=True))
