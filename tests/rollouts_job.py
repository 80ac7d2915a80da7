"""examples/rollouts.py, of which a process is killed at a random point.

python rollouts_job.py EXAMPLE (learner | worker) LINES FOLDER …: the example with its own arguments, and SIGKILL once it
has written so many more lines about prompts (trained on or rejected), at whatever it does then.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.txt"))


def kill(victim: str, folder: Path, count: int) -> None:
    while lines(folder) < count:
        time.sleep(0.001)
    worker = multiprocessing.active_children()[0].pid
    os.kill(os.getpid() if victim == "learner" or worker is None else worker, signal.SIGKILL)


if __name__ == "__main__":
    example, victim, count, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    sys.argv[:4] = [example]
    threading.Thread(target=kill, args=(victim, folder, lines(folder) + count), daemon=True).start()
    runpy.run_path(example, run_name="__main__")
