"""Rows of every stage in the Python format are Python's own values, however they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import midepoch
from conftest import write_arrow

TABLE = pa.table(
    {
        "input_ids": pa.array([[i] * (i % 5) for i in range(40)], pa.list_(pa.int32())),
        "mask": pa.array([[True] * (i % 5) for i in range(40)], pa.list_(pa.bool_())),
        "text": pa.array([f"a b{' b' * (i % 3)}" for i in range(40)]),
    }
)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


STAGES: dict[str, Callable[[midepoch.Dataset], Any]] = {
    "rows": lambda ds: ds,
    "pack": lambda ds: ds.pack(8, eos=9, cu_seqlens=True),
    "pack flags": lambda ds: ds.pack(8, extra={"mask": 0}),
    "best fit": lambda ds: ds.pack(8, strategy="best_fit", window=8, cu_seqlens=True),
    "tokenize": lambda ds: ds.tokenize(tokenizer()),
    "tokenize and pack": lambda ds: ds.tokenize(tokenizer(), output="ids").pack(4, "ids"),
    "batch": lambda ds: ds.batch(3),
    "batch of packs": lambda ds: ds.pack(8).batch(2),
    "unbatch": lambda ds: ds.unbatch("input_ids"),
    "unbatch packs": lambda ds: ds.pack(8).unbatch(["input_ids", "position_ids", "segment_ids"]),
    "shuffle": lambda ds: ds.pack(8).shuffle(seed=1, window=4),
}


@pytest.mark.parametrize("name", STAGES)
def test_python_rows_are_json(tmp_path: Path, name: str) -> None:
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 16))
    stream = STAGES[name](ds)
    rows = list(stream)
    assert json.loads(json.dumps(rows)) == rows
    assert list(stream.with_format("python")) == rows
    columns = list(stream.with_format("python").iter(3))
    assert json.loads(json.dumps(columns)) == columns
    assert [row[key] for row in rows for key in row] == [
        batch[key][i] for batch in columns for i in range(len(next(iter(batch.values())))) for key in batch
    ]
    batches = list(stream.with_format("python").loader(3))
    assert json.loads(json.dumps(batches)) == batches == columns
    assert [row for batch in stream.loader(3, collate_fn=list) for row in batch] == rows


def test_other_formats_keep_the_types_of_tokens(tmp_path: Path) -> None:
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 16))
    for strategy in ("concat", "best_fit"):
        packed = ds.pack(8, strategy=strategy, extra={"mask": 0}).with_format("numpy")
        row, batch = next(iter(packed)), next(iter(packed.loader(3)))
        assert row["input_ids"].dtype == batch["input_ids"].dtype == np.int32
        assert batch["input_ids"].shape == (3, 8)
        assert row["mask"].dtype == batch["mask"].dtype == np.bool_
        batch["input_ids"][0, 0] = 5  # it is the caller's
        assert next(iter(packed.with_format("arrow").loader(2)))["input_ids"].type == pa.list_(pa.int32(), 8)
