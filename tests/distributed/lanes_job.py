"""Ranks of a stream, each with lanes of its own: run by test_rank_lanes.py under torchrun.

lanes_job.py FOLDER DATA train | resume
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import midepoch
from midepoch.checkpoint import PipelineCheckpoint


def kept(row: dict[str, Any]) -> bool:
    """More of what comes first: ranks have unequal numbers of rows."""
    return row["id"] < 30 or row["id"] % 4 == 0


def stream(data: str) -> midepoch.Dataset:
    found: midepoch.Dataset = midepoch.from_files(data).select_columns("id").filter(kept)
    return found.with_lanes(6)


def one_sided(data: str) -> midepoch.Dataset:
    """All outputs are in lane 0: of two ranks, the second one has none at all."""
    found: midepoch.Dataset = midepoch.from_files(data).select_columns("id").filter(lambda row: row["id"] < 50)
    return found.with_lanes(2)


def ids_of(batch: Any) -> list[int]:
    real = ~batch["is_padding"] if "is_padding" in batch else torch.ones(len(batch["id"]), dtype=torch.bool)
    return [int(number) for number in batch["id"][real]]


def passes(loader: Any) -> list[list[int]]:
    """The rows of each step. All ranks wait for each other in every step: unequal numbers of steps would hang."""
    found = []
    for batch in loader:
        dist.all_reduce(torch.ones(1))
        found.append(ids_of(batch))
    return found


def padded_then_resumed(make: Callable[[str], midepoch.Dataset], data: str, steps: int) -> list[list[int]]:
    """So many steps with padding, and the rest by other loaders that go on from the states of all ranks."""
    loader = make(data).loader(4, last_batch="pad")
    passing = iter(loader)
    found = []
    for _ in range(steps):
        dist.all_reduce(torch.ones(1))
        found.append(ids_of(next(passing)))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    if steps == 0:
        return found
    other = make(data).loader(4, last_batch="pad")
    other.load_state_dict(states)
    other.set_epoch(0)
    return found + passes(other)


def main(folder: Path, data: str, phase: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoint = PipelineCheckpoint(folder / "checkpoints")
    said: dict[str, Any] = {}
    if phase == "train":
        try:
            stream(data).loader(4)
        except midepoch.WorldError as problem:
            said["asked"] = str(problem)
        dropping = stream(data).loader(4, last_batch="drop", num_workers=1)
        said["drop"] = [passes(dropping), passes(dropping)]
        dropping.close()
        said["pad"] = passes(stream(data).loader(4, last_batch="pad"))
        said["shared"] = passes(stream(data).with_lanes(1).loader(4, last_batch="pad"))
        said["resumed"] = [
            padded_then_resumed(stream, data, steps) for steps in range(len(said["pad"]) - 3, len(said["pad"]) + 1)
        ]
        said["one-sided"] = [
            passes(one_sided(data).loader(4, num_workers=workers, last_batch="pad")) for workers in (0, 1)
        ]
        said["one-sided"] += [padded_then_resumed(one_sided, data, steps) for steps in (1, 5)]
        loader = stream(data).loader(2, last_batch="drop")
        said["before"] = []
        for step, batch in enumerate(loader):
            said["before"].append(ids_of(batch))
            if step == 2:
                checkpoint.save(loader, step=3)
                break
    else:
        loader = stream(data).loader(3, last_batch="pad")
        assert checkpoint.restore_latest(loader) == 3
        said["after"] = passes(loader)
    (folder / f"{phase}-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
