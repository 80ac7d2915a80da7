"""Saves in a thread: no interrupt, fork or end of the program loses one silently."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import dataset, make_model, train, values

from alarms import signal_after
from forks import forked
from midepoch.checkpoint import (
    CheckpointSaveError,
    PipelineCheckpoint,
    local,
)
from midepoch.checkpoint.background import Background
from midepoch.checkpoint.local import LocalSink
from midepoch.checkpoint.manifest import Manifest
from midepoch.testing import same

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if another test has used it


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written to a checkpoint until it is opened."""
    opened = threading.Event()
    real = LocalSink.write

    def write(self: LocalSink, data: memoryview, /) -> None:
        assert opened.wait(60)
        real(self, data)

    monkeypatch.setattr(LocalSink, "write", write)
    yield opened
    opened.set()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_wait_after_an_interrupted_one_waits(tmp_path: Path, gate: threading.Event) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    checkpoint.save(None, {"w": np.ones(5)}, step=1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), signal_after(0.05, interrupt):
            checkpoint.wait()
    threading.Timer(0.2, gate.set).start()
    checkpoint.wait()
    assert checkpoint.steps() == [1]


def test_a_save_after_an_interrupted_wait_does_not_overlap(tmp_path: Path, gate: threading.Event) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    checkpoint.save(None, {"w": np.ones(5)}, step=1)
    with pytest.raises(KeyboardInterrupt), signal_after(0.05, interrupt):
        checkpoint.wait()
    threading.Timer(0.2, gate.set).start()
    checkpoint.save(None, {"w": np.ones(5)}, step=2)
    assert (tmp_path / "step_1").exists()
    checkpoint.wait()
    assert checkpoint.steps() == [1, 2]


def test_a_signal_handler_may_wait_in_the_middle_of_a_wait(tmp_path: Path, gate: threading.Event) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    checkpoint.save(None, {"w": np.ones(5)}, step=1)
    waited = []

    def handler(*_: Any) -> None:
        threading.Timer(0.1, gate.set).start()
        checkpoint.wait()
        waited.append(checkpoint.save(None, {"w": np.ones(5)}, step=2))

    with signal_after(0.05, handler):
        checkpoint.wait()
        while not waited:
            time.sleep(0.01)
    assert checkpoint.steps() == [1, 2]


def test_an_interrupted_start_runs_the_action_or_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = threading.Thread.start

    def before(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    def after(self: threading.Thread) -> None:
        real(self)
        while not done:  # its ``run`` has begun
            time.sleep(0.001)
        raise KeyboardInterrupt

    background = Background()
    for start in (before, after):
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            background.start("this", lambda: done.append("ran"))
        background.wait()
    assert done == ["ran"]


def test_a_fork_does_not_wait_for_the_save_of_its_parent(tmp_path: Path, gate: threading.Event) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, async_save=True)
    checkpoint.save(None, {"w": np.ones(5)}, step=1)

    def in_child() -> bool:
        gate.set()
        checkpoint.wait()
        checkpoint.save(step=2)
        checkpoint.wait()
        return (tmp_path / "step_2").exists()

    assert forked(in_child) == 0
    gate.set()
    checkpoint.wait()
    assert checkpoint.steps() == [1, 2]


PROGRAM = """
import os, sys, time, numpy as np
from pathlib import Path
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.local import LocalSink

folder, problem = Path(sys.argv[1]), sys.argv[2]
real = LocalSink.write
def write(self, data, /):
    while not (folder / "go").exists():
        time.sleep(0.01)
    if problem:
        raise OSError(28, problem)
    real(self, data)
LocalSink.write = write
def main():
    checkpoint = PipelineCheckpoint(folder, async_save=True)
    checkpoint.save(None, {"w": np.ones(5)}, step=1)
if sys.argv[3] == "main":
    main()
    print("at the end", flush=True)
else:
    import multiprocessing
    if __name__ == "__main__":
        child = multiprocessing.get_context(sys.argv[3]).Process(target=main)
        child.start()
        child.join()
        os._exit(child.exitcode)
"""


def program(tmp_path: Path, problem: str = "", where: str = "main") -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), problem, where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_at_the_end_of_a_program_does_not_lose_the_save(tmp_path: Path) -> None:
    with program(tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "at the end\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=60)
    PipelineCheckpoint(tmp_path).verify(1)
    assert "failed" not in said, said


def test_interrupts_that_lose_the_save_end_the_program_with_an_error(tmp_path: Path) -> None:
    with program(tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "at the end\n"
        while process.poll() is None:
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT
    assert PipelineCheckpoint(tmp_path).steps() == []


@pytest.mark.parametrize("where", ["main", "fork", "spawn"])
def test_a_save_that_fails_at_the_end_of_a_program_fails_the_program(where: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with program(tmp_path, "No space left on device", where) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode > 0, said
    assert "saving step 1 failed" in said and "No space left on device" in said
    assert PipelineCheckpoint(tmp_path).steps() == []


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    original = local.LocalSink.write

    def write(self: Any, data: memoryview) -> None:
        time.sleep(seconds)
        original(self, data)

    monkeypatch.setattr(local.LocalSink, "write", write)


def test_calls_from_other_threads_do_not_let_saves_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("files", 12 << 20),
        ("orbax", 12 << 20),
        pytest.param("files", 10, marks=pytest.mark.slow),
        pytest.param("orbax", 10, marks=pytest.mark.slow),
    ],
)
def test_a_large_save_finishes_at_exit(backend: str, size: int, tmp_path: Path) -> None:
    script = f"""
import numpy as np
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path)!r}, async_save=True, backend={backend!r})
c.save(None, {{"w": np.ones({size})}}, step=1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert float(PipelineCheckpoint(tmp_path).read(1, "model")["w"].sum()) == size, done.stderr


def test_an_exit_handler_may_save(tmp_path: Path) -> None:
    script = f"""
import atexit, numpy as np
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path)!r})
atexit.register(lambda: c.save(None, {{"w": np.ones(20 << 20)}}, step=1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    PipelineCheckpoint(tmp_path).verify(1)


def test_the_error_of_a_dropped_manager_is_logged(tmp_path: Path) -> None:
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
    original = checkpoint._steps.commit

    def commit(token: str, manifest: Manifest) -> Manifest:
        step = manifest.step
        inside.append(step)
        most.append(len(inside))
        time.sleep(0.02)
        if step == 3:
            inside.remove(step)
            raise OSError(errno.ENOSPC, "No space left on device")
        committed = original(token, manifest)
        inside.remove(step)
        return committed

    checkpoint._steps.commit = commit  # type: ignore[method-assign]
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
original = c._steps.commit
c._steps.commit = lambda *a: time.sleep(0.3) or original(*a)
c.save(extra={{"x": np.arange(10000)}}, step=1)
{ends[how]}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"end": 0, "error": 1, "exit": 3}[how], done.stderr
    assert PipelineCheckpoint(tmp_path).read(1, "x")[-1] == 9999


def test_async_logs_at_exit_an_error_that_nothing_raised(tmp_path: Path) -> None:
    script = f"""
from midepoch.checkpoint import PipelineCheckpoint
c = PipelineCheckpoint({str(tmp_path / "file")!r}, async_save=True)
c.save(step=1)
"""
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "saving step 1 failed" in done.stderr and "was not saved" in done.stderr, done.stderr
