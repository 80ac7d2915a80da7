"""Which rank this is: by whom it is found, what contradicts, and that a mesh of any layout shares data as it should."""

from __future__ import annotations

import itertools
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import midepoch
from midepoch.distributed.world import World, find_world, launcher

NAMES = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def be(rank: int, size: int) -> None:
    """A process group in which this process is that rank, and the others are not there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (World(3, 8), "torchrun")),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (World(1, 2), "OpenMPI")),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (World(1, 4), "MPI")),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (World(5, 8), "SLURM")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, (World(0, 8), "SLURM")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, (World(0, 2), "SLURM")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (World(0, 1), "SLURM")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "9", "WORLD_SIZE": "16"}, (World(9, 16), "torchrun")),
        ({"SLURM_NTASKS": "8"}, None),
        ({"RANK": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "RANK": "0", "WORLD_SIZE": "1"}, (World(0, 1), "torchrun")),
        ({}, None),
    ],
)
def test_launchers(environment: dict[str, str], found: Any) -> None:
    assert launcher(environment) == found


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK=8 and WORLD_SIZE=8: that is not a valid rank"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK=x and WORLD_SIZE=8: that is not a valid rank"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "not started by srun"),
        ({"RANK": "3"}, "RANK=3 without a world size: WORLD_SIZE is missing"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
            "torchrun says rank 0 of 1, but OpenMPI has started 8 processes",
        ),
    ],
)
def test_environments_that_cannot_be(environment: dict[str, str], says: str) -> None:
    with pytest.raises(midepoch.WorldError, match=says):
        launcher(environment)


def test_who_is_asked_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midepoch")
    assert find_world() == World(0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert find_world() == find_world() == World(1, 3)
    be(2, 5)
    assert find_world() == World(2, 5)  # RANK may be of anybody, as long as it was not torchrun that set it
    assert find_world(1, 2) == World(1, 2)
    assert [record.message for record in caplog.records].count("rank 1 of 3, found by torchrun") == 1


def test_a_size_without_a_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(midepoch.WorldError, match="WORLD_SIZE=4 without RANK.*Set RANK"):
        find_world()
    assert find_world(1, 4) == World(1, 4)
    be(2, 4)
    assert find_world() == World(2, 4)


def test_contradictions_are_errors(monkeypatch: pytest.MonkeyPatch, small_files: list[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    be(0, 1)  # each process a group of its own: all would read everything
    with pytest.raises(
        midepoch.WorldError, match="torch.distributed says rank 0 of 1, torchrun says rank 1 of 3. Pass rank= and"
    ):
        midepoch.from_files(small_files).loader(4)
    assert midepoch.from_files(small_files).loader(4, rank=0, world_size=1).shard.count == 1
    be(1, 3)
    assert find_world() == World(1, 3)


class _Context:
    def get_world_rank(self) -> int:
        return 2

    def get_world_size(self) -> int:
        return 4


def test_ray_train_is_asked_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one is in tests/integrations/test_ray.py; this is about what it may answer."""
    train = types.ModuleType("ray.train")
    monkeypatch.setitem(sys.modules, "ray.train", train)
    for answer in (lambda: None, lambda: 1 / 0):
        monkeypatch.setattr(train, "get_context", answer, raising=False)
        assert find_world() == World(0, 1)
    monkeypatch.setattr(train, "get_context", _Context)
    assert find_world() == World(2, 4)
    be(0, 4)
    with pytest.raises(midepoch.WorldError, match="torch.distributed says rank 0 of 4, Ray Train says rank 2 of 4"):
        find_world()


LAYOUTS = [
    ((4, 2), ("dp", "tp"), "dp"),
    ((2, 4), ("tp", "dp"), "dp"),
    ((2, 2, 2), ("pp", "dp", "tp"), "dp"),
    ((2, 2, 2), ("dp_replicate", "dp_shard", "cp"), ("dp_replicate", "dp_shard")),
    ((2, 2, 2), ("dp_shard", "cp", "dp_replicate"), ("dp_replicate", "dp_shard")),
    ((8,), ("dp",), ()),
]


@pytest.mark.parametrize(("shape", "names", "data"), LAYOUTS)
def test_a_mesh_of_any_layout_shares_data(small_files: list[str], shape: Any, names: Any, data: Any) -> None:
    """Ranks along the other dimensions get the very same batches; over the data dimensions every row comes once."""
    wanted = (data,) if isinstance(data, str) else tuple(data) or names
    ds = midepoch.from_files(small_files).shuffle(seed=1).select_columns("id")
    seen: dict[tuple[int, ...], list[list[int]]] = {}
    alone = [batch["id"].tolist() for batch in ds.loader(8, rank=0, world_size=1)]
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        be(rank, 8)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        loader = ds.loader(
            8 // _product(shape, names, wanted), data_parallel=(mesh, data) if data else mesh, last_batch="uneven"
        )
        if isinstance(data, str):
            assert find_world(data_parallel=mesh[data]) == World(loader.shard.index, loader.shard.count)
            assert find_world(data_parallel=mesh.get_group(data)) == World(loader.shard.index, loader.shard.count)
        batches = [batch["id"].tolist() for batch in loader]
        key = tuple(place[names.index(name)] for name in wanted)
        assert seen.setdefault(key, batches) == batches
    assert len(seen) == _product(shape, names, wanted)
    steps = [sorted(sum(step, [])) for step in itertools.zip_longest(*seen.values(), fillvalue=[])]
    assert steps == [sorted(batch) for batch in alone]  # and no row of the order has moved


def _product(shape: tuple[int, ...], names: tuple[str, ...], wanted: tuple[str, ...]) -> int:
    size = 1
    for name in wanted:
        size *= shape[names.index(name)]
    return size


def test_a_mesh_that_cannot_be_cut_is_refused() -> None:
    be(0, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="the mesh has the dimensions 'dp', 'tp'; data_parallel names none of them"):
        find_world(data_parallel=mesh)
    with pytest.raises(ValueError, match="data_parallel names 'data', the mesh has 'dp', 'tp'"):
        find_world(data_parallel=(mesh, "data"))
    with pytest.raises(TypeError, match="data_parallel takes a torch process group, a DeviceMesh"):
        find_world(data_parallel="dp")
    with pytest.raises(ValueError, match="not both"):
        find_world(0, 8, mesh["dp"])
