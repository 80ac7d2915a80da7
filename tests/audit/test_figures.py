"""The figures that a ledger records beside its steps."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from clock import Clock
from data import Numbers
from midepoch._internal.processes import machine
from midepoch.audit import Ledger, read_run
from midepoch.audit.journal import records_in
from midepoch.audit.ledger import is_gone, process_name


@pytest.mark.parametrize("kind", ["positions", "lanes"])
def test_marks_count_rows_and_the_last_step_is_dated(numbers: Numbers, tmp_path: Path, clock: Clock, kind: str) -> None:
    ds = numbers(0, 60).with_format("numpy")
    ds = ds if kind == "positions" else ds.filter(lambda row: row["n"] % 2 == 0)
    loader = ds.loader(2, audit=tmp_path)
    for _ in range(8):
        next(loader)
        clock.now += 2.0
    (one,) = read_run(tmp_path).every
    record = one.of_rank[0]
    began, marks = record.header.time, record.marks
    assert [(mark.steps, mark.elapsed) for mark in marks] == [(2, 2000), (3, 4000), (5, 8000), (8, 14000)]
    assert [mark.figures and mark.figures.rows for mark in marks] == [2, 4, 8, 14]  # after the first batch
    assert record.last_time == began + 14.0 and record.header.workers == 0 and not read_run(tmp_path).is_finished(one)
    loader.stats(reset=True)  # is no concern of the ledger
    for _ in range(3):
        next(loader)
        clock.now += 2.0
    (one,) = read_run(tmp_path).every
    record = one.of_rank[0]
    assert record.marks[-1].figures is not None and record.marks[-1].figures.rows == 2 * (one.steps[0] - 1)
    assert record.last_time == began + 20.0


def test_the_last_mark_of_an_epoch_is_at_its_last_step(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    for _ in numbers(0, 9).with_format("numpy").loader(2, audit=tmp_path):
        clock.now += 0.25
    (one,) = read_run(tmp_path).every
    (mark,) = one.of_rank[0].marks[-1:]
    assert read_run(tmp_path).is_finished(one) and (mark.steps, mark.elapsed, mark.figures and mark.figures.rows) == (
        5,
        1000,
        7,
    )


def test_steps_take_no_space(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    """They are counted in place. Only marks are appended."""
    loader = numbers(0, 40).with_format("numpy").loader(2, audit=tmp_path)
    kinds = []
    for _ in range(12):
        next(loader)
        clock.now += 1.0
        (path,) = tmp_path.glob("*.ledger")
        kinds.append([record.kind for record in records_in(path.read_bytes())])
    assert kinds[0] == [b"pass", b"live"] and set(kinds[-1][2:]) == {b"mark"} and len(kinds[-1]) < 8
    assert read_run(tmp_path).steps == 12


def test_processes_of_this_machine_are_known_to_be_gone() -> None:
    host, number, _ = process_name().rsplit("-", 2)
    assert int(number) == os.getpid() and is_gone(process_name(), machine()) is False
    if not (child := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_gone(f"{host}-{child}-00000000", machine()) is True  # it has exited, and nobody has noted it
    os.waitpid(child, 0)
    assert is_gone(f"{host}-{child}-00000000", machine()) is True
    assert is_gone(f"{host}-{child}-00000000", "another/1") is None and is_gone(process_name(), "") is None


def test_a_ledger_that_is_not_mapped_dates_its_last_step(
    numbers: Numbers, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    loader = numbers(0, 40).with_format("numpy").loader(2, audit=Ledger(tmp_path, attempt="1"))
    monkeypatch.setattr("midepoch.audit.journal.mmap.mmap", refuse)
    for _ in range(9):
        next(loader)
        clock.now += 1.5
    (one,) = read_run(tmp_path).every
    assert one.of_rank[0].last_time == one.of_rank[0].header.time + 12.0 and one.steps == {0: 9}


def test_stages_and_transport_are_recorded(
    numbers: Numbers, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midepoch._internal.progress._SEND_SECONDS", 0.0)  # with every batch
    ds = numbers(0, 4000).with_format("numpy").map(lambda row: {"n": np.sqrt(row["n"])})
    with ds.loader(50, num_workers=1, audit=tmp_path) as loader:
        for _ in loader:
            clock.now += 1.0
        stats = loader.stats()
    (one,) = read_run(tmp_path).every
    figures = one.of_rank[0].marks[-1].figures
    assert figures is not None and figures.rows == 3950 and figures.map and figures.transport is not None
    assert stats.transport > 0 and figures.map <= 1000 * stats.stages["functions"] + 1
    assert figures.tokens is None and figures.packed is None  # there are none
