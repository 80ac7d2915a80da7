"""Runs in processes of their own: one that is killed in the middle of an epoch, and one that continues it.

A process opens all ranks and takes their steps in turn. It writes the batches and the states, and kills itself: nothing
but the states, pickled, reaches the next one.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.planned.contenders import CONTENDERS, Rank, Setting
from benchmarks.planned.figures import Delivered, Rows, delivered

ROOT = Path(__file__).resolve().parents[2]


class Leg(NamedTuple):
    """Batches of each rank, and the states after them."""

    ranks: list[list[Rows]]
    states: list[Any]

    def steps(self) -> list[Rows]:
        """Return all batches."""
        return [rows for rank in self.ranks for rows in rank]


def take(name: str, setting: Setting, world: int, steps: int | None = None, states: Any = None, epoch: int = 0) -> Leg:
    """Take steps of all ranks in this process. A rank without a state gets that of rank 0."""
    leg = Leg([], [])
    for index in range(world):
        state = None if states is None else states[index if index < len(states) else 0]
        opened = CONTENDERS[name](setting, Rank(index, world, epoch, state))
        leg.ranks.append(list(islice(opened.batches, steps)))
        leg.states.append(pickle.loads(pickle.dumps(opened.state())))
    return leg


class Resumed(NamedTuple):
    """A run that resumed another one. ``exact``: its batches are those of an uninterrupted run."""

    result: Delivered | None
    exact: bool
    state_bytes: int
    error: str = ""

    def __str__(self) -> str:
        return self.error or f"{self.result}{', exact' * self.exact}"


def resumed(name: str, setting: Setting, worlds: tuple[int, int], steps: int) -> Resumed:
    """Stop after some steps with a number of ranks, and finish the epoch with another one, in new processes."""
    first = _in_process(name, setting, worlds[0], steps)
    size = len(pickle.dumps(first.states[0]))
    try:
        second = _in_process(name, setting, worlds[1], None, first.states)
    except RuntimeError as problem:
        return Resumed(None, False, size, f"refused: {problem}"[:100])
    whole = take(name, setting, worlds[0])
    joined = [before + after for before, after in zip(first.ranks, second.ranks, strict=False)]
    exact = worlds[0] == worlds[1] and all(
        len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in zip(joined, whole.ranks, strict=True)
    )
    return Resumed(delivered([*first.steps(), *second.steps()], setting.rows), exact, size)


def _in_process(name: str, setting: Setting, world: int, steps: int | None, states: Any = None) -> Leg:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leg"
        path.write_bytes(pickle.dumps((name, setting, world, steps, states)))
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        words = [sys.executable, "-m", "benchmarks.planned.legs", str(path)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != -signal.SIGKILL:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the process ended")
        return Leg(*pickle.loads(path.with_suffix(".done").read_bytes()))


def main() -> None:
    path = Path(sys.argv[1])
    name, setting, world, steps, states = pickle.loads(path.read_bytes())
    leg = take(name, setting, world, steps, states)
    path.with_suffix(".done").write_bytes(pickle.dumps(tuple(leg)))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
