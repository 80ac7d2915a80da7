"""Measurements of loader settings on this machine: rows/s by workers and batch size, beside the limit.

The limit is the speed of the same rows without a loader: copied in order from mapped files, or fetched and decoded
block after block by as many threads as there are cores, and discarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch._internal.processes import cores
from midepoch.dataset import Dataset
from midepoch.pipeline.engine import Engine
from midepoch.stats import Stats

_NEAR = 0.95
"""A setting with fewer workers is as good as the fastest if it reaches this share of its speed."""
_LIMIT_BLOCKS = 64


@dataclass(frozen=True)
class Trial:
    """One setting, and its measurements."""

    num_workers: int
    batch_size: int
    stats: Stats


@dataclass(frozen=True)
class Limit:
    """The speed of this machine for these rows, without a loader, warm."""

    rows_per_second: float
    bytes_per_second: float
    how: str


def try_settings(
    ds: Dataset,
    *,
    batch_sizes: Sequence[int],
    workers: Sequence[int],
    seconds: float,
    report: Callable[[int, int], Any],
) -> list[Trial]:
    """Measure each setting for ``seconds`` seconds, in turn, after a first pass that is not counted."""
    settings = [(count, size) for count in workers for size in batch_sizes]
    trials = []
    _consume(ds.loader(batch_sizes[0], last_batch="uneven"), min(seconds, 0.5))  # the first read is slower
    for number, (count, size) in enumerate(settings, 1):
        with ds.loader(size, num_workers=count, last_batch="uneven", persistent_workers=count > 0) as loader:
            _consume(loader, seconds)
            trials.append(Trial(count, size, loader.stats()))
        report(number, len(settings))
    return trials


def _consume(loader: Any, seconds: float) -> None:
    """Take batches for a while after the first one, over several epochs if they are short."""
    until = math.inf
    while True:
        is_empty = True
        for _ in loader:
            is_empty, now = False, time.perf_counter()
            if now >= until:
                return
            until = min(until, now + seconds)
        if is_empty or time.perf_counter() >= until:
            return


def find_limit(ds: Dataset, seconds: float) -> Limit:
    """Measure the same columns without a loader."""
    leaf = ds.pipeline.leaf
    source, engine = leaf.source, Engine(leaf)
    rows, size, began = 0, 0, time.perf_counter()
    if source.fetched:
        columns = list(leaf.head.values())
        blocks = np.linspace(0, len(source.layout.block_starts) - 2, _LIMIT_BLOCKS).astype(int)

        def fetch(block: int) -> tuple[int, int]:
            table = source.fetch(block, columns)
            return table.num_rows, table.nbytes

        with ThreadPoolExecutor(cores()) as pool:
            while time.perf_counter() - began < seconds:
                for some_rows, some_bytes in pool.map(fetch, np.unique(blocks).tolist()):
                    rows, size = rows + some_rows, size + some_bytes
        how = f"blocks fetched and decoded by {cores()} threads"
    else:
        at, step, total = 0, engine.chunk_rows(1 << 20), len(ds)
        while time.perf_counter() - began < seconds:
            for piece, count in engine.read_pieces(np.arange(at, min(at + step, total))):
                rows, size = rows + count, size + _copied(piece.columns.values())
            at = at + step if at + step < total else 0
        how = "rows in order, copied once from mapped files"
    elapsed = time.perf_counter() - began
    return Limit(rows / elapsed, size / elapsed, how)


def _copied(columns: Iterable[Any]) -> int:
    """Copy the memory of Arrow columns, and return the number of bytes."""
    size = 0
    for column in columns:
        for buffer in getattr(column, "array", column).buffers():
            if buffer is not None:
                share = min(buffer.size, int(column.nbytes)) if hasattr(column, "nbytes") else buffer.size
                size += np.frombuffer(buffer, np.uint8, share).copy().nbytes
    return size


def advise(trials: Sequence[Trial]) -> tuple[Trial, str]:
    """Return the fastest setting, and the reason for it.

    Of several that are close to it, it is that with the fewest workers, then the smallest batches.
    """

    def rate(one: Trial) -> float:
        return one.stats.rows_per_second

    fastest = max(trials, key=rate)
    near = [one for one in trials if rate(one) >= _NEAR * rate(fastest)]
    best = min(near, key=lambda one: (one.num_workers, one.batch_size))
    alone = max((one for one in trials if not one.num_workers), key=rate, default=None)
    stages = best.stats.stages
    most = max(stages, key=lambda name: stages[name])
    work = {"read": "reading", "functions": "your functions", "present": "assembling batches"}[most]
    if best.num_workers and alone is not None and rate(alone):
        ratio = rate(best) / rate(alone)
        why = f"{best.num_workers} workers are {ratio:.1f} × as fast as none: most of the work is {work}."
    elif not best.num_workers and any(one.num_workers for one in trials):
        why = f"workers do not help here: most of the work is {work}, and transferring batches costs as much."
    else:
        why = f"most of the work is {work}."
    if best is not fastest:
        why += f" {fastest.num_workers} workers with batches of {fastest.batch_size} are no more than 5 % faster."
    return best, why
