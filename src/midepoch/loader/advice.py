"""Advice for a model that waits for data, by the work that takes the time."""

from __future__ import annotations

from midepoch._internal.processes import cores
from midepoch.stats import Stats

_WORK = {"functions": "running your functions", "present": "assembling batches", "read": "reading"}
_WITH_WORKERS = {
    "functions": "map(…, batched=True) processes many rows in one call; or run them once, before training.",
    "present": "a collate_fn that takes columns (collate_columns=True) has less to do, and so do numbers instead of "
    "objects.",
    "read": "select_columns() reads less, and shuffle(scope='window') reads in larger pieces.",
}
_MISSED = 0.9


def remedy(stats: Stats, workers: int) -> str:
    """Return the advice for a loader with ``workers`` workers."""
    most = max(stats.stages, key=lambda name: stats.stages[name])
    hits, spare = stats.cache_hits, cores() - 1
    if most == "read" and hits is not None and hits < _MISSED:
        advice = (
            f"{100 * (1 - hits):.0f} % of the blocks had to be fetched or decoded when they were needed: increase "
            "cache_bytes, or use shuffle(scope='window') with fewer blocks per window."
        )
    elif workers < max(1, spare):
        advice = f"Most of the work is {_WORK[most]}: use num_workers={max(1, spare)} instead of {workers}."
    else:
        advice = f"Most of the work is {_WORK[most]}: {_WITH_WORKERS[most]}"
    return f"{advice} See loader.stats() for the numbers; `midepoch bench` measures other settings."
