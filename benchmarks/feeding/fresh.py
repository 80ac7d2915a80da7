"""Measurements that need a fresh process: `python -m benchmarks.feeding.fresh NAME ARGUMENTS` prints a line of JSON."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, **arguments: Any) -> dict[str, Any]:
    """Call a function of this module in a fresh process. Raise RuntimeError with its last complaint."""
    command = [sys.executable, "-m", "benchmarks.feeding.fresh", name, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def first_batch(
    *, folder: str, smoke: bool, workers: int, watch: str = "", prefetch: int | None = None
) -> dict[str, Any]:
    """Seconds to the first batch of text → filter → tokenize → mix → pack.

    ``watch``: "workers" adds when their functions were called, "main" a profile of the main process. Both slow it down.
    """
    import torch

    from benchmarks.feeding import routes, timeline
    from midepoch.loader import make

    assert torch, make  # imported before the clock runs
    scale, files = _data(folder, smoke)
    log = Path(folder) / f"timeline-{os.getpid()}"
    tokenizers = timeline.tokenizers(log, scale) if watch == "workers" else ()
    ds = routes.dataset("text", files, scale, tokenizers)
    profiler = cProfile.Profile()
    if watch == "main":
        os.register_at_fork(after_in_child=profiler.disable)
        profiler.enable()
    start = time.monotonic()
    loader = ds.loader(scale.sequences, num_workers=workers, prefetch=prefetch)
    next(iter(loader))
    end = time.monotonic()
    profiler.disable()
    loader.close()
    found: dict[str, Any] = {"seconds": end - start}
    if watch == "workers":
        found["workers"] = timeline.summary(log, start, end)
    if watch == "main":
        found["main"] = _slowest(profiler)
    return found


def _slowest(profiler: cProfile.Profile, count: int = 12) -> list[str]:
    """The functions of the main process that took the most time of their own."""
    rows: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    slowest = sorted(rows.items(), key=lambda item: -item[1][2])[:count]
    return [
        f"{own:.3f} s own, {whole:.3f} s in all, {calls} calls: {Path(path).name}:{line} {name}"
        for (path, line, name), (_, calls, own, whole, _) in slowest
    ]


def jpeg(*, folder: str, smoke: bool, workers: int, worker_type: str | None, seconds: float) -> dict[str, Any]:
    """Images per second of the JPEG loop with workers of a type, and the memory of all processes meanwhile."""
    from benchmarks.feeding import measure, memory, routes

    scale, files = _data(folder, smoke)
    before = memory.megabytes()
    options = {} if worker_type is None else {"worker_type": worker_type}
    feed = measure.Feed(lambda: routes.ours("images", files, scale, workers, **options))
    figures = measure.measure(
        feed.next,
        lambda batch: None,
        seconds=seconds,
        warm_up=seconds / 3,
        wait=lambda: None,
        waited=lambda: feed.waited,
    )
    found = {"rate": figures.rows_per_second, "cpu_ms": figures.cpu_ms, "megabytes": memory.megabytes()}
    feed.close()
    return {**found, "before": before}


def index(*, path: str, index_dir: str, workers: int, method: str | None, select: bool, batches: int) -> dict[str, Any]:
    """Memory of a loader over an index of many rows, shuffled by rows, after some batches, while its workers wait.

    ``select``: all rows in another order are selected first, which takes an array as long as the index.
    """
    import numpy as np

    import midepoch
    from benchmarks.feeding import memory

    ds = midepoch.from_files(path, index_dir=index_dir)
    rows = len(ds)
    if select:
        ds = ds.select(np.arange(rows - 1, -1, -1))
    ds = ds.shuffle(seed=1, scope="rows").with_format("numpy")
    loader = ds.map(_same).loader(64, num_workers=workers, multiprocessing_context=method)
    passing = iter(loader)
    for _ in range(batches):
        next(passing)
    found = {"rows": rows, "megabytes": memory.megabytes(), "processes": len(memory.family())}
    loader.close()
    return found


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _data(folder: str, smoke: bool) -> tuple[Any, Any]:
    """The scale, and the files that were made for it before."""
    from benchmarks.feeding.files import Files
    from benchmarks.feeding.work import Scale

    made = json.loads((Path(folder) / "files.json").read_text())
    paths: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in made.items()}
    return (Scale().smoke if smoke else Scale()), Files(**paths)


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {"first_batch": first_batch, "jpeg": jpeg, "index": index}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
