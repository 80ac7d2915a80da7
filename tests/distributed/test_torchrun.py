"""Ranks for real: torchrun with gloo, DDP, another number of ranks, nodes that come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midepoch
from launch import Launch, end, launch, torchrun
from midepoch.audit import read_run

HERE = Path(__file__).parent
ROWS = 111


@pytest.fixture(scope="module")
def data(make_files: Callable[..., list[str]]) -> str:
    return str(Path(make_files([40, 30, 41])[0]).parent)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_three_recipes_at_another_number_of_ranks(data: str, tmp_path: Path, launched: Launch, python: str) -> None:
    """Two ranks by an agent of torchrun, whatever starts the three."""
    job = str(HERE / "recipes_job.py")
    torchrun(2, job, str(tmp_path), data, "train", python=python)
    first = [read(tmp_path / f"train-{rank}.json") for rank in range(2)]
    ds = midepoch.from_files(data).shuffle(seed=5)
    order = [row["id"] for row in ds]
    batches = [set(order[i * 12 : i * 12 + 12]) for i in range(9)]
    assert [set(a) | set(b) for a, b in zip(first[0]["rows"], first[1]["rows"], strict=True)] == batches

    launched(3, job, str(tmp_path), data, "resume")
    second = [read(tmp_path / f"resume-{rank}.json") for rank in range(3)]
    for recipe in ("rank0", "gathered", "gathered list", "per rank"):
        runs = [one[recipe] for one in second]
        steps = zip(*(run["rows"] for run in runs), strict=True)
        assert [set().union(*step) for step in steps] == batches[4:], recipe
        assert all(len(set(row)) == 4 for run in runs for row in run["rows"])
        # The same rows in every global batch: the same gradients, but for the order in which they are summed up.
        np.testing.assert_allclose(runs[0]["weights"], first[0]["weights"], rtol=1e-9)

    # What two ranks must not get away with.
    assert all("rank 0: epoch 0, position 48" in one["list"] for one in first)
    assert all("the ranks were not at the same step when these states were saved" in one["list"] for one in first)
    refused = [one["apart"] for one in first if "apart" in one]
    assert len(refused) == 1  # the one that came second; under DDP the other ends with it
    assert re.search("position is (48|60) on rank 0 and (48|60) on rank 1", refused[0]), refused
    assert "load the same state" in refused[0]
    assert all("the last step of epoch 0 has 1 row left for 2 ranks" in one["uneven"] for one in first)
    assert first[0]["shared"] == first[1]["shared"] == order[:6]  # tensor parallel: the same rows
    assert first[0]["drawn"] == first[1]["drawn"]  # a seed that nobody gave is one for all
    assert all("each process has drawn its own seed" in one["early"] for one in first)
    for case, field in (("one epoch", "epoch is 3"), ("batch size", "batch size is 3"), ("position", "position is 12")):
        messages = [one[case] for one in first if one[case] is not None]  # of who came second, or of both
        assert messages and all(field in message for message in messages), messages
    assert [one["look"] for one in first] == [None, None]
    assert [one["iterator"] for one in first] == [11, 11]  # the next epoch, on both


def entries(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(folder.glob("log-*.jsonl")):
        found += [(path.name, json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def wait_for(steps: int, size: int, folder: Path, agents: list[subprocess.Popen[str]]) -> None:
    """Until so many steps more were made by a world of that size."""
    done = lambda: sum("step" in entry and entry["size"] == size for _, entry in entries(folder))  # noqa: E731
    before, started = done(), time.monotonic()
    while done() < before + steps:
        assert all(agent.poll() is None for agent in agents), "an agent has ended"
        assert time.monotonic() - started < 120, entries(folder)[-5:]
        time.sleep(0.05)


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for agent in running:
        end(agent)


@pytest.mark.slow  # 40 s: agents wait for each other
def test_nodes_come_and_go(data: str, tmp_path: Path, agents: list[subprocess.Popen[str]], free_port: int) -> None:
    """One node, then two, then one again by kill -9: each time the run goes on with another world size by itself."""
    options = ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port}", "--monitor-interval=0.1"]
    timing = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"  # a busy machine is no dead one
    arguments = [str(HERE / "elastic_job.py"), str(tmp_path), data]
    agents.append(launch(*options, f"--rdzv-conf=is_host=1,{timing}", *arguments))
    wait_for(5, 1, tmp_path, agents)
    agents.append(launch(*options, f"--rdzv-conf=is_host=0,{timing}", *arguments))
    wait_for(8, 2, tmp_path, agents)
    lost = agents.pop()
    for _, entry in entries(tmp_path):  # the node as a whole: its workers are no children of its agent's session
        if entry.get("agent") == lost.pid:
            os.kill(entry["pid"], signal.SIGKILL)
    end(lost)
    wait_for(4, 1, tmp_path, agents)
    (tmp_path / "finish").touch()
    assert agents[0].wait(timeout=120) == 0
    check_history(tmp_path, data)
    run = read_run(tmp_path)  # the ledger tells the same
    assert run.exact and all(epoch.complete for epoch in run.epochs)
    assert run.worlds == [1, 2, 1]


def check_history(folder: Path, data: str) -> None:
    """Along what the weights at the end have seen, every row of every epoch came once, in the order of the positions."""
    logs: dict[str, list[dict[str, Any]]] = {}
    for name, entry in entries(folder):
        logs.setdefault(name, []).append(entry)
    starts = sorted(logs.values(), key=lambda log: (log[0]["time"], log[0]["rank"]))
    steps: dict[int, list[int]] = {}
    before: tuple[int, int] | None = None
    for first, *made in starts:
        if (first["size"], first["from"]) != before:  # ranks of one start restore the same step
            steps = {step: rows for step, rows in steps.items() if step <= first["from"]}
            before = (first["size"], first["from"])
        for entry in made:
            steps.setdefault(entry["step"], []).extend(entry["ids"])
    ds, at = midepoch.from_files(data).shuffle(seed=5), 0
    expected: list[int] = []
    for step in sorted(steps):
        if at == len(expected):
            ds.set_epoch(at // ROWS)
            expected += [row["id"] for row in ds]
        assert sorted(expected[at : at + len(steps[step])]) == sorted(steps[step]), step
        at += len(steps[step])
    assert at == len(expected) > 0  # whole epochs, each row once
