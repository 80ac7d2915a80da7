"""Pruning beside other writers: what was committed later stays, and the folder is never without a step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midepoch.checkpoint import (
    Keep,
    PipelineCheckpoint,
)
from midepoch.checkpoint.local import LocalStore
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.store import Copy, Steps


def save(checkpoint: PipelineCheckpoint, step: int, **metadata: Any) -> None:
    checkpoint.save(step=step, metadata=metadata, rng=False)


def before_pruning(checkpoint: PipelineCheckpoint, action: Any) -> None:
    """Do something between the next commit of a writer and its pruning."""
    prune = checkpoint._prune

    def later(*arguments: Any) -> None:
        checkpoint._prune = prune  # type: ignore[method-assign]
        action()
        prune(*arguments)

    checkpoint._prune = later  # type: ignore[method-assign]


@pytest.mark.parametrize("rules", [Keep(last=1), Keep(best=1, metric="loss"), Keep(every=1000), Keep(hours=1e-9)])
def test_a_step_committed_after_ones_own_is_not_pruned(rules: Keep, tmp_path: Path) -> None:
    first, second = PipelineCheckpoint(tmp_path, keep=rules), PipelineCheckpoint(tmp_path, keep=rules)
    second.restore_latest(rng=False)
    save(first, 71, by="first", loss=3)
    before_pruning(first, lambda: save(second, 71, by="second", loss=1))
    save(first, 72, by="first", loss=2)
    assert first.steps() == [71], "the second writer saw 72, and committed 71 after it"
    assert first.metadata(71)["by"] == "second"


def test_a_step_of_another_number_committed_after_ones_own_is_not_pruned(tmp_path: Path) -> None:
    first, second = PipelineCheckpoint(tmp_path, keep=1), PipelineCheckpoint(tmp_path, keep=1)
    second.restore_latest(rng=False)
    save(first, 70)
    before_pruning(first, lambda: save(second, 69))
    save(first, 72)
    assert first.steps() == [69]
    assert first.latest_step() == 69


def test_a_step_saved_again_is_later_than_itself_before(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    save(checkpoint, 5)
    earlier = checkpoint.manifest(5).sequence
    save(checkpoint, 5)
    assert checkpoint.manifest(5).sequence > earlier


class Meddled(LocalStore):
    """Store in which another process does something before or after a step is withdrawn."""

    def __init__(self, path: Path, *, before: Any = None, after: Any = None) -> None:
        super().__init__(path)
        self._before, self._after = before, after

    def withdraw(self, copy: Copy) -> Copy:
        before, self._before = self._before, None
        if before is not None:
            before()
        withdrawn = super().withdraw(copy)
        after, self._after = self._after, None
        if after is not None:
            after()
        return withdrawn


def test_a_step_committed_before_the_removal_of_another_stays(tmp_path: Path) -> None:
    """It is withdrawn by mistake, and put back."""
    writer = PipelineCheckpoint(tmp_path)
    save(writer, 71, by="first")
    steps = Steps(Meddled(tmp_path, before=lambda: save(writer, 71, by="second")))
    assert not steps.remove(71, steps.manifest(71))
    assert os.listdir(tmp_path) == ["step_71"]
    assert writer.metadata(71)["by"] == "second"


def test_a_step_committed_during_the_removal_of_another_stays(tmp_path: Path) -> None:
    writer = PipelineCheckpoint(tmp_path)
    save(writer, 71, by="first")
    steps = Steps(Meddled(tmp_path, after=lambda: save(writer, 71, by="second")))
    assert not steps.remove(71, steps.manifest(71)), "who replaces it removes it"
    assert os.listdir(tmp_path) == ["step_71"]
    assert writer.metadata(71)["by"] == "second"


def test_a_step_that_a_sweep_puts_back_is_removed_all_the_same(tmp_path: Path) -> None:
    save(PipelineCheckpoint(tmp_path), 71)
    steps = Steps(Meddled(tmp_path, after=Steps(LocalStore(tmp_path)).sweep))
    assert steps.remove(71, steps.manifest(71))
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_being_removed_or_replaced_is_a_step_until_it_is_gone(tmp_path: Path) -> None:
    seen: list[Any] = []
    reader = PipelineCheckpoint(tmp_path)

    def look() -> None:
        seen.append((reader.steps(), reader.restore_latest(rng=False), sorted(os.listdir(tmp_path))))

    save(PipelineCheckpoint(tmp_path), 71)
    assert Steps(Meddled(tmp_path, after=look)).remove(71)
    assert [(steps, latest) for steps, latest, _ in seen] == [([71], 71)] and seen[0][2] != ["step_71"]
    assert reader.steps() == []


def test_live_writers_never_leave_the_folder_without_a_step(tmp_path: Path) -> None:
    save(PipelineCheckpoint(tmp_path), 1)
    jobs = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("writer_job.py")), str(tmp_path), first, "60"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in ("1", "2", "3")
    ]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    looks = 0
    while any(job.poll() is None for job in jobs):
        checkpoint = PipelineCheckpoint(tmp_path)
        assert checkpoint.latest_step() is not None
        assert checkpoint.restore_latest(rng=False) is not None
        looks += 1
    for job in jobs:
        _, errors = job.communicate()
        assert job.returncode == 0, errors[-2000:]
        assert not errors
    assert looks > 3
    assert PipelineCheckpoint(tmp_path).restore_latest(rng=False) in range(1, 6)


def test_a_damaged_step_that_is_saved_again_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    save(checkpoint, 5)
    (tmp_path / "step_5/manifest.json").write_bytes(b"damaged")
    save(checkpoint, 5, by="second")
    assert os.listdir(tmp_path) == ["step_5"] and checkpoint.metadata(5)["by"] == "second"


def test_damaged_steps_do_not_count_for_retention(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=2)
    for step in (2, 3):
        checkpoint.save(None, {"w": np.full(5000, float(step))}, step=step)
    path = tmp_path / "step_3/model.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    assert checkpoint.restore_latest(None, {"w": np.zeros(5000)}) == 2
    checkpoint.save(None, {"w": np.full(5000, 4.0)}, step=4)
    assert 2 in checkpoint.steps() and 4 in checkpoint.steps()


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoint.save(step=step)
    assert checkpoint.steps() == [4, 5]
    checkpoint.save(step=6, keep=4)
    assert checkpoint.steps() == [4, 5, 6]


def test_a_step_is_kept_if_any_rule_keeps_it(tmp_path: Path) -> None:
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


def test_steps_are_kept_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_bad_rules_are_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError)):
        PipelineCheckpoint(tmp_path, keep=Keep(**keep) if isinstance(keep, dict) else keep)


def test_pruning_never_removes_the_newest_intact_step(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=1)
    checkpoint.save(step=1, extra={"x": [1]})
    original = checkpoint._steps.commit

    def commit(token: str, manifest: Manifest) -> Manifest:
        committed = original(token, manifest)
        os.truncate(tmp_path / committed.place / "extra.x.json", 1)  # a disk that loses what it has acknowledged
        return committed

    checkpoint._steps.commit = commit  # type: ignore[method-assign]
    checkpoint.save(step=2, extra={"x": [2]})
    assert checkpoint.steps() == [1, 2]
    assert PipelineCheckpoint(tmp_path).restore_latest(extra={"x": (found := [0])}) == 1
    assert found == [1]
