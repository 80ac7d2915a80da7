"""The bounded chaos run of the default suite. scripts/chaos --kills 2000 is the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def chaos(kills: int, seed: int) -> None:
    # A process of its own: it forks ranks, and must have no thread when it does.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "chaos", f"--kills={kills}", f"--seed={seed}"]
    environment = {**os.environ, "CHAOS_VERBOSE": "1"}
    tests = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    last = done.stdout.splitlines()[-1]
    assert re.match(rf"{kills} kills in \d+ pipelines, \d+ s: 0 lost, 0 repeated", last), last
    assert "'rank'" in done.stdout and "'all'" in done.stdout and "'worker'" in done.stdout  # all kinds of victims
    assert re.search(r"[1-9]\d* again after a crash", done.stdout)  # kills in the middle, not just at the start
    assert "dataset (" in done.stdout and "stream (" in done.stdout


def test_twenty_kills() -> None:
    chaos(20, seed=5)


@pytest.mark.slow
def test_five_hundred_kills() -> None:
    chaos(500, seed=11)
