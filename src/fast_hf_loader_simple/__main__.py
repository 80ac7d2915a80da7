"""``python -m fast_hf_loader_simple``: load a generated dataset in two fresh processes, and show the time of each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

_LOAD = """
import json, sys, time
import numpy, pyarrow
start = time.perf_counter()
from fast_hf_loader_simple import fast_load_iterable_dataset
ids = fast_load_iterable_dataset("parquet", split="train", **json.loads(sys.argv[1]))
first = next(iter(ids))
print(f"{1e3 * (time.perf_counter() - start):9.1f} ms to the first row ({len(ids):,} rows, {ids.num_files} files; "
      f"datasets {'was' if 'datasets' in sys.modules else 'was not'} imported)")
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fast-hf-") as folder:
        for part in range(8):
            ids = range(part * 5_000, (part + 1) * 5_000)
            table = pa.table({"id": ids, "text": [f"example number {i} " * 8 for i in ids]})
            pq.write_table(table, f"{folder}/{part}.parquet")
        arguments = {
            "data_files": f"{folder}/*.parquet",
            "cache_dir": f"{folder}/cache",
            "index_dir": f"{folder}/index",
        }
        for load in ("first load", "second load"):
            print(f"{load:12}", end="", flush=True)
            subprocess.run([sys.executable, "-c", _LOAD, json.dumps(arguments)], check=True)


if __name__ == "__main__":
    main()
