"""The examples run, and say what the text they were made after says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

RESUMABLE = """\
Saved checkpoint at step 1000
Saved checkpoint at step 2000
Resumed from step 2000
  Epoch: 3
  Position: 256
Saved checkpoint at step 3000
Saved checkpoint at step 1000
Saved checkpoint at step 2000
Saved checkpoint at step 3000
Deterministic restoration: True
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_resumable_training(framework: str) -> None:
    script = EXAMPLES / f"resumable_training_{framework}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == RESUMABLE, done.stderr[-3000:]
