"""Rows that ranks noted, step by step, and those they should have noted."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import midepoch
from forks import Forks

Steps = dict[int, list[int]]


def noted(folder: Path) -> Steps:
    """The rows of each step over all ranks. Notes are removed."""
    steps: Steps = defaultdict(list)
    for notes in folder.glob("rows-*.txt"):
        for line in notes.read_text().splitlines():
            step, *rows = map(int, line.split())
            steps[step] += rows
        notes.unlink()
    return {step: sorted(rows) for step, rows in sorted(steps.items())}


def killed(forks: Forks, ranks: int, *command: str) -> None:
    """Run a job on ranks that kill themselves."""
    done = forks.world(ranks, *command)
    assert {one.returncode for one in done} == {-signal.SIGKILL}, "\n".join(one.stderr[-3000:] for one in done)


def check_page(forks: Forks, folder: Path) -> None:
    """The code of docs/stacks.md runs: all that this environment has the packages for."""
    root = Path(__file__).parents[2]
    command = [str(root / "tests/docs/page.py"), str(root / "docs/stacks.md")]
    (done,) = forks.run(command, cwd=folder, env={"MIDEPOCH_CACHE": str(folder / ".cache")})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def check_steps(data: Path, column: str, runs: Sequence[Steps], ranges: Sequence[tuple[int, int]]) -> None:
    """Runs have the global batches of one process that was never interrupted, from the first to the last of each."""
    ds = midepoch.from_files(data).shuffle(seed=42).with_lanes(8)
    loader, rows = ds.loader(16, last_batch="drop"), []
    while len(rows) < 20:
        rows += [sorted(batch[column][:, 0].tolist()) for batch in loader]
    assert loader.epoch > 3
    expected = dict(enumerate(rows[:20], 1))
    for seen, (first, last) in zip(runs, ranges, strict=True):
        assert seen == {step: expected[step] for step in range(first, last + 1)}
