"""Benchmarks in a process of their own, on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from forks import PYTHON

ROOT = Path(__file__).parent.parent


def run(python: str, *words: str) -> str:
    """Return the output of a Python process with these arguments, from the root of the project."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", PYTHON: python}
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
