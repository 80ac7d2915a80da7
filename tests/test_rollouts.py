"""A loop of reinforcement learning with rollout processes, killed at random points: each prompt is trained on once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

from forks import Forks
from midepoch.audit import read_run

EXAMPLE, JOB = Path(__file__).parents[1] / "examples" / "rollouts.py", Path(__file__).with_name("rollouts_job.py")
PROMPTS = 400


def trained(folder: Path) -> Counter[int]:
    """How often the last model was trained on each prompt: without steps that were lost with an attempt."""
    steps: list[tuple[int, list[int]]] = []
    for line in (folder / "trained.txt").read_text().splitlines():
        kind, step, *prompts = line.split()
        if kind == "from":
            steps = [each for each in steps if each[0] <= int(step)]
        else:
            steps.append((int(step), [int(prompt) for prompt in prompts]))
    return Counter(prompt for _, prompts in steps for prompt in prompts)


def rejected(folder: Path) -> set[int]:
    """Prompts that some worker was about to reject, in any attempt."""
    return {int(line) for path in folder.glob("rejected-*.txt") for line in path.read_text().splitlines()}


def check(folder: Path, said: str) -> None:
    """Every prompt was trained on once, or rejected."""
    once = trained(folder)
    assert set(once.values()) == {1}
    others = set(range(PROMPTS)) - once.keys()
    assert others and others <= rejected(folder)
    (epoch,) = read_run(folder / "ledger").epochs
    assert epoch.exact and epoch.complete and epoch.leases is not None
    assert (epoch.leases.acknowledged, epoch.leases.rejected) == (PROMPTS, len(others))
    assert (epoch.leases.repeated, epoch.leases.never, epoch.leases.out) == (0, 0, 0)
    assert said == f"{PROMPTS} prompts: {len(once)} trained on, {len(others)} rejected\n"


def test_learner_killed_at_random_points(torch_forks: Forks, tmp_path: Path) -> None:
    chosen = random.Random()
    for workers in (2, 3, 1, 2):
        lines = str(chosen.randrange(1, 60))
        command = [str(JOB), str(EXAMPLE), "learner", lines, str(tmp_path), "--workers", str(workers)]
        (killed,) = torch_forks.run(command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    (done,) = torch_forks.run([str(EXAMPLE), str(tmp_path), "--workers", "3"])
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, done.stdout)


def test_worker_killed_at_a_random_point(torch_forks: Forks, tmp_path: Path) -> None:
    lines = str(random.Random().randrange(1, 150))
    (done,) = torch_forks.run([str(JOB), str(EXAMPLE), "worker", lines, str(tmp_path), "--workers", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, done.stdout)
