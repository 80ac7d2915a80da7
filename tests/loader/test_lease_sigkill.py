"""Runs with 1,000 leases out that are killed with SIGKILL, judged by a log of what their workers did.

A row whose acknowledgement had returned before a checkpoint was begun is in it, and must not be delivered after that
checkpoint is restored. A row whose acknowledgement had not begun when the checkpoint was complete is not in it, and must
be delivered again. Between the two, both is right.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from data import write_arrow
from forks import PYTHON
from midepoch.audit import read_run

JOB = Path(__file__).with_name("lease_job.py")


def lines_in(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def run_and_kill(python: str, folder: Path, data: str, attempt: int, after: int | None) -> None:
    """Run an attempt until so many lines are in its log, then kill it. None: to its end."""
    log = folder / "log"
    stop = None if after is None else lines_in(log) + after
    command = [python, str(JOB), str(folder), data, str(attempt), "1000"]
    env = {**os.environ, PYTHON: python}  # for its workers
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, env=env)
    assert process.stderr is not None
    try:
        while process.poll() is None and (stop is None or lines_in(log) < stop):
            time.sleep(0.005)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        elif process.returncode:
            raise AssertionError(process.stderr.read().decode())
        process.stderr.read()  # until its workers have noticed, and ended
    finally:
        process.stderr.close()


def judge(log: Path, rows: int) -> tuple[int, int, int]:
    """Check a log. Return the numbers of attempts, of rows delivered more than once, and of the most leases out."""
    sure: dict[int, set[int]] = {-1: set()}  # by checkpoint: rows that are in it for certain, and those that may be
    possible: dict[int, set[int]] = {-1: set()}
    acked: set[int] = set()
    begun: set[int] = set()
    out: set[int] = set()
    before: dict[int, set[int]] = {}
    delivered: Counter[int] = Counter()
    since: set[int] = set()
    attempts = most = 0
    for kind, attempt, *number in (line.split() for line in log.read_text().splitlines()):
        value = int(number[0]) if number else -1
        if kind == "R":
            attempts, base = int(attempt), value
            if base not in sure:  # it was saved, and the run was killed before it noted that
                sure[base], possible[base] = before[base], begun
            acked, begun, out, since = set(sure[base]), set(possible[base]), set(), set()
        elif int(attempt) < attempts:
            assert kind == "W"  # a worker of an attempt that was killed, whose acknowledgement failed
        elif kind == "D":
            assert value not in acked, f"row {value} was acknowledged, and delivered again"
            assert value not in since, f"row {value} was delivered twice in attempt {attempt}"
            since.add(value)
            out.add(value)
            delivered[value] += 1
            most = max(most, len(out))
        elif kind == "W":
            begun.add(value)
        elif kind == "A":
            assert value not in acked, f"row {value} was acknowledged twice"
            acked.add(value)
            out.discard(value)
        elif kind == "B":
            before[value] = set(acked)
        elif kind == "E":
            sure[value], possible[value] = before[value], set(begun)
        else:
            assert kind == "X"
            assert begun == set(range(rows)), "rows were skipped"
            assert since | possible[base] == set(range(rows)), "rows were skipped"
    return attempts + 1, sum(count > 1 for count in delivered.values()), most


def kill_often(python: str, folder: Path, rows: int, kills: int) -> tuple[int, int, int]:
    draw = random.Random(kills)
    data = str(write_arrow(folder / "data.arrow", pa.table({"id": range(rows)}), 256))
    for attempt in range(kills):
        run_and_kill(python, folder, data, attempt, draw.randint(1, 2500))
    run_and_kill(python, folder, data, kills, None)
    found = judge(folder / "log", rows)
    run = read_run(folder / "ledger")
    proof = run.epochs[0]
    assert run.exact and proof.complete, (run.problems, proof)
    assert proof.leases is not None
    assert (proof.once, proof.leases.acknowledged, proof.leases.out) == (rows, rows, 0)
    assert proof.leases.rejected == len(range(0, rows, 7))
    assert proof.leases.leased >= rows
    return found


def test_killed_runs_skip_nothing_and_acknowledge_nothing_twice(tmp_path: Path, python: str) -> None:
    attempts, again, _ = kill_often(python, tmp_path, rows=3_000, kills=3)
    assert attempts == 4
    assert again > 0


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path, python: str) -> None:
    attempts, again, most = kill_often(python, tmp_path, rows=100_000, kills=200)
    print(f"{attempts} attempts, {again} rows delivered again, at most {most} leases out")
    assert attempts == 201
    assert 1000 <= most <= 1004  # each worker notes an acknowledgement a moment after it has returned
