"""Ranks that set the weights of a mix, each to its own measure of them: run by test_weights_ranks.py.

weights_job.py FOLDER DATA STEPS: takes STEPS steps from the kept states, and sets weights after the second step of the run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import midepoch


def mixed(data: str) -> midepoch.Dataset:
    ds = midepoch.from_files(data)
    sources = {"a": ds.slice(0, 300).shuffle(seed=1), "b": ds.slice(300, 600).shuffle(seed=2)}
    return midepoch.mix(sources, [1, 1], seed=3, stop="never").filter(kept).with_lanes(6)


def kept(row: dict[str, int]) -> bool:
    return bool(row["id"] % 5)


def main(folder: Path, data: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = mixed(data).loader(12 // size, last_batch="drop")
    states = folder / "states.json"
    first = not states.exists()
    if not first:
        loader.load_state_dict(json.loads(states.read_text()))
    dist.barrier()
    seen = []
    for batch in loader:
        dist.all_reduce(torch.ones(1))
        seen.append(batch["id"].tolist())
        if first and len(seen) == 2:
            loader.set_weights({"a": 0.75 + 0.01 * rank, "b": 0.25})  # as ranks measure them
        if len(seen) == steps:
            break
    gathered = [None] * size
    dist.all_gather_object(gathered, (loader.state_dict(), loader.weights))
    if rank == 0:
        states.write_text(json.dumps([state for state, _ in gathered]))
    done = {"seen": seen, "weights": [weights for _, weights in gathered]}
    (folder / f"weights-{size}-{rank}.json").write_text(json.dumps(done))
    dist.barrier()
    if first:
        loader = mixed(data).loader(2, last_batch="uneven")
        try:
            if rank == 1:
                next(loader)
            loader.set_weights([1, 1])
        except midepoch.WorldError as problem:
            (folder / f"refused-{rank}.txt").write_text(str(problem))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
