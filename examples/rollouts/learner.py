"""Reinforcement learning with rollout processes: every prompt is trained on once, or rejected once, over kills.

Prompts are leased to workers. The learner collects groups of completions, makes a step of GRPO, and then acknowledges
their prompts. A checkpoint holds the model and the prompts that were acknowledged or rejected until then. Prompts that
were on their way when the learner or a worker was killed, and only those, are delivered again.

python examples/rollouts/learner.py run                  # kill it, or a worker, at any time (kill -9)
python examples/rollouts/learner.py run --workers 3      # resumes, with another number of workers
midepoch audit run/ledger                                # each prompt was acknowledged once
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from worker import DIGITS, exit_with_learner, rollouts

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

PROMPTS, GROUPS, DEPTH, EVERY, RESTARTS = 400, 8, 4, 5, 10


def train(folder: Path, workers: int) -> None:
    from grpo import make_model, update  # here, because workers import this file, and do without torch

    if not (path := folder / "prompts.parquet").exists():
        folder.mkdir(parents=True, exist_ok=True)
        left, right = np.random.default_rng(0).integers(DIGITS, size=(2, PROMPTS))
        pq.write_table(pa.table({"prompt": np.arange(PROMPTS), "left": left, "right": right}), path)
    loader = midepoch.from_files(path).shuffle(seed=42).loader(1, collate_fn=itemgetter(0), audit=folder / "ledger")
    (model, optimizer), trained = make_model(), {"prompts": 0}
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=2)
    step = checkpoint.restore_latest(loader, model, optimizer, extra={"trained": trained}) or 0
    print(f"Resumed from step {step}" if step else "Started", flush=True)
    restarts = 0
    while loader.epoch == 0:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), exit_with_learner)
        try:
            with pool, loader.lease() as leases:
                groups = rollouts(pool, leases, model, workers * DEPTH)
                while ready := list(islice(groups, GROUPS)):
                    update(model, optimizer, ready)
                    for lease, _ in ready:
                        lease.ack()
                    step, trained["prompts"] = step + 1, trained["prompts"] + len(ready)
                    if step % EVERY == 0:
                        checkpoint.save(loader, model, optimizer, step=step, extra={"trained": trained})
                        print(f"Saved step {step}", flush=True)
        except BrokenProcessPool:  # a worker has died: prompts that are out are delivered again, to new workers
            if (restarts := restarts + 1) > RESTARTS:
                raise
    checkpoint.save(loader, model, optimizer, step=step, extra={"trained": trained})
    print(f"{PROMPTS} prompts: {trained['prompts']} trained on, {PROMPTS - trained['prompts']} rejected")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    train(**vars(parser.parse_args()))
