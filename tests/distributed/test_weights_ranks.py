"""Weights of a mix that ranks set while they train together: equal on all of them, and kept on 2, then 3 ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from test_torchrun import HERE, read
from weights_job import mixed

from data import write_arrow
from launch import Launch


def test_all_ranks_have_the_weights_of_the_first(tmp_path: Path, launched: Launch) -> None:
    data = str(write_arrow(tmp_path / "a.arrow", pa.table({"id": np.arange(600)}), 40))
    job = str(HERE / "weights_job.py")
    launched(2, job, str(tmp_path), data, "6")
    launched(3, job, str(tmp_path), data, "4")
    first = [read(tmp_path / f"weights-2-{rank}.json") for rank in range(2)]
    then = [read(tmp_path / f"weights-3-{rank}.json") for rank in range(3)]
    agreed = first[0]["weights"][0]
    assert agreed["a"] in (0.75, 0.76 / 1.01)
    assert all(weights == agreed for one in (*first, *then) for weights in one["weights"])

    alone = mixed(data).loader(12)
    expected = []
    for step in range(10):
        expected.append(sorted(next(alone)["id"].tolist()))
        if step == 1:
            alone.set_weights(agreed)
    steps = [sorted(row for one in first for row in one["seen"][step]) for step in range(6)]
    steps += [sorted(row for one in then for row in one["seen"][step]) for step in range(4)]
    assert steps == expected
    refused = list(tmp_path.glob("refused-*.txt"))
    assert len(refused) == 1 and "Call it at the same step on all ranks" in refused[0].read_text()
