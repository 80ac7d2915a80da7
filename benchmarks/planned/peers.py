"""The contenders side by side: padding, batches, spread, randomness, and resuming."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planned import data, figures, legs
from benchmarks.planned.contenders import CONTENDERS, Setting, installed
from benchmarks.planned.plans import RANKS

WINDOWS = (500, 1_000, 2_000, 5_000)
"""Smaller windows of midepoch: more random, more padding."""


def ordered(ranks: Sequence[figures.Batches]) -> list[figures.Rows]:
    """Return batches step by step."""
    return [rank[step] for step in range(max(map(len, ranks))) for rank in ranks if step < len(rank)]


def shapes(name: str, setting: Setting) -> str:
    """Return the figures of the batches of eight ranks."""
    start = time.perf_counter()
    ranks = legs.take(name, setting, RANKS).ranks
    seconds = (time.perf_counter() - start) / RANKS
    batches, following = ordered(ranks), ordered(legs.take(name, setting, RANKS, epoch=1).ranks)
    most = int(figures.padded_tokens(batches, setting.lengths).max())
    return (
        f"{len(batches):>6,} {figures.padding(batches, setting.lengths):>7.2%} {most:>8,}  "
        f"{figures.spread(ranks, setting.lengths)};  {figures.spread(ranks, setting.lengths, 2)};  "
        f"{figures.randomness(batches, following, setting.lengths)};  {seconds:.2f}"
    )


def resumes(name: str, setting: Setting) -> str:
    """Return what is lost and repeated without an interruption, and after one."""
    whole = legs.take(name, setting, 2)
    steps = min(map(len, whole.ranks)) * 2 // 5
    same, other = (legs.resumed(name, setting, (2, world), steps) for world in (2, 3))
    return f"{figures.delivered(whole.steps(), setting.rows)};  {same};  {other};  {same.state_bytes}"


def measure(folder: Path, rows: int, only: str = "") -> None:
    """Print both tables."""
    path = folder / "peers.arrow"
    data.write_ids(path, rows)
    setting = Setting(path, rows)
    names = [name for name in CONTENDERS if name.startswith(only)]
    for name in names:
        if not installed(name):
            print(f"    {name}: left out, not installed")
    names = [name for name in names if installed(name)]
    limit = f"budget {setting.budget:,} or {setting.batch_size} rows"
    print(f"{rows:,} rows, window {setting.window:,}, {limit}, {RANKS} ranks")
    print("    batches, padding, largest;  spread of tokens (mean/median/p95/total);  of squares;")
    print("    randomness (distance/neighbours/again);  seconds for a rank")
    for name in names:
        print(f"    {name:<26} {shapes(name, setting)}", flush=True)
    for window in WINDOWS if "midepoch".startswith(only) else ():
        print(f"    midepoch, window {window:<9,} {shapes('midepoch', replace(setting, window=window))}", flush=True)
    print("    rows lost / repeated: uninterrupted, 2 ranks;  resumed on 2;  resumed on 3;  bytes of a state")
    for name in names:
        print(f"    {name:<26} {resumes(name, setting)}", flush=True)
