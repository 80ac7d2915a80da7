"""Programs as users start them: alone, or by torchrun, an agent that starts ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from forks import PYTHON

QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}

PATIENCE = 600
"""Seconds after which a program is killed: it hangs."""

Program = Callable[..., int]
"""(size, script, *arguments): its exit status"""

Launch = Callable[..., None]
"""(size, script, *arguments, cwd=None, env=None)"""


def launch(
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    error: int | None = None,
    python: str = sys.executable,
) -> subprocess.Popen[str]:
    """An agent, and ranks of it, in a session of its own; ``env`` is what differs from this process's environment.

    ``python``: the program that runs the agent, and from which it starts its ranks.
    """
    # With the store shared between agents, torch 2.13 does not come together again after a node has joined.
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", PYTHON: python, **(env or {})}
    command = [python, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **own}, start_new_session=True, stderr=error, text=True
    )


def torchrun(
    size: int,
    *command: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
) -> None:
    """A script as so many ranks on this machine, to their end."""
    options = ["--standalone", f"--nproc-per-node={size}"]
    process = launch(*options, *command, cwd=cwd, env=env, error=subprocess.PIPE, python=python)
    try:
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said[-6000:]
    finally:
        end(process)


def program(size: int, script: Path, *arguments: str) -> int:
    """A script in a process of its own, or as ranks, to its end; its exit status. Of ranks none is left behind."""
    command = [str(script), *arguments]
    if size > 1:
        process = launch("--standalone", f"--nproc-per-node={size}", *command, env=QUIET)
    else:
        alone = [sys.executable, *command]
        process = subprocess.Popen(alone, env={**os.environ, **QUIET}, start_new_session=True, text=True)
    try:
        return process.wait(timeout=PATIENCE)
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """An agent and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
