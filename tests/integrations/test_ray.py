"""Ray loses workers and nodes in the middle of an index and of a run, and every row is still handed out exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ray_index_job import OPTIONS
from ray_train_job import END, GLOBAL_BATCH, make_data, make_model, train_step

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes have addresses of their own in 127.0.0.0/8")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
ROWS = 96
QUIET = {
    "RAY_AUTH_MODE": "disabled",  # or it writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2",  # for free places in the cluster; it tries again for ever
    "OMP_NUM_THREADS": "1",
}


def processes_of(folder: Path) -> dict[int, str]:
    """Who has a file below ``folder`` open: all processes of a Ray cluster whose sessions are there have their logs."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
            if any(name.startswith(str(folder)) for name in files):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:200]
        except OSError:
            continue  # it has gone
    return found


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Ray's sockets need a short path. Its processes end by themselves, or the test fails and they are ended here."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        yield folder
        deadline = time.monotonic() + 60
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        said = str(left)
        while left:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            left = processes_of(folder)
        assert said == "{}"


def run(ray_folder: Path, script: Path, *arguments: str) -> str:
    """What a driver said; in a process of its own, since Ray leaves threads in it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**inherited, **QUIET, "RAY_TMPDIR": str(ray_folder)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def surviving(lines: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    """The rows of each step, by rank, after all: a restore undoes the steps beyond it."""
    steps: dict[int, dict[int, list[int]]] = {}
    for attempt in range(max(line["attempt"] for line in lines) + 1):
        own = [line for line in lines if line["attempt"] == attempt]
        (restored,) = {line["restored"] for line in own if "restored" in line}
        steps = {step: rows for step, rows in steps.items() if step <= restored}
        for line in own:
            if "step" in line:
                rows = steps.setdefault(line["step"], {})
                assert line["rank"] not in rows, "an attempt does a step once"
                rows[line["rank"]] = line["rows"]
    return {step: [rows[rank] for rank in range(len(rows))] for step, rows in sorted(steps.items())}


def make_lake(folder: Path, files: int = 240) -> None:
    folder.mkdir()
    for number in range(files):
        ids = np.arange(number * 5, number * 5 + 5)
        pq.write_table(
            pa.table({"id": ids, "text": ids.astype(str)}), folder / f"{number:04}.parquet", row_group_size=2
        )


def check_index(folder: Path) -> None:
    """It is the index that threads make, byte for byte, though a worker and a node were lost."""
    told = json.loads((folder / "index.json").read_text())
    assert (told["killed"], told["lost"]) == (1, 1)
    done = [number for number, _ in told["seen"]]
    assert done == sorted(done) and done[-1] == told["seen"][-1][1] == 480  # looked at, then counted
    midepoch.from_files(folder / "lake", index_dir=folder / "by-threads", **OPTIONS)
    names = {path.name for path in (folder / "by-threads").iterdir() if not path.name.startswith(".")}
    assert Path(told["path"]).name in names and len(names) == 2
    for name in names:
        assert (folder / "by-ray" / name).read_bytes() == (folder / "by-threads" / name).read_bytes()


@pytest.mark.slow  # two minutes on two cores
def test_workers_and_nodes_are_lost_and_their_number_changes(make_files: Any, ray_folder: Path, tmp_path: Path) -> None:
    data = str(Path(make_files([40, ROWS - 40])[0]).parent)
    make_lake(tmp_path / "lake")
    run(ray_folder, Path(__file__).with_name("ray_cluster_job.py"), str(tmp_path), data)
    check_index(tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    starts = sorted({(line["attempt"], line["size"], line["restored"]) for line in lines if "restored" in line})
    assert starts == [(0, 2, 0), (1, 2, 3), (2, 1, 9), (3, 3, 12)], "killed at 5, lost a node at 10, stopped at 14"

    model, whole = make_model(), make_data(data).loader(batch_size=GLOBAL_BATCH, drop_last=True)
    handed = surviving(lines)
    assert list(handed) == list(range(1, END + 1))
    for first in range(1, END + 1, ROWS // GLOBAL_BATCH):
        epoch: list[int] = []
        for step, batch in enumerate(whole, first):
            # Ranks take turns: row by row, together they have the batch of the one process.
            rows = [row for turn in zip(*handed[step], strict=True) for row in turn]
            assert rows == batch["id"].tolist(), f"step {step}"
            epoch += rows
            train_step(model, batch)
        assert sorted(epoch) == list(range(ROWS)), "0 lost, 0 repeated"

    trained = make_model()
    assert PipelineCheckpoint(tmp_path / "checkpoints").restore_latest(None, trained) == END
    for weight, expected in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


@pytest.mark.slow
def test_the_example(ray_folder: Path, tmp_path: Path) -> None:
    said = run(ray_folder, EXAMPLE, "--storage", str(tmp_path), "--workers", "2", "--kill")
    for line in (
        "Started at step 0: epoch 0, position 0, world size 2",
        "Resumed from step 40: epoch 0, position 1920, world size 2",
        "Saved step 100: epoch 0, position 4800, world size 2",
    ):
        assert line in said
    said = run(ray_folder, EXAMPLE, "--storage", str(tmp_path), "--workers", "3")
    assert "Resumed from step 100: epoch 0, position 4800, world size 3" in said
    assert "Saved step 200: epoch 1, position 2400, world size 3" in said
