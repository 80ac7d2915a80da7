"""examples/rollouts.py, killed at a random point.

python rollouts_job.py EXAMPLE OUTCOMES FOLDER …: the example with its own arguments, and SIGKILL once it has written so
many more lines about prompts (trained on or rejected), at whatever it does then.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.txt"))


def kill(folder: Path, outcomes: int) -> None:
    while lines(folder) < outcomes:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    example, outcomes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    del sys.argv[:1], sys.argv[1]
    threading.Thread(target=kill, args=(folder, lines(folder) + outcomes), daemon=True).start()
    runpy.run_path(example, run_name="__main__")
