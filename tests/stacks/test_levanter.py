"""Levanter on rows of midepoch: its trainer, killed and resumed on other numbers of devices, gets the same batches."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from launch import QUIET

pytest.importorskip("haliax", reason="levanter is not installed")
from midepoch.integrations.levanter import Positions

EXAMPLE = Path(__file__).parents[2] / "examples" / "levanter_train.py"


def rows_of_epochs(ds: midepoch.Dataset, epochs: int) -> list[int]:
    return [int(row["id"]) for epoch in range(epochs) for row in (ds.set_epoch(epoch), ds)[1]]


def test_same_batches_on_other_numbers_of_devices(tmp_path: Path) -> None:
    for devices, die_at in ((4, 5), (2, 11), (8, None)):
        command = [sys.executable, "-W", "ignore", str(EXAMPLE), str(tmp_path), "--devices", str(devices)]
        command += [] if die_at is None else ["--die-at", str(die_at)]
        done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=600)
        assert done.returncode == (0 if die_at is None else -9), done.stderr[-3000:]
    noted = [[int(word) for word in line.split()] for line in (tmp_path / "rows.txt").read_text().splitlines()]
    ds = midepoch.from_files(tmp_path / "data.parquet").shuffle(seed=42)
    rows = rows_of_epochs(ds, 3)
    assert {step for step, *_ in noted} == set(range(1, 17))
    assert len(noted) < 16 + 5 + 6  # no attempt begins again
    for step, *batch in noted:
        assert batch == rows[8 * (step - 1) : 8 * step], step


def get(data: Positions, indices: Any) -> list[Any]:
    return list(asyncio.run(data.get_batch(indices)))


def test_positions(tmp_path: Path) -> None:
    table = pa.table({"id": range(10), "x": [np.full(3, i, np.float32) for i in range(10)]})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=3)
    ds = midepoch.from_files(tmp_path / "data.parquet").shuffle(seed=1)
    data, rows = Positions(ds, epochs=3), rows_of_epochs(ds, 3)
    ds.set_epoch(2)  # nothing to the positions
    assert [int(row["id"]) for row in get(data, range(30))] == rows
    mixed = [29, 0, 11, 5, 11]
    found = get(data, mixed)
    assert [int(row["id"]) for row in found] == [rows[place] for place in mixed]
    assert [row["x"].tolist() for row in found] == [[float(rows[place])] * 3 for place in mixed]
    assert data.is_finite() and asyncio.run(data.async_len()) == asyncio.run(data.wait_until_len_at_least(99)) == 30
    for outside in ([30], [-1]):
        with pytest.raises(IndexError, match=r"must be in \[0, 30\)"):
            get(data, outside)
    endless = Positions(ds)
    assert not endless.is_finite() and asyncio.run(endless.current_len()) is None
    assert int(get(endless, [10_000_000_007])[0]["id"]) in range(10)


def test_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "data.parquet")
    ds = midepoch.from_files(tmp_path / "data.parquet")
    with pytest.raises(TypeError, match="have none .*cache"):
        Positions(ds.filter(lambda row: row["id"] > 2))
    with pytest.raises(TypeError, match="Leave out loader"):
        Positions(ds.loader(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shard 0 of 2"):
        Positions(ds.shard(2, 0))
    failing = ds.map(lambda row: {"id": 1 // (row["id"] - 3)}, on_error="skip")
    with pytest.raises(ValueError, match="1 of 10 rows of epoch 0 were skipped"):
        get(Positions(failing), range(10))
