"""Pruning beside other writers: what was committed later stays, and the folder is never without a step."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midepoch.checkpoint import (
    Keep,
    PipelineCheckpoint,
)
from midepoch.checkpoint.disk import NO_LOCKS, folder_lock
from midepoch.checkpoint.local import LocalStore


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
    save(first, 71, by="first", loss=3)
    before_pruning(first, lambda: save(second, 71, by="second", loss=1))
    save(first, 72, by="first", loss=2)
    assert first.steps() == [71], "the second writer saw 72, and committed 71 after it"
    assert first.metadata(71)["by"] == "second"


def test_a_step_of_another_number_committed_after_ones_own_is_not_pruned(tmp_path: Path) -> None:
    first, second = PipelineCheckpoint(tmp_path, keep=1), PipelineCheckpoint(tmp_path, keep=1)
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


def test_a_commit_waits_while_a_step_is_removed(tmp_path: Path) -> None:
    save(PipelineCheckpoint(tmp_path), 71, by="first")
    directory = LocalStore(tmp_path)
    expected = directory.manifest(71)
    with folder_lock(tmp_path) as mine:
        assert mine
        second = threading.Thread(target=lambda: save(PipelineCheckpoint(tmp_path), 71, by="second"))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert LocalStore(tmp_path).manifest(71) == expected
    second.join()
    assert not directory.remove(71, expected)
    assert PipelineCheckpoint(tmp_path).metadata(71)["by"] == "second"


def test_what_is_moved_aside_by_mistake_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks: another step of that number is committed just before the removal."""
    first, second = LocalStore(tmp_path), PipelineCheckpoint(tmp_path)
    save(second, 71, by="first")
    expected = first.manifest(71)
    seen = first.manifest

    def late(step: int) -> Any:
        found = seen(step)
        save(second, 71, by="second")
        return found

    monkeypatch.setattr(first, "manifest", late)
    monkeypatch.setattr("midepoch.checkpoint.disk.try_lock", lambda *_, **__: NO_LOCKS)
    assert not first.remove(71, expected)
    assert second.steps() == [71]
    assert second.metadata(71)["by"] == "second"


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


def test_who_interrupts_a_turn_does_not_wait_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a signal handler does that saves while a save is at work."""
    with folder_lock(tmp_path) as outer:
        with folder_lock(tmp_path) as inner:
            pass
        assert outer and not inner
    with folder_lock(tmp_path) as after:
        assert after
    assert not caplog.records


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
    original = checkpoint._store.commit

    def commit(step: int, token: str, manifest: bytes) -> None:
        original(step, token, manifest)
        os.truncate(tmp_path / f"step_{step}/extra.x.json", 1)  # a disk that loses what it has acknowledged

    checkpoint._store.commit = commit  # type: ignore[method-assign]
    checkpoint.save(step=2, extra={"x": [2]})
    assert checkpoint.steps() == [1, 2]
    assert PipelineCheckpoint(tmp_path).restore_latest(extra={"x": (found := [0])}) == 1
    assert found == [1]
