"""Saves in a thread: no interrupt, fork or end of the program loses one silently."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forks import forked
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.background import Background
from midepoch.checkpoint.disk import LocalSink

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


@contextmanager
def signal_after(seconds: float, handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
from midepoch.checkpoint.disk import LocalSink

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
