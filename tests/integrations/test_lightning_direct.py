"""A loader given to Lightning's fit directly is warned about, and its checkpoints can be inspected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from launch import Program
from midepoch.cli.app import app


def test_a_loader_given_to_fit(program: Program, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(10)}), tmp_path / "data.parquet")
    assert program(1, Path(__file__).with_name("lightning_direct_job.py"), str(tmp_path)) == 0
    found = json.loads((tmp_path / "warnings.json").read_text())
    [warning] = found["direct"]["warnings"]  # once, in two epochs with validation
    assert "may lose or repeat rows" in warning and "ResumableData(lambda: ds.loader(…))" in warning
    assert found["datamodule"]["warnings"] == found["mix"]["warnings"] == []
    assert found["datamodule"]["validated"][-10:] == list(range(10))
    for place in (tmp_path / "step=4.ckpt", tmp_path):
        told = CliRunner().invoke(app, ["inspect", str(place), "--json"])
        assert told.exit_code == 0, told.output
        summary = json.loads(told.stdout)
        assert summary["step"] == 4 and summary["place"].endswith("step=4.ckpt")
        assert [text.split(":")[0] for text in summary["sources"]] == ["web", "code"]
