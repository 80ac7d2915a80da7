"""States that are saved in another thread, or with an interrupt, while steps are recorded."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest

import midepoch
from midepoch.audit import read_run
from midepoch.audit.journal import Journal
from midepoch.audit.lanes import CURSORS


def make(folder: Path) -> midepoch.Loader:
    kept = midepoch.from_dict({"id": range(60)}).shuffle(seed=1).filter(lambda row: row["id"] % 3 != 1)
    return kept.with_lanes(2).loader(1, collate_fn=list, audit=folder)


def places(folder: Path) -> list[list[Any]]:
    """The places of the lanes after each step."""
    (passed,) = read_run(folder).every
    track = passed.tracks[0]
    return [[track.taken(lane, step), track.at(lane, step)] for step in range(track.delivered) for lane in (0, 1)]


@pytest.fixture
def expected(tmp_path: Path) -> list[list[Any]]:
    assert sum(1 for _ in make(tmp_path / "whole")) == 40
    return places(tmp_path / "whole")


def test_a_thread_that_saves_does_not_disturb_the_record(
    tmp_path: Path, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    append, writes, continues = Journal.append, Event(), Event()

    def slow(self: Journal, kind: bytes, content: bytes, number: int = 0) -> int:
        if current_thread() is not main_thread() and kind == CURSORS:
            writes.set()
            continues.wait(0.3)  # the loop would save in between, and does not come to it
        return append(self, kind, content, number)

    monkeypatch.setattr(Journal, "append", slow)
    loader = make(tmp_path / "run")
    thread = Thread(target=loader.state_dict)
    for number, _ in enumerate(loader, 1):
        if number == 5:
            thread.start()
            assert writes.wait(10)
        if number in (8, 11):
            loader.state_dict()
            continues.set()
    thread.join()
    assert places(tmp_path / "run") == expected


def test_an_interrupt_while_a_record_is_written_does_not_disturb_the_next(
    tmp_path: Path, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append
    interrupts: list[BaseException] = []

    def interrupted(self: Journal, kind: bytes, content: bytes, number: int = 0) -> int:
        if number == 1 and interrupts:
            raise interrupts.pop()
        return append(self, kind, content, number)

    monkeypatch.setattr(Journal, "append", interrupted)
    loader = make(tmp_path / "run")
    steps = iter(loader)
    next(steps), next(steps)
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        loader.state_dict()
    assert sum(1 for _ in steps) == 38
    assert places(tmp_path / "run") == expected
