"""Structured files, what is not throughput: opening, resuming, memory. `python -m benchmarks.lake`.

Bytes fetched from an object store are counted in the tests (`tests/storage/test_object_store.py`), where they decide.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import data
from benchmarks.latency import Measured

MANY = 10_000
GROUPS = 50
CACHE = 512 << 20
_SHAPE = 20 << 30

_OPEN = """
import sys, time
import numpy, pyarrow, midepoch, midepoch.open, midepoch.loader, midepoch.sources.lake, pyarrow.parquet, pyarrow.fs
start = time.perf_counter()
ds = midepoch.from_files(sys.argv[1], index_dir=sys.argv[2], validate=sys.argv[3] == "1")
took = time.perf_counter() - start
assert len(ds) == int(sys.argv[4])
print(took)
"""

_MEMORY = """
import sys, threading, time, json
import midepoch
peak = 0
def watch():
    global peak
    while True:
        for line in open("/proc/self/status"):
            if line.startswith("VmRSS"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
where = {"index_dir": sys.argv[2], "cache_dir": sys.argv[4] or None}
ds = midepoch.from_files(sys.argv[1], cache_bytes=int(sys.argv[3]), **where)
loader = ds.shuffle(seed=1).with_format("numpy").loader(256)
rows, until = 0, time.monotonic() + float(sys.argv[5])
for batch in loader:
    rows += len(batch["x"])
    if time.monotonic() > until:
        break
print(json.dumps({"peak": peak, "rows": rows, "of": len(ds)}))
"""


def _run(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def _many(folder: Path) -> Path:
    """10,000 files: one written, the others copies of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = folder / "many"
    if not (target / "done").exists():
        target.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": range(100), "x": [0.5] * 100}), target / "first.parquet")
        data = (target / "first.parquet").read_bytes()
        (target / "first.parquet").unlink()
        for i in range(MANY):
            (target / f"part-{i:05}.parquet").write_bytes(data)
        (target / "done").write_text("")
    return target


def _one(folder: Path) -> Path:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "fifty.parquet"
    if not path.exists():
        x = np.random.default_rng(0).integers(0, 1 << 30, GROUPS * 20_000)
        pq.write_table(pa.table({"x": x, "y": x[::-1]}), path, row_group_size=20_000)
    return path


def _sparse(folder: Path) -> Path:
    """20 GB once decoded: rows of 4 KB, all zero, in row groups of 64 MB that take next to nothing on disk."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "sparse-20g.parquet"
    if not path.exists():
        rows = 16_384
        column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 1024, np.int32)), 1024)
        table = pa.table({"x": column})
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            for _ in range(_SHAPE // (rows * 4096)):
                writer.write_table(table, row_group_size=rows)
    return path


def second_open(folder: Path) -> list[Measured]:
    files, index = _many(folder), folder / "many-index"
    _run(_OPEN, files, index, 1, MANY * 100)
    found = []
    for validate in (1, 0):
        best = min(float(_run(_OPEN, files, index, validate, MANY * 100)) for _ in range(7))
        what = "" if validate else ", validate=False"
        found.append(Measured(f"second open of {MANY:,} files{what}", "ms", 100, best * 1000))
    return found


def resume(folder: Path) -> list[Measured]:
    import midepoch

    path = _one(folder)
    loader = midepoch.from_files(path).loader(64)
    batches = iter(loader)
    for _ in range(int(0.905 * len(loader))):  # inside of a row group
        next(batches)
    state = loader.state_dict()
    fresh, resumed = [], []
    for _ in range(15):
        for times, start in ((fresh, None), (resumed, state)):
            ds = midepoch.from_files(path)
            begun = time.perf_counter()
            again = ds.loader(64)
            if start is not None:
                again.load_state_dict(start)
            next(iter(again))
            times.append(time.perf_counter() - begun)
    return [Measured("resume at 90 % of 50 row groups ÷ fresh start", "×", 1.3, min(resumed) / min(fresh))]


def memory(folder: Path, seconds: float) -> list[Measured]:
    path, found = _sparse(folder), []
    for shared in (False, True):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            out = _run(_MEMORY, path, folder / "sparse-index", CACHE, cache if shared else "", seconds)
        result = json.loads(out)
        where = "on disk" if shared else "in memory"
        share = result["rows"] / result["of"]
        bar = f"memory beyond cache_bytes, 20 GB by window, blocks {where} ({share:.0%} of an epoch)"
        found.append(Measured(bar, "MB", 300, (result["peak"] - CACHE) / 1e6))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR / "lake")
    parser.add_argument("--seconds", type=float, default=30.0, help="longest measurement of memory")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    options.data_dir.mkdir(parents=True, exist_ok=True)
    found = [*second_open(options.data_dir), *resume(options.data_dir), *memory(options.data_dir, options.seconds)]
    for each in found:
        verdict = "passed" if each.passed else "LOST  "
        print(f"{verdict}  {each.bar}: {each.measured:.2f} {each.unit} (at most {each.allowed:g})")
    if options.json:
        options.json.write_text(json.dumps([vars(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
