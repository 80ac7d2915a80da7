"""Traces a save, and looks at what a kill or a power loss before every single call would have left. Run by test_crash.py,
as a process of its own: everything is forked from here, before any library has threads.

    python crash.py BACKEND sync|async new|replace [EVERY]
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tracer
from counting import Numbers

from midepoch.checkpoint import PipelineCheckpoint

ROWS = 3000
KILLS = 5
"""Real kills of a save, spread over its calls. Every other is replayed from the trace of one save."""

# Imported once, not in every fork.
LIBRARIES = {
    "files": (),
    "dcp": (
        "torch.distributed.checkpoint.state_dict",
        "torch.utils.serialization.config",
        "midepoch.checkpoint.dcp",
    ),
    "orbax": ("flax.nnx", "orbax.checkpoint", "midepoch.checkpoint.orbax"),
}


def model_at(step: int) -> dict[str, Any]:
    return {"weight": np.arange(ROWS, dtype=np.float32) * step, "bias": np.full(5, step, np.float64)}


def torch_model_at(step: int) -> Any:
    import torch

    layer = torch.nn.Linear(50, 60)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(3000.0).reshape(60, 50) * step)
        layer.bias.fill_(step)
    return layer


def save(
    folder: Path, backend: str, asynchronous: bool, step: int, *, value: int, keep: int | None, trace: bool
) -> None:
    checkpoint = PipelineCheckpoint(folder, backend=backend, async_save=asynchronous)
    model = torch_model_at(value) if backend == "dcp" else model_at(value)
    if checkpoint.steps():
        checkpoint.manifest(checkpoint.steps()[-1])  # else it would not replace a step
    if trace:
        tracer.begin()
    checkpoint.save(Numbers(value), model, step=step, metadata={"value": value}, keep=keep)
    checkpoint.wait()


def look(folder: Path, backend: str, allowed: list[tuple[int, int]]) -> None:
    """A restart: restores one of the allowed (step, value), whole; saves again; leaves nothing behind."""
    checkpoint = PipelineCheckpoint(folder, backend=backend)
    numbers, model = Numbers(), torch_model_at(0) if backend == "dcp" else model_at(0)
    step = checkpoint.restore_latest(numbers, model)
    assert step is not None, "no step is left"
    value = checkpoint.metadata(step)["value"]
    assert (step, value) in allowed, f"step {step} with {value}"
    assert numbers.at == value
    if backend == "dcp":
        assert float(model.bias[0].detach()) == value
        assert float(model.weight[1, 0].detach()) == 50.0 * value
    else:
        assert np.array_equal(model["weight"], model_at(value)["weight"])
        assert np.array_equal(model["bias"], model_at(value)["bias"])
    for each in checkpoint.steps():
        checkpoint.verify(each)
    checkpoint.save(Numbers(9), model, step=9, metadata={"value": 9}, keep=1)
    left = sorted(os.listdir(folder))
    assert left == ["step_9"], f"left behind: {left}"


def forked(action: Callable[[], None]) -> None:
    status = os.waitpid(tracer.forked(action), 0)[1]
    if status:
        raise SystemExit(f"failed with {status}")


def main(backend: str, mode: str, case: str, every: int) -> None:
    for name in ("numpy.random", *LIBRARIES[backend]):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page
    root = Path(tempfile.mkdtemp(prefix="crash-"))
    asynchronous, second = mode == "async", 1 if case == "replace" else 2
    before = root / "before"
    forked(lambda: save(before, backend, asynchronous, 1, value=1, keep=None, trace=False))
    allowed = [(1, 1), (second, 2)]

    def attempt(stop_before: int | None) -> tracer.Traced:
        """A real save in a copy, to its end or before this call, and a look at the folder."""
        folder = root / "attempt"
        shutil.copytree(before, folder)
        action = lambda: save(folder, backend, asynchronous, second, value=2, keep=1, trace=True)  # noqa: E731
        found = tracer.traced(action, folder, stop_before)
        assert found.killed or found.code == 0, f"point {stop_before}: the save itself failed ({found.code})"
        if stop_before is None:
            disk = tracer.Disk(before)
            for op in found.ops:
                disk.apply(_moved(op, folder, before))
            real = tracer.Disk(folder)
            assert disk.left(tracer.Event.KILL) == real.left(tracer.Event.KILL), "the tracer missed a call"
        forked(lambda: look(folder, backend, allowed if found.killed else allowed[1:]))
        shutil.rmtree(folder)
        return found

    ops = attempt(None).ops
    kills = sum(attempt(1 + number * len(ops) // KILLS).killed for number in range(KILLS))
    assert kills >= KILLS - 1, "a save may make fewer calls than another one, but not so few"
    points = 0
    looked: set[Any] = set()  # many moments leave the very same disk, byte for byte: one look at each disk
    for count in sorted({*range(0, len(ops), every), len(ops)}):
        disk = tracer.Disk(before)
        for op in ops[:count]:
            disk.apply(_moved(op, root / "attempt", before))
        for event in tracer.Event:
            fits = allowed if count < len(ops) else allowed[1:]
            seen = (len(fits), disk.left(event))
            if seen in looked:
                continue
            looked.add(seen)
            after = root / f"after-{count}-{event.name}"
            disk.write(after, event)
            forked(lambda after=after, fits=fits: look(after, backend, fits))  # type: ignore[misc]
            shutil.rmtree(after)
            points += 1
    print(json.dumps({"calls": len(ops), "points": points}))
    shutil.rmtree(root)


def _moved(op: tracer.Op, old: Path, new: Path) -> tracer.Op:
    def path(text: str) -> str:
        return str(new) + text[len(str(old)) :] if text else ""

    return tracer.Op(op.what, path(op.path), path(op.to), op.offset, op.data)


if __name__ == "__main__":
    main(*sys.argv[1:4], every=int(sys.argv[4]) if len(sys.argv) > 4 else 1)  # type: ignore[call-arg]
