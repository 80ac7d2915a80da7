"""The examples run, and say what the text they were made after says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forks import PYTHON, Forks

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

# A twentieth of the steps: 33 in an epoch, so that the last save before the kill is in the fourth epoch here too.
SMALLER = {
    "ROWS, BATCH, EPOCHS, EVERY = 21_248, 32, 5, 1000": "ROWS, BATCH, EPOCHS, EVERY = 1_056, 32, 5, 50",
    '"2345"': '"117"',
    "[2000:]": "[100:]",
}
SMALLER_SAYS = {"1000": "50", "2000": "100", "3000": "150", "256": "32"}


def says(script: Path) -> str:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    return said_by(done)


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout if done.returncode == 0 else done.stderr[-3000:]


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_resumable_training_on_fewer_rows(framework: str, tmp_path: Path, torch_forks: Forks, python: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(replaced((EXAMPLES / f"resumable_training_{framework}.py").read_text(), SMALLER))
    said = said_by(*torch_forks.run([str(script)], env={PYTHON: python})) if framework == "torch" else says(script)
    assert said == replaced(RESUMABLE, SMALLER_SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_resumable_training(framework: str) -> None:
    assert says(EXAMPLES / f"resumable_training_{framework}.py") == RESUMABLE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_megatron_needs_a_gpu(tmp_path: Path, torch_forks: Forks) -> None:
    fakes = {
        "__init__": "dist_checkpointing = enums = parallel_state = None",
        "num_microbatches_calculator": "get_num_microbatches = init_num_microbatches_calculator = None",
        "pipeline_parallel": "get_forward_backward_func = None",
        "transformer": "MegatronModule = TransformerConfig = object",
    }
    (tmp_path / "megatron/core").mkdir(parents=True)
    for name, code in fakes.items():
        (tmp_path / f"megatron/core/{name}.py").write_text(code)
    (done,) = torch_forks.run(
        [str(EXAMPLES / "megatron_core_loop.py"), str(tmp_path / "run")], env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 1
    assert done.stderr == (
        "Megatron-Core needs CUDA, and torch finds no GPU here. Run this example on a machine with a GPU.\n"
    )
