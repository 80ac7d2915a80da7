"""PipelineCheckpoint as users see it: saving, restoring, keeping, refusing."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import dataset, make_model, train, values
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    PipelineCheckpoint,
)
from midepoch.testing import same
from midepoch.typing import CheckpointableIterator, Stateful

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")


def test_everything_comes_back_together(small_files: Any, tmp_path: Path) -> None:
    loader = dataset(small_files).shuffle(seed=1).loader(batch_size=7)
    model, optimizer = make_model()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    passing = iter(loader)
    for _ in range(3):
        next(passing)
        train(model, optimizer, 1)
        schedule.step()
    checkpoint = PipelineCheckpoint(tmp_path, keep=3)
    assert (
        checkpoint.save(
            loader, model, optimizer, step=3, metadata={"loss": np.float32(0.5)}, extra={"schedule": schedule}
        )
        == 3
    )
    following = [random.random(), np.random.rand(), torch.rand(1).item()]
    expected = [next(passing) for _ in range(3)]

    other, (model2, optimizer2) = (
        dataset(small_files).shuffle(seed=1).loader(batch_size=7, num_workers=2),
        make_model(5),
    )
    schedule2 = torch.optim.lr_scheduler.StepLR(optimizer2, 1)
    assert checkpoint.restore_latest(other, model2, optimizer2, extra={"schedule": schedule2}) == 3
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == following
    assert all(same(a, b) for a, b in zip(expected, other, strict=False))
    other.close()
    assert same(values(model), values(model2))
    assert same(optimizer.state_dict()["state"], optimizer2.state_dict()["state"])
    assert optimizer2.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert schedule2.state_dict() == schedule.state_dict()
    assert checkpoint.metadata(3) == {"loss": 0.5}
    assert checkpoint.latest_step() == 3
    assert checkpoint.steps() == [3]
    checkpoint.verify(3)


def test_the_layout_is_for_people(small_files: Any, tmp_path: Path) -> None:
    loader = dataset(small_files).loader(batch_size=7)
    next(iter(loader))
    model, optimizer = make_model()
    PipelineCheckpoint(tmp_path).save(loader, model, optimizer, step=100, metadata={"note": "π"})
    assert sorted(os.listdir(tmp_path)) == ["step_100"]
    manifest = json.loads((tmp_path / "step_100/manifest.json").read_text())
    assert manifest["step"] == 100
    assert manifest["metadata"] == {"note": "π"}
    assert manifest["versions"]["torch"]
    assert manifest["parts"]["data"] == "midepoch.loader.loader.Loader"
    assert set(manifest["files"]) == set(os.listdir(tmp_path / "step_100")) - {"manifest.json"}
    assert json.loads((tmp_path / "step_100/data.json").read_text()) == loader.state_dict()


def test_nothing_there_is_none_and_changes_nothing(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path / "none")
    assert checkpoint.restore_latest() is None
    assert checkpoint.latest_step() is None
    assert checkpoint.steps() == []
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointNotFoundError, match=r"no step 5.*none"):
        checkpoint.restore(step=5)


def test_positional_forms_and_numbers_by_themselves(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    model, optimizer = make_model()
    train(model, optimizer)
    assert checkpoint.save(None, model.state_dict(), optimizer.state_dict()) == 1
    assert checkpoint.save(None, model.state_dict(), optimizer.state_dict()) == 2
    model2, optimizer2 = make_model(9)
    state = values(model2)
    assert checkpoint.restore_latest(None, state) == 2
    assert same(values(model), values(model2)), "the tensors of a state dict are those of its model"
    assert checkpoint.restore(None, model2, optimizer2, step=1) == 1
    assert same(optimizer.state_dict()["state"], optimizer2.state_dict()["state"])


# Keeping


def test_going_back_makes_the_new_branch_the_latest(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    for step in (100, 200, 300):
        checkpoint.save(step=step, metadata={"branch": "old"})
    checkpoint.restore(step=100)
    checkpoint.save(step=200, metadata={"branch": "new"})
    assert checkpoint.steps() == [100, 200, 300]
    assert checkpoint.latest_step() == 200
    assert checkpoint.restore_latest() == 200
    assert checkpoint.metadata(200) == {"branch": "new"}


def test_delete(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    checkpoint.delete(1)
    assert checkpoint.steps() == []
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.delete(1)


# Refusing


def test_another_dataset_restores_nothing(small_files: Any, tmp_path: Path) -> None:
    loader = dataset(small_files).shuffle(seed=1).loader(batch_size=7)
    next(iter(loader))
    model, optimizer = make_model()
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(loader, model, optimizer, step=1)
    for other in (
        dataset(small_files).shuffle(seed=2).loader(batch_size=7),
        dataset(small_files).take(20).shuffle(seed=1).loader(batch_size=7),
        dataset(small_files).shuffle(seed=1).map(lambda row: row).loader(batch_size=7),
        StatefulDataLoader(dataset(small_files).shuffle(seed=2), batch_size=7),
    ):
        fresh, fresh_optimizer = make_model(3)
        before = {name: value.clone() for name, value in values(fresh).items()}
        generators = torch.get_rng_state()
        with pytest.raises(midepoch.StateError):
            checkpoint.restore_latest(other, fresh, fresh_optimizer)
        assert same(before, values(fresh))
        assert not fresh_optimizer.state
        assert torch.equal(generators, torch.get_rng_state())
        state = other.state_dict()
        assert isinstance(other, StatefulDataLoader) or state["position"] == 0


def test_a_stateful_dataloader_of_other_data_is_refused_before_the_model(small_files: Any, tmp_path: Path) -> None:
    def make(seed: int) -> StatefulDataLoader:
        return StatefulDataLoader(dataset(small_files).shuffle(seed=seed), batch_size=7)

    loader, (model, _) = make(1), make_model()
    next(iter(loader))
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(loader, model, step=1)
    fresh, _ = make_model(3)
    before = {name: value.clone() for name, value in values(fresh).items()}
    with pytest.raises(CheckpointMismatchError, match="seed"):
        checkpoint.restore_latest(make(2), fresh)
    assert same(before, values(fresh))
    assert checkpoint.restore_latest(make(1), fresh) == 1
    assert same(values(model), values(fresh))


def test_another_model_restores_nothing(small_files: Any, tmp_path: Path) -> None:
    loader = dataset(small_files).loader(batch_size=7)
    next(iter(loader))
    model, optimizer = make_model()
    train(model, optimizer)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(loader, model, optimizer, step=1)
    other = dataset(small_files).loader(batch_size=7)
    for wrong, fitting in ((make_model(1, width=17), False), ((torch.nn.Linear(2, 2), None), False)):
        before = {name: value.clone() for name, value in values(wrong[0]).items()}
        with pytest.raises(CheckpointMismatchError, match="model"):
            checkpoint.restore_latest(other, *wrong)
        assert same(before, values(wrong[0]))
        assert other.position == 0
        assert not fitting
    fresh, _ = make_model(1)
    with pytest.raises(CheckpointMismatchError, match="optimizer"):
        checkpoint.restore_latest(other, fresh, torch.optim.SGD(list(fresh.parameters())[:1]))
    assert other.position == 0
    assert not same(values(fresh), values(model))


def test_a_pipeline_that_refuses_leaves_the_model_alone(tmp_path: Path) -> None:
    class Picky:
        def get_state(self) -> dict[str, int]:
            return {"at": 1}

        def set_state(self, state: dict[str, int]) -> None:
            raise RuntimeError("no")

    model, _ = make_model()
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(Picky(), model, step=1)
    fresh, _ = make_model(3)
    with pytest.raises(RuntimeError, match="no"):
        checkpoint.restore_latest(Picky(), fresh)
    assert not same(values(fresh), values(model))


def test_an_extra_that_refuses_puts_the_pipeline_back(small_files: Any, tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("no")

    loader = dataset(small_files).loader(batch_size=7)
    next(iter(loader))
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(loader, extra={"picky": Picky()}, step=1)
    other = dataset(small_files).loader(batch_size=7)
    with pytest.raises(CheckpointError, match=r"picky refused"):
        checkpoint.restore_latest(other, extra={"picky": Picky()})
    assert other.position == 0


def test_a_part_that_was_not_saved(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"a": [1]})
    for wanted in ({"model": {}}, {"extra": {"b": {}}}, {"pipeline": midepoch.from_list([{"a": 1}])}):
        with pytest.raises((CheckpointNotFoundError, CheckpointMismatchError)):
            checkpoint.restore_latest(**wanted)
    with pytest.raises(CheckpointNotFoundError, match=r"without extra.b.*extra.a"):
        checkpoint.read(1, "b")


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "", ".", "..", ".hidden", "a\\b", "a\0b", "nul", "x" * 200, "/etc/passwd", 5]
)
def test_names_cannot_escape(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        PipelineCheckpoint(tmp_path).save(extra={name: [1]})
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, ValueError),
        ({"step": 1.5}, TypeError),
        ({"step": True}, TypeError),
        ({"metadata": [1]}, TypeError),
        ({"metadata": {"a": object()}}, TypeError),
        ({"metadata": {"a": np.zeros(3)}}, TypeError),
    ],
)
def test_bad_arguments(arguments: Any, error: Any, tmp_path: Path) -> None:
    with pytest.raises(error):
        PipelineCheckpoint(tmp_path).save(**arguments)
    assert not list(tmp_path.rglob("*"))


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend"):
        PipelineCheckpoint(tmp_path, backend="pickle")
    with pytest.raises(ValueError, match="rank"):
        PipelineCheckpoint(tmp_path, rank=1)
    with pytest.raises(ValueError, match="rank"):
        PipelineCheckpoint(tmp_path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="local"):
        PipelineCheckpoint(tmp_path, storage_options={"region": "x"})


# A folder that refuses


# Several at once


# Asynchronously


# Damage


# Protocols


def test_midepochs_own_serve_both_protocols(small_files: Any) -> None:
    ds = dataset(small_files)
    loader = ds.loader(batch_size=7)
    for thing in (ds, loader, iter(ds), iter(loader), ds.iter(4)):
        assert isinstance(thing, CheckpointableIterator) and isinstance(thing, Stateful), thing


def test_grain_style_iterators(small_files: Any) -> None:
    ds = dataset(small_files).shuffle(seed=3)
    for make in (
        lambda: iter(ds.loader(batch_size=7)),
        lambda: iter(dataset(small_files).shuffle(seed=3)),
        lambda: dataset(small_files).shuffle(seed=3).iter(5),
    ):
        iterator = make()
        for _ in range(3):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        expected = list(iterator)
        other = make()
        next(other)
        other.set_state(state)
        assert same(list(other), expected)


def test_next_on_a_loader_and_a_dataset(small_files: Any) -> None:
    for thing in (dataset(small_files).loader(batch_size=7), dataset(small_files)):
        first = [next(thing) for _ in range(3)]
        state = thing.get_state()
        rest = [next(thing) for _ in range(2)]
        thing.set_state(state)
        assert same([next(thing) for _ in range(2)], rest)
        thing.set_epoch(5)
        assert same(next(thing), first[0])
        assert thing.epoch == 5
        thing.epoch = 6
        assert thing.epoch == 6


def test_next_ends_at_an_epochs_end_and_goes_on_with_the_next(small_files: Any) -> None:
    loader = dataset(small_files).loader(batch_size=7)
    for epoch in range(3):
        count = 0
        while True:
            try:
                next(loader)
            except StopIteration:
                break
            count += 1
        assert count == len(loader)
        assert loader.epoch == epoch + 1


@pytest.mark.parametrize("step", [True, 5.0, -1])
def test_steps_are_integers_everywhere(step: Any, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    for call in (checkpoint.delete, checkpoint.verify, checkpoint.metadata, lambda step: checkpoint.restore(step=step)):
        with pytest.raises((TypeError, ValueError)):
            call(step)
    with pytest.raises((CheckpointNotFoundError, CheckpointDamagedError)):
        checkpoint.restore(step=7)
