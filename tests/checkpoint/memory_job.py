"""Saves and restores a model, its optimizer and a tree, and prints by how many bytes the process grew in each case.

python memory_job.py FOLDER BYTES ENDPOINT: run by test_restoring.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from midepoch.checkpoint import PipelineCheckpoint
from s3 import storage_options


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def filled(nbytes: int) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its optimizer and a tree of as many bytes in all."""
    layers, length = 4, nbytes // 4 // 4 // 4
    model = torch.nn.ParameterList([torch.empty(length) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.empty(length) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    arrays = [torch.empty(length) for _ in range(layers)]
    return model, optimizer, {"average": [*arrays[:2], *(array.numpy() for array in arrays[2:])]}


def arrays_of(model: Any, optimizer: Any, tree: dict[str, Any]) -> list[torch.Tensor]:
    states = [state[name] for state in optimizer.state.values() for name in state]
    return [*(one.detach() for one in model.parameters()), *states, *map(torch.as_tensor, tree["average"])]


def measure(checkpoint: PipelineCheckpoint, step: int, nbytes: int) -> tuple[int, int]:
    """By how many bytes the process grew while it saved, and while it restored."""
    things = filled(nbytes)
    model, optimizer, tree = things
    for array in arrays_of(*things):
        array.fill_(step)
    forget_peak()
    before = peak()
    checkpoint.save(None, model, optimizer, extra={"tree": tree}, step=step)
    while_saving = peak() - before
    for array in arrays_of(*things):
        array.zero_()
    forget_peak()
    before = peak()
    checkpoint.restore(None, model, optimizer, extra={"tree": tree}, step=step)
    while_restoring = peak() - before
    assert all(bool((array == step).all()) for array in arrays_of(*things))
    return while_saving, while_restoring


if __name__ == "__main__":
    folder, size, endpoint = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    options = storage_options(endpoint)
    growth = {}
    for name, address, backend in (
        ("files", f"{folder}/files", "files"),
        ("dcp", f"{folder}/dcp", "dcp"),
        ("store", "s3://bucket/run", "files"),
    ):
        given = {"storage_options": options} if name == "store" else {}
        checkpoint = PipelineCheckpoint(address, backend=backend, **given)  # type: ignore[arg-type]
        measure(checkpoint, 1, 1 << 14)  # a small one first, so that everything is imported
        growth[name] = measure(checkpoint, 2, size)
    print(json.dumps(growth))
