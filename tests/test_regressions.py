"""What reviews found, one test each: small cases that no other file is the natural home of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from conftest import numbered, write_arrow
from midepoch.errors import CheckpointMismatchError, FormatError, MapError, MidepochError, WorkerError
from midepoch.sources.storage import locked


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def test_a_lock_is_not_inherited_by_a_forked_child(tmp_path: Path) -> None:
    """A pool of ``datasets`` outlives a killed parent: what it inherited must not block the next run."""
    code = (
        "import os, sys, time; from pathlib import Path; from midepoch.sources.storage import locked\n"
        "with locked(Path(sys.argv[1]), 'it'):\n"
        "    if os.fork() == 0: time.sleep(600); os._exit(0)\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    target = tmp_path / "x"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        waiter = "import sys; from pathlib import Path; from midepoch.sources.storage import locked\n"
        waiter += "with locked(Path(sys.argv[1]), 'it'): print('free')"
        done = subprocess.run(
            [sys.executable, "-c", waiter, str(target)], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.strip() == "free"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    with locked(target, "it") as place:
        assert place.keep(lambda: target.write_bytes(b"kept"))


def test_folders_behind_links_are_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "real" / "b.arrow", numbered(5, 9), 2)
    write_arrow(tmp_path / "data" / "a.arrow", numbered(0, 5), 2)
    (tmp_path / "data" / "more").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "up").symlink_to(tmp_path / "data")  # leads back: each folder is read once
    assert [row["id"] for row in midepoch.from_files(tmp_path / "data")] == list(range(9))


def test_columns_of_one_name_and_dictionaries_in_unions_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(FormatError, match="several columns are named 'a'"):
        midepoch.from_files(write_arrow(tmp_path / "a.arrow", twice, 1))
    inner = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["x"]).dictionary_encode()])
    with pytest.raises(FormatError, match="dictionary-encoded values inside"):
        midepoch.from_files(write_arrow(tmp_path / "b.arrow", pa.table({"s": inner}), 1))


def test_joined_streams_and_files_without_a_footer_are_refused(tmp_path: Path) -> None:
    stream = write_arrow(tmp_path / "a.arrow", numbered(0, 9), 3).read_bytes()
    (tmp_path / "joined.arrow").write_bytes(stream + stream)
    with pytest.raises(FormatError, match="as if files had been concatenated"):
        midepoch.from_files(tmp_path / "joined.arrow")
    whole = write_arrow(tmp_path / "b.arrow", numbered(0, 9), 3, file_format=True).read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[:-6])
    with pytest.raises(FormatError, match="footer is missing"):
        midepoch.from_files(tmp_path / "cut.arrow")


def test_a_changed_middle_column_is_other_data(tmp_path: Path) -> None:
    def make(name: str, value: int) -> midepoch.Dataset:
        table = pa.table({"id": range(20_000), "label": [value] * 20_000, "text": ["x" * 40] * 20_000})
        return midepoch.from_files(write_arrow(tmp_path / name, table, 1000))

    with pytest.raises(CheckpointMismatchError, match="data"):
        make("b.arrow", 1).load_state_dict(make("a.arrow", 0).state_dict())


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_functions(ds: midepoch.Dataset, workers: int) -> None:
    def stops(rows: list[Any]) -> Any:
        return next(iter([])) if rows[0]["id"] >= 20 else rows

    with pytest.raises(MapError, match="collate_fn failed on a batch of 10 rows"):
        list(ds.loader(10, num_workers=workers, collate_fn=stops))
    assert list(ds.loader(10, num_workers=workers, collate_fn=lambda rows: None)) == [None] * 4


def leave(row: dict[str, Any]) -> dict[str, Any]:
    sys.exit(0)


def test_exit_in_a_worker_does_not_end_the_training(ds: midepoch.Dataset) -> None:
    with pytest.raises(WorkerError, match="stopped by SystemExit"):
        list(ds.map(leave).loader(5, num_workers=1))


def handler_in_place(row: dict[str, Any]) -> dict[str, Any]:
    return {"own": callable(signal.getsignal(signal.SIGTERM))}


def test_handlers_of_the_script_do_not_run_in_workers(ds: midepoch.Dataset) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        batches = list(ds.map(handler_in_place).loader(20, num_workers=1, multiprocessing_context="fork"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(bool(value) for batch in batches for value in batch["own"])


def test_a_second_iteration_does_not_end_the_first_silently(ds: midepoch.Dataset) -> None:
    loader = ds.loader(5)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(MidepochError, match="another iter"):
        next(first)


def first_rows_fail(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] in (0, 2, 4):
        raise ValueError(row["id"])
    return {}


def test_ranks_do_not_drift_apart_when_rows_are_skipped(ds: midepoch.Dataset) -> None:
    skipping = ds.map(first_rows_fail, on_error="skip")
    with pytest.raises(MidepochError, match="one step ahead"):
        list(skipping.loader(1, rank=0, world_size=2))
    parts = [skipping.shard(2, index, mode="example") for index in range(2)]
    iterators = [iter(part) for part in parts]
    seen = [next(iterator)["id"] for iterator in iterators for _ in range(3)]
    states = [part.state_dict() for part in parts]
    with pytest.raises(CheckpointMismatchError, match="each needs a state"):
        skipping.shard(2, 1, mode="example").load_state_dict(states[0])
    for index, state in enumerate(states):
        part = skipping.shard(2, index, mode="example")
        part.load_state_dict(state)
        seen += [row["id"] for row in part]
    assert sorted(seen) == [i for i in range(37) if i not in (0, 2, 4)]


def test_loaded_positions_are_not_lost_by_what_comes_after(ds: midepoch.Dataset) -> None:
    source = ds.shuffle(seed=1)
    whole = [row["id"] for row in source]
    source.load_state_dict({**source.state_dict(), "position": 10})
    with pytest.raises(ValueError, match="then load the state"):
        source.take(5)
    assert sorted(row["id"] for i in range(2) for row in source.shard(2, i)) == sorted(whole[10:])
