"""State follows delivery (G8): whatever interrupts ``next()``, and wherever, no batch is lost or delivered twice.

CPython handles signals when a function is entered, after a call and at a jump back. So an interrupt is raised at every
such place of the code that delivers, one after the other, and none is left to chance.
"""

from __future__ import annotations

import dis
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.audit import Ledger, read_run

HERE = Path(midepoch.__file__).parent
DELIVERING = [
    "audit/lanes.py",
    "audit/ledger.py",
    "compat/structured.py",
    "_internal/resumable.py",
    "integrations/states.py",
    "iteration/iterators.py",
    "iteration/iterators.py",
    "iteration/iterators.py",
    "loader/feeds.py",
    "loader/lanes.py",
    "loader/loader.py",
    "loader/meter.py",
    "loader/passes.py",
    "loader/state.py",
    "pipeline/plans.py",
]
FILES = {str(HERE / name) for name in DELIVERING}
assert all(map(os.path.exists, FILES))
ENDING = ("__del__", "close", "_close", "_leave")


Place = tuple[CodeType, int]
"""An instruction at which a signal could be handled."""


@cache
def names_of(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class Interrupts:
    """Raises KeyboardInterrupt when a place of the delivering code is reached for the ``visit``-th time.

    Without a place it raises nothing, and counts the visits of each.
    """

    def __init__(self, place: Place | None = None, visit: int = 0) -> None:
        self._place, self._left = place, visit
        self.raised = False
        self.visits: dict[Place, int] = {}
        self._before: dict[FrameType, str] = {}

    def __enter__(self) -> Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ENDING or self._is_collected(frame):
            return None
        if self._place is not None and frame.f_code is not self._place[0]:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _is_collected(self, frame: FrameType | None) -> bool:
        """Return True in a call of ``__del__``, where Python ignores exceptions."""
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        return frame is not None

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        if event == "opcode":
            name = names_of(frame.f_code).get(frame.f_lasti, "")
            before, self._before[frame] = self._before.get(frame, ""), name
            if before.startswith("CALL") or name.startswith(("RESUME", "JUMP_BACKWARD")):
                place = (frame.f_code, frame.f_lasti)
                self.visits[place] = self.visits.get(place, 0) + 1
                if place == self._place and self.visits[place] == self._left:
                    self.raised = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._opcode


def row_ids(batch: Any) -> list[int]:
    return np.atleast_1d(np.asarray(batch["id"])).tolist()


def keep_odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


Made = tuple[Any, Callable[[Any], Iterator[Any]]]
KINDS: dict[str, Callable[[midepoch.Dataset, Path], Made]] = {
    "loader": lambda ds, _: (ds.loader(4), iter),
    "ledger": lambda ds, run: (ds.loader(4, audit=Ledger(run, attempt=os.urandom(4).hex())), iter),
    "next": lambda ds, _: (ds.loader(4), lambda loader: loader.current_pass()),
    "progress": lambda ds, _: (ds.loader(4), lambda loader: loader.progress()),
    "map": lambda ds, _: (ds.map(lambda row: {"twice": 2 * row["id"]}).loader(4), iter),
    "filter": lambda ds, _: (ds.filter(keep_odd).loader(2), iter),
    "filter ledger": lambda ds, run: (
        ds.filter(keep_odd).loader(2, audit=Ledger(run, attempt=os.urandom(4).hex())),
        iter,
    ),
    "groups": lambda ds, _: (
        ds.map(lambda rows: {"first": [rows["id"][0]] * len(rows["id"])}, True, 5).loader(4),
        iter,
    ),
    "batches": lambda ds, _: (ds, lambda ds: ds.iter(4)),
    "rows": lambda ds, _: (ds.map(lambda row: {}), iter),
    "filter rows": lambda ds, _: (ds.filter(keep_odd), iter),
    "filter batches": lambda ds, _: (ds.filter(keep_odd), lambda ds: ds.iter(2)),
}


def delivered_by(kind: str, ds: midepoch.Dataset, run: Path, interrupts: Interrupts) -> tuple[Any, list[int]]:
    """An object of this kind, and the rows that it delivers to the end or until it is interrupted."""
    source, go_through = KINDS[kind](ds, run)
    delivered: list[int] = []
    try:
        batches = go_through(source)
        with interrupts:
            for batch in batches:
                sys.settrace(None)
                delivered += row_ids(batch)
                sys.settrace(interrupts._call)
    except KeyboardInterrupt:
        pass
    return source, delivered


_VISITED: dict[str, dict[Place, int]] = {}


def visited(kind: str, ds: midepoch.Dataset, folder: Path) -> dict[Place, int]:
    """How often this kind reaches each place, the second time, when everything is imported. Counted once."""
    if kind not in _VISITED:
        for number in range(2):
            interrupts = Interrupts()
            delivered_by(kind, ds, folder / kind / str(number), interrupts)
        _VISITED[kind] = interrupts.visits
    return _VISITED[kind]


def chosen(kind: str, ds: midepoch.Dataset, folder: Path) -> list[tuple[Place, int]]:
    """Each place that no kind before this one reaches, and every fifth of the others, at one of its visits."""
    before = {place for other in list(KINDS)[: list(KINDS).index(kind)] for place in visited(other, ds, folder)}
    own = visited(kind, ds, folder)
    places = [place for place in own if place not in before]
    places += [place for place in own if place in before][list(KINDS).index(kind) % 5 :: 5]
    return [(place, 1 + number % own[place]) for number, place in enumerate(places)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_loses_no_batch(
    kind: str, every: bool, make_files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At every place, or at all visits of every place."""
    ds = midepoch.from_files(make_files([12])).select_columns("id").shuffle(seed=1).with_format("numpy")
    expected = [ids for batch in KINDS[kind](ds, tmp_path / "whole")[0] for ids in row_ids(batch)]
    if every:
        visits = visited(kind, ds, tmp_path).items()
        moments = [(place, visit) for place, count in visits for visit in range(1, count + 1)]
    else:
        moments = chosen(kind, ds, tmp_path)
    places = 0
    for number, ((code, offset), visit) in enumerate(moments):
        run = tmp_path / str(number)
        interrupts = Interrupts((code, offset), visit)
        source, delivered = delivered_by(kind, ds, run, interrupts)
        places += interrupts.raised
        resumed, _ = KINDS[kind](ds, run)
        resumed.load_state_dict(source.state_dict())
        rest = [ids for batch in resumed for ids in row_ids(batch)] if len(delivered) < len(expected) else []
        where = f"interrupted at {code.co_name}, offset {offset}, visit {visit}"
        assert delivered + rest == expected, where
        if kind.endswith("ledger"):
            proof = read_run(run)
            assert proof.exact and proof.steps == 3, f"{where}: {proof.epochs}"
    assert places > 5


@pytest.mark.parametrize("kind", ["positions", "lanes", "groups"])
def test_an_interrupted_iterator_continues_with_the_next_row(kind: str, make_files: Any) -> None:
    calls = itertools.count()

    def interrupted(rows: dict[str, Any]) -> dict[str, Any]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return {}

    ds = midepoch.from_files(make_files([40])).select_columns("id").map(interrupted, kind == "groups", 5)
    ds = ds.filter(lambda row: True) if kind == "lanes" else ds
    rows, delivered, interrupts = iter(ds), [], 0
    while True:
        try:
            delivered.append(next(rows)["id"])
        except KeyboardInterrupt:
            interrupts += 1
        except StopIteration:
            break
    assert delivered == list(range(40)) and interrupts == 1


@pytest.mark.parametrize("fails", ["fsync", "write"])
def test_a_ledger_that_cannot_be_written_moves_nothing_ahead(
    fails: str, make_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)  # synced at every step
    loader = midepoch.from_files(make_files([40])).with_format("numpy").loader(4, audit=tmp_path)
    delivered = []
    for batch in loader:
        delivered += row_ids(batch)
        assert loader.position == len(delivered) % 40
        if len(delivered) == 12:
            monkeypatch.setattr(os, "fsync" if fails == "fsync" else "posix_fallocate", failing)
            journal: Any = loader._ledger._journal if loader._ledger is not None else None
            journal._room = journal._end if fails == "write" else journal._room
    assert delivered == list(range(40))
    run = read_run(tmp_path)
    assert not run.exact and "the record is incomplete" in run.problems[0]
    assert run.steps == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_interrupt_while_a_thread_is_started_stays_an_interrupt(
    make_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = midepoch.from_files(make_files([400])).map(lambda row: {}).loader(4)
    batches = iter(loader)
    next(batches)

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(batches)
