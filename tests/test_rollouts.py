"""A loop of reinforcement learning with rollout processes, killed at random points: each prompt is trained on once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

from forks import Forks
from midepoch.audit import read_run

JOB = Path(__file__).with_name("rollouts_job.py")
PROMPTS, EVERY = 400, 5


def steps_of(folder: Path) -> list[tuple[int, list[int]]]:
    """The prompts of each step that is in the last model: without steps that were lost with an attempt."""
    steps: list[tuple[int, list[int]]] = []
    for line in (folder / "trained.txt").read_text().splitlines():
        kind, step, *prompts = line.split()
        if kind == "from":
            steps = [each for each in steps if each[0] <= int(step)]
        else:
            steps.append((int(step), [int(prompt) for prompt in prompts]))
    return steps


def rejected(folder: Path) -> set[int]:
    """Prompts that some worker was about to reject, in any attempt."""
    return {int(line) for path in folder.glob("rejected-*.txt") for line in path.read_text().splitlines()}


def resumed_from(folder: Path) -> int:
    """The step from which the last attempt resumed."""
    steps = [line.split()[1] for line in (folder / "trained.txt").read_text().splitlines() if line.startswith("from")]
    return int(steps[-1])


def check(folder: Path, said: str) -> None:
    """Every prompt was trained on once, or rejected."""
    steps = steps_of(folder)
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    once = Counter(prompt for _, prompts in steps for prompt in prompts)
    assert set(once.values()) == {1}
    others = set(range(PROMPTS)) - once.keys()
    assert others and others <= rejected(folder)
    (epoch,) = read_run(folder / "ledger").epochs
    assert epoch.exact and epoch.complete and epoch.leases is not None
    assert (epoch.leases.acknowledged, epoch.leases.rejected) == (PROMPTS, len(others))
    assert (epoch.repeated, epoch.never, epoch.leases.out) == (0, 0, 0)
    first = resumed_from(folder)
    assert said.splitlines() == [
        f"Resumed from step {first}" if first else "Started",
        *(f"Saved step {step}" for step in range(first + EVERY, len(steps) + 1, EVERY)),
        f"{PROMPTS} prompts: {len(once)} trained on, {len(others)} rejected",
    ]


def test_learner_killed_at_random_points(torch_forks: Forks, tmp_path: Path) -> None:
    chosen = random.Random()
    for workers in (2, 3):
        lines = str(chosen.randrange(1, 60))
        command = [str(JOB), "learner", lines, str(tmp_path), "--workers", str(workers)]
        (killed,) = torch_forks.run(command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    (done,) = torch_forks.run([str(JOB), "nobody", "0", str(tmp_path), "--workers", "3"])
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, done.stdout)


def test_worker_killed_at_a_random_point(torch_forks: Forks, tmp_path: Path) -> None:
    lines = str(random.Random().randrange(1, 150))
    (done,) = torch_forks.run([str(JOB), "worker", lines, str(tmp_path), "--workers", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    check(tmp_path, done.stdout)
