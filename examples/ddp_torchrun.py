"""DDP under torchrun: be killed with kill -9 on the way, start again with any number of ranks, go on at the next row.

torchrun --nproc-per-node=2 examples/ddp_torchrun.py run --die-at 47
torchrun --nproc-per-node=2 examples/ddp_torchrun.py run
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

ROWS, GLOBAL_BATCH, EPOCHS, EVERY = 500, 16, 2, 10


def make_data(path: Path) -> None:
    if dist.get_rank() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
        pq.write_table(pa.table(table), path)
    dist.barrier()


def train(folder: Path, die_at: int | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    make_data(folder / "data.parquet")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Rank and world size are found. With an equal global batch, any number of ranks sees the same steps.
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    loader = ds.loader(GLOBAL_BATCH // size, num_workers=1, last_batch="drop")
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=3)  # all ranks save and restore
    step = checkpoint.restore_latest(loader, model, optimizer) or 0
    if step and rank == 0:
        print(f"Resumed from step {step}, in epoch {loader.epoch}", flush=True)
    with open(folder / f"rows-{rank}.txt", "a", buffering=1) as seen:
        while loader.epoch < EPOCHS:
            for batch in loader:
                loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(step, *batch["id"].tolist(), file=seen)
                if step % EVERY == 0:
                    checkpoint.save(loader, model, optimizer, step=step)
                if step == die_at:
                    signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="one that all ranks see")
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" on GPUs
    train(args.folder, args.die_at)
    dist.destroy_process_group()
