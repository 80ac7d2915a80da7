"""Checkpoints in an object store: a real S3 server, faults in front of it, and kill -9 before every request."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import Numbers
from store_job import model_at, open_at

from forks import Forks
from midepoch.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointSaveError,
    Keep,
    PipelineCheckpoint,
    manifest,
    remote,
)
from midepoch.checkpoint.remote import Objects
from midepoch.checkpoint.store import Process
from midepoch.errors import FetchError
from proxy import Fault, Proxy
from s3 import Server


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that remembers what it has written for a moment: without, rclone takes seconds to find it again."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    with Server(folder, "--dir-cache-time=1s") as server:
        yield server


@pytest.fixture
def run(s3_server: Server) -> Iterator[Path]:
    """The folder behind an address that no other test has."""
    folder = s3_server.folder / "bucket" / secrets.token_hex(8)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def address(run: Path) -> str:
    return f"s3://bucket/{run.name}"


def objects(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def save(checkpoint: PipelineCheckpoint, step: int, **options: Any) -> None:
    checkpoint.save(Numbers(step), model_at(step), step=step, metadata={"step": step}, **options)


def restored(checkpoint: PipelineCheckpoint) -> int:
    numbers, model = Numbers(), model_at(0)
    step = checkpoint.restore_latest(numbers, model)
    assert step is not None
    assert numbers.at == step and np.array_equal(model["w"], model_at(step)["w"])
    return step


def test_saving_keeping_and_restoring(s3_server: Server, run: Path, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint, keep=Keep(last=2, every=3))
    assert checkpoint.restore_latest() is None
    for step in range(1, 6):
        save(checkpoint, step)
        assert restored(checkpoint) == step
    assert checkpoint.steps() == [3, 4, 5] and checkpoint.latest_step() == 5
    assert {name.split("/")[0] for name in objects(run)} == {"step_3", "step_4", "step_5"}
    assert len(objects(run)) == 3 * 5, "data, model twice, rng and a manifest each"
    checkpoint.verify(4)
    assert checkpoint.metadata(4) == {"step": 4}
    save(checkpoint, 4)  # again: the old attempt's objects go
    assert len(objects(run)) == 3 * 5 and checkpoint.latest_step() == 4
    checkpoint.delete(3)
    assert checkpoint.steps() == [4, 5]


def test_asynchronously(s3_server: Server, address: str) -> None:
    with open_at(address, s3_server.endpoint, async_save=True) as checkpoint:
        for step in (1, 2, 3):
            save(checkpoint, step)
    assert restored(open_at(address, s3_server.endpoint)) == 3


@pytest.mark.parametrize("backend", ["dcp", "orbax"])
def test_other_backends(backend: str, s3_server: Server, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint, backend=backend)
    model = torch.nn.Linear(60, 70)
    checkpoint.save(Numbers(1), model, step=1)
    other = torch.nn.Linear(60, 70)
    assert checkpoint.restore_latest(Numbers(), other) == 1
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "manifest"])
def test_a_damaged_step_is_passed_over(damage: str, s3_server: Server, run: Path, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint)
    save(checkpoint, 1)
    save(checkpoint, 2)
    name = "manifest.json" if damage == "manifest" else "model.safetensors"
    path = next((run / "step_2").rglob(name))
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-5] if damage == "cut" else data)
    time.sleep(1.1)  # until the server looks again
    assert restored(checkpoint) == 1
    with pytest.raises(CheckpointDamagedError):
        checkpoint.verify(2)


def test_kill_before_every_request(
    s3_server: Server, run: Path, address: str, store_forks: Forks, tmp_path: Path
) -> None:
    """Each save replaces step 1 by step 2, with pruning, and dies before its n-th request."""
    store_forks.executable(tmp_path / "python")
    number, finished = 0, False
    while not finished:
        number += 1
        assert number < 200
        first = open_at(address, s3_server.endpoint)
        save(first, 1, keep=1)
        with Proxy(s3_server.endpoint) as proxy:
            job = subprocess.Popen(
                [tmp_path / "python", str(Path(__file__).with_name("store_job.py")), address, proxy.endpoint, "2"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            seen = 0

            def fatal(method: str, path: str, job: Any = job, number: int = number) -> bool:
                nonlocal seen
                seen += 1
                if seen == number:
                    os.kill(job.pid, signal.SIGKILL)
                return seen >= number

            proxy.add(Fault("reset", times=None, match=fatal))
            _, errors = job.communicate("go\n", timeout=60)
        finished = job.returncode == 0
        assert finished or job.returncode == -signal.SIGKILL, errors[-2000:]
        again = open_at(address, s3_server.endpoint)
        assert restored(again) in ((2,) if finished else (1, 2))
        save(again, 9, keep=1)
        assert {name.split("/")[0] for name in objects(run)} == {"step_9"}, "swept"
        again.delete(9)
    assert number > 10


@pytest.mark.parametrize("kind", ["500", "503", "reset"])
def test_passing_faults_are_survived(kind: str, proxy: Proxy, address: str) -> None:
    checkpoint = open_at(address, proxy.endpoint)
    proxy.add(Fault(kind, times=2, match=lambda method, path: method in ("PUT", "POST")))
    save(checkpoint, 1)
    assert restored(checkpoint) == 1


def test_lasting_faults_leave_what_was_there(proxy: Proxy, s3_server: Server, address: str) -> None:
    save(open_at(address, s3_server.endpoint), 1)
    checkpoint = open_at(address, proxy.endpoint)
    proxy.add(Fault("403", times=None, match=lambda method, path: method in ("PUT", "POST") and "step_2" in path))
    with pytest.raises(CheckpointSaveError, match=r"(?s)step 2 was not saved.*are unchanged \(1, up to 1\)"):
        save(checkpoint, 2)
    assert restored(open_at(address, s3_server.endpoint)) == 1
    save(open_at(address, s3_server.endpoint), 3)


def test_ranks_meet_in_the_store(s3_server: Server, address: str) -> None:
    def run(rank: int) -> int:
        checkpoint = open_at(address, s3_server.endpoint, rank=rank, world_size=3, timeout=60)
        checkpoint.save(Numbers(rank), model_at(5), step=5)
        numbers, model = Numbers(), model_at(0)
        assert checkpoint.restore_latest(numbers, model) == 5
        assert model["w"][1] == 5
        return numbers.at

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [0, 1, 2]


def test_another_live_process_is_left_alone(s3_server: Server, run: Path, address: str) -> None:
    other = open_at(address, s3_server.endpoint)._steps
    other.begin(7, "aa")
    with other.sink(7, "aa", "half") as sink:
        sink.write(memoryview(b"x"))
    checkpoint = open_at(address, s3_server.endpoint)
    save(checkpoint, 1)
    assert "step_7/aa/half" in objects(run) and checkpoint.steps() == [1]
    other.abandon(7, "aa")
    assert not [name for name in objects(run) if "step_7" in name]


def test_a_step_committed_after_ones_own_is_not_pruned(s3_server: Server, address: str) -> None:
    first, second = (open_at(address, s3_server.endpoint, keep=1) for _ in range(2))
    second.restore_latest(rng=False)
    save(first, 71)
    prune = first._prune

    def late(*arguments: Any) -> None:
        save(second, 71)
        prune(*arguments)

    first._prune = late  # type: ignore[method-assign]
    save(first, 72)
    assert first.steps() == [71], "the second writer saw 72, and committed 71 after it"
    assert restored(first) == 71


def test_what_another_process_is_about_to_commit_is_not_pruned(s3_server: Server, run: Path, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint)
    save(checkpoint, 7)
    other = open_at(address, s3_server.endpoint)._steps
    other.begin(7, "aa")
    with other.sink(7, "aa", "half") as sink:
        sink.write(memoryview(b"x"))
    save(checkpoint, 8, keep=1)
    assert checkpoint.steps() == [8]
    assert [name for name in objects(run) if "step_7" in name] == ["step_7/aa/claim", "step_7/aa/half"]
    other.abandon(7, "aa")
    assert {name.split("/")[0] for name in objects(run)} == {"step_8"}


def test_a_step_committed_before_or_during_the_removal_of_another_stays(s3_server: Server, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint)
    save(checkpoint, 1)
    steps: Any = checkpoint._steps
    first = steps.manifest(1)
    delete = steps.store._objects.delete

    def late(names: Any) -> None:
        steps.store._objects.delete = delete
        other = open_at(address, s3_server.endpoint)
        other.manifest(1)
        save(other, 1)
        delete(names)

    steps.store._objects.delete = late
    steps.remove(1, first)
    assert steps.manifest(1) != first
    assert not steps.remove(1, first), "it is another one now"
    assert restored(checkpoint) == 1


def test_a_bucket_that_is_not_there(s3_server: Server) -> None:
    checkpoint = open_at("s3://no-such-bucket-at-all/run", s3_server.endpoint)
    with pytest.raises(CheckpointError):
        save(checkpoint, 1)


def test_no_secret_is_written_or_said(proxy: Proxy, run: Path, address: str) -> None:
    from s3 import SECRET

    checkpoint = open_at(address, proxy.endpoint)
    save(checkpoint, 1)
    assert SECRET not in repr(checkpoint)
    assert not any(SECRET.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())
    proxy.add(Fault("403", times=None))
    with pytest.raises(Exception) as caught:
        save(checkpoint, 2)
    assert SECRET not in str(caught.value)


def test_ranges_of_objects_are_read_by_several_threads() -> None:
    """The server of these tests sends whole objects; this store, in memory, sends ranges."""
    checkpoint = PipelineCheckpoint("memory:///run")
    model = {"w": np.arange(10_000_000)}
    checkpoint.save(None, model, step=1)
    store: Any = checkpoint._steps.store
    read, offsets = store._objects.read_into, []
    store._objects.read_into = lambda name, data, offset: offsets.append(offset) or read(name, data, offset)
    found = {"w": np.zeros(10_000_000, int)}
    assert checkpoint.restore_latest(None, found) == 1
    assert np.array_equal(found["w"], model["w"]) and len(set(offsets)) > 9


def test_a_server_without_ranges_sends_an_object_once(s3_server: Server, run: Path, address: str) -> None:
    checkpoint = open_at(address, s3_server.endpoint)
    save(checkpoint, 1)
    steps: Any = checkpoint._steps
    client = steps.store._objects
    client._ranges = False
    stream, requests = client.stream, []
    client.stream = lambda name: requests.append(name) or stream(name)
    data = bytearray(40_000)
    source = steps.source(steps.manifest(1), "model.safetensors")
    for first in (0, 20_000, 30_000, 10_000):
        assert source.read_into(memoryview(data)[first : first + 10_000], first) == 10_000
    assert len(requests) == 1
    assert source.read_into(memoryview(bytearray(100)), source.size - 50) == 50
    assert source.read_into(memoryview(bytearray(100)), source.size + 50) == 0
    assert data == next(run.glob("step_1/*/model.safetensors")).read_bytes()[:40_000]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError("the answer was lost")], ids=["interrupt", "lost"])
@pytest.mark.parametrize("second", [1, 2])
def test_a_commit_whose_response_was_lost_is_kept(problem: Any, second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import secrets

    address = f"memory:///{secrets.token_hex(4)}"
    stores: dict[str, Any] = {}
    made = Objects.__init__

    def shared(self: Any, address: str, options: Any = None) -> None:
        made(self, address, options)
        self._store = stores.setdefault(address, self._store)

    monkeypatch.setattr(Objects, "__init__", shared)
    checkpoint = PipelineCheckpoint(address)
    checkpoint.save(None, {"w": np.full(5000, 1.0)}, step=1)
    real = Objects.put

    def put(self: Any, name: str, data: bytes) -> None:
        real(self, name, data)
        if name.endswith("manifest.json"):
            raise problem

    monkeypatch.setattr(Objects, "put", put)
    with pytest.raises((KeyboardInterrupt, CheckpointSaveError)):
        checkpoint.save(None, {"w": np.full(5000, 2.0)}, step=second)
    monkeypatch.setattr(Objects, "put", real)
    found = {"w": np.zeros(5000)}
    assert PipelineCheckpoint(address).restore_latest(None, found) == second
    assert found["w"][0] == 2


def test_an_old_midepoch_leaves_the_steps_of_a_newer_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint("memory:///newer")
    checkpoint.save(None, {"w": np.ones(5000)}, step=1)
    monkeypatch.setattr(manifest, "VERSION", 2)
    checkpoint.save(None, {"w": np.ones(5000)}, step=3)
    monkeypatch.undo()
    store = checkpoint._steps.store
    before = set(store.list(""))
    monkeypatch.setattr(remote, "STALE", -1.0)
    checkpoint = PipelineCheckpoint("memory:///newer")
    checkpoint._steps.store = store
    with pytest.raises(CheckpointError, match="Upgrade midepoch"):
        checkpoint.restore_latest()
    for step in (2, 3):
        checkpoint.save(None, {"w": np.ones(5000)}, step=step)
    assert before <= set(store.list(""))
    assert checkpoint.restore_latest() == 3, "saved again"


def test_a_damaged_step_that_is_saved_again_leaves_nothing() -> None:
    checkpoint = PipelineCheckpoint("memory:///damaged")
    checkpoint.save(None, {"w": np.ones(5000)}, step=1)
    store = checkpoint._steps.store
    [name] = (name for name in store.list("") if name.endswith("manifest.json"))
    store.put(name, b"damaged")
    checkpoint.save(None, {"w": np.ones(5000)}, step=1)
    assert len(store.list("")) == 4 and name not in store.list("")
    checkpoint.verify(1)


def test_the_first_error_is_reported_if_nothing_works_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, name: Any, *_: Any) -> None:
        raise FetchError("the first" if str(name).endswith("manifest.json") else "a later one")

    checkpoint = PipelineCheckpoint("memory:///broken")
    monkeypatch.setattr(Objects, "delete", fails)
    monkeypatch.setattr(remote.RemoteStore, "commit", lambda self, *_: fails(self, "manifest.json"))
    with pytest.raises(CheckpointSaveError, match="the first"):
        checkpoint.save(step=1)


def test_the_claim_of_a_process_that_died_after_its_commit_is_swept() -> None:
    checkpoint = PipelineCheckpoint("memory:///claims")
    checkpoint.save(step=1)
    store = checkpoint._steps.store
    claims = {
        f"{checkpoint.manifest(1).place}/claim": Process.current()._replace(started="before"),
        "step_2/aa/claim": Process.current(),
    }
    for name, process in claims.items():
        store.put(name, json.dumps(process).encode())
    checkpoint.save(step=3)
    assert [name for name in store.list("") if name.endswith("claim")] == ["step_2/aa/claim"], "of a live process"


def test_attempts_of_another_machine_are_swept_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = PipelineCheckpoint("memory:///machines")
    store = checkpoint._steps.store
    store.put("step_5/aa/half", b"x")
    store.put("step_5/aa/claim", b'["elsewhere", 1, "1"]')
    checkpoint.save(step=1)
    assert "step_5/aa/half" in store.list("")
    monkeypatch.setattr(remote, "STALE", -1.0)
    checkpoint.save(step=2)
    assert not [name for name in store.list("") if "step_5" in name]
