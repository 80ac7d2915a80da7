"""A billion rows in a million record batches: how long to the first shuffled batch, and how much memory.

The file is real: one record batch of 1,000 one-byte rows, written a million times (1.3 GB), indexed like any other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BLOCKS, ROWS = 1_000_000, 1_000

_FIRST_BATCH = """
import json, resource, sys, time
import numpy, pyarrow
import midepoch.open, midepoch.loader
def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
start = time.perf_counter()
ds = midepoch.from_files(sys.argv[1], index_dir=sys.argv[2])
loader = ds.shuffle(seed=1, scope="rows").with_format("numpy").loader(64)
batch = next(iter(loader))
print(json.dumps({"rows": len(ds), "seconds": time.perf_counter() - start, "megabytes": resident()}))
"""


def make(folder: Path, blocks: int = BLOCKS) -> Path:
    """The file, made once."""
    import numpy as np
    import pyarrow as pa

    path = folder / "huge.arrow"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema({"x": pa.int8()})
    batch = pa.record_batch([pa.array(np.arange(ROWS) % 100, pa.int8())], schema=schema)
    message = batch.serialize().to_pybytes()
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(schema.serialize().to_pybytes())
        for _ in range(blocks // 1_000):
            file.write(message * 1_000)
        file.write(b"\xff\xff\xff\xff\x00\x00\x00\x00")
    temporary.rename(path)
    return path


def measure(folder: Path, repeats: int = 5) -> dict[str, float]:
    """Best time and least memory of fresh processes; the first one builds the index and does not count."""
    path = make(folder)
    command = [sys.executable, "-c", _FIRST_BATCH, str(path), str(folder / "index")]
    runs = []
    for _ in range(repeats + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        runs.append(json.loads(done.stdout))
    return {
        "indexing": runs[0]["seconds"],
        "rows": runs[0]["rows"],
        "seconds": min(run["seconds"] for run in runs[1:]),
        "megabytes": min(run["megabytes"] for run in runs[1:]),
    }
