"""The example for verl, which needs older versions of other packages than the tests: run it in an environment with verl."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: it needs transformers < 5.11")

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_verl.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), str(folder), *arguments], capture_output=True, text=True)


def test_every_prompt_once_over_kills(tmp_path: Path) -> None:
    for die_at in (4, 7, 8):
        killed = run(tmp_path, "--die-at", str(die_at))
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps: list[tuple[int, list[str]]] = []
    rejected: set[str] = set()
    for line in (tmp_path / "prompts.txt").read_text().splitlines():
        kind, *words = line.split()
        if kind == "rejected":
            rejected.update(words)
        elif kind == "from":
            steps = [each for each in steps if each[0] <= int(words[0])]
        else:
            steps.append((int(words[0]), words[1:]))
    trained = Counter(prompt for _, prompts in steps for prompt in prompts)
    others = {str(number) for number in range(120)} - trained.keys()
    assert set(trained.values()) == {1}
    assert others and others <= rejected
