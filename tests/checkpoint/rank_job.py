"""One rank of a small run, as a process of its own: run by test_ranks.py.

python rank_job.py FOLDER DATA RANK SIZE HOW STEP [WHEN]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import midepoch
from midepoch.checkpoint import CheckpointError, PipelineCheckpoint


def main(folder: str, data: str, rank: int, size: int, how: str, step: int, when: str = "") -> None:
    # Only who never comes is waited for that long; of the dead it is known that they are.
    timeout = 2.0 if when == "alone" else 60.0
    if when == "alone" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint = PipelineCheckpoint(folder, rank=rank, world_size=size, timeout=timeout, async_save=how == "async")
    loader = (
        midepoch.from_files(data).shuffle(seed=4).with_format("numpy").loader(batch_size=2, rank=rank, world_size=size)
    )
    model = {"w": np.zeros(5000), "step": 0}
    started = time.monotonic()
    try:
        if how == "restore":
            found = checkpoint.restore_latest(loader, model)
            batches = [batch["id"].tolist() for batch in loader]
            print("restored", found, model["step"], float(model["w"][0]), batches, np.random.rand(), flush=True)
            return
        if how == "again":
            checkpoint.manifest(step - 1)
        batches = 3 if when == "ahead" and rank == size - 1 else 2
        passing = iter(loader)
        for _ in range(batches):
            next(passing)
        if when == f"first {rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        if when.startswith("then"):  # it was there once, and dies on its way to the next meeting
            checkpoint.save(loader, model, step=step - 1)
            if when == f"then {rank}":
                os.kill(os.getpid(), signal.SIGKILL)
        _die(when, rank)
        model = {"w": np.full(5000, float(step)), "step": step}
        np.random.seed(rank)
        checkpoint.save(loader, model, step=step, metadata={"by": size})
        checkpoint.wait()
        print("saved", checkpoint.steps(), flush=True)
    except CheckpointError as problem:
        print("refused", type(problem).__name__, f"{time.monotonic() - started:.1f}", problem, flush=True)


def _die(when: str, rank: int) -> None:
    """Die in the middle: where ``when`` says "RANK:METHOD", when that method is first called."""
    if ":" not in when or int(when.split(":")[0]) != rank:
        return
    from midepoch.checkpoint import local, rendezvous

    name = when.split(":")[1]
    kind = next(kind for kind in (rendezvous.Leader, rendezvous.Follower, local.LocalStore) if hasattr(kind, name))
    setattr(kind, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6]), *sys.argv[7:])
