"""Measure one route in this process and print one line of JSON.

`python -m benchmarks.one CONTENDER WORKLOAD ROUTE`, or `python -m benchmarks.one CONTENDER prepare` to convert.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import contenders, data
from benchmarks.contenders import Contender, Route

WARM_UP_SECONDS = 1.0


def folder_of(contender: str, dataset: data.Data) -> Path:
    """Where a contender keeps its converted data."""
    return dataset.folder / "converted" / contender


def prepare(key: str, contender: Contender, dataset: data.Data) -> dict[str, Any]:
    """Convert once; what it cost is kept beside the result."""
    folder = folder_of(key, dataset)
    done = folder / "prepared.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        if found["version"] == contender.version():
            return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.perf_counter()
    contender.prepare(dataset, folder)
    seconds = time.perf_counter() - start
    size = sum(_own_bytes(path) for path in folder.rglob("*"))
    cost = {"version": contender.version(), "seconds": round(seconds, 2), "bytes": size}
    done.write_text(json.dumps(cost))
    return cost


def _own_bytes(path: Path) -> int:
    """Size of a file that was written for this contender; a link to the shared data counts nothing."""
    found = path.stat()
    return found.st_size if path.is_file() and found.st_nlink == 1 else 0


def warm_page_cache(dataset: data.Data, folder: Path, workload: str) -> None:
    """Read through every file the route may touch, so that no route pays for the disk."""
    name = "text" if workload.startswith("text") else "tokens"
    files = dataset.text if name == "text" else dataset.tokens
    converted = [p for p in folder.rglob("*") if p.is_file() and name in p.relative_to(folder).parts[0]]
    # Parquet is read by some contenders straight from the shared folder.
    for path in [*map(Path, files.arrow), *map(Path, files.parquet), *converted]:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def measure(route: Route, dataset: data.Data, folder: Path, *, seconds: float, whole: bool) -> dict[str, Any]:
    """Rows per second after the first item, for `seconds` or one pass, after a warm-up that is thrown away.

    ``whole``: from the beginning, where much of the work may be done before the first item: a shuffle buffer that is
    filled first has decoded a good part of the files by then.
    """
    _take(route(dataset, folder), WARM_UP_SECONDS)
    gc.collect()
    start = time.perf_counter()
    first_rows, first_at, rows, stopped, complete = _take(route(dataset, folder), seconds)
    elapsed, counted = (stopped - start, rows) if whole else (stopped - first_at, rows - first_rows)
    return {
        "rows_per_second": counted / elapsed if elapsed > 0 and counted > 0 else 0.0,
        "first_item_seconds": first_at - start,
        "rows": rows,
        "seconds": stopped - start,
        "full_pass": complete,
    }


def _take(steps: Iterator[int], seconds: float) -> tuple[int, float, int, float, bool]:
    """Rows of the first item, when it came, all rows, when they had come, and whether the pass was complete."""
    first = next(steps)
    first_at = now = time.perf_counter()
    rows, until = first, first_at + seconds
    complete = True
    for count in steps:
        rows += count
        now = time.perf_counter()
        if now > until:
            complete = False
            break
    if complete:
        now = time.perf_counter()
    close = getattr(steps, "close", None)
    if close is not None:
        close()
    return first, first_at, rows, now, complete


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=contenders.MODULES)
    parser.add_argument("workload")
    parser.add_argument("route", nargs="?", default="plain")
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    dataset = data.load(arguments.data_dir, arguments.scale)
    contender = contenders.find(arguments.contender)
    cost = prepare(arguments.contender, contender, dataset)
    if arguments.workload == "prepare":
        routes = {workload: list(found) for workload, found in contender.ROUTES.items()}
        print(json.dumps({"name": contender.NAME, **cost, "routes": routes}), flush=True)
        return
    folder = folder_of(arguments.contender, dataset)
    warm_page_cache(dataset, folder, arguments.workload)
    route = contender.ROUTES[arguments.workload][arguments.route]
    whole = arguments.workload.startswith("parquet")
    result = measure(route, dataset, folder, seconds=arguments.seconds, whole=whole)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
