"""A process that ends while its loader reads ahead ends as it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import write_arrow
from forks import Forks

# Registered before anything else, so called after everything else: what still runs then may be in C++ code when the
# interpreter goes, and takes the process with it ("terminate called without an active exception", SIGABRT).
SCRIPT = """
import atexit, sys, threading
atexit.register(lambda: print("left:", [t.name for t in threading.enumerate() if t.name.startswith("midepoch")]))
import midepoch
from midepoch.loader import direct

kind, path = sys.argv[1:]
ds = midepoch.from_files(path).shuffle(seed=1).with_format("numpy")
if kind == "map":
    ds = ds.map(dict)
if kind == "touched":
    faults = iter(range(10**9))
    direct._faults = lambda: next(faults)
batches = iter(ds.loader(2))
for _ in range(4):
    next(batches)
print("ran:", bool([t for t in threading.enumerate() if t.name.startswith("midepoch")]))
"""


@pytest.mark.parametrize("kind", ["fetched", "map", "touched"])
def test_nothing_reads_on_when_the_process_ends(kind: str, tmp_path: Path) -> None:
    table = pa.table({"id": np.arange(4000)})
    if kind == "touched":
        write_arrow(tmp_path / "a.arrow", table, 10)
    else:
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    command = [sys.executable, "-c", SCRIPT, kind, str(next(tmp_path.glob("a.*")))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran: True\nleft: []\n"


# The function keeps the names of the script until modules are cleared: what is deleted then finds nothing in them.
HELD = """
import sys
import midepoch
from midepoch.loader import direct
faults = iter(range(10**9))
direct._faults = lambda: next(faults)  # a file that is not in memory
def keep(): ...
path, folder, kind = sys.argv[1:]
ds = midepoch.from_files(path, index_dir=folder, cache_dir=folder if kind == "cached" else None).shuffle(seed=1)
ds = ds.with_format("numpy")  # importing torch would take longer than all the rest
loaders = {
    "numbers": lambda: ds.loader(2),
    "cached": lambda: ds.loader(2),
    "threads": lambda: ds.map(dict).loader(2),
    "workers": lambda: ds.map(dict).loader(2, num_workers=2),
    "audited": lambda: ds.loader(2, audit=folder + "/ledger"),
    "stream": lambda: ds.filter(bool).loader(2),
    "stream of workers": lambda: ds.filter(bool).loader(2, num_workers=2),
    "rows": lambda: ds,
}
batches = iter(loaders[kind]())
for _ in range(4):
    next(batches)
sys.modules["held"] = batches
"""
KINDS = ["numbers", "cached", "threads", "workers", "audited", "stream", "stream of workers", "rows"]


@pytest.mark.parametrize("suffix", [pytest.param("arrow", marks=pytest.mark.slow), "parquet"])
def test_an_iterator_that_a_script_leaves_behind_is_silent(suffix: str, tmp_path: Path) -> None:
    table, path = pa.table({"id": np.arange(4000)}), tmp_path / f"a.{suffix}"
    if suffix == "arrow":
        write_arrow(path, table, 10)
    else:
        pq.write_table(table, path, row_group_size=10)
    (tmp_path / "script.py").write_text(HELD)
    with Forks("midepoch", "midepoch.loader.direct") as forks:
        commands = [[str(tmp_path / "script.py"), str(path), str(tmp_path / f"{kind}"), kind] for kind in KINDS]
        for kind, done in zip(KINDS, forks.run(*commands, teardown=True), strict=True):
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), kind
