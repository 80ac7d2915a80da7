"""examples/rollouts, which notes its prompts, and of which a process may be killed at a random point.

python rollouts_job.py (learner | worker | nobody) LINES FOLDER …: the example with its own arguments, and SIGKILL once it
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
from functools import partial
from pathlib import Path
from typing import Any

import midepoch.checkpoint
import rollouts_notes

EXAMPLE = Path(__file__).parents[1] / "examples" / "rollouts"


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.txt"))


def kill(victim: str, folder: Path, count: int) -> None:
    while lines(folder) < count:
        time.sleep(0.001)
    pid: int | None = os.getpid() if victim == "learner" else None
    while pid is None:  # the first lines are written before there are workers
        pid = next((worker.pid for worker in multiprocessing.active_children()), None)
    os.kill(pid, signal.SIGKILL)
    (folder / "killed").touch()


def note_prompts(folder: Path) -> None:
    """Have the example note the step it resumes from, the prompts of each step, and prompts that are rejected."""
    import grpo
    import worker

    log, update, step = folder / "trained.txt", grpo.update, 0

    class Checkpoint(midepoch.checkpoint.PipelineCheckpoint):
        def restore_latest(self, *rest: Any, **named: Any) -> int | None:
            nonlocal step
            step = super().restore_latest(*rest, **named) or 0
            rollouts_notes.note(log, "from", step)
            return step

    def noted(model: Any, optimizer: Any, groups: Any) -> None:
        nonlocal step
        update(model, optimizer, groups)
        step += 1
        rollouts_notes.note(log, "step", step, *(lease.batch["prompt"] for lease, _ in groups))

    midepoch.checkpoint.PipelineCheckpoint = Checkpoint
    grpo.update = noted
    worker.generate = partial(rollouts_notes.generate, folder)


if __name__ == "__main__":
    victim, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    sys.argv[:3] = [str(EXAMPLE / "learner.py")]
    sys.path.insert(0, str(EXAMPLE))
    note_prompts(folder)
    if victim != "nobody":
        threading.Thread(target=kill, args=(victim, folder, lines(folder) + count), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
