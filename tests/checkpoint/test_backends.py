"""Backends: every one saves and restores the same values, and refuses what does not fit."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midepoch.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    PipelineCheckpoint,
    manifest,
)
from midepoch.checkpoint.files import Checksums
from midepoch.testing import same

BACKENDS = ["files", "orbax", "dcp"]


def adam(seed: int = 0, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters(), **{"lr": 0.1, **options})


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_saving_changes_nothing(backend: str, tmp_path: Path) -> None:
    model, optimizer = adam()
    PipelineCheckpoint(tmp_path, backend=backend).save(None, model, optimizer, step=1)
    assert not optimizer.state
    other, other_optimizer = adam(1)
    step(other, other_optimizer)
    assert PipelineCheckpoint(tmp_path, backend=backend).restore_latest(None, other, other_optimizer) == 1
    assert not other_optimizer.state and same(values(model), values(other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lr", [np.float64(0.05), torch.tensor(0.05), 0.05], ids=["numpy", "tensor", "float"])
def test_learning_rates_of_any_type_come_back(backend: str, lr: Any, tmp_path: Path) -> None:
    model, optimizer = adam()
    optimizer.param_groups[0]["lr"] = lr
    step(model, optimizer)
    PipelineCheckpoint(tmp_path, backend=backend).save(None, model, optimizer, step=1)
    other, other_optimizer = adam(1)
    PipelineCheckpoint(tmp_path, backend=backend).restore_latest(None, other, other_optimizer)
    found = other_optimizer.param_groups[0]["lr"]
    assert type(found) is type(lr) and float(found) == float(lr)
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(values(model), values(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_of_another_kind_is_refused(backend: str, tmp_path: Path) -> None:
    model, optimizer = adam()
    step(model, optimizer)
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, optimizer, step=1, extra={"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)})
    other, _ = adam(1)
    before = values(other)
    with pytest.raises(CheckpointMismatchError, match="kind of optimizer"):
        checkpoint.restore_latest(None, other, torch.optim.SGD(other.parameters(), momentum=0.9))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(other.parameters(), lr=1), 5)
    with pytest.raises(CheckpointMismatchError, match="class of schedule"):
        checkpoint.restore_latest(None, other, extra={"schedule": cosine})
    assert same(before, values(other))
    with pytest.raises(CheckpointMismatchError, match="dtype"):
        checkpoint.restore_latest(None, other.to(torch.float64))
    assert same({name: value.double() for name, value in before.items()}, values(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_extra_that_refuses_leaves_the_model_alone(backend: str, tmp_path: Path) -> None:
    class Bad:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no")

    model, _ = adam()
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, step=1, extra={"bad": Bad()})
    other, _ = adam(1)
    before = values(other)
    with pytest.raises(CheckpointError, match="bad refused"):
        checkpoint.restore_latest(None, other, extra={"bad": Bad()})
    assert same(before, values(other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [{}, {"i": 3}, torch.nn.Identity()], ids=["empty", "number", "identity"])
def test_models_without_arrays_are_saved(backend: str, model: Any, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, step=1)
    assert checkpoint.restore_latest(None, {"i": 0} if model == {"i": 3} else model) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "keys",
    [("a", "a.b"), ("a.b", "a"), ("a/b", "c//d"), ("../x", "."), ("..", "a."), ("%2e", "."), ("é", " "), ("", "_")],
    ids=str,
)
def test_arrays_of_any_name_come_back(backend: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    tree = {key: np.full(50, float(number)) for number, key in enumerate(keys)}
    tree["nested"] = {"a": {"b": np.ones(3)}, "a.b": np.zeros(3)}  # type: ignore[dict-item]
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, tree, step=1)
    assert same(checkpoint.read(1, "model"), tree)
    fresh = {key: np.zeros(50) for key in keys} | {"nested": {"a": {"b": np.zeros(3)}, "a.b": np.ones(3)}}
    checkpoint.restore_latest(None, fresh)
    assert same(fresh, tree)


def test_no_pickle_in_a_dcp_folder_is_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harmed"),)

    data = pickle.dumps(Evil())
    (tmp_path / "step_1/arrays").mkdir(parents=True)
    files = {}
    tree = b'{"by": "numbers", "tree": {"$": "array", "of": "torch", "dtype": "float32", "shape": [2], "name": "w"}}'
    for name, content in {"arrays/__0.metadata": data, "model.json": tree}.items():
        (tmp_path / "step_1" / name).write_bytes(content)
        files[name] = Checksums(len(content), (zlib.crc32(content),))
    forged = manifest.Manifest(1, 1, 0.0, "dcp", 1, files, parts={"model": "x"})
    (tmp_path / "step_1/manifest.json").write_bytes(manifest.to_bytes(forged))
    for action in (
        lambda: PipelineCheckpoint(tmp_path).read(1, "model"),
        lambda: PipelineCheckpoint(tmp_path).restore_latest(None, {"w": 1}),
    ):
        with pytest.raises(CheckpointError):
            action()
    assert not (tmp_path / "harmed").exists()
