"""Ray Train that loses a worker in mid-epoch and continues, and later resumes with another number of workers.

python examples/ray_train.py --workers 2 --kill  # a worker is killed on the way; Ray starts all again, and they resume
python examples/ray_train.py --workers 3         # resumes where that ended
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

ROWS, GLOBAL_BATCH, STEPS, EVERY = 7200, 48, 100, 20


def train(config: dict[str, Any]) -> None:
    rank, size = get_context().get_world_rank(), get_context().get_world_size()
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Rank and world size are found by themselves. The global batch stays, so any number of workers sees the same steps.
    pipeline = midepoch.from_files(config["data"]).shuffle(seed=42).loader(GLOBAL_BATCH // size, drop_last=True)
    checkpoint = PipelineCheckpoint(config["checkpoints"], keep=3)  # a folder that all nodes see, or s3://…
    started = step = checkpoint.restore_latest(pipeline, model, optimizer) or 0

    def say(what: str) -> None:
        if rank == 0:  # not by print, which Ray 2.60 shows twice
            where = f"epoch {pipeline.epoch}, position {pipeline.position}, world size {size}"
            sys.stdout.write(f"{what} step {step}: {where}\n")

    say("Resumed from" if step else "Started at")
    while step < config["until"]:
        for batch in pipeline:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                checkpoint.save(pipeline, model, optimizer, step=step, metadata={"loss": loss.item()})
                say("Saved")
            if step == config["kill_at"] and started == config["started"] and rank == size - 1:
                signal.raise_signal(signal.SIGKILL)  # only the first time: those who resumed started later
            if step == config["until"]:
                break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill", action="store_true", help="kill a worker on the way")
    parser.add_argument("--storage", type=Path, default=Path("ray_run"), help="a folder that all nodes see")
    args = parser.parse_args()
    (storage := args.storage.resolve()).mkdir(parents=True, exist_ok=True)  # workers' working directory is another
    data, checkpoints = storage / "data.parquet", storage / "checkpoints"
    if not data.exists():
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        pq.write_table(pa.table({"image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}), data)
    started = PipelineCheckpoint(checkpoints).latest_step() or 0
    plan = {"started": started, "until": started + STEPS, "kill_at": started + STEPS // 2 if args.kill else None}
    TorchTrainer(
        train,
        train_loop_config={"data": str(data), "checkpoints": str(checkpoints), **plan},
        scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(storage / "ray"), failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
