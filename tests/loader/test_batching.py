"""Batches by tokens and of changing sizes: what a loader counts, and what it says about wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from data import write_arrow

ROWS = 90


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    lengths = np.random.default_rng(2).integers(1, 30, ROWS).tolist()
    tokens = pa.array([list(range(length)) for length in lengths], pa.list_(pa.int32()))
    columns = {"id": np.arange(ROWS), "input_ids": tokens, "text": ["x" * length for length in lengths]}
    write_arrow(tmp_path / "a.arrow", pa.table(columns), 20)
    return midepoch.from_files(str(tmp_path / "a.arrow"))


def tokenized(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [ord(each) for each in row["text"]]}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_batches_that_are_formed_at_run_time_are_counted_once(ds: midepoch.Dataset, world: int) -> None:
    mapped, rows = ds.map(tokenized), 0
    for rank in range(world):
        loader = mapped.loader(max_tokens=100, bucket_window=30, rank=rank, world_size=world, last_batch="uneven")
        delivered = sum(len(batch["id"]) for batch in loader)
        assert loader.stats().rows == delivered
        rows += delivered
    assert rows == ROWS


SIZES = {0: 2, 5: 3, 12: 7}


@pytest.mark.parametrize("last_batch", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_length_of_lanes_follows_the_sizes(ds: midepoch.Dataset, last_batch: str, world: int) -> None:
    rows = ds.select_columns("id").shuffle(seed=1)
    both = midepoch.concat([rows.slice(0, 37), rows.slice(37)]).with_lanes(1)
    for rank in range(world):
        loader = both.loader(SIZES, last_batch=last_batch, rank=rank, world_size=world)
        for _ in range(3):
            length = len(loader)
            assert [len(loader) for _ in loader][:-1] == [length] * (length - 1)


@pytest.mark.parametrize("last_batch", ["uneven", "drop", "pad"])
def test_an_estimated_length_follows_the_sizes(ds: midepoch.Dataset, last_batch: str) -> None:
    loader = ds.select_columns("id").filter(odd).loader(SIZES, last_batch=last_batch)
    estimates = [loader.estimated_len or 0 for _ in loader]
    assert max(abs(estimate - len(estimates)) for estimate in estimates[3:-1]) <= 2
    for _ in range(2):  # the rows have been counted
        assert loader.estimated_len == len(list(loader))


def test_the_estimated_length_of_passes_of_steps(ds: midepoch.Dataset) -> None:
    loader = ds.select_columns("id").filter(odd).loader(4, steps_per_epoch=5)
    assert loader.estimated_len == len(loader) == len(list(loader)) == 5


@pytest.mark.parametrize("sizes", [{0: 2, 5: 100}, {0: 2, 5: 100, 9: 4}, {0: 100, 5: 2}], ids=str)
def test_a_size_that_no_epoch_can_fill_is_an_error(ds: midepoch.Dataset, sizes: dict[int, int]) -> None:
    """At its step, every epoch would be empty, so that no step follows."""
    with pytest.raises(ValueError, match="fewer than a global batch of 100"):
        ds.loader(sizes, last_batch="drop")
