"""Ranks that load different things, and a mesh with tensor parallelism: run by test_equal.py under torchrun.

differing_job.py OUT DATA OTHER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import midepoch
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.distributed import keyvalue


def even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def threes(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3 == 0)


Make = Callable[[Any, Any, int, int], Any]
"""(dataset, another dataset of as many rows, 1 on the rank that differs, a batch size of its own): a loader"""

DIFFERING: dict[str, Make] = {
    "data": lambda ds, other, odd, n: (other if odd else ds).shuffle(1).loader(n, last_batch="drop"),
    "selection": lambda ds, _, odd, n: ds.select(range(odd, 39 + odd)).loader(n, last_batch="drop"),
    "scope": lambda ds, _, odd, n: (ds if odd else ds.shuffle(1)).loader(n, last_batch="drop"),
    "scope of another kind": lambda ds, _, odd, n: ds.shuffle(1, "window" if odd else "rows").loader(
        n, last_batch="drop"
    ),
    "window": lambda ds, _, odd, n: ds.shuffle(1, "window", 3 if odd else 2).loader(n, last_batch="drop"),
    "seed": lambda ds, _, odd, n: ds.shuffle(odd).loader(n, last_batch="drop"),
    "pipeline": lambda ds, _, odd, n: (ds.map(even_or_odd) if odd else ds).loader(n, last_batch="drop"),
    "batch size": lambda ds, _, odd, n: ds.loader(n + odd, last_batch="uneven"),
    "last_batch": lambda ds, _, odd, n: ds.loader(n, last_batch="pad" if odd else "drop"),
    "stream: data": lambda ds, other, odd, n: (other if odd else ds).filter(even).loader(n, last_batch="pad"),
    "stream: pipeline": lambda ds, _, odd, n: (ds.filter(even).filter(threes) if odd else ds.filter(even)).loader(
        n, last_batch="pad"
    ),
    "stream: lanes": lambda ds, _, odd, n: ds.filter(even).with_lanes(4 if odd else 2).loader(n, last_batch="pad"),
    "stream: scope": lambda ds, _, odd, n: (ds if odd else ds.shuffle(1)).filter(even).loader(n, last_batch="pad"),
    "stream beside a dataset: last_batch": lambda ds, _, odd, n: (
        ds.loader(n, last_batch="drop") if odd else ds.filter(even).loader(n, last_batch="pad")
    ),
    "uneven stream: selection": lambda ds, _, odd, n: (
        ds.select(range(odd, 39 + odd)).filter(even).loader(n, last_batch="uneven")
    ),
    "mix: parts": lambda ds, other, odd, n: midepoch.mix([ds, other], weights=[1, 2 + odd], seed=1).loader(
        n, last_batch="pad"
    ),
    "excluded positions": lambda ds, _, odd, n: without(
        ds.shuffle(1).loader(n, last_batch="drop"), steps=range(4 - odd, 6)
    ),
    "excluded rows": lambda ds, _, odd, n: without(ds.shuffle(1).loader(n, last_batch="drop"), rows=range(odd, 3)),
    "stream: excluded rows": lambda ds, _, odd, n: without(
        ds.filter(even).loader(n, last_batch="pad"), rows=range(odd, 3)
    ),
}


def without(loader: Any, **excluded: Any) -> Any:
    loader.exclude(**excluded)
    return loader


def even_or_odd(row: dict[str, Any]) -> dict[str, Any]:
    return {"even": row["id"] % 2 == 0}


def refused(make: Make, ds: Any, other: Any, number: int = 2) -> str:
    """What is raised with the first batch; or with the second one, if this rank came first."""
    batches = iter(make(ds, other, int(dist.get_rank() == 1), number))
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


def shifted(ds: Any, other: Any, kind: str) -> list[int]:
    """The batches of a loader that all ranks make, and of one that one rank makes before, and iterates after it."""
    extra = other.loader(3, last_batch="drop") if dist.get_rank() == 0 else None
    source = ds.shuffle(3) if kind == "dataset" else ds.take(37).filter(threes)
    found = [len(list(source.loader(3, last_batch="drop")))]
    if extra is not None:
        found.append(len(list(extra)))
    dist.barrier()
    return found


def waiting(ds: Any, other: Any, late: float) -> str:
    """What is raised by ranks that differ, and whose loaders have different numbers: each waits for the other.

    One of them notices it first, by any part of the time between two looks.
    """
    if dist.get_rank() == 0:
        other.loader(2, last_batch="pad")
    loader = ds.take(36 - dist.get_rank()).filter(even).loader(6, last_batch="drop")
    if dist.get_rank() == 1:
        other.loader(2, last_batch="pad")
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(late)
    found = "nothing was raised"
    try:
        list(loader)
    except midepoch.WorldError as problem:
        found = str(problem)
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
            for batch in (
                ds.filter(even).with_lanes(4).with_format("numpy").loader(3, data_parallel=given, last_batch=ends)
            ):
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
        # First: ranks that have made other loaders before may be refused for those.
        keyvalue._LOOK, keyvalue._SURE = 0.2, 1.0
        told["waiting"] = [waiting(ds, others, late) for late in (0.0, 0.1, 0.3)]
        # Batches of another size for each: a loader that another rank has made, too, is none that differs.
        told |= {name: refused(make, ds, others, 2 + i % 8) for i, (name, make) in enumerate(DIFFERING.items())}
        alike = ds.shuffle(1)
        told["alike"] = refused(lambda *_: alike.loader(2), ds, others)
        told |= {f"shifted {kind}": shifted(ds, others, kind) for kind in ("dataset", "stream")}
        told["saved"] = saved(Path(out) / "checkpoint", ds)
    else:
        told = {ends: of_mesh(ds, ends) for ends in ("pad", "drop")}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        twin = mesh.get_local_rank("tp")
        told["twins"] = refused(lambda *_: ds.shuffle(twin).loader(2, data_parallel=(mesh, "dp")), ds, others)
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
