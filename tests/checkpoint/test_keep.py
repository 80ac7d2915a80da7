"""Pruning beside other writers: what was committed later stays, and the folder is never without a step."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from midepoch.checkpoint import Keep, PipelineCheckpoint
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
