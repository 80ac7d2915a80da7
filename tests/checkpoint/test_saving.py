"""Saves that are interrupted, and saves in a signal handler, which may have interrupted anything."""

from __future__ import annotations

import dis
import json
import linecache
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import midepoch
from midepoch.checkpoint import CheckpointSaveError, PipelineCheckpoint
from midepoch.checkpoint.local import NO_LOCKS, LocalSink, try_lock


def python(script: str, *arguments: str) -> list[Any]:
    """What a program prints in its last line, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return said


LAZY = """
import json, sys
import numpy as np
kind, folder = sys.argv[1:]
if kind == "dcp":
    import torch
from midepoch.checkpoint import PipelineCheckpoint
checkpoint = PipelineCheckpoint("memory:///run" if kind == "memory" else folder, backend="dcp" if kind == "dcp" else "files")
model = torch.nn.Linear(64, 64) if kind == "dcp" else {"w": np.ones((200, 200))}
before = set(sys.modules)
checkpoint.save(None, model, step=1, extra={"x": {"y": np.ones(3)}})
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize("kind", ["files", "memory", "dcp"])
def test_a_save_imports_nothing(kind: str, tmp_path: Path) -> None:
    assert python(LAZY, kind, str(tmp_path)) == []


IMPORTING = """
import json, signal, sys
import numpy as np
from midepoch.checkpoint import PipelineCheckpoint

checkpoint = PipelineCheckpoint(sys.argv[1], keep=1)
problems, steps, imports, saving = [], 0, 0, False

def handler(*_):
    global saving, steps
    saving, steps = True, steps + 1
    try:
        checkpoint.save(None, {"w": np.ones(2000)}, step=steps)
    except BaseException as problem:
        problems.append(f"{type(problem).__name__}: {problem}"[:300])
    saving = False

def hook(event, arguments):
    global imports
    if event == "import" and not saving:
        imports += 1
        if imports % 16 == 0:
            signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, handler)
sys.addaudithook(hook)
import numpy.ma, numpy.random, torch
print(json.dumps([steps, problems, checkpoint.latest_step()]))
"""


def test_a_sigterm_handler_saves_in_the_middle_of_any_import(tmp_path: Path) -> None:
    steps, problems, latest = python(IMPORTING, str(tmp_path))
    assert steps > 20 and latest == steps and problems == []


def test_a_sigterm_handler_saves_in_the_middle_of_any_save(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, keep=2)
    model = torch.nn.Linear(64, 64)
    checkpoint.save(None, model, step=1)
    started = time.monotonic()
    checkpoint.save(None, model, step=2)
    seconds, moments = time.monotonic() - started, 40
    handled: list[int] = []

    def handler(*_: Any) -> None:
        handled.append(checkpoint.save(None, model, step=1000 + len(handled)))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(moments):
            signal.setitimer(signal.ITIMER_REAL, seconds * (number + 1) / moments)
            checkpoint.save(None, model, step=3 + number)
            while len(handled) <= number:
                time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for step in checkpoint.steps():
        checkpoint.verify(step)
    assert len(handled) == moments


LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (midepoch, torch.distributed.checkpoint))


def is_end_of_with(frame: FrameType) -> bool:
    """True between the body of a with statement and its ``__exit__``, where Python handles no signal."""
    first = next(offset for offset, number in dis.findlinestarts(frame.f_code) if number == frame.f_lineno)
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_lasti > first and text.lstrip().startswith("with ")


def lines_until_interrupt(run: Callable[[], Any], line: int | None = None) -> int:
    """Run with an interrupt before one of the lines of ours and of DCP; returns the number of lines that ran.

    A signal at a random moment may also come while C++ code of torch, which allows no exceptions, calls Python: that
    aborts the process, whatever is saved.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, line
        if not frame.f_code.co_filename.startswith(LIBRARIES) or frame.f_code.co_name in ("close", "create_stream"):
            return None  # DCP leaves a file open; the interpreter closes it where it can raise nothing
        if event == "line":
            if lines == line and is_end_of_with(frame):
                line += 1
            elif lines == line:
                raise KeyboardInterrupt
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("backend", ["files", "dcp"])
def test_an_interrupt_stays_an_interrupt_and_keeps_no_lock(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend, keep=1)
    model = torch.nn.Linear(64, 64)
    for _ in range(3):  # the first creates the folder, the second reads its manifest, the third is as those below
        lines = lines_until_interrupt(lambda: checkpoint.save(None, model, step=2))
    assert lines > 500
    for line in range(0, lines - 20, lines // 100):
        with pytest.raises(KeyboardInterrupt):
            lines_until_interrupt(lambda: checkpoint.save(None, model, step=2), line)
    checkpoint.save(None, model, step=3)
    checkpoint.verify(3)
    assert checkpoint.steps() == [3]
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("midepoch")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"]


def test_an_interrupt_at_any_line_keeps_no_lock(tmp_path: Path) -> None:
    def locks() -> None:
        lock = try_lock(tmp_path)
        assert lock is not None and try_lock(tmp_path) is None
        lock.release()

    for line in range(lines_until_interrupt(locks)):
        with pytest.raises(KeyboardInterrupt):
            lines_until_interrupt(locks, line)
        lock = try_lock(tmp_path)
        assert lock is not None and lock is not NO_LOCKS, line
        lock.release()


FORKING = """
import gc, json, os, sys
from pathlib import Path
from midepoch.checkpoint.local import try_lock

folder = Path(sys.argv[1])
lock = try_lock(folder)
if not (child := os.fork()):
    del lock
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
found = [try_lock(folder) is None]
lock.release()
print(json.dumps([*found, try_lock(folder) is not None]))
"""


def test_a_forked_process_that_drops_a_lock_does_not_release_it(tmp_path: Path) -> None:
    assert python(FORKING, str(tmp_path)) == [True, True]


def test_a_failed_save_while_an_interrupt_is_handled_is_no_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LocalSink, "write", fails)
    checkpoint = PipelineCheckpoint(tmp_path)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(CheckpointSaveError, match="was not saved to .*: MemoryError. There are no earlier steps"):
            checkpoint.save(step=1)
