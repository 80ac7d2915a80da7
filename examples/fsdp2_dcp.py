"""FSDP2 with torch.distributed.checkpoint: shards of the model and the place in the data, committed together.

torchrun --nproc-per-node=2 examples/fsdp2_dcp.py run --die-at 47
torchrun --nproc-per-node=2 examples/fsdp2_dcp.py run          # or on 4 ranks: tensors are resharded, rows continue
"""

import argparse
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))  # "cuda" on GPUs
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    loader = ds.loader(GLOBAL_BATCH // size, last_batch="drop", data_parallel=mesh)  # or mesh["dp"], with TP
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=3, backend="dcp")
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
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" on GPUs
    train(args.folder, args.die_at)
    dist.destroy_process_group()
