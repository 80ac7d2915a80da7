"""Arrays with values that this process does not hold: none of them is saved as if it were whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from midepoch.checkpoint import PipelineCheckpoint


@pytest.fixture(autouse=True, scope="module")
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dtensor() -> Any:
    return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])


def sharded() -> Any:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    return sharded_tensor.ones(spec, 4, 4)


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(4, 4)


def meta() -> Any:
    return torch.ones(4, 4, device="meta")


INCOMPLETE = {"DTensor": dtensor, "ShardedTensor": sharded, "meta": meta, "FakeTensor": fake}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("address", ["folder", "memory:///run"])
@pytest.mark.parametrize("name", INCOMPLETE)
def test_tensors_without_all_of_their_values_are_refused(
    name: str, address: str, allow_pickle: bool, tmp_path: Path
) -> None:
    tensor = INCOMPLETE[name]()
    checkpoint = PipelineCheckpoint(tmp_path if address == "folder" else address, allow_pickle=allow_pickle)
    objects = np.array([None, SimpleNamespace(state=tensor)], object)
    for tree, path in (
        ({"w": tensor}, "model.w"),
        ({"layers": [{"w": (tensor,)}]}, "model.layers.0.w.0"),
        ({"w": torch.nn.Parameter(tensor) if name in ("DTensor", "meta") else tensor}, "model.w"),
        ({"held": SimpleNamespace(inner={"deep": [tensor]})}, "model.held"),
        ({"held": objects}, "model.held"),
    ):
        with pytest.raises(TypeError, match=rf"{path} .*") as caught:
            checkpoint.save(None, tree, step=1)
        if allow_pickle or "held" not in path:
            assert 'backend="dcp"' in str(caught.value) and "allow_pickle" not in str(caught.value)
        with pytest.raises(TypeError):
            checkpoint.save(extra={"tree": tree}, step=1)
    assert checkpoint.steps() == []


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("shard", [fully_shard, FullyShardedDataParallel])
def test_a_sharded_model_and_its_optimizer_are_refused_but_by_dcp(shard: Any, tmp_path: Path) -> None:
    model = shard(torch.nn.Linear(4, 3), **({} if shard is fully_shard else {"device_id": torch.device("cpu")}))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint = PipelineCheckpoint(tmp_path, allow_pickle=True)
    for things in ({"model": model}, {"optimizer": optimizer}, {"extra": {"ema": model}}):
        with pytest.raises(TypeError, match='sharded.*backend="dcp"'):
            checkpoint.save(**things, step=1)
    for tree, problem in (
        ({"wrapped": model}, "cannot be pickled|holds a sharded tensor"),
        ({"list": list(model.parameters())}, r"model\.list\.0 is a sharded tensor"),
        ({"held": SimpleNamespace(inner=list(model.parameters()))}, r"model\.held holds a sharded tensor"),
    ):
        with pytest.raises(TypeError, match=problem):
            checkpoint.save(None, tree, step=1)
    distributed = PipelineCheckpoint(tmp_path, backend="dcp")
    with pytest.raises(TypeError, match="Pass the model as well"):
        distributed.save(None, None, optimizer, step=1)
    assert checkpoint.steps() == []
    if shard is fully_shard:
        distributed.save(None, model, optimizer, step=1)
        assert distributed.restore_latest(None, model, optimizer) == 1


def test_a_pickled_tensor_that_is_complete_comes_back(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, allow_pickle=True)
    checkpoint.save(extra={"held": SimpleNamespace(w=torch.arange(3), parameter=torch.nn.Parameter(torch.ones(2)))})
    held = checkpoint.read(1, "held")
    assert held.w.tolist() == [0, 1, 2] and held.parameter.tolist() == [1, 1]
