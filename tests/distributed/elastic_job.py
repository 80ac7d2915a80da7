"""A run that an elastic agent restarts whenever a node comes or goes: run by test_torchrun.py.

torchrun --nnodes=1:4 … elastic_job.py FOLDER DATA: goes on until FOLDER/finish is there, then to the end of the epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midepoch
from midepoch.checkpoint import PipelineCheckpoint


def main(folder: Path, data: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    log = os.open(folder / f"log-{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=3)
    loader = midepoch.from_files(data).shuffle(seed=5).loader(4, last_batch="pad", audit=folder / "ledger")
    step = checkpoint.restore_latest(loader, model) or 0
    start = {"from": step, "rank": rank, "size": size, "time": time.time(), "agent": os.getppid(), "pid": os.getpid()}
    os.write(log, json.dumps(start).encode() + b"\n")
    while True:
        for batch in loader:
            step += 1
            model(batch["tokens"].double()).sum().backward()  # waits for the other ranks
            ids = batch["id"][~batch["is_padding"]].tolist()
            if os.getppid() != start["agent"]:  # it was killed, and nobody would end this
                os._exit(1)
            entry = {"step": step, "ids": ids, "size": size}
            os.write(log, json.dumps(entry).encode() + b"\n")
            time.sleep(0.02)
            if step % 3 == 0:
                checkpoint.save(loader, model, step=step)
        over = [(folder / "finish").exists()]
        dist.broadcast_object_list(over)
        if over[0]:
            break
    checkpoint.save(loader, model, step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
