"""Ranks that load different things, and a mesh with tensor parallelism: run by test_equal.py under torchrun.

differing_job.py OUT DATA OTHER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import midepoch
from midepoch.checkpoint import PipelineCheckpoint


def even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def threes(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3 == 0)


Make = Callable[[Any, Any, int], Any]
"""(dataset, another dataset of as many rows, whether this rank is the one that differs): a loader"""

DIFFERING: dict[str, Make] = {
    "data": lambda ds, other, odd: (other if odd else ds).shuffle(1).loader(2),
    "selection": lambda ds, _, odd: ds.select(range(odd, 39 + odd)).loader(2),
    "scope": lambda ds, _, odd: (ds if odd else ds.shuffle(1)).loader(2),
    "scope of another kind": lambda ds, _, odd: ds.shuffle(1, "window" if odd else "rows").loader(2),
    "window": lambda ds, _, odd: ds.shuffle(1, "window", 3 if odd else 2).loader(2),
    "seed": lambda ds, _, odd: ds.shuffle(odd).loader(2),
    "pipeline": lambda ds, _, odd: (ds.map(even_or_odd) if odd else ds).loader(2),
    "batch size": lambda ds, _, odd: ds.loader(2 + odd),
    "ends": lambda ds, _, odd: ds.loader(2, ends="pad" if odd else "drop"),
    "stream: data": lambda ds, other, odd: (other if odd else ds).filter(even).loader(2, ends="drop"),
    "stream: pipeline": lambda ds, _, odd: (ds.filter(even).filter(threes) if odd else ds.filter(even)).loader(
        2, ends="drop"
    ),
    "stream: lanes": lambda ds, _, odd: ds.filter(even).with_lanes(4 if odd else 2).loader(2, ends="drop"),
    "stream: scope": lambda ds, _, odd: (ds if odd else ds.shuffle(1)).filter(even).loader(2, ends="pad"),
    "stream beside a dataset: ends": lambda ds, _, odd: ds.loader(2) if odd else ds.filter(even).loader(2, ends="pad"),
    "uneven stream: selection": lambda ds, _, odd: (
        ds.select(range(odd, 39 + odd)).filter(even).loader(2, ends="uneven")
    ),
    "mix: parts": lambda ds, other, odd: midepoch.mix([ds, other], weights=[1, 2 + odd], seed=1).loader(2, ends="drop"),
}


def even_or_odd(row: dict[str, Any]) -> dict[str, Any]:
    return {"even": row["id"] % 2 == 0}


def refused(make: Make, ds: Any, other: Any) -> str:
    """What is raised with the first batch; or with the second one, if this rank came first."""
    batches = iter(make(ds, other, int(dist.get_rank() == 1)))
    found = "nothing was raised"
    for _ in range(2):
        try:
            next(batches)
        except midepoch.WorldError as problem:
            found = str(problem)
        except midepoch.MidepochError as problem:  # of the second batch, where the first was refused
            found = found if "this iteration has failed" in str(problem) else str(problem)
        dist.barrier()
    return found


def saved(folder: Path, ds: Any) -> str:
    """What a checkpoint says of ranks that were not compared: each was told its rank."""
    rank = dist.get_rank()
    loader = ds.shuffle(1, "window" if rank else "rows").loader(2, rank=rank, world_size=3)
    checkpoint = PipelineCheckpoint(folder, rank=rank, world_size=dist.get_world_size(), timeout=60)
    try:
        checkpoint.save(loader, step=1)
    except midepoch.MidepochError as problem:
        return str(problem)
    return "nothing was raised"


def of_mesh(ds: Any, ends: str) -> list[list[int]]:
    """The rows of each step, of a mesh of two data ranks and two tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for _ in range(2):
        for given in ((mesh, "dp"), mesh["dp"], mesh["dp"].get_group()):
            for batch in ds.filter(even).with_lanes(4).with_format("numpy").loader(3, data_parallel=given, ends=ends):
                real = ~batch["is_padding"] if "is_padding" in batch else slice(None)
                found.append(batch["id"][real].tolist())
                dist.barrier()
    return found


def main(out: str, data: str, other: str) -> None:
    dist.init_process_group("gloo")
    rank, ds, others = dist.get_rank(), midepoch.from_files(data), midepoch.from_files(other)
    ds, others = ds.select_columns("id"), others.select_columns("id")
    told: dict[str, Any] = {}
    if dist.get_world_size() == 2:
        told = {name: refused(make, ds, others) for name, make in DIFFERING.items()}
        alike = ds.shuffle(1)
        told["alike"] = refused(lambda *_: alike.loader(2), ds, others)
        told["saved"] = saved(Path(out) / "checkpoint", ds)
    else:
        told = {ends: of_mesh(ds, ends) for ends in ("pad", "drop")}
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
