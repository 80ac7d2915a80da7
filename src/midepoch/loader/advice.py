"""What to do when the model waits for data, by what takes the time."""

from __future__ import annotations

import os

from midepoch.stats import Stats

_WORK = {"functions": "running your functions", "present": "putting batches together", "read": "reading"}
_WITH_WORKERS = {
    "functions": "map(…, batched=True) does many rows at once; or run them once, ahead of training.",
    "present": "a collate_fn that takes columns (collate_columns=True) does less, and so do numbers beside objects.",
    "read": "select_columns() reads less, and shuffle(scope='window') reads in larger pieces.",
}
_MISSED = 0.9


def remedy(stats: Stats, workers: int) -> str:
    """In words, for a loader with so many workers."""
    most = max(stats.stages, key=lambda name: stats.stages[name])
    hits, spare = stats.cache_hits, cores() - 1
    if most == "read" and hits is not None and hits < _MISSED:
        advice = (
            f"{100 * (1 - hits):.0f} % of the blocks had to be fetched or decoded when they were needed: give more "
            "cache_bytes, or shuffle(scope='window') with fewer blocks a window."
        )
    elif workers < max(1, spare):
        advice = f"Most of the work is {_WORK[most]}: give num_workers={max(1, spare)} instead of {workers}."
    else:
        advice = f"Most of the work is {_WORK[most]}: {_WITH_WORKERS[most]}"
    return f"{advice} loader.stats() has the numbers, and `midepoch bench` tries settings."


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
