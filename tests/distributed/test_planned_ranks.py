"""Batches by tokens on ranks that train together: equal steps without a hang, every row once on 2, then 3 ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_torchrun import HERE, read

import midepoch
from data import write_arrow
from launch import Launch
from midepoch import WorldError, audit
from midepoch.loader.loader import Loader
from midepoch.pipeline.cursor import Cursor

ROWS = 301


def test_ranks_take_equal_steps_to_the_last_row(tmp_path: Path, launched: Launch) -> None:
    lengths = np.minimum(np.random.default_rng(2).lognormal(2.5, 0.8, ROWS).astype(int), 60).tolist()
    table = pa.table({"id": np.arange(ROWS), "input_ids": [list(range(length)) for length in lengths]})
    data = str(write_arrow(tmp_path / "a.arrow", table, 40))
    job = str(HERE / "planned_job.py")
    launched(2, job, str(tmp_path), data, "5")
    launched(3, job, str(tmp_path), data, "0")
    for name in ("tokens", "balanced", "run time", "steps"):
        first = [read(tmp_path / f"{name}-2-{rank}.json") for rank in range(2)]
        then = [read(tmp_path / f"{name}-3-{rank}.json") for rank in range(3)]
        assert {len(each["seen"]) for each in first} == {5}
        assert len({len(each["seen"]) for each in then}) == 1
        assert all(shape <= 200 for each in (*first, *then) for shape in each["shapes"])
        rows = sorted(row for each in (*first, *then) for batch in each["seen"] for row in batch)
        if name == "steps":  # the rest of a pass of six steps: 4 of 3 rows, then 6
            assert [len(batch) for batch in first[0]["seen"]] == [3, 3, 3, 3, 6]
            assert [len(batch) for batch in then[0]["seen"]] == [6] and len(rows) == len(set(rows))
            continue
        assert rows == list(range(1, ROWS, 2) if name == "run time" else range(ROWS))
        assert name == "run time" or all(each["state"] for each in (*first, *then))
        assert audit.read_run(tmp_path / "ledger" / name).exact


def test_a_last_step_without_a_row_for_a_rank_is_refused_before_the_first_one(tmp_path: Path) -> None:
    """Where the batches of an epoch are counted quickly: not after days."""
    table = pa.table({"id": range(9), "input_ids": [[1] * 10] * 9})
    ds = midepoch.from_files(str(write_arrow(tmp_path / "a.arrow", table, 4))).shuffle(seed=1)
    for ranks, refused in ((4, True), (3, False)):
        planned = ds.loader(max_tokens=10, rank=0, world_size=ranks)
        options = replace(planned.options, last_batch=None)  # as on ranks that train together
        loader = Loader(planned.pipeline, options, Cursor())
        if refused:
            with pytest.raises(WorldError, match="has 1 row left for 4 ranks"):
                next(loader)
        else:
            assert len(list(loader)) == 3
