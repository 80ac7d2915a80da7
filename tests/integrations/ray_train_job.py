"""The train loop of a TorchTrainer in which a worker kills itself, a node is lost, and every rank logs its rows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

GLOBAL_BATCH, EVERY = 12, 3
KILL_AT, LOSE_AT, STOP_AT, END = 5, 10, 14, 24  # steps, of which 8 are an epoch


def make_data(data: str) -> midepoch.Dataset:
    return midepoch.from_files(data).select_columns(["id", "tokens"]).shuffle(seed=7)


def make_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def train_step(model: torch.nn.Linear, batch: dict[str, Any], size: int = 1) -> None:
    """By hand: DistributedDataParallel and torch.optim import torch._dynamo, a second for each of eight workers."""
    model.zero_grad()
    model(batch["tokens"].float() / 100).square().mean().backward()
    for weight in model.parameters():
        assert weight.grad is not None
        if size > 1:
            dist.all_reduce(weight.grad)
        weight.data -= 0.1 / size * weight.grad


def wait_for(condition: Callable[[], bool]) -> None:
    """As long as it takes: the test that started all this gives up first."""
    while not condition():
        time.sleep(0.05)


def train(config: dict[str, Any]) -> None:
    import ray  # not above: pytest imports this file, and needs no Ray in its process

    torch.set_num_threads(1)
    folder, rank, size = Path(config["folder"]), dist.get_rank(), dist.get_world_size()
    node = ray.get_runtime_context().get_node_id()
    counted = [len(list(folder.glob("attempt-*")))]
    dist.broadcast_object_list(counted)
    attempt = counted[0]
    (folder / f"attempt-{attempt}").touch()
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(**what: Any) -> None:
        line = {"attempt": attempt, "rank": rank, "size": size, "node": node, **what}
        os.write(log, json.dumps(line).encode() + b"\n")

    model, loader = make_model(), make_data(config["data"]).loader(batch_size=GLOBAL_BATCH // size, drop_last=True)
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=2, timeout=60)
    step = checkpoint.restore_latest(loader, model) or 0
    say(restored=step)
    while step < config["until"]:
        for batch in loader:
            step += 1
            say(step=step, rows=batch["id"].tolist())
            if step == KILL_AT and rank == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == LOSE_AT:  # a worker on the lost node waits for its end
                wait_for(lambda: (folder / "lost").exists() and (folder / "lost").read_text() != node)
            train_step(model, batch, size)
            if step % EVERY == 0:
                checkpoint.save(loader, model, step=step)
            if step == config["until"]:
                break
