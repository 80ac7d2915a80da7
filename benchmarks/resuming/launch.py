"""Start the ranks of a leg as a launcher would, one process each, and collect what they delivered."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.resuming import Topology
from benchmarks.speed import ROOT, interpreter


class LegError(Exception):
    """A rank raised, or did not finish in time."""


@dataclass(frozen=True)
class Data:
    """Dataset of all legs: `benchmarks.data.load(data_dir, scale)`."""

    data_dir: Path
    scale: float


@dataclass(frozen=True)
class Leg:
    """Batches of all ranks from one start of a run to its end.

    `batches[rank][step]` are ids. `states` are pickled, one for each rank. `first` is the time from opening the data to
    the first batch, of the slowest rank. `following` is the batch of rank 0 after the state.
    """

    batches: list[list[list[int]]]
    states: list[bytes]
    first: float
    following: list[int]

    def ids(self) -> list[int]:
        """Return the ids of all batches of all ranks."""
        return [row for rank in self.batches for batch in rank for row in batch]


def run_leg(
    contender: str,
    dataset: Data,
    topology: Topology,
    *,
    states: list[bytes],
    steps: int | None,
    save: bool = False,
    following: bool = False,
    timeout: float = 180,
) -> Leg:
    """Run all ranks for `steps`, or to the end of the epoch, and `save` their states there.

    Raise `LegError` with the first error of a rank.
    """
    with tempfile.TemporaryDirectory() as name:
        specification = Path(name) / "leg.json"
        saved = [Path(name) / f"state-{rank}" for rank in range(len(states))]
        for path, state in zip(saved, states, strict=True):
            path.write_bytes(state)
        fields = {
            "contender": contender,
            "data_dir": str(dataset.data_dir),
            "scale": dataset.scale,
            "topology": asdict(topology),
            "states": [str(path) for path in saved],
            "steps": steps,
            "save": save,
            "following": following,
        }
        specification.write_text(json.dumps(fields))
        results = _run(contender, specification, topology.world_size, timeout)
    for result in results:
        if "error" in result:
            raise LegError(result["error"])
    return Leg(
        [result["batches"] for result in results],
        [result["state"] for result in results] if save else [],
        max(result["first"] for result in results),
        results[0]["following"],
    )


def _run(contender: str, specification: Path, world_size: int, timeout: float) -> list[dict[str, Any]]:
    port = _free_port()
    log = specification.with_suffix(".log").open("w+")
    processes = []
    for rank in range(world_size):
        environment = _environment(rank, world_size, port)
        command = [interpreter(contender), "-m", "benchmarks.resuming.rank", str(specification)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        processes.append(process)
    paths = [specification.with_suffix(f".{rank}.pickle") for rank in range(world_size)]
    try:
        return _collect(processes, paths, time.monotonic() + timeout)
    except LegError as error:
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        raise LegError(f"{error} {lines[-1][:160] if lines else ''}".strip()) from None
    finally:
        for process in processes:
            _end(process)
        log.close()


def _collect(processes: list[subprocess.Popen[bytes]], paths: list[Path], until: float) -> list[dict[str, Any]]:
    """Wait for the results; after an error of one rank the others, which may wait for it, are not waited for."""
    while True:
        ready = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
        if len(ready) == len(paths) or any("error" in result for result in ready):
            return ready
        if any(process.poll() is not None for process in processes):
            raise LegError("a rank ended without a result:")
        if time.monotonic() > until:
            raise LegError("no result in time.")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank and its workers: they are alone in their session."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
