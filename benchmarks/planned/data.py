"""Log-normal lengths, and Arrow files of rows with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.planned.figures import Rows

BUDGET = 16_384
WINDOW = 10_000
MEAN, SIGMA, LONGEST = 600, 1.0, 8_192
_BLOCK = 1_000  # rows of a record batch, as `datasets` writes them


def lengths_of(rows: int, mean: float = MEAN, sigma: float = SIGMA, longest: int = LONGEST) -> Rows:
    """Return log-normal lengths of this mean (before they are cut) and sigma, from 1 to ``longest``."""
    drawn = np.random.default_rng(7).lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    return np.clip(drawn.astype(np.int64), 1, longest)


def write_ids(path: Path, rows: int) -> None:
    """Write row numbers alone: batches are formed by lengths that are given."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema({"id": pa.int64()})) as writer:
        for start in range(0, rows, 100 * _BLOCK):
            ids = pa.array(np.arange(start, min(start + 100 * _BLOCK, rows)))
            writer.write_batch(pa.record_batch([ids], names=["id"]))


def write_tokens(path: Path, lengths: Rows) -> None:
    """Write row numbers and int32 tokens."""
    random = np.random.default_rng(8)
    schema = pa.schema({"id": pa.int64(), "input_ids": pa.list_(pa.int32())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, len(lengths), _BLOCK):
            here = lengths[start : start + _BLOCK]
            ends = np.concatenate([[0], np.cumsum(here)]).astype(np.int32)
            values = pa.array(random.integers(0, 50_257, int(ends[-1]), dtype=np.int32))
            columns = [pa.array(np.arange(start, start + len(here))), pa.ListArray.from_arrays(pa.array(ends), values)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
