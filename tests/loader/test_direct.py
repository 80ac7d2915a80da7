"""Batches that are only copied: no worker is started for them, and pages are touched ahead only where that helps."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import numbered, write_arrow
from midepoch.loader import direct


@pytest.fixture
def plain(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files).select_columns(["id", "tokens"]).shuffle(seed=3)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def reading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("midepoch-read")}


def test_no_worker_is_started_where_it_could_only_copy(plain: midepoch.Dataset) -> None:
    others = set(multiprocessing.active_children())  # of tests before this one
    loader = plain.loader(4, num_workers=2)
    batches = iter(loader)
    first = next(batches)["id"].tolist()
    assert set(multiprocessing.active_children()) <= others
    assert [first, *ids(batches)] == ids(plain.loader(4))


def test_a_map_is_run_by_workers(plain: midepoch.Dataset) -> None:
    others = set(multiprocessing.active_children())
    batches = iter(plain.map(dict).loader(4, num_workers=2))
    next(batches)
    assert len(set(multiprocessing.active_children()) - others) == 2
    batches.close()  # type: ignore[attr-defined]


def test_pages_are_touched_ahead_while_they_have_to_be_waited_for(
    plain: midepoch.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = reading_threads()  # of loaders that tests before this one have left
    expected = ids(plain.loader(2))
    assert reading_threads() <= others
    counter = itertools.count()
    monkeypatch.setattr(direct, "_faults", lambda: next(counter))
    touched = []
    touch = direct.Read.touch
    monkeypatch.setattr(direct.Read, "touch", lambda read: (touched.append(read.step), touch(read)))
    loader = plain.loader(2)
    batches = iter(loader)
    found = [next(batches)["id"].tolist(), next(batches)["id"].tolist()]
    assert reading_threads() - others
    deadline = time.monotonic() + 60
    while not touched and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found + ids(batches) == expected
    assert reading_threads() <= others
    assert touched
    assert len(touched) == len(set(touched))


def test_mixed_files_are_still_read(tmp_path: Path) -> None:
    """The first file can be copied from, the second is compressed: it is read, not copied."""
    first = write_arrow(tmp_path / "a.arrow", numbered(0, 20), 5)
    second = write_arrow(tmp_path / "b.arrow", numbered(20, 40), 5, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    third = write_arrow(tmp_path / "c.arrow", numbered(40, 41), 5)
    ds = midepoch.from_files([str(first), str(second), str(third)]).select_columns(["id"]).shuffle(seed=1)
    for workers in (0, 2):
        assert sorted(sum(ids(ds.loader(3, num_workers=workers)), [])) == list(range(41))
