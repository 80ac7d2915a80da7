"""The ledger: what it says of a run is what was handed over, whatever happened to it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from midepoch.audit import Ledger, read_run
from midepoch.audit import ledger as ledgers
from midepoch.audit.journal import Journal
from midepoch.audit.records import HEADER, Count, RecordedBatching
from midepoch.loader.meter import Meter
from midepoch.pipeline.cursor import Cursor

ORDERS: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "in order": lambda ds: ds,
    "rows": lambda ds: ds.shuffle(seed=1),
    "window": lambda ds: ds.shuffle(seed=1, scope="window", window=3).with_lanes(4),
    "files": lambda ds: ds.shuffle(seed=1, scope="files"),
    "slice": lambda ds: ds.slice(3, 31).shuffle(seed=2),
    "select": lambda ds: ds.select([30, 2, 17, 8, 9, 10, 11]).shuffle(seed=2, scope="window", window=1),
}


class Simulation:
    """Ranks as loaders of one process; what they are handed is kept besides the ledger."""

    def __init__(self, files: list[str], folder: Path, order: str = "rows") -> None:
        self.ds = ORDERS[order](midepoch.from_files(files))
        self.folder, self.starts = folder, 0
        self.steps: list[list[tuple[int, int, int]]] = []  # (epoch, rank, row) of each step of the history
        self.state: Any = None

    def start(self, world: int, batch: int, ends: str = "uneven") -> list[midepoch.Loader]:
        self.starts += 1
        audit = Ledger(self.folder, attempt=f"start {self.starts}")
        ds = self.ds.with_format("numpy")
        loaders = [ds.loader(batch, rank=r, world_size=world, audit=audit, last_batch=ends) for r in range(world)]
        if self.state is not None:
            for loader in loaders:
                loader.load_state_dict(self.state)
        return loaders

    def step(self, loaders: list[midepoch.Loader]) -> None:
        """All ranks take a batch; at the end of an epoch, the first of the next."""
        made = []
        for rank, loader in enumerate(loaders):
            epoch = loader.epoch
            try:
                batch = next(loader)
            except StopIteration:
                epoch = loader.epoch
                batch = next(loader)
            made += [(epoch, rank, int(row)) for row in batch["id"]]
        self.steps.append(made)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_and_steps_are_named_as_they_were(small_files: list[str], tmp_path: Path, order: str) -> None:
    """Two epochs, a crash with steps lost, another world and batch size: every step and every row found again."""
    run = Simulation(small_files, tmp_path, order)
    loaders = run.start(2, 1)
    for _ in range(2):
        run.step(loaders)
    run.state, kept = loaders[1].state_dict(), len(run.steps)
    run.step(loaders)
    run.steps = run.steps[:kept]  # the last is lost in a crash
    loaders = run.start(3, 1)
    while loaders[0].epoch < 2:
        try:
            run.step(loaders)
        except StopIteration:
            break
        if loaders[0].epoch == 1 and loaders[0].position + 3 > len(run.ds):
            break
    found = read_run(tmp_path)
    assert found.steps == len(run.steps)
    chosen = {int(row): i for i, row in enumerate(run.ds.pipeline.order.selection.source_rows(np.arange(len(run.ds))))}
    rows_seen: dict[int, list[int]] = {}
    for number, step in enumerate(run.steps, 1):
        deliveries = found.rows_of_step(number)
        assert sorted((one.epoch, one.rank, one.row) for one in deliveries) == sorted(
            (epoch, rank, chosen[row]) for epoch, rank, row in step
        )
        for one in deliveries:
            rows_seen.setdefault(one.row, []).append(number)
    for row in range(len(run.ds)):
        assert [one.step for one in found.steps_of_row(row)] == rows_seen.get(row, [])
    first = found.epochs[0]
    assert (first.once, first.repeated, first.never, first.pending) == (len(run.ds), 0, 0, 0)
    assert first.complete and first.again == 2
    assert found.exact and found.attempts == 2 and found.worlds == [2, 3]
    with pytest.raises(midepoch.DataNotFoundError, match="there is no step 1000"):
        found.rows_of_step(1000)
    with pytest.raises(midepoch.DataNotFoundError, match="there is no row 99"):
        found.steps_of_row(99)
    assert "row" in found.order.source.place(0) and ".arrow" in found.order.source.place(0)


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_any_history_is_told_as_it_was(small_files: list[str], tmp_path_factory: Any, seed: int) -> None:
    """Random worlds, batches, crashes and checkpoints, also of ranks a step apart: losses and repeats to the row."""
    draw = random.Random(seed)
    run = Simulation(small_files, tmp_path_factory.mktemp("run"))
    delivered: Counter[tuple[int, int]] = Counter()
    made = 0
    for _ in range(draw.randint(1, 4)):
        world, batch = draw.randint(1, 4), draw.randint(1, 5)
        loaders = run.start(world, batch, draw.choice(["uneven", "pad"]))
        begun = (loaders[0].epoch, loaders[0].position)
        delivered = Counter({key: times for key, times in delivered.items() if _before(run, key, begun)})
        states = [loader.state_dict() for loader in loaders]
        for rank, loader in enumerate(loaders):
            for _ in range(draw.randint(1, 3)):  # ranks that do not wait for each other
                epoch = loader.epoch
                batch_ = next(loader, None)
                if batch_ is None:
                    break
                rows = batch_["id"][~batch_["is_padding"]] if "is_padding" in batch_ else batch_["id"]
                delivered.update((epoch, int(row)) for row in rows)
                made += len(rows)
            states[rank] = loader.state_dict()
        run.state = draw.choice(states)
    found = read_run(run.folder)
    for proof in found.epochs:
        times = [delivered[proof.epoch, row] for row in range(37)]
        assert proof.once == times.count(1)
        assert proof.repeated == sum(count > 1 for count in times)
        assert proof.never + proof.pending == times.count(0)
    assert (
        sum(proof.once + proof.again for proof in found.epochs)
        + sum(delivered[key] for key in delivered if delivered[key] > 1)
        == made
    )


def _before(run: Simulation, key: tuple[int, int], begun: tuple[int, int]) -> bool:
    epoch, row = key
    order = run.ds.pipeline.order.at(epoch, run.ds.pipeline.source.layout)
    return (epoch, int(order.positions_of(row)[0])) < begun


def at(loader: midepoch.Loader, position: int) -> dict[str, Any]:
    cursor = [[0, position]] if position else []
    return {
        **loader.state_dict(),
        "position": position,
        "cursor": cursor,
        "steps": position // (3 * loader.shard.count),
    }


def test_a_lost_and_a_repeated_row_are_found(small_files: list[str], tmp_path: Path) -> None:
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    for number, position in enumerate([0, 12, 20]):  # 9 rows made, then on at 12: three lost
        loader = ds.loader(3, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at(loader, position))
        for _ in range(3):
            next(loader)
    proof = read_run(tmp_path).epochs[0]
    # Rows 18 and 19 are of a step that the last state claims in part, so that it was not saved after one of these steps.
    assert (proof.once, proof.never, proof.repeated, proof.again) == (9 + 6 + 9, 3 + 2, 0, 1)
    assert proof.examples == (9, 10, 11, 18, 19) and not proof.exact
    apart = tmp_path / "apart"  # two ranks of which one goes on a step behind: its last rows come twice
    for position in (0, 6):
        loaders = [ds.loader(3, rank=r, world_size=2, audit=Ledger(apart, attempt=f"{position}")) for r in range(2)]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(at(loader, position if rank else 0))
            next(loader)
            next(loader)
    assert not read_run(apart).exact
    assert read_run(apart).problems  # the two starting points are two passes, each with one rank only


def test_kill_9_at_any_step_loses_no_record(small_files: list[str], tmp_path: Path, python: str) -> None:
    """The record of a batch is there when the batch is, and no record of one that was not handed over."""
    script = (
        "import sys, os, midepoch\n"
        "ds = midepoch.from_files(sys.argv[1:-2]).shuffle(seed=1).with_format('numpy')\n"
        "loader = ds.loader(2, int(sys.argv[-1]), audit=sys.argv[-2])\n"
        "for batch in loader: os.write(1, b'.'); sys.stdin.buffer.read(1) or os.kill(os.getpid(), 9)\n"
    )
    for workers, steps in ((0, 1), (0, 7), (2, 5)):
        folder = tmp_path / f"{workers}-{steps}"
        command = [python, "-c", script, *small_files, str(folder), str(workers)]
        done = subprocess.run(command, input=b"x" * (steps - 1), capture_output=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert read_run(folder).steps == len(done.stdout) == steps
        (path,) = folder.glob("*.ledger")
        content = path.read_bytes().rstrip(b"\0")
        path.write_bytes(content + b"\0" * 50)
        assert read_run(folder).steps == steps
    for cut in range(len(content)):  # a machine may lose the end of a file
        path.write_bytes(content[:cut])
        try:
            assert read_run(folder).steps == steps
            assert cut > content.index(b"live")
        except midepoch.DataNotFoundError:
            assert cut < content.index(b"live") + 16 + 8 * len(Count)


def test_skipped_rows_are_told(small_files: list[str], tmp_path: Path) -> None:
    def not_sevens(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 7 == 0:
            raise ValueError("seven")
        return {}

    list(midepoch.from_files(small_files).map(not_sevens, on_error="skip").loader(10, audit=tmp_path))
    proof = read_run(tmp_path).epochs[0]
    assert (proof.once, proof.skipped, proof.steps) == (37, 6, 4)


def test_dropped_rows_are_not_lost_ones(small_files: list[str], tmp_path: Path) -> None:
    loader = midepoch.from_files(small_files).loader(5, last_batch="drop", audit=tmp_path)
    list(loader)
    next(loader)
    first, second = read_run(tmp_path).epochs
    assert (first.once, first.dropped, first.never, first.pending) == (35, 2, 0, 0)
    assert first.complete
    assert (second.once, second.pending, second.dropped, second.complete) == (5, 30, 2, False)


def test_overlap_of_two_runs(small_files: list[str], tmp_path: Path) -> None:
    ds = midepoch.from_files(small_files)
    train, leaked, other = ds.slice(0, 30), ds.slice(25, 37), ds.select([0, 1])
    for name, part, steps in (("a", train.shuffle(seed=1), 10), ("b", leaked, 3), ("c", other, 1)):
        loader = part.loader(4, audit=tmp_path / name)
        for _ in zip(range(steps), loader, strict=False):
            pass
    a, b, c = (read_run(tmp_path / name) for name in "abc")
    assert a.overlap(b) == (30, 12, 5)
    assert b.overlap(c) == (12, 2, 0)
    midepoch.from_files(small_files[:2]).loader(4, audit=tmp_path / "d").__iter__().__next__()
    with pytest.raises(midepoch.StateError, match="the runs read different data"):
        a.overlap(read_run(tmp_path / "d"))


def test_several_loaders_and_looks_ahead(small_files: list[str], tmp_path: Path) -> None:
    """Training and evaluation in one folder are two streams; one rank's look at a batch puts nothing out of order."""
    ds, audit = midepoch.from_files(small_files).shuffle(seed=1), Ledger(tmp_path, attempt="one")
    train = [ds.loader(4, rank=r, world_size=2, audit=audit) for r in range(2)]
    evaluation = ds.take(8).loader(4, audit=audit)
    next(iter(train[0]))
    for loader in train:
        batches = iter(loader)
        next(batches)
        assert len(list(evaluation)) == 2
        assert len(list(batches)) == 4
    run = read_run(tmp_path)
    assert run.steps == 5 and run.epochs[0].complete and len(run.streams) == 2
    assert [proof.once for proof in read_run(tmp_path, list(run.streams)[1]).epochs] == [8, 8]


def test_a_ledger_is_small(tmp_path: Path) -> None:
    """Millions of rows in kilobytes: counted from a pass that is written as the loader would, without reading rows."""
    ds = _many_rows(tmp_path)
    record = Ledger(tmp_path / "ledger", attempt="x")
    batching = RecordedBatching(str(4_000_000 // 8000), "drop")
    record.begin(ds.pipeline, Cursor(), batching, Meter(0), until=4_000_000)
    for number in range(8000):
        record.step(number, 0)
        record.counters[0] = number + 1
    size = sum(path.stat().st_size for path in (tmp_path / "ledger").iterdir())
    assert read_run(tmp_path).epochs[0].complete
    assert size < 16_000


def _many_rows(folder: Path) -> midepoch.Dataset:
    import pyarrow as pa

    with pa.OSFile(str(folder / "many.arrow"), "wb") as sink:
        batch = pa.record_batch({"id": pa.array(np.zeros(4_000_000, np.int8))})
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write(batch)
    return midepoch.from_files(folder / "many.arrow").shuffle(seed=1)


def test_what_cannot_be_recorded_or_read_is_said(
    small_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = midepoch.from_files(small_files)
    with pytest.raises(ValueError, match="set MIDEPOCH_RUN_ID for all ranks"):
        ds.loader(4, rank=0, world_size=2, audit=tmp_path)
    monkeypatch.setenv("MIDEPOCH_RUN_ID", "by hand")
    assert ds.loader(4, rank=0, world_size=2, audit=tmp_path).shard.count == 2
    with pytest.raises(ValueError, match="Pass a local folder"):
        ds.loader(4, audit="s3://bucket/run")
    with pytest.raises(midepoch.DataNotFoundError, match="there is no ledger in"):
        read_run(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="the ledger cannot be kept in"):
        ds.loader(4, audit=tmp_path / "file" / "x")
    Journal(tmp_path / "x.ledger").append(HEADER, json.dumps({"version": 99}).encode())
    with pytest.raises(midepoch.StateError, match="written by a newer version"):
        read_run(tmp_path)
    (tmp_path / "x.ledger").write_text("a text")
    with pytest.raises(midepoch.StateError, match="is not a ledger of midepoch"):
        read_run(tmp_path)


def test_the_folder_of_the_data_is_refused(small_files: list[str], tmp_path: Path) -> None:
    table = pa.table({"id": range(8)})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "0.parquet")
    parquet = midepoch.from_files(str(tmp_path / "data"))
    both = midepoch.mix([midepoch.from_files(small_files).select_columns("id"), parquet])
    for ds in (parquet, both):
        for folder in (tmp_path / "data", str(tmp_path / "other" / ".." / "data"), Ledger(tmp_path / "data")):
            with pytest.raises(ValueError, match="is the folder of the data.*Pass a folder of the run, as in audit="):
                ds.loader(4, audit=folder)
        with pytest.raises(ValueError, match="is the folder of the data"):
            midepoch.from_files(small_files).loader(4, audit=os.path.dirname(small_files[0]))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["0.parquet"]
    assert parquet.loader(4, audit=tmp_path / "data" / "run").shard.count == 1


@pytest.mark.parametrize("mapped", [True, False])
def test_a_full_disk_ends_the_ledger_and_not_the_run(
    small_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if not mapped:
        monkeypatch.delattr(os, "posix_fallocate")
    loader = midepoch.from_files(small_files).loader(4, audit=tmp_path)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert loader._ledger is not None and loader._ledger._journal is not None
    monkeypatch.setattr(ledgers, "_MARK_SECONDS", 0.0)
    monkeypatch.setattr(ledgers, "_FIRST_MARK", 0.0)
    loader._ledger._mark = loader._ledger.due = 0.0
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    monkeypatch.setattr(os, "pwrite", full)
    loader._ledger._journal._room = loader._ledger._journal._end  # the page is full, or the disk
    assert len(list(batches)) == 8
    run = read_run(tmp_path)
    assert run.steps == 2 and run.epochs[0].pending == 29
    # Where not a single byte can be written any more, it looks like a run that was stopped there.
    assert len(run.problems) == mapped and all("the record is incomplete" in problem for problem in run.problems)


@pytest.mark.parametrize(
    ("kind", "filtered"), [(b"pass", False), (b"live", False), (b"mark", False), (b"pass", True), (b"curs", True)]
)
def test_a_pass_of_which_nothing_could_be_written_is_called_incomplete(
    small_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, filtered: bool
) -> None:
    append, failing = Journal.append, [False]

    def full(self: Journal, found: bytes, content: bytes, number: int = 0) -> int:
        if found == kind and failing[0]:
            failing[0] = False
            raise OSError(28, "No space left on device")
        return append(self, found, content, number)

    monkeypatch.setattr(Journal, "append", full)
    monkeypatch.setattr(ledgers, "_MARK_SECONDS", 0.0)
    monkeypatch.setattr(ledgers, "_FIRST_MARK", 0.0)
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    loader = (ds.filter(lambda row: True) if filtered else ds).loader(4, collate_fn=list, audit=tmp_path)
    for fails in (False, True, False):
        failing[0] = fails
        assert sum(1 for _ in loader) == 10
    run = read_run(tmp_path)
    assert not run.exact and 1 in run.incomplete and "the record is incomplete" in "".join(run.problems)
    assert [one.complete for one in run.epochs] == [True, False, True]
