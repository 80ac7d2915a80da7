"""The Trainer over datasets that are not shuffled: shuffled as Trainer does it, and resumed in the order of the run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from launch import Program

ROWS, BATCH, STEPS = 26, 4, 9


def batches(folder: Path, seed: int | None) -> list[list[int]]:
    ds = midepoch.from_files(folder / "data.parquet")
    loader = (ds if seed is None else ds.shuffle(seed=seed)).loader(BATCH)
    return list(islice((batch["id"].tolist() for _ in range(2) for batch in loader), STEPS))


def test_order_of_the_trainer(program: Program, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, 4), dtype=np.float32)
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": list(values)}), tmp_path / "data.parquet")
    assert program(1, Path(__file__).with_name("trainer_order_job.py"), str(tmp_path)) == 0
    found: dict[str, Any] = json.loads((tmp_path / "order.json").read_text())

    in_order = batches(tmp_path, None)
    for case, seed in (("data_seed", 7), ("seed", 11)):
        assert found[case]["rows"] == batches(tmp_path, seed) != in_order, case
        [(level, message)] = found[case]["messages"]
        assert level == "INFO" and f"shuffled with seed {seed}" in message and "'sequential'" in message
    assert found["sequential"]["rows"] == in_order and found["sequential"]["messages"] == []
    for case in ("data_seed", "stream"):  # evaluation is in order, whatever the training does
        assert sum(found[case]["evaluated"], []) == list(range(ROWS))

    assert found["stream"]["rows"] == found["sequential stream"]["rows"] == in_order
    for case in ("stream", "half shuffled"):
        [(level, message)] = found[case]["messages"]
        assert level == "WARNING" and "Call shuffle(seed=…) before those steps" in message
    assert sum(found["begun"]["rows"], []) == list(range(5, 17)), "a state that was loaded has an order"
    assert found["sequential stream"]["messages"] == []

    for step in (3, 8):  # the order of the checkpoint, whatever the arguments say now
        assert found[f"shuffled from {step}"]["rows"] == batches(tmp_path, 7)[step:], step
        assert found[f"in order from {step}"]["rows"] == in_order[step:], step
        [(level, message)] = found[f"in order from {step}"]["messages"]
        assert level == "INFO" and "the run continues in order" in message

    assert "'group_by_length' needs the lengths of all rows" in found["lengths"]["refused"]
    assert "'batch_rebalance'" in found["rebalance"]["refused"]
    assert "split_batches" in found["split"]["refused"] and "dispatch_batches" in found["dispatch"]["refused"]
