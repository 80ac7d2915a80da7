"""PipelineCheckpoint as users see it: saving, restoring, keeping, refusing."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    Keep,
    PipelineCheckpoint,
)
from midepoch.testing import same
from midepoch.typing import CheckpointableIterator, Stateful

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")


def make_model(seed: int = 0, width: int = 16) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def dataset(small_files: Any) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


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


def test_keep_the_last(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoint.save(step=step)
    assert checkpoint.steps() == [4, 5]
    checkpoint.save(step=6, keep=4)
    assert checkpoint.steps() == [4, 5, 6]


def test_rules_combine(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=Keep(last=2, every=10, best=1, metric="loss"))
    losses = {3: 0.1}
    for step in range(1, 26):
        checkpoint.save(step=step, metadata={"loss": losses.get(step, 1.0 / step if step != 7 else float("nan"))})
    assert checkpoint.steps() == [10, 20, 24, 25], "1/25 is the best by now"
    checkpoint.save(step=26, metadata={"loss": 9.0})
    assert checkpoint.steps() == [10, 20, 25, 26]
    upward = PipelineCheckpoint(tmp_path / "up", keep=Keep(best=2, metric="score", mode="max"))
    for step, score in enumerate([5, 9, 1, 7, None, 0], 1):
        upward.save(step=step, metadata={"score": score})
    assert upward.steps() == [2, 4, 6], "the two best, and the newest"


def test_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    checkpoint = PipelineCheckpoint(tmp_path, keep=Keep(hours=2))
    for step, age in ((1, 5), (2, 3), (3, 1), (4, 0)):
        monkeypatch.setattr(time, "time", lambda age=age: now - 3600 * age)
        checkpoint.save(step=step)
    assert checkpoint.steps() == [3, 4]


@pytest.mark.parametrize(
    "keep",
    [
        0,
        -1,
        "3",
        True,
        {"last": 0},
        {"best": 1},
        {"metric": "x"},
        {"best": 1, "metric": "x", "mode": "most"},
        {"hours": 0},
    ],
)
def test_bad_rules(keep: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError)):
        PipelineCheckpoint(tmp_path, keep=Keep(**keep) if isinstance(keep, dict) else keep)


def test_pruning_never_removes_the_newest_whole_step(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=1)
    checkpoint.save(step=1, extra={"x": [1]})
    original = checkpoint._store.commit

    def commit(step: int, token: str, manifest: bytes) -> None:
        original(step, token, manifest)
        os.truncate(tmp_path / f"step_{step}/extra.x.json", 1)  # a disk that loses what it has acknowledged

    checkpoint._store.commit = commit  # type: ignore[method-assign]
    checkpoint.save(step=2, extra={"x": [2]})
    assert checkpoint.steps() == [1, 2]
    assert PipelineCheckpoint(tmp_path).restore_latest(extra={"x": (found := [0])}) == 1
    assert found == [1]


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
    for wanted in ({"model": {}}, {"extra": {"b": {}}}, {"pipeline": midepoch.testing}):
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


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=1)
    checkpoint.save(extra={"x": [1]}, step=1)
    real = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 20_000:
            real(fd, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointSaveError, match=r"step 2 was not saved.*No space left.*are unchanged \(1, up to 1\)"):
        checkpoint.save(extra={"x": np.zeros(10_000)}, step=2)
    assert sorted(os.listdir(tmp_path)) == ["step_1"]
    monkeypatch.undo()
    checkpoint.verify(1)


def test_a_real_small_file_system(tmp_path: Path) -> None:
    """ENOSPC by the kernel, where a tmpfs may be mounted in a namespace of its own."""
    script = f"""
import numpy as np, os
from midepoch.checkpoint import *
c = PipelineCheckpoint({str(tmp_path)!r})
c.save(extra={{"x": [1]}}, step=1)
try:
    c.save(extra={{"x": np.zeros(1 << 20)}}, step=2)
except CheckpointSaveError as e:
    print("refused:", e)
c.verify(1)
print(sorted(os.listdir({str(tmp_path)!r})))
"""
    command = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -"
    done = subprocess.run(
        ["unshare", "-mr", "sh", "-c", command], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr[:100]}")
    assert "refused: step 2" in done.stdout and "No space left" in done.stdout and "['step_1']" in done.stdout, done


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointSaveError, match=r"(?i)permission"):
            checkpoint.save(step=2)
        assert checkpoint.restore_latest() == 1
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointSaveError, match="is a file: name the folder"):
        PipelineCheckpoint(tmp_path / "file").save(step=1)


def test_a_read_only_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointSaveError, match=r"Read-only.*are unchanged"):
        checkpoint.save(step=2)
    assert checkpoint.restore_latest() == 1


# Several at once


def test_another_live_process_is_left_alone(tmp_path: Path) -> None:
    script = f"""
import sys, os
from midepoch.checkpoint.local import LocalStore
d = LocalStore({str(tmp_path)!r})
d.begin(7, "aa")
with d.sink(7, "aa", "half") as sink:
    sink.write(memoryview(b"x"))
print("begun", flush=True)
sys.stdin.readline()
os._exit(0)
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        checkpoint = PipelineCheckpoint(tmp_path)
        checkpoint.save(step=1)
        assert (tmp_path / ".step_7.aa.saving/files/half").exists()
        mine = PipelineCheckpoint(tmp_path)
        mine._store.begin(8, "bb")
        checkpoint.save(step=2)
        assert (tmp_path / ".step_8.bb.saving").exists(), "one of this process is alive as well"
        mine._store.abandon(8, "bb")
    finally:
        other.kill()
        other.communicate()
    checkpoint.save(step=3)
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2", "step_3"], "its process is dead now"


def test_two_runs_in_one_folder_lose_nothing(tmp_path: Path) -> None:
    def run(first: int) -> None:
        checkpoint = PipelineCheckpoint(tmp_path)
        for step in range(first, first + 40, 2):
            checkpoint.save(extra={"x": np.full(3000, step)}, step=step)
            checkpoint.save(extra={"x": np.full(3000, 1000)}, step=1000)

    threads = [threading.Thread(target=run, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoint = PipelineCheckpoint(tmp_path)
    assert checkpoint.steps() == [*range(1, 41), 1000]
    for step in checkpoint.steps():
        assert checkpoint.read(step, "x")[0] == step
    assert sorted(os.listdir(tmp_path)) == sorted(f"step_{step}" for step in checkpoint.steps())


def test_restoring_while_another_process_prunes(tmp_path: Path) -> None:
    done = threading.Event()

    def run() -> None:
        checkpoint = PipelineCheckpoint(tmp_path, keep=1)
        for step in range(150):
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


# Asynchronously


def test_async_keeps_the_state_of_the_moment(small_files: Any, tmp_path: Path) -> None:
    loader = dataset(small_files).loader(batch_size=7)
    model, optimizer = make_model(width=4000)
    train(model, optimizer)
    passing = iter(loader)
    next(passing)
    with PipelineCheckpoint(tmp_path, async_save=True) as checkpoint:
        for step in range(1, 6):
            expected = {name: value.clone() for name, value in values(model).items()}
            position = loader.position
            checkpoint.save(loader, model, optimizer, step=step)
            train(model, optimizer, 1)
            next(passing)
            checkpoint.wait()
            assert same(dict(checkpoint.read(step, "model")), expected)
            assert checkpoint.read(step, "data")["position"] == position
    assert PipelineCheckpoint(tmp_path).steps() == [1, 2, 3, 4, 5]


def test_async_saves_never_overlap_and_errors_surface_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    inside: list[int] = []
    most: list[int] = []
    original = checkpoint._store.commit

    def commit(step: int, token: str, manifest: bytes) -> None:
        inside.append(step)
        most.append(len(inside))
        time.sleep(0.02)
        if step == 3:
            inside.remove(step)
            raise OSError(errno.ENOSPC, "No space left on device")
        original(step, token, manifest)
        inside.remove(step)

    checkpoint._store.commit = commit  # type: ignore[method-assign]
    for step in (1, 2, 3):
        checkpoint.save(step=step)
    with pytest.raises(CheckpointSaveError, match=r"step 3 was not saved.*No space"):
        checkpoint.save(step=4)
    checkpoint.save(step=5)
    checkpoint.wait()
    assert checkpoint.steps() == [1, 2, 5]
    assert max(most) == 1


@pytest.mark.parametrize("how", ["end", "error", "exit"])
def test_async_is_finished_when_the_program_ends(how: str, tmp_path: Path) -> None:
    ends = {"end": "", "error": "raise RuntimeError('boom')", "exit": "import sys; sys.exit(3)"}
    script = f"""
import time
import numpy as np
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path)!r}, async_save=True)
original = c._store.commit
c._store.commit = lambda *a: (time.sleep(0.3), original(*a))
c.save(extra={{"x": np.arange(10000)}}, step=1)
{ends[how]}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"end": 0, "error": 1, "exit": 3}[how], done.stderr
    assert PipelineCheckpoint(tmp_path).read(1, "x")[-1] == 9999


def test_async_reports_at_the_end_what_nobody_asked_for(tmp_path: Path) -> None:
    script = f"""
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path / "file")!r}, async_save=True)
c.save(step=1)
"""
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "saving step 1 failed" in done.stderr and "was not saved" in done.stderr, done.stderr


# Damage


def test_a_damaged_step_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
