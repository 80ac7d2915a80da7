"""Ranks that train together on batches by tokens, to the end of the epoch: run by test_planned_ranks.py.

planned_job.py FOLDER DATA STEPS: STEPS 0 runs to the end; else it stops there, and rank 0 keeps the state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import midepoch

KINDS = {
    "tokens": {"max_tokens": 200, "bucket_window": 60},
    "balanced": {"max_tokens": 200, "bucket_window": 60, "balance": "quadratic"},
    "run time": {"max_tokens": 200, "bucket_window": 20, "last_batch": "pad"},
    "steps": {"batch_size": {0: 3, 4: 6}, "steps_per_epoch": 6, "last_batch": "drop"},
}


def odd(row: dict[str, int]) -> bool:
    return bool(row["id"] % 2)


def main(folder: Path, data: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, options in KINDS.items():
        ds = midepoch.from_files(data).shuffle(seed=4)
        ds = ds.filter(odd) if name == "run time" else ds
        ds = ds.select_columns("id") if name == "steps" else ds
        loader = ds.loader(**options, audit=folder / "ledger" / name)
        kept = folder / f"{name}.json"
        if kept.exists():
            loader.load_state_dict(json.loads(kept.read_text()))
        dist.barrier()
        seen, shapes = [], []
        for batch in loader:
            dist.all_reduce(torch.ones(1))  # a rank with fewer steps would hang the others here
            padding = batch["is_padding"] if "is_padding" in batch else torch.zeros(len(batch["id"]), dtype=torch.bool)
            seen.append(batch["id"][~padding].tolist())
            shapes.append(batch["input_ids"].numel() if "input_ids" in batch else len(batch["id"]))
            if len(seen) == steps:
                break
        states = [None] * size
        dist.all_gather_object(states, loader.state_dict())
        if rank == 0:
            kept.write_text(json.dumps(states if name == "run time" else states[0]))
        done = {"seen": seen, "shapes": shapes, "state": states[0] == states[rank]}
        (folder / f"{name}-{size}-{rank}.json").write_text(json.dumps(done))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
