"""JAX arrays, in a process of its own: where JAX runs, workers are started instead of forked."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest

from data import write_arrow

JAX = """
import sys
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import midepoch
from midepoch.testing import assert_resumes_exactly

def odd(row):
    return row["id"] % 2

def formats(path):
    ds = midepoch.from_files(path).select_columns(["i", "fixed", "s"]).with_format("jax")
    found = ds[0:2]
    assert isinstance(found["i"], jax.Array)
    assert found["fixed"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found["s"] == ["a", None]
    for workers in (0, 2):
        batches = list(ds.loader(3, num_workers=workers))
        assert all(isinstance(batch["i"], jax.Array) for batch in batches)
        assert [batch["i"].tolist() for batch in batches] == [[1, 2, 3], [4]], batches

def make(workers=0):
    ds = midepoch.from_files(sys.argv[1]).select_columns(["id"]).take(40)
    return ds.filter(odd).with_format("jax").loader(4, num_workers=workers)

def resumes():
    batch = next(iter(make()))
    assert isinstance(batch["id"], jax.Array) and batch["id"].tolist() == [1, 3, 5, 7]
    assert_resumes_exactly(make)
    assert [b["id"].tolist() for b in make(1)] == [b["id"].tolist() for b in make()]

def cuts_no_number(path):
    pq.write_table(pa.table({"id": np.arange(4), "large": np.arange(4) + 2**40}), path)
    ds = midepoch.from_files(path).with_format("jax")
    assert next(iter(ds.select_columns("id").loader(4)))["id"].tolist() == [0, 1, 2, 3]
    try:
        next(iter(ds.loader(4)))
    except midepoch.MidepochError as problem:
        assert "jax_enable_x64" in str(problem)
    else:
        raise AssertionError("large numbers were cut")
    jax.config.update("jax_enable_x64", True)
    assert next(iter(ds.loader(4)))["large"].tolist() == [2**40, 2**40 + 1, 2**40 + 2, 2**40 + 3]

if __name__ == "__main__":
    formats(sys.argv[3])
    resumes()
    cuts_no_number(sys.argv[2])
    print("done")
"""


def test_jax_batches_are_arrays_resume_exactly_and_cut_no_number(documents_folder: str, tmp_path: Path) -> None:
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    table = pa.table(
        {
            "i": pa.array([1, 2, 3, 4], pa.int32()),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float64(), 2)),
            "s": ["a", None, "ccc", ""],
        }
    )
    mixed = write_arrow(tmp_path / "a.arrow", table, 3)
    script = tmp_path / "script.py"
    script.write_text(JAX)
    command = [sys.executable, "-W", "error", str(script), documents_folder, str(tmp_path / "a.parquet"), str(mixed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
