"""DDP training with the three ways to save the data's state that users know, under torchrun: run by test_torchrun.py.

torchrun --nproc-per-node N recipes_job.py FOLDER DATA train|resume
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import midepoch

GLOBAL_BATCH, SAVED = 12, 4
EARLY: list[midepoch.Dataset] = []


class Run:
    """A model that learns which rows it has seen, and in which batches."""

    def __init__(self, data: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = (
            midepoch.from_files(data).shuffle(seed=5).loader(GLOBAL_BATCH // dist.get_world_size(), last_batch="drop")
        )
        self.rows: list[list[int]] = []

    def train(self, steps: int | None = None) -> None:
        for number, batch in enumerate(self.loader, 1):
            loss = (self.model(batch["tokens"].double() / 100) - batch["score"][:, None]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.rows.append(batch["id"].tolist())
            if number == steps:
                break

    def weights(self) -> list[float]:
        return [value for p in self.model.module.parameters() for value in p.flatten().tolist()]


def train(folder: Path, data: str) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    run = Run(data)
    run.train(SAVED)
    rest = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    if rank == 0:  # rank 0 saves, all load
        torch.save({"data": run.loader.state_dict(), **rest}, folder / "rank0.pt")
    states: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(run.loader.state_dict(), states)  # gathered on rank 0, a slice for each
    if rank == 0:
        torch.save({"data": states, **rest}, folder / "gathered.pt")
    torch.save({"data": run.loader.state_dict(), **rest}, folder / f"rank-{rank}.pt")  # a file for each rank
    if rank == 1:
        next(run.loader)  # a mistake: it stands elsewhere now
    torch.save({"data": run.loader.state_dict(), **rest}, folder / f"apart-{rank}.pt")
    whole = Run(data)
    whole.train()
    return {"rows": whole.rows, "weights": whole.weights(), **refusals(folder, data)}


def refusals(folder: Path, data: str) -> dict[str, Any]:
    """What a run of two ranks must not get away with, and a mesh in which both see the same."""
    found: dict[str, Any] = {}
    rank, ds = dist.get_rank(), midepoch.from_files(data).shuffle(seed=5)
    dist.barrier()
    states = [torch.load(folder / f"apart-{i}.pt")["data"] for i in range(2)]
    try:
        ds.loader(6).load_state_dict(states)
    except midepoch.CheckpointMismatchError as problem:
        found["list"] = str(problem)
    apart = ds.loader(3)
    apart.load_state_dict(states[rank])
    passing = iter(apart)
    next(passing)  # of a first batch anyone may have a look
    try:
        next(passing)
    except midepoch.WorldError as problem:
        found["apart"] = str(problem)
    dist.barrier()
    try:
        ds.take(25).loader(3)
    except midepoch.WorldError as problem:
        found["uneven"] = str(problem)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found["shared"] = next(iter(ds.loader(6, data_parallel=mesh["dp"])))["id"].tolist()
    if rank == 0:
        midepoch.from_files(data).take(10).shuffle()  # a preview, which only one rank has
    drawn = midepoch.from_files(data).shuffle().pipeline.order.shuffle
    found["drawn"] = drawn.seed if drawn is not None else None
    try:
        EARLY[0].loader(6, last_batch="drop")
    except ValueError as problem:
        found["early"] = str(problem)
    found |= apart_in_other_ways(data, mesh)
    return found


def apart_in_other_ways(data: str, mesh: Any) -> dict[str, Any]:
    """One rank of two does something else; and one that may."""
    rank, found = dist.get_rank(), {}

    def second_batch(loader: Any, name: str) -> None:
        dist.barrier()
        passing = iter(loader)
        try:
            next(passing)
            next(passing)
            found[name] = None
        except midepoch.WorldError as problem:
            found[name] = str(problem)
        dist.barrier()  # a refusal that comes later would be taken for one of the next loader

    def make(part: int, batch: int = 3, **options: Any) -> Any:
        return midepoch.from_files(data).take(96 - part).shuffle(seed=5).loader(batch, last_batch="drop", **options)

    loader = make(1)
    if rank == 0:
        loader.load_state_dict({**loader.state_dict(), "epoch": 3})  # only one found a checkpoint
    second_batch(loader, "one epoch")
    second_batch(make(2, batch=3 + rank), "batch size")
    wide = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    loader = make(3, data_parallel=(wide, "dp"))
    if rank == 0:
        loader.load_state_dict({**loader.state_dict(), "position": 12, "cursor": [[0, 12]]})
    second_batch(loader, "position")
    loader = make(4)
    if rank == 0:
        next(iter(loader))  # a look at the first batch before the restore
    loader.load_state_dict({**loader.state_dict(), "position": 12, "cursor": [[0, 12]]})
    second_batch(loader, "look")
    passing = iter(make(5, batch=4))
    passing.load_state_dict({**passing.state_dict(), "position": 88, "cursor": [[0, 88]]})
    found["iterator"] = len(list(passing))
    return found


def resume(folder: Path, data: str) -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for recipe in ("rank0", "gathered", "gathered list", "per rank"):
        name = {"per rank": f"rank-{rank % 2}"}.get(recipe, recipe.split()[0])  # of two files, for three ranks
        saved = torch.load(folder / f"{name}.pt")
        run = Run(data)
        run.model.module.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.loader.load_state_dict(saved["data"][rank % 2] if recipe == "gathered" else saved["data"])
        run.train()
        found[recipe] = {"rows": run.rows, "weights": run.weights()}
    return found


if __name__ == "__main__":
    EARLY.append(midepoch.from_files(sys.argv[2]).shuffle())  # a seed that each rank draws for itself
    dist.init_process_group("gloo")
    folder, data, act = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    found = {"train": train, "resume": resume}[act](folder, data)
    (folder / f"{act}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
