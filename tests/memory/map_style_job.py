"""Ranks that train on a map-style dataset, one line changed from a DataLoader: run by test_map_style.py.

torchrun … map_style_job.py FOLDER STOP: continues from the last checkpoint, and one rank is killed after step STOP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

ITEMS_OF_AN_EPOCH, BATCH = 160, 8


class Rows(torch.utils.data.Dataset[Any]):
    """Numbers with an augmentation."""

    def __len__(self) -> int:
        return ITEMS_OF_AN_EPOCH

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, torch.rand(())


def dataset() -> midepoch.Dataset:
    return midepoch.from_map_style(Rows()).shuffle(seed=3)


def main(folder: Path, stop: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = dataset().loader(BATCH // size)
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=2)
    step = checkpoint.restore_latest(loader) or 0
    log = os.open(folder / f"log-{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for numbers, noise in loader:
        step += 1
        dist.barrier()
        entry = {"step": step, "size": size, "rank": rank, "ids": numbers.tolist(), "noise": noise.tolist()}
        os.write(log, json.dumps(entry).encode() + b"\n")
        if step % 2 == 0:
            checkpoint.save(loader, step=step)
        if step == stop and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
