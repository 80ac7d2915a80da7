"""Programs run as users run them: in processes of their own, alone or as ranks under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT = 900


def run(script: Path, *arguments: str, ranks: int = 1) -> int:
    """Run a script to its end; its exit status. Of ranks none is left behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), *arguments]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
