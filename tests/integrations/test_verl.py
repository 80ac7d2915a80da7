"""The example for verl, which needs older versions of other packages than the tests: run it in an environment with verl."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from midepoch.audit import read_run

pytest.importorskip("verl", reason="verl is not installed: it needs transformers < 5.11")

JOB = Path(__file__).with_name("verl_job.py")
PROMPTS, EVERY = 120, 3


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(JOB), str(folder), *arguments], capture_output=True, text=True)


def test_every_prompt_once_over_kills(tmp_path: Path) -> None:
    for die_at in (4, 7, 8):
        killed = run(tmp_path, str(die_at))
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps: list[tuple[int, list[str]]] = []
    resumed: list[int] = []
    rejected: set[str] = set()
    for line in (tmp_path / "prompts.txt").read_text().splitlines():
        kind, *words = line.split()
        if kind == "rejected":
            rejected.update(words)
        elif kind == "from":
            resumed.append(int(words[0]))
            steps = [each for each in steps if each[0] <= resumed[-1]]
        else:
            steps.append((int(words[0]), words[1:]))
    assert resumed == [0, 3, 6, 6]
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    trained = Counter(prompt for _, prompts in steps for prompt in prompts)
    others = {str(number) for number in range(PROMPTS)} - trained.keys()
    assert set(trained.values()) == {1}
    assert others and others <= rejected
    (epoch,) = read_run(tmp_path / "ledger").epochs
    assert epoch.exact and epoch.complete and epoch.leases is not None
    assert (epoch.leases.acknowledged, epoch.leases.rejected) == (PROMPTS, len(others))
    assert (epoch.repeated, epoch.never, epoch.leases.out) == (0, 0, 0)
    saved = [f"Saved step {step}" for step in range(6 + EVERY, len(steps) + 1, EVERY)]
    assert done.stdout.splitlines() == ["Resumed from step 6", *saved]
