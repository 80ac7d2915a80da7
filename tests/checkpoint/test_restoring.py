"""Restoring in place: no second copy in memory, and nothing is changed before all of a step has been checked."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midepoch
from midepoch.checkpoint import (
    CheckpointDamagedError,
    PipelineCheckpoint,
)
from s3 import Server

SIZE = 100 << 20


def test_neither_saving_nor_restoring_holds_a_copy_of_the_model(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from /proc")
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with Server(tmp_path / "s3", "--dir-cache-time=1s") as server:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("memory_job.py"), tmp_path, str(SIZE), server.endpoint],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (saving, restoring) in json.loads(done.stdout.splitlines()[-1]).items():
        assert restoring < SIZE / 4, f"{name}: {restoring} bytes"
        assert saving < SIZE / 2, f"{name}: {saving} bytes"


def trained(value: float) -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def test_what_is_saved_and_not_passed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = midepoch.from_dict({"id": range(8)}).loader(4)
    model, optimizer = trained(1)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(loader, model, optimizer, step=1)
    checkpoint.restore_latest(loader, model, optimizer)
    checkpoint.restore(model=model, step=1)  # as for inference
    assert "also has" not in caplog.text
    checkpoint.restore_latest(loader)
    assert "step 1 also has the model and the optimizer: restore was not given them. Pass them" in caplog.text


def values(*things: Any) -> list[torch.Tensor]:
    found = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing.clone())
        elif isinstance(thing, dict):
            found += values(*thing.values())
        elif isinstance(thing, list):
            found += values(*thing)
        elif hasattr(thing, "state_dict"):
            found += values(thing.state_dict())
    return found


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


@pytest.mark.parametrize("backend", ["files", "dcp"])
def test_the_arrays_of_a_model_and_its_optimizer_are_filled_in_place(backend: str, tmp_path: Path) -> None:
    model, optimizer = trained(2)
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, optimizer, step=1)
    other, its_optimizer = trained(5)
    memory = [parameter.data_ptr() for parameter in other.parameters()]
    moments = {id(state["exp_avg"]) for state in its_optimizer.state.values()}
    assert checkpoint.restore_latest(None, other, its_optimizer) == 1
    assert equal(values(model, optimizer), values(other, its_optimizer))
    assert memory == [parameter.data_ptr() for parameter in other.parameters()]
    assert moments == {id(state["exp_avg"]) for state in its_optimizer.state.values()}
    fresh = torch.optim.AdamW(other.parameters())
    assert checkpoint.restore_latest(None, other, fresh) == 1
    assert equal(values(optimizer), values(fresh))


def test_damage_in_the_last_byte_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, model, optimizer, step=1)
    path = tmp_path / "step_1" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other, its_optimizer = trained(5)
    before = values(other, its_optimizer)
    with pytest.raises(CheckpointDamagedError):
        checkpoint.restore_latest(None, other, its_optimizer)
    assert equal(before, values(other, its_optimizer))


def test_states_of_other_parameters_are_not_mixed_up(tmp_path: Path) -> None:
    """The saved optimizer has a state for two parameters, the current one for the second alone."""
    weights = [torch.nn.Parameter(torch.zeros(4000)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, momentum=0.9)
    for number, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, number + 1.0)
    optimizer.step()
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, None, optimizer, step=1)
    other = torch.optim.SGD(weights, momentum=0.9)
    weights[0].grad = None
    other.step()
    assert len(other.state_dict()["state"]) == 1
    checkpoint.restore_latest(None, None, other)
    assert [float(other.state[weight]["momentum_buffer"][7]) for weight in weights] == [1, 2]


@pytest.mark.parametrize("tied_before", [False, True])
@pytest.mark.parametrize("tied_after", [False, True])
def test_tied_weights(tied_before: bool, tied_after: bool, tmp_path: Path) -> None:
    def model(value: float, tied: bool) -> Any:
        layers = torch.nn.ModuleList([torch.nn.Linear(60, 60, bias=False) for _ in range(2)])
        with torch.no_grad():
            for layer in layers:
                layer.weight.fill_(value)
        if tied:
            layers[1].weight = layers[0].weight
        return layers

    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, model(3, tied_before), step=1)
    other = model(0, tied_after)
    checkpoint.restore_latest(None, other)
    assert all(bool((layer.weight == 3).all()) for layer in other)
    assert (other[0].weight is other[1].weight) == tied_after


def test_layouts_and_scalars_come_back(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        images = torch.full((3, 20, 30, 40), value)
        return {
            "channels_last": images.to(memory_format=torch.channels_last),
            "slice": torch.full((100, 100), value)[:, ::2],
            "columns": np.asfortranarray(np.full((70, 80), value)),
            "scalar": np.float32(value),
            "bfloat16": torch.full((5000,), value, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
            "one": torch.full((1, 2), value)[:, 0],
        }

    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, tree(2), step=1)
    found = tree(0)
    layouts = [found["channels_last"].stride(), found["slice"].stride(), found["columns"].strides]
    checkpoint.restore_latest(None, found)
    for name, expected in tree(2).items():
        assert np.array_equal(
            np.asarray(found[name].float() if name == "bfloat16" else found[name]),
            np.asarray(expected.float() if name == "bfloat16" else expected),
        ), name
    assert layouts == [found["channels_last"].stride(), found["slice"].stride(), found["columns"].strides]
    read = checkpoint.read(1, "model")
    assert type(read["scalar"]) is np.float32 and read["scalar"] == 2


def test_a_module_that_leaves_a_buffer_out_keeps_it(tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3000,), value))
            self.register_buffer("own", torch.full((3000,), value))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            super()._load_from_state_dict({**state_dict, f"{prefix}own": self.own}, prefix, *rest)

    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, Own(1.0), step=1)
    other = Own(7.0)
    checkpoint.restore_latest(None, other)
    assert float(other.weight[5].detach()) == 1 and float(other.own[5]) == 7


def test_a_file_that_is_written_to_while_it_is_restored_is_reported(tmp_path: Path) -> None:
    from midepoch.checkpoint.files import file_checksums
    from midepoch.checkpoint.local import open_file, verified

    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    source = verified(open_file(tmp_path, "file"), file_checksums(path), "file")
    data = bytearray(100)
    assert source.read_into(memoryview(data), 0) == 100
    path.write_bytes(b"y" * 100)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointDamagedError, match="written to"):
        source.read_into(memoryview(data), 0)


def test_a_step_that_is_removed_while_it_is_restored_is_restored(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, {"w": np.arange(9000)}, step=1)
    manifest = checkpoint.manifest(1)
    from midepoch.checkpoint import restoring

    stored = restoring.Step(checkpoint._steps, manifest, allow_pickle=False).open("model")
    checkpoint.delete(1)
    assert np.array_equal(stored.read()["w"], np.arange(9000))


def test_arrays_of_another_byte_order_or_layout_are_restored_in_place(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    saved = {"big": np.array([1, 2], ">i4"), "first": torch.ones(2), "turned": torch.arange(6.0).reshape(2, 3)}
    checkpoint.save(model=saved, step=1)
    target = {
        "big": np.zeros(2, ">i4"),
        "first": torch.zeros(2),
        "turned": torch.nn.Parameter(torch.zeros(3, 2).t()),
    }
    checkpoint.restore_latest(model=target)
    assert target["big"].tolist() == [1, 2]
    assert torch.equal(target["turned"], saved["turned"]) and torch.equal(target["first"], saved["first"])


def test_restoring_while_the_same_step_is_saved_again(tmp_path: Path) -> None:
    writer = PipelineCheckpoint(tmp_path)
    writer.save(None, {"w": np.full(20_000, 0.0)}, step=1)
    writer.save(None, {"w": np.full(20_000, 1.0)}, step=100)
    done = threading.Event()

    def again() -> None:
        for number in range(2, 120):
            writer.save(None, {"w": np.full(20_000, float(number))}, step=100)
        done.set()

    thread = threading.Thread(target=again)
    thread.start()
    while not done.is_set():
        found = {"w": np.zeros(20_000)}
        assert PipelineCheckpoint(tmp_path).restore_latest(None, found) == 100
        assert len(set(found["w"].tolist())) == 1
    thread.join()


def test_equal_sequence_numbers_have_one_order(tmp_path: Path) -> None:
    from test_damage import rewritten

    checkpoint = PipelineCheckpoint(tmp_path)
    for step in (1, 2):
        checkpoint.save(step=step)
    rewritten(lambda content: content.update(sequence=checkpoint.manifest(1).sequence))(tmp_path)
    fresh = PipelineCheckpoint(tmp_path)
    assert fresh.latest_step() == fresh.restore_latest() == 2


def test_restoring_while_another_process_prunes(tmp_path: Path) -> None:
    done = threading.Event()

    def run() -> None:
        checkpoint = PipelineCheckpoint(tmp_path, keep=1)
        for step in range(1, 150):
            checkpoint.save(extra={"x": np.full(5000, step)}, step=step)
        done.set()

    PipelineCheckpoint(tmp_path).save(extra={"x": np.full(5000, 0)}, step=0)
    thread = threading.Thread(target=run)
    thread.start()
    seen = 0
    while not done.is_set():
        found = np.zeros(5000, int)
        step = PipelineCheckpoint(tmp_path).restore_latest(extra={"x": found})
        assert step is not None
        assert (found == step).all()
        seen += 1
    thread.join()
    assert seen > 3


def test_a_damaged_step_is_logged_and_the_one_before_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    for step in (1, 2, 3):
        checkpoint.save(extra={"x": np.full(5000, step)}, step=step)
    data = bytearray((tmp_path / "step_3/extra.x.safetensors").read_bytes())
    data[20_000] ^= 4
    (tmp_path / "step_3/extra.x.safetensors").write_bytes(data)
    (tmp_path / "step_2/manifest.json").unlink()
    with caplog.at_level(logging.ERROR):
        found = np.zeros(5000, int)
        assert checkpoint.restore_latest(extra={"x": found}) == 1
    assert (found == 1).all()
    assert "step 3: extra.x.safetensors is damaged" in caplog.text
    assert "step 2: there is no manifest" in caplog.text
    with pytest.raises(CheckpointDamagedError, match=r"step 3.*extra.x"):
        checkpoint.restore(step=3)
    with pytest.raises(CheckpointDamagedError):
        checkpoint.verify(3)
    checkpoint.verify(1)
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointDamagedError, match="no step of"):
        checkpoint.restore_latest()
