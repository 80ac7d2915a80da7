"""Padding and the cost of ranks, of batches that loaders deliver."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import midepoch
from benchmarks.planned import data, figures
from benchmarks.planned.contenders import SEED
from benchmarks.planned.figures import Rows, Spread

RANKS = 8
SHAPES = ((300, 0.5), (600, 1.0), (600, 1.5), (2_000, 1.0))
"""Mean and sigma of lengths."""
OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padded, tokens": {"balance": "tokens"},
    "padded, quadratic": {"balance": "quadratic"},
    "varlen": {"layout": "varlen"},
    "varlen, tokens": {"layout": "varlen", "balance": "tokens"},
    "varlen, quadratic": {"layout": "varlen", "balance": "quadratic"},
}


class Planned(NamedTuple):
    """Batches of an epoch over all ranks. ``padding``: of delivered tensors. ``filled``: tokens beside the budget."""

    batches: int
    padding: float
    filled: float
    tokens: Spread
    quadratic: Spread


def open_tokens(path: Path, **options: Any) -> midepoch.Loader:
    """Return a loader of a file of tokens."""
    ds = midepoch.from_files(str(path), index_dir=path.parent / "index").shuffle(seed=SEED)
    return ds.loader(max_tokens=data.BUDGET, **options)


def planned(path: Path, lengths: Rows, **options: Any) -> Planned:
    """Iterate an epoch of eight ranks, and return its figures."""
    ranks: list[list[Rows]] = []
    room = 0
    for rank in range(RANKS):
        loader = open_tokens(path, rank=rank, world_size=RANKS, **options)
        ranks.append([])
        for batch in loader:
            ranks[-1].append(batch["id"].numpy())
            room += batch["input_ids"].numel()
    batches = [rows for step in zip_longest(*ranks) for rows in step if rows is not None]
    found = figures.delivered(batches, len(lengths))
    if found != (0, 0):
        raise RuntimeError(f"rows lost and repeated: {found}")
    total, padded = int(lengths.sum()), options.get("layout") != "varlen"
    spreads = [figures.spread(ranks, lengths, power, padded) for power in (1, 2)]
    return Planned(len(batches), 1 - total / room, total / len(batches) / data.BUDGET, *spreads)


def measure(folder: Path, rows: int) -> None:
    """Print the figures of all options and shapes of lengths."""
    for mean, sigma in SHAPES:
        lengths = data.lengths_of(rows, mean, sigma)
        path = folder / f"{mean}-{sigma}.arrow"
        data.write_tokens(path, lengths)
        windows = [data.WINDOW, *([10 * data.WINDOW] if (mean, sigma) == (data.MEAN, data.SIGMA) else [])]
        print(f"{rows:,} rows, mean {lengths.mean():.0f}, sigma {sigma}, median {np.median(lengths):.0f}")
        print(
            "    window, options, batches, padding, filled, spread of tokens; of squares (mean / median / p95 / total)"
        )
        for window in windows:
            for name, options in OPTIONS.items():
                each = planned(path, lengths, bucket_window=window, **options)
                print(
                    f"    {window:>7,} {name:<19} {each.batches:>7,} {each.padding:>8.2%} {each.filled:>7.1%}  "
                    f"{each.tokens}; {each.quadratic}",
                    flush=True,
                )
        path.unlink()
