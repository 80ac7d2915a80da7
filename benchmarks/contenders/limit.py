"""The reference: hand-written loops over the memory-mapped Arrow files, or the Parquet files, in one process.

Not a library. The orders are precomputed, nothing is checked, nothing can be resumed: what is left is the cost of the
bytes and of the Python objects.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.common import (
    BATCH,
    cut,
    decoded_tokens,
    package_version,
    rows_of,
    walk_lists,
    walk_tensors,
)
from benchmarks.data import TOKENS_PER_ROW, Data, Files

NAME = "limit (hand-written)"
CHUNK = 250  # rows gathered per step: 1,000 was 4 to 22 % slower, 4,000 and 16,000 mostly slower still

Int64Array = npt.NDArray[np.int64]


def version() -> str:
    return f"pyarrow {package_version('pyarrow')}, numpy {package_version('numpy')}"


def prepare(data: Data, folder: Path) -> None:
    """Nothing to convert."""


@dataclass(frozen=True)
class Mapped:
    """The mapped files, and per record batch the first row, the file, and the address of the buffers of each column."""

    files: list[pa.Buffer]
    starts: Int64Array
    ends: Int64Array
    file: Int64Array
    buffers: dict[str, Int64Array]  # column → [record batch, buffer]

    @classmethod
    def open(cls, files: Files) -> Mapped:
        mapped, rows, of_file = [], [], []
        buffers: dict[str, list[list[int]]] = {}
        for number, path in enumerate(files.arrow):
            whole = pa.memory_map(path).read_buffer()
            mapped.append(whole)
            for batch in pa.ipc.open_stream(whole):
                rows.append(len(batch))
                of_file.append(number)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
                    addresses = [b.address for b in flat.buffers() if b is not None]
                    buffers.setdefault(name, []).append(addresses)
        ends = np.cumsum(np.array(rows, np.int64))
        arrays = {name: np.array(addresses) for name, addresses in buffers.items()}
        return cls(mapped, ends - np.array(rows, np.int64), ends, np.array(of_file), arrays)

    def memory(self, dtype: type) -> tuple[int, npt.NDArray[Any]]:
        """All mappings as one array, from the lowest mapped address; only mapped places of it may be read."""
        low = min(b.address for b in self.files)
        high = max(b.address + b.size for b in self.files)
        raw = (ctypes.c_char * (high - low)).from_address(low)
        return low, np.frombuffer(raw, dtype, count=(high - low) // np.dtype(dtype).itemsize)


def text_in_order(data: Data, folder: Path) -> Iterator[int]:
    return walk_lists(batch.to_pylist() for batch in data.text.batches())


def text_columns(data: Data, folder: Path) -> Iterator[int]:
    """`to_pylist` per column, the rows by hand: what `RecordBatch.to_pylist` does, without its generality."""
    return walk_lists(
        rows_of({"id": batch.column("id").to_pylist(), "text": batch.column("text").to_pylist()})
        for batch in data.text.batches()
    )


def text_shuffled(data: Data, folder: Path) -> Iterator[int]:
    return walk_lists(_gather_text(data.text))


def _gather_text(files: Files) -> Iterator[list[dict[str, Any]]]:
    source = Mapped.open(files)
    maps = [_map(path) for path in files.arrow]
    bases = np.array([b.address for b in source.files])
    low, offsets = source.memory(np.int32)
    _, numbers = source.memory(np.int64)
    id_at = (source.buffers["id"][:, 0] - low) // 8
    offset_at = (source.buffers["text"][:, 0] - low) // 4
    text_at = source.buffers["text"][:, 1] - bases[source.file]
    order = np.random.default_rng(1).permutation(files.rows)
    for start in range(0, len(order), CHUNK):
        rows = order[start : start + CHUNK]
        batch = np.searchsorted(source.ends, rows, side="right")
        local = rows - source.starts[batch]
        at = offset_at[batch] + local
        first = offsets[at] + text_at[batch]
        last = offsets[at + 1] + text_at[batch]
        ids = numbers[id_at[batch] + local].tolist()
        if len(maps) == 1:
            one = maps[0]
            yield [
                {"id": i, "text": one[a:z].decode()} for i, a, z in zip(ids, first.tolist(), last.tolist(), strict=True)
            ]
        else:
            of = [maps[f] for f in source.file[batch].tolist()]
            yield [
                {"id": i, "text": m[a:z].decode()}
                for m, i, a, z in zip(of, ids, first.tolist(), last.tolist(), strict=True)
            ]


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def tokens_shuffled(data: Data, folder: Path) -> Iterator[int]:
    return walk_tensors(_gather_tokens(data.tokens))


def _gather_tokens(files: Files) -> Iterator[Any]:
    import torch

    source = Mapped.open(files)
    low, flat = source.memory(np.int32)
    # Row k of this view is the 1,024 values from value k on, so that one numpy gather copies whole rows: 1.4 M rows/s
    # where a loop over the rows gave 0.7 M and an index per value 0.4 M.
    view = np.lib.stride_tricks.as_strided(
        flat, shape=(len(flat) - TOKENS_PER_ROW, TOKENS_PER_ROW), strides=(4, 4), writeable=False
    )
    at = (source.buffers["tokens"][:, 0] - low) // 4
    order = np.random.default_rng(1).permutation(files.rows)
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        batch = np.searchsorted(source.ends, rows, side="right")
        yield torch.from_numpy(view[at[batch] + (rows - source.starts[batch]) * TOKENS_PER_ROW])


def parquet_in_order(data: Data, folder: Path, *, size: int, mapped: bool = False) -> Iterator[int]:
    """Nothing is shuffled here: what is left is the decoding, which is most of the work on Parquet."""
    batches = (
        batch
        for path in data.tokens.parquet
        for batch in pq.ParquetFile(path, memory_map=mapped).iter_batches(size, columns=["tokens"])
    )
    return walk_tensors(cut(map(decoded_tokens, batches)))


ROUTES = {
    "text_in_order": {
        "to_pylist per record batch": text_in_order,
        "to_pylist per column": text_columns,
    },
    "text_shuffled": {"gather from mapped buffers": text_shuffled},
    "tokens_shuffled_w0": {"numpy gather": tokens_shuffled},
    "parquet_window_w0": {
        "iter_batches(64), in order": partial(parquet_in_order, size=BATCH),
        "iter_batches(1024), cut, in order": partial(parquet_in_order, size=1_024),
        "mapped, iter_batches(1024), cut, in order": partial(parquet_in_order, size=1_024, mapped=True),
    },
}
