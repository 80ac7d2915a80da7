"""What a review of durability has broken, once each."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import Numbers

from midepoch.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    PipelineCheckpoint,
    disk,
    local,
    manifest,
    objects,
    remote,
)
from midepoch.checkpoint.files import Checksums


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    original = disk.LocalSink.write

    def write(self: Any, data: memoryview) -> None:
        time.sleep(seconds)
        original(self, data)

    monkeypatch.setattr(disk.LocalSink, "write", write)


def test_a_look_from_another_thread_does_not_let_saves_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_writes(monkeypatch, 0.02)
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    model = {f"w{number}": torch.full((5000,), 1.0) for number in range(10)}
    lookers = []
    for step in (1, 2, 3):
        for value in model.values():
            value.fill_(step)
        checkpoint.save(None, model, step=step)
        lookers += [
            threading.Thread(target=look) for look in (checkpoint.latest_step, checkpoint.steps, checkpoint.wait)
        ]
        for looker in lookers[-3:]:
            looker.start()
    checkpoint.wait()
    assert not list(tmp_path.glob(".*.saving")), "wait() came back too early"
    for looker in lookers:
        looker.join()
    for step in (1, 2, 3):
        assert {float(value[0]) for value in checkpoint.read(step, "model").values()} == {float(step)}


@pytest.mark.parametrize("size", [10, 12 << 20])
@pytest.mark.parametrize("backend", ["files", "orbax"])
def test_a_large_save_at_the_end_of_a_program(backend: str, size: int, tmp_path: Path) -> None:
    script = f"""
import numpy as np
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path)!r}, async_save=True, backend={backend!r})
c.save(None, {{"w": np.ones({size})}}, step=1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert float(PipelineCheckpoint(tmp_path).read(1, "model")["w"].sum()) == size, done.stderr


def test_a_save_by_atexit(tmp_path: Path) -> None:
    script = f"""
import atexit, numpy as np
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path)!r})
atexit.register(lambda: c.save(None, {{"w": np.ones(20 << 20)}}, step=1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    PipelineCheckpoint(tmp_path).verify(1)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError("the answer was lost")], ids=["interrupt", "lost"])
@pytest.mark.parametrize("second", [1, 2])
def test_a_store_that_committed_and_did_not_say_so(problem: Any, second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import secrets

    address = f"memory:///{secrets.token_hex(4)}"
    stores: dict[str, Any] = {}
    made = objects.Objects.__init__

    def shared(self: Any, address: str, options: Any = None) -> None:
        made(self, address, options)
        self._store = stores.setdefault(address, self._store)

    monkeypatch.setattr(objects.Objects, "__init__", shared)
    checkpoint = PipelineCheckpoint(address)
    checkpoint.save(None, {"w": np.full(5000, 1.0)}, step=1)
    real = objects.Objects.put

    def put(self: Any, name: str, data: bytes) -> None:
        real(self, name, data)
        if name.endswith("manifest.json"):
            raise problem

    monkeypatch.setattr(objects.Objects, "put", put)
    with pytest.raises((KeyboardInterrupt, CheckpointSaveError)):
        checkpoint.save(None, {"w": np.full(5000, 2.0)}, step=second)
    monkeypatch.setattr(objects.Objects, "put", real)
    found = {"w": np.zeros(5000)}
    assert PipelineCheckpoint(address).restore_latest(None, found) == second
    assert found["w"][0] == 2


def test_an_old_midepoch_leaves_the_steps_of_a_newer_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint("memory:///newer")
    checkpoint.save(None, {"w": np.ones(5000)}, step=1)
    store = checkpoint._store._objects  # type: ignore[attr-defined]
    store.put("step_1/manifest.json", b'{"of": "the future"}')
    before = set(store.list())
    monkeypatch.setattr(remote, "STALE", -1.0)
    checkpoint.save(None, {"w": np.ones(5000)}, step=2)
    assert before <= set(store.list())


def test_attempts_of_another_machine_are_swept_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint("memory:///machines")
    store = checkpoint._store._objects  # type: ignore[attr-defined]
    store.put("step_5/aa/half", b"x")
    store.put(".attempts/step_5.aa", b'{"machine": "elsewhere", "pid": 1, "started": "1"}')
    checkpoint.save(step=1)
    assert "step_5/aa/half" in store.list()
    monkeypatch.setattr(remote, "STALE", -1.0)
    checkpoint.save(step=2)
    assert not [name for name in store.list() if "step_5" in name]


def test_no_pickle_is_read_by_whatever_name_torch_would(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_file_that_cannot_be_read(name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def ranks(size: int, action: Any) -> list[str]:
    def run(rank: int) -> str:
        try:
            return str(action(rank))
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("case", ["extra of rank 0", "state of rank 1", "begin of rank 0"])
def test_who_fails_before_the_meeting_is_not_waited_for(case: str, tmp_path: Path) -> None:
    class Refuses(Numbers):
        def get_state(self) -> Any:
            raise RuntimeError("no state")

    def save(rank: int) -> Any:
        checkpoint = PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300)
        if case == "begin of rank 0" and rank == 0:

            def begin(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            checkpoint._store.begin = begin  # type: ignore[method-assign]
        pipeline = Refuses() if case == "state of rank 1" and rank == 1 else Numbers()
        extra = {"x": object()} if case == "extra of rank 0" else {}
        return checkpoint.save(pipeline, step=1, extra=extra)

    started = time.monotonic()
    said = ranks(3, save)
    assert time.monotonic() - started < 200, said
    assert all("Error" in text for text in said), said
    assert PipelineCheckpoint(tmp_path).steps() == []
    assert (
        ranks(
            3, lambda rank: PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300).save(Numbers(), step=1)
        )
        == ["1"] * 3
    )


def test_several_ranks_have_to_name_the_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several ranks"):
        PipelineCheckpoint(tmp_path, rank=0, world_size=2).save(Numbers())
    for backend in ("dcp", "orbax"):
        with pytest.raises(ValueError, match="initialised"):
            PipelineCheckpoint(tmp_path, backend=backend, rank=0, world_size=2)


def test_ranks_restore_from_a_folder_that_they_cannot_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PipelineCheckpoint(tmp_path).save(step=3)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(local.LocalBoard, "put", refuse)
    assert (
        ranks(3, lambda rank: PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300).restore_latest())
        == ["3"] * 3
    )


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


def test_nothing_leaks_when_beginning_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    real = os.mkdir

    def full(path: Any, *arguments: Any) -> None:
        if str(path).endswith("files"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *arguments)

    monkeypatch.setattr(os, "mkdir", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CheckpointSaveError, match="No space"):
            checkpoint.save(step=2)
    assert len(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == ["step_1"]


def test_retention_does_not_count_what_was_found_damaged(tmp_path: Path) -> None:
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


def test_a_link_to_nowhere_and_an_old_step_of_the_future(tmp_path: Path) -> None:
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


def test_equal_sequence_numbers_have_one_order(tmp_path: Path) -> None:
    from test_damage import rewritten

    checkpoint = PipelineCheckpoint(tmp_path)
    for step in (1, 2):
        checkpoint.save(step=step)
    rewritten(lambda content: content.update(sequence=1))(tmp_path)
    fresh = PipelineCheckpoint(tmp_path)
    assert fresh.latest_step() == fresh.restore_latest() == 2


def test_the_end_of_a_forgotten_manager_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = f"""
import gc
from midepoch.checkpoint import PipelineCheckpoint
def run():
    PipelineCheckpoint({str(tmp_path / "file")!r}, async_save=True).save(step=1)
run(); gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "saving step 1 failed" in done.stderr


def test_a_step_or_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    """None would mean a fresh start, with a whole run lying there."""
    PipelineCheckpoint(tmp_path / "run").save(step=1)
    for wrong, way_out in (
        (tmp_path / "run/step_1", "name the folder around it"),
        (tmp_path / "run/step_1/rng.json", "is a file"),
    ):
        for call in (lambda c: c.restore_latest(), lambda c: c.steps(), lambda c: c.save(step=2)):
            with pytest.raises(CheckpointError, match=way_out):
                call(PipelineCheckpoint(wrong))


@pytest.mark.filterwarnings("ignore:.*set_vital.*")
def test_a_stateful_dataloader_is_not_asked_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start its workers to answer."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    checkpoint = PipelineCheckpoint(tmp_path)
    loader = StatefulDataLoader(list(range(20)), batch_size=2)
    next(iter(loader))
    checkpoint.save(loader, step=1)
    fresh = StatefulDataLoader(list(range(20)), batch_size=2, num_workers=0)
    monkeypatch.setattr(StatefulDataLoader, "state_dict", lambda _: pytest.fail("asked"))
    assert checkpoint.restore_latest(fresh) == 1
    assert next(iter(fresh)).tolist() == [2, 3]


@pytest.mark.parametrize("step", [True, 5.0, -1])
def test_steps_are_whole_numbers_everywhere(step: Any, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1)
    for call in (checkpoint.delete, checkpoint.verify, checkpoint.metadata, lambda step: checkpoint.restore(step=step)):
        with pytest.raises((TypeError, ValueError)):
            call(step)
    with pytest.raises((CheckpointNotFoundError, CheckpointDamagedError)):
        checkpoint.restore(step=7)


def test_a_save_that_failed_on_one_rank_does_not_put_the_ranks_out_of_step(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        checkpoint = PipelineCheckpoint(tmp_path, async_save=True, rank=rank, world_size=2, timeout=300)
        prune, told = checkpoint._prune, []

        def fails_once(*arguments: Any) -> None:
            checkpoint._prune = prune  # type: ignore[method-assign]
            raise OSError(errno.ESTALE, "Stale file handle")

        for step in range(1, 6):
            if rank == 1 and step == 2:
                checkpoint._prune = fails_once  # type: ignore[method-assign]
            try:
                checkpoint.save(Numbers(step), step=step)
            except OSError as problem:
                told.append((step, problem.errno))
        checkpoint.wait()
        return told

    said = ranks(2, run)
    assert said == ["[]", f"[(3, {errno.ESTALE})]"], "told by the call after it, which saves all the same"
    assert PipelineCheckpoint(tmp_path).steps() == [1, 2, 3, 4, 5]
