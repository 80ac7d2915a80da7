"""Packed sequences on 4 processes, of which two share each data-parallel rank.

python data_ranks_job.py FOLDER: notes batches and states in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import torch.distributed as dist

import midepoch
from midepoch.integrations.micro_batches import MicroBatches
from midepoch.integrations.states import arguments_for


def check_group(data_rank: int) -> None:
    """The group for a data-parallel rank has one process of each, in order, and is connected."""
    group = arguments_for(data_rank, 2)["data_parallel"]
    assert arguments_for(data_rank, 2)["data_parallel"] is group
    seen: list[int | None] = [None, None]
    dist.all_gather_object(seen, data_rank, group)
    assert seen == [0, 1], seen


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    data_rank = dist.get_rank() // 2  # tensor parallelism: neighbours share the data
    packed = midepoch.from_files(folder / "data.parquet").with_lanes(2).pack(4)
    made = [MicroBatches(packed.loader(4, last_batch="drop", **arguments_for(data_rank, 2)), 2) for _ in range(2)]
    first = [part.batch["input_ids"].tolist() for part in islice(made[0].passes(), 6)]
    state = made[0].state()
    made[1].load(state)
    rest = [part.batch["input_ids"].tolist() for part in made[1].passes(1)]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps([made[0].loader.shard.index, state, first, rest]))
    check_group(dist.get_rank() % 2)  # another mesh with as many data ranks
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    check_group(data_rank)
    dist.destroy_process_group()
