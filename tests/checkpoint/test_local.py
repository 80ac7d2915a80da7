"""Checkpoints on a disk: full, read-only, with leftovers, beside other processes."""

from __future__ import annotations

import errno
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
    CheckpointError,
    CheckpointSaveError,
    PipelineCheckpoint,
    local,
    manifest,
)
from midepoch.checkpoint.local import LocalStore
from midepoch.checkpoint.store import Steps


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("step", [1, 3])
def test_an_unreadable_file_counts_as_damage(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    for number in (1, 2, 3):
        checkpoint.save(None, {"w": np.full(5000, float(number))}, step=number)
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(f"step_{step}/{name}"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    fresh = PipelineCheckpoint(tmp_path)
    found = {"w": np.zeros(5000)}
    assert fresh.restore_latest(None, found) == (3 if step == 1 else 2)
    fresh.save(step=4)
    assert fresh.latest_step() == 4


def test_nothing_leaks_when_an_attempt_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    real = os.mkdir

    def full(path: Any, *arguments: Any) -> None:
        if str(path).endswith("saving"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *arguments)

    monkeypatch.setattr(os, "mkdir", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CheckpointSaveError, match="No space"):
            checkpoint.save(step=2)
    assert len(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == ["step_1"]


def test_a_dangling_link_and_a_newer_version_among_the_steps(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    for step in (1, 2):
        checkpoint.save(step=step)
    (tmp_path / "step_9").symlink_to(tmp_path / "unmounted")
    assert checkpoint.restore_latest() == 2
    from test_damage import rewritten

    (tmp_path / "step_2").rename(tmp_path / "aside")
    (tmp_path / "step_1").rename(tmp_path / "step_2")
    rewritten(lambda content: content.update({manifest.KEY: 7}))(tmp_path)
    (tmp_path / "step_2").rename(tmp_path / "step_1")
    (tmp_path / "aside").rename(tmp_path / "step_2")
    assert PipelineCheckpoint(tmp_path).restore_latest() == 2, "older than what there is"


def test_a_step_or_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """None would mean a fresh start, with a whole run lying there."""
    PipelineCheckpoint(tmp_path / "run").save(step=1)
    for wrong, way_out in (
        (tmp_path / "run/step_1", "name the folder around it"),
        (tmp_path / "run/step_1/rng.json", "is a file"),
    ):
        for call in (lambda c: c.restore_latest(), lambda c: c.steps(), lambda c: c.save(step=2)):
            with pytest.raises(CheckpointError, match=way_out):
                call(PipelineCheckpoint(wrong))


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
    with pytest.raises(CheckpointError, match=r"/file is a file: name the folder"):
        PipelineCheckpoint(tmp_path / "file" / "steps").restore_latest()


def test_a_read_only_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointSaveError, match=r"Read-only.*are unchanged"):
        checkpoint.save(step=2)
    assert checkpoint.restore_latest() == 1


def test_another_live_process_is_left_alone(tmp_path: Path) -> None:
    script = f"""
import sys, os
from midepoch.checkpoint.local import LocalStore
from midepoch.checkpoint.store import Steps
d = Steps(LocalStore({str(tmp_path)!r}))
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
        assert (tmp_path / ".step_7.aa.saving/half").exists()
        mine = PipelineCheckpoint(tmp_path)
        mine._steps.begin(8, "bb")
        checkpoint.save(step=2)
        assert (tmp_path / ".step_8.bb.saving").exists(), "one of this process is alive as well"
        mine._steps.abandon(8, "bb")
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


def test_an_attempt_of_a_process_killed_before_it_was_locked_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".step_2.aa.saving").mkdir()
    PipelineCheckpoint(tmp_path).save(step=3, rng=False)
    assert os.listdir(tmp_path) == ["step_3"]


@pytest.mark.parametrize("moment", ["before", "between", "during"])
def test_an_attempt_that_is_swept_before_it_is_locked_begins_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it before its folder is opened, before it is locked, or is about to remove it then."""
    lock, flock, sweeps = local.try_lock, local.fcntl.flock, []
    other = Steps(LocalStore(tmp_path))

    def sweep() -> None:
        sweeps.append(threading.Thread(target=other.sweep))
        sweeps[0].start()
        if moment != "during":
            sweeps[0].join()

    def late(folder: Path) -> Any:
        if threading.current_thread() is threading.main_thread() and not sweeps and moment == "before":
            sweep()
        return lock(folder)

    def late_flock(*arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not sweeps:
            sweep()
            while moment == "during" and not held.is_set():
                time.sleep(0.001)
        flock(*arguments)

    held, retire = threading.Event(), other.store.discard

    def slow(copy: Any) -> None:
        held.set()
        time.sleep(0.2 if moment == "during" else 0)
        retire(copy)

    monkeypatch.setattr(other.store, "discard", slow)
    monkeypatch.setattr(local, "try_lock", late)
    monkeypatch.setattr(local.fcntl, "flock", late_flock)
    PipelineCheckpoint(tmp_path).save(step=1, rng=False)
    sweeps[0].join()
    assert held.is_set() and os.listdir(tmp_path) == ["step_1"]
    PipelineCheckpoint(tmp_path).verify(1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("made", [False, True], ids=["new", "made by a killed process"])
def test_the_name_of_the_folder_survives_a_power_loss(
    world: int, made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a rank has made the folder before, for its notes."""
    synced, real = set(), os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "run" / "checkpoints"
    if made:
        folder.mkdir(parents=True)
    ranks = [PipelineCheckpoint(folder, rank=rank, world_size=world) for rank in range(world)]
    saves = [threading.Thread(target=rank.save, kwargs={"step": 1}) for rank in ranks]
    for save in saves:
        save.start()
    for save in saves:
        save.join()
    assert ranks[0].steps() == [1]
    assert {folder, folder.parent} <= synced
    assert made or tmp_path in synced
