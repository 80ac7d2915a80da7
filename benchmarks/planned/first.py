"""Time to the first batch at 90 % of an epoch, beside a fresh start, with lengths that are given."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planned import data
from benchmarks.planned.contenders import Rank, Setting, open_ids
from benchmarks.planned.figures import Rows

SHARE = 0.9


def state_at(setting: Setting, share: float) -> tuple[Any, Rows]:
    """Iterate a part of an epoch on rank 0 of 2. Return the state, and the batch that follows."""
    loader = open_ids(setting, Rank(0, 2))
    batches: Iterator[Rows] = iter(loader)
    for _ in range(int(share * len(loader))):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    return state, next(batches)


def start(setting: Setting, state: Any, world: int) -> tuple[float, float, Rows]:
    """Return seconds from opening and from loading the state to the first batch, and the batch.

    Batch k is that of rank k mod S, so the next one of the epoch is that of this rank.
    """
    rank = 0 if state is None else state["position"] % world
    opened = time.perf_counter()
    loader = open_ids(setting, Rank(rank, world))
    loaded = time.perf_counter()
    if state is not None:
        loader.load_state_dict(state)
    batch = next(iter(loader))
    over = time.perf_counter()
    return over - opened, over - loaded, batch


def measure(folder: Path, rows: int, rounds: int) -> None:
    """Print the times of a fresh start and of resumes on 2 and 3 ranks, in turn, medians."""
    path = folder / f"{rows}.arrow"
    data.write_ids(path, rows)
    setting = Setting(path, rows)
    state, expected = state_at(setting, SHARE)
    starts = {"fresh, 2 ranks": (None, 2), "resumed, 2 ranks": (state, 2), "resumed, 3 ranks": (state, 3)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for _ in range(rounds):
        for name, (loaded, world) in starts.items():
            opened, restored, batch = start(setting, loaded, world)
            found[name].append((opened, restored))
            if loaded is not None and not np.array_equal(batch, expected):
                raise RuntimeError(f"{name}: the first batch is not the one that follows")
    size = len(json.dumps(state))
    print(f"{rows:,} rows, at {SHARE:.0%}, state of {size} bytes: ms to the first batch, medians of {rounds} rounds")
    for name, each in found.items():
        opened, restored = np.median(np.array(each), axis=0) * 1e3
        print(f"    {name:<18} from opening {opened:>7.1f}, from load_state_dict {restored:>7.1f}")
    path.unlink()
