"""The time until the first batch is that of loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = """
import sys
import midepoch
from midepoch.loader import passes

clock, seen = passes.perf_counter, []
passes.perf_counter = lambda: seen.append("torch" in sys.modules) or clock()
ds = midepoch.from_files(sys.argv[1])
if sys.argv[2] == "stream":
    ds = ds.filter(lambda row: row["id"] % 2 == 0)
assert "torch" not in sys.modules
batch = next(ds.loader(4))
print(seen[0], type(batch["id"]).__name__)
"""


@pytest.mark.parametrize("kind", [pytest.param("dataset", marks=pytest.mark.slow), "stream"])
def test_importing_torch_is_no_loading(kind: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": list(range(20))}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a.parquet"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True Tensor\n", done.stdout + done.stderr
