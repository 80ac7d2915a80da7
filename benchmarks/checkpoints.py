"""Checkpoints beside torch.save, torch.load, Orbax and a memcpy. `python -m benchmarks.checkpoints`.

Everything is measured in turn, in one process, on one disk; the best of several. The bars are ratios of those.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import midepoch
from benchmarks import machine
from benchmarks.latency import Measured
from midepoch.checkpoint import PipelineCheckpoint

TENSORS = 64


def _timed(action: Callable[[], Any]) -> float:
    """Seconds, on a disk that has nothing else to do: a sync also writes what others have left in memory."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _in_turn(repeats: int, *actions: Callable[[], float]) -> list[float]:
    """The best of each, measured one after the other, again and again."""
    found = [[action() for action in actions] for _ in range(repeats)]
    return [min(column) for column in zip(*found, strict=True)]


def _model(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}.weight": torch.randn(nbytes // TENSORS // 4) for number in range(TENSORS)}


def _torch_save(tensors: dict[str, torch.Tensor], path: Path) -> float:
    def save() -> None:
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    path.unlink(missing_ok=True)
    return _timed(save)


def data_state(folder: Path, repeats: int) -> Measured:
    """The state of a loader alone, through fsync, beside the same values through Orbax."""
    import orbax.checkpoint as ocp

    pq.write_table(pa.table({"x": np.arange(1000)}), folder / "x.parquet")
    loader = midepoch.from_files(folder / "x.parquet").shuffle(seed=1).with_format("numpy").loader(batch_size=8)
    next(iter(loader))
    checkpoint, orbax = PipelineCheckpoint(folder / "ours"), ocp.PyTreeCheckpointer()
    # Orbax keeps no None; the rest of the state as it is.
    state = {name: value for name, value in loader.state_dict().items() if value is not None}
    count = iter(range(10**6))

    def ours() -> float:
        step = next(count)
        spent = _timed(lambda: checkpoint.save(loader, step=step, rng=False))
        checkpoint.delete(step)
        return spent

    def theirs() -> float:
        path = folder / "theirs" / str(next(count))
        spent = _timed(lambda: orbax.save(path, state))
        shutil.rmtree(path)
        return spent

    mine, other = _in_turn(20 * repeats, ours, theirs)
    print(f"  data state: {1e3 * mine:.2f} ms, Orbax {1e3 * other:.2f} ms", flush=True)
    return Measured("save of the data state, times slower than 1/20 of Orbax", "x", 1.0, mine / (other / 20))


def large(folder: Path, nbytes: int, repeats: int) -> list[Measured]:
    tensors = _model(nbytes)
    target = [torch.empty_like(tensor) for tensor in tensors.values()]
    sync, background = (
        PipelineCheckpoint(folder / "sync", keep=1),
        PipelineCheckpoint(folder / "async", keep=1, async_save=True),
    )
    count = iter(range(10**6))

    def ours() -> float:
        return _timed(lambda: sync.save(model=tensors, step=next(count), rng=False))

    def theirs() -> float:
        return _torch_save(tensors, folder / "torch.pt")

    def blocked() -> float:
        spent = _timed(lambda: background.save(model=tensors, step=next(count), rng=False))
        background.wait()
        return spent

    def memcpy() -> float:
        return _timed(lambda: [one.copy_(two) for one, two in zip(target, tensors.values(), strict=True)])

    memcpy(), blocked()  # memory that is there already, on both sides
    save, reference, snapshot, copy = _in_turn(repeats, ours, theirs, blocked, memcpy)
    print(
        f"  save {save:.2f} s, torch.save + fsync {reference:.2f} s; blocked {snapshot:.3f} s, memcpy {copy:.3f} s",
        flush=True,
    )

    # As it happens: in a fresh process, whose memory is not there yet.
    reading, loading = _in_turn(
        repeats, lambda: _fresh(RESTORE, str(folder / "sync")), lambda: _fresh(LOAD, str(folder / "torch.pt"))
    )
    print(f"  restore_latest {reading:.2f} s, torch.load {loading:.2f} s", flush=True)
    return [
        Measured("save beside torch.save and fsync", "x", 1.15, save / reference),
        Measured("time blocked by async_save beside a memcpy", "x", 1.2, snapshot / copy),
        Measured("restore_latest with verification beside torch.load", "x", 1.3, reading / loading),
    ]


RESTORE = """
import sys, time, torch
from midepoch.checkpoint import PipelineCheckpoint
checkpoint, empty = PipelineCheckpoint(sys.argv[1]), {}
start = time.perf_counter()
checkpoint.restore_latest(model=empty, rng=False)
print(time.perf_counter() - start)
"""

LOAD = """
import sys, time, torch
start = time.perf_counter()
torch.load(sys.argv[1], mmap=False)
print(time.perf_counter() - start)
"""


def _fresh(program: str, *arguments: str) -> float:
    """What a program of its own prints last."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


MEMORY = """
import resource, sys, torch
from pathlib import Path
from benchmarks.checkpoints import TENSORS, _model
from midepoch.checkpoint import PipelineCheckpoint
tensors = _model(int(sys.argv[2]))
checkpoint = PipelineCheckpoint(sys.argv[1])
checkpoint.save(model={"small": torch.zeros(5000)}, step=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.save(model=tensors, step=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def memory(folder: Path, nbytes: int) -> Measured:
    """How much more memory a save needs at its peak, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder / "memory"), str(nbytes)], capture_output=True, text=True, check=True
    )
    return Measured(
        "peak extra memory of a save beside the largest tensor", "x", 1.1, int(done.stdout) * 1024 / (nbytes / TENSORS)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    print(machine.describe())
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="midepoch-checkpoints-"))
    try:
        found = [data_state(folder, args.repeats), *large(folder, args.bytes, args.repeats), memory(folder, args.bytes)]
    finally:
        shutil.rmtree(folder)
    for one in found:
        verdict = "passed" if one.passed else "LOST  "
        print(f"{verdict}  {one.bar}: {one.measured:.2f} {one.unit} (at most {one.allowed:g})")
    if args.json:
        args.json.write_text(json.dumps([{**vars(one), "passed": one.passed} for one in found], indent=1))


if __name__ == "__main__":
    main()
