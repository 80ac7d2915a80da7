"""``python -m fast_hf_loader_simple``: load a dataset twice and show the time of the second load."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_LOAD = """
import json, sys, time
start = time.perf_counter()
import numpy, pyarrow
imported = time.perf_counter()
from fast_hf_loader_simple import fast_load_iterable_dataset
ids = fast_load_iterable_dataset(**json.loads(sys.argv[1]))
first = next(iter(ids))
done = time.perf_counter()
print(json.dumps({"imports": imported - start, "load": done - imported, "rows": len(ids), "files": ids.num_files,
                  "columns": list(first), "datasets imported": "datasets" in sys.modules}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fast_hf_loader_simple", description=__doc__)
    parser.add_argument("path", nargs="?", help="a dataset's name or folder (default: a small generated one)")
    parser.add_argument("name", nargs="?", help="its configuration")
    parser.add_argument("--split", default="train")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fast-hf-") as folder:
        request = {"path": args.path, "name": args.name, "split": args.split}
        if args.path is None:
            request = {**_sample(Path(folder)), "split": args.split}
        request["index_dir"] = f"{folder}/index"
        print(f"loading {request['path']} in a fresh process, twice")
        for which in ("first load", "second load"):
            found = _run(request)
            print(
                f"  {which:12}: {found['load'] * 1e3:9.1f} ms to the first row "
                f"({found['rows']:,} rows, {found['files']} files; "
                f"datasets {'was' if found['datasets imported'] else 'was not'} imported)"
            )


def _sample(folder: Path) -> dict[str, object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(8):
        ids = range(part * 5_000, (part + 1) * 5_000)
        pq.write_table(
            pa.table({"id": ids, "text": [f"example number {i} " * 8 for i in ids]}), folder / f"{part}.parquet"
        )
    return {"path": "parquet", "data_files": f"{folder}/*.parquet", "cache_dir": f"{folder}/cache"}


def _run(request: dict[str, object]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, json.dumps(request)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"loading {request['path']} failed (see above)")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
