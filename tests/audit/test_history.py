"""Histories that an audit could get wrong: each was told wrongly once, or could easily be."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import midepoch
from compositions import PIPELINES, ROWS, Case
from forks import forked, together
from midepoch.audit import EpochProof, Ledger, Run, ledger, read_run, read_runs
from midepoch.audit.journal import records_in
from midepoch.audit.records import MARK, Count, Passed, read_file
from midepoch.errors import MidepochError


@pytest.fixture
def ds(make_files: Any) -> midepoch.Dataset:
    return midepoch.from_files(make_files([25, 15])).shuffle(seed=1)


def take(loader: midepoch.Loader, steps: int) -> None:
    passing = iter(loader)
    for _ in range(steps):
        next(passing)


def passes_in(folder: Path) -> list[Passed]:
    return [one for path in sorted(folder.glob("*.ledger")) for one in read_file(path).passes]


def told(run: Run, epoch: int = 0) -> tuple[int, int, int, int, int]:
    proof: EpochProof = run.epochs[epoch]
    return proof.once, proof.repeated, proof.never, proof.dropped, proof.pending


def at(loader: midepoch.Loader, position: int, epoch: int = 0) -> dict[str, Any]:
    size = (loader.batch_size or 1) * loader.shard.count
    cursor = [[0, position]] if position else []
    return {
        **loader.state_dict(),
        "epoch": epoch,
        "position": position,
        "cursor": cursor,
        "steps": position // size + epoch * -(-40 // size),
    }


def test_a_restore_that_lands_in_the_next_epoch_takes_back_the_rest_of_the_old_one(
    ds: midepoch.Dataset, tmp_path: Path
) -> None:
    first = ds.loader(3, last_batch="pad", audit=Ledger(tmp_path, attempt="1"))
    passing = iter(first)
    for _ in range(11):
        next(passing)
    state = first.state_dict()
    list(passing)  # to the end, which is lost in a crash
    second = ds.loader(9, last_batch="drop", audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    take(second, 1)
    run = read_run(tmp_path)
    assert told(run) == (33, 0, 0, 7, 0) and run.steps == 12 and run.exact
    assert told(run, 1) == (9, 0, 0, 4, 27)


def test_rows_that_a_named_epoch_leaves_out_are_lost(ds: midepoch.Dataset, tmp_path: Path) -> None:
    list(ds.loader(4, audit=Ledger(tmp_path, attempt="1")))
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(at(second, 20))
    second.set_epoch(1)
    take(second, 1)
    assert told(read_run(tmp_path)) == (20, 0, 20, 0, 0)


def test_an_epoch_that_never_was(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(4, audit=tmp_path)
    list(loader)
    loader.set_epoch(2)
    list(loader)
    run = read_run(tmp_path)
    assert [told(run, epoch)[:3] for epoch in range(3)] == [(40, 0, 0), (0, 0, 40), (40, 0, 0)] and not run.exact


def test_loaders_made_again_in_one_process_come_one_after_the_other(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=tmp_path)
    take(first, 5)
    state = first.state_dict()
    for steps in (5, 2):
        again = ds.loader(4, audit=tmp_path)
        again.load_state_dict(state)
        take(again, steps)
    assert told(read_run(tmp_path)) == (28, 0, 0, 0, 12)
    last = ds.loader(4, audit=tmp_path)
    last.load_state_dict(at(last, 32))
    take(last, 2)
    assert told(read_run(tmp_path)) == (36, 0, 4, 0, 0)


def test_going_back_without_loading_repeats(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(4, audit=tmp_path)
    for _ in range(3):
        loader.set_epoch(0)
        list(loader)
    run = read_run(tmp_path)
    assert told(run) == (0, 40, 0, 0, 0) and run.steps == 30 and not run.exact


def test_a_look_at_a_batch_is_no_step(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    next(iter(loader))
    take(loader, 5)
    state = loader.state_dict()
    next(iter(loader))
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    list(second)
    run = read_run(tmp_path)
    assert told(run) == (40, 0, 0, 0, 0) and run.exact and run.steps == 10 and run.epochs[0].again == 8


def test_ranks_a_step_apart_over_the_end_of_an_epoch(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """While a run goes on that is no loss; if it was gone on with from there, it is."""
    loaders = [ds.loader(4, rank=r, world_size=2, audit=Ledger(tmp_path, attempt="1")) for r in range(2)]
    take(loaders[0], 4)
    list(loaders[1])
    take(loaders[1], 1)
    assert told(read_run(tmp_path)) == (36, 0, 0, 0, 4) and read_run(tmp_path).exact
    third = [ds.loader(4, rank=r, world_size=2, audit=Ledger(tmp_path, attempt="2")) for r in range(2)]
    for loader in third:
        loader.load_state_dict(at(loader, 8, 1))
        take(loader, 1)
    assert told(read_run(tmp_path)) == (36, 0, 4, 0, 0)


def test_a_rank_without_a_record(ds: midepoch.Dataset, tmp_path: Path) -> None:
    for rank in range(2):
        list(ds.loader(4, rank=rank, world_size=3, audit=Ledger(tmp_path, attempt="1")))
    run = read_run(tmp_path)
    assert told(run) == (27, 0, 13, 0, 0) and run.problems == ["epoch 0 after step 0: no record of rank 2 of 3"]


@pytest.mark.parametrize("resumed", [False, True], ids=["next epoch", "resumed"])
@pytest.mark.parametrize("name", ["rows", "mix", "one lane"])
def test_steps_that_one_of_the_ranks_that_share_a_lane_left_out_are_lost(
    tmp_path: Path, name: str, resumed: bool
) -> None:
    ds = midepoch.from_dict({"id": list(range(40))}).shuffle(seed=1)
    if name == "mix":
        ds = midepoch.mix([ds, midepoch.from_dict({"id": list(range(40, 60))})], [2, 1], stop="first")
    elif name == "one lane":
        ds = ds.filter(lambda row: row["id"] >= 0).with_lanes(1)

    def ranks(attempt: str) -> list[midepoch.Loader]:
        ledger = Ledger(tmp_path, attempt=attempt)
        return [ds.loader(3, rank=rank, world_size=2, last_batch="uneven", audit=ledger) for rank in range(2)]

    ahead, behind = ranks("a")
    found = [id_ for _, batch in zip(range(2), behind, strict=False) for id_ in batch["id"].tolist()]
    if resumed:
        found += [id_ for _, batch in zip(range(5), ahead, strict=False) for id_ in batch["id"].tolist()]
        state = ahead.state_dict()
        for loader in ranks("b"):
            loader.load_state_dict(state)
            found += [id_ for batch in loader for id_ in batch["id"].tolist()]
    else:
        found += [id_ for batch in ahead for id_ in batch["id"].tolist()]
        for loader in (ahead, behind):
            loader.set_epoch(1)
            list(loader)
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert len(set(found)) < proof.rows and not run.exact and not proof.complete
    assert proof.once <= len(set(found)) and proof.never >= proof.rows - len(set(found))


def test_an_epoch_that_is_left_inside_of_its_last_rows_is_not_complete(tmp_path: Path) -> None:
    """All rows have begun after step 6 of 10."""
    ds = midepoch.from_dict({"input_ids": [list(range(1, 61)), list(range(61, 121))]}).shuffle(seed=1).pack(6, pad=0)
    loader = ds.loader(2, audit=tmp_path)
    for _ in zip(range(6), loader, strict=False):
        pass
    assert read_run(tmp_path).epochs[0].pending
    loader.set_epoch(1)
    list(loader)
    proof = read_run(tmp_path).epochs[0]
    assert not proof.exact and (proof.once, proof.never) == (1, 1)


@pytest.mark.parametrize("ends", [True, False], ids=["schedule", "never"])
def test_an_epoch_in_which_rows_are_drawn_again_is_not_complete_when_all_were_drawn(tmp_path: Path, ends: bool) -> None:
    sources = {name: midepoch.from_dict({"id": list(range(8))}).shuffle(seed=1) for name in ("web", "code")}
    weights = {"web": 1.0, "code": 1.0}
    if ends:
        ds = midepoch.mix(sources, midepoch.Schedule([midepoch.Phase("main", weights, rows=80)]), seed=1)
    else:
        ds = midepoch.mix(sources, weights, seed=1, stop="never")
    loader = ds.loader(4, audit=tmp_path)
    batches = iter(loader)
    for _ in range(10):  # 40 rows of 16
        next(batches)
    proof = read_run(tmp_path).epochs[0]
    assert proof.exact and proof.once == 16 and not proof.complete
    if ends:
        assert len(list(batches)) == 10 and read_run(tmp_path).epochs[0].complete


def test_tensor_parallel_processes_count_once(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of one data rank go on together, step by step."""
    monkeypatch.setenv("MIDEPOCH_RUN_ID", "together")
    step = multiprocessing.get_context("fork").Barrier(2, timeout=60)

    def train() -> bool:
        for _ in ds.loader(4, rank=0, world_size=1, audit=tmp_path):
            step.wait()
        return True

    assert together(train, train) == [0, 0]
    run = read_run(tmp_path)
    assert told(run) == (40, 0, 0, 0, 0) and run.attempts == 1 and run.steps == 10 and run.exact


def test_clocks_do_not_order_starts(ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    for number, (position, steps) in enumerate([(0, 10), (20, 2), (32, 2)]):
        monkeypatch.setattr(ledger.time, "time", lambda number=number: clock() - 60 * number)
        loader = ds.loader(4, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at(loader, position))
        take(loader, steps)
    assert told(read_run(tmp_path)) == (36, 0, 4, 0, 0)


def test_an_epoch_in_two_orders_proves_nothing(make_files: Any, tmp_path: Path) -> None:
    files = make_files([40])
    for number, position in enumerate((0, 20)):
        loader = midepoch.from_files(files).shuffle().loader(4, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at(loader, position))  # the position only: another seed was drawn
        take(loader, 5)
    run = read_run(tmp_path)
    assert not run.exact and "in another order" in run.problems[0]


def test_the_same_run_with_its_seed_given_later(make_files: Any, tmp_path: Path) -> None:
    files = make_files([40])
    first = midepoch.from_files(files).shuffle().loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 3)
    state = first.state_dict()
    second = midepoch.from_files(files).shuffle(state["seed"]).loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    list(second)
    assert told(read_run(tmp_path)) == (40, 0, 0, 0, 0)


def test_loaders_of_the_same_rows_need_names(ds: midepoch.Dataset, tmp_path: Path) -> None:
    def train(folder: Path, **names: Any) -> None:
        training, evaluation = (
            ds.loader(size, audit=Ledger(folder, attempt="1", name=names.get(name, "")))
            for name, size in (("train", 4), ("test", 8))
        )
        passing = iter(training)
        for _ in range(5):
            next(passing)
        list(evaluation)
        list(passing)

    train(tmp_path / "a")
    assert "name them" in read_run(tmp_path / "a").problems[0]
    train(tmp_path / "b", train="train", test="test")
    assert all(run.exact and told(run)[0] == 40 for run in read_runs(tmp_path / "b"))
    assert read_run(tmp_path / "b", "train").steps == 10 and read_run(tmp_path / "b", "test").steps == 5
    with pytest.raises(midepoch.DataNotFoundError, match="The recorded ones are: train, test"):
        read_run(tmp_path / "b", "other")


@pytest.mark.parametrize("hours", [0, -1, 1])
def test_two_starts_at_once_are_noticed_whatever_the_clock_says(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    ahead, clock = multiprocessing.get_context("fork").Barrier(2, timeout=60), time.time

    def train(number: int) -> bool:
        monkeypatch.setattr(ledger.time, "time", lambda: clock() + 3600 * hours * number)
        batches = iter(ds.loader(4, audit=Ledger(tmp_path, attempt=str(number))))
        for step in range(6):
            if number == 0 and step == 3:
                ahead.wait()  # now the second one begins
                ahead.wait()
            elif number == 1 and step == 0:
                ahead.wait()
                next(batches)
                ahead.wait()
            next(batches)
        return True

    assert together(lambda: train(0), lambda: train(1)) == [0, 0]
    problems = read_run(tmp_path).problems
    assert problems == ["two starts of the run recorded at the same time: each row may have been seen by both"]


@pytest.mark.parametrize("same", [True, False])
def test_loaders_of_the_same_rows_are_separate_runs_in_other_folders(
    ds: midepoch.Dataset, tmp_path: Path, same: bool
) -> None:
    folders = [tmp_path, tmp_path if same else tmp_path / "other"]
    loaders = [ds.loader(4, audit=folder) for folder in folders]
    passes = [iter(loader) for loader in loaders]
    next(passes[0]), next(passes[1])
    loaders[0].exclude(rows=[39])  # which begins another pass
    assert len([*passes[0], *passes[1]]) == 18
    problems = {problem for folder in folders for problem in read_run(folder).problems}
    assert any(problem.startswith("two loaders of the same rows") for problem in problems) == same
    assert same or read_run(folders[0]).epochs[0].complete


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_moved_between_starts_changes_no_verdict(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(ledger, "_MARK_SECONDS", 0.0)
    clock = time.time

    def train(number: int) -> bool:
        monkeypatch.setattr(ledger.time, "time", lambda: clock() + 3600 * hours * number)
        loader = ds.loader(4, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at(loader, 12 * number))
        take(loader, [5, 7][number])
        return True

    assert [forked(lambda number=number: train(number)) for number in range(2)] == [0, 0]
    run = read_run(tmp_path)
    assert run.exact and told(run) == (40, 0, 0, 0, 0) and run.attempts == 2


def test_a_name_that_two_starts_have_used_tells_them_apart(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is queued again may have the MIDEPOCH_RUN_ID of its first start."""

    def train(name: str, position: int, steps: int) -> bool:
        monkeypatch.setenv("MIDEPOCH_RUN_ID", name)
        loader = ds.loader(2, audit=tmp_path)
        if position:
            loader.load_state_dict(at(loader, position))
        take(loader, steps)
        return True

    starts = [("a", 0, 9), ("a", 12, 7), ("b", 20, 4), ("a", 24, 1), ("a", 24, 2), ("a", 24, 1)]
    for start in starts:
        assert forked(lambda start=start: train(*start)) == 0
    run = read_run(tmp_path)
    assert run.attempts == len(starts) and run.steps == 13 and not run.problems
    assert told(run) == (26, 0, 0, 0, 14) and run.exact


def test_a_fork_does_not_write_its_parents_ledger(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.select_columns("id").loader(4, audit=tmp_path)  # numbers only: no thread reads them, which a fork lacks
    passing = iter(loader)
    next(passing)
    next(passing)
    assert forked(lambda: list(passing)) == 0
    assert told(read_run(tmp_path)) == (8, 0, 0, 0, 32)


def test_marks_may_be_torn(ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is counted before the first mark, in the same file: the loss of marks loses no step."""
    monkeypatch.setattr(ledger, "_MARK_SECONDS", 0.0)  # a mark at every step
    take(ds.loader(4, audit=tmp_path), 5)
    (path,) = tmp_path.glob("*.ledger")
    content = path.read_bytes()
    records = list(records_in(content))
    marks = [record.place for record in records if record.kind == MARK]
    ends = [record.place + 16 + len(record.content) for record in records if record.kind == MARK]
    assert len(marks) == 5
    for cut in range(marks[0], len(content), 7):
        path.write_bytes(content[:cut])
        run = read_run(tmp_path)
        assert run.steps == 5 and len(run.every[0].of_rank[0].marks) == sum(cut >= end for end in ends)
    path.write_bytes(content[: marks[1] + 20] + b"\0" * 30 + content[marks[1] + 50 :])  # a page was not written
    assert read_run(tmp_path).steps == 5 and len(read_run(tmp_path).every[0].of_rank[0].marks) == 1


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_times_that_are_due_take_no_step_from_the_record(
    pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written right before a step is delivered, with what is known of the steps before it."""
    monkeypatch.setattr(ledger, "_MARK_SECONDS", 0.0)  # a mark at every step
    case = Case((), pipeline)
    first = case.make(audit=Ledger(tmp_path, attempt="1"))
    take(first, 5)
    second = case.make(audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        list(second)
    run = read_run(tmp_path)
    assert run.exact and [one.complete for one in run.epochs] == [True, True]
    assert all(one.track is None or one.track.recorded == one.steps for one in passes_in(tmp_path))


@pytest.mark.parametrize("pipeline", ["rows", "pack"])
def test_parts_of_a_ledger_may_be_zeros(pipeline: str, tmp_path: Path) -> None:
    """Pages that were not written before the power was lost: the record is shorter, or refused, and never a crash."""
    loader = Case((), pipeline).make(audit=Ledger(tmp_path, attempt="first"))
    take(loader, 3)
    loader.load_state_dict(loader.state_dict())
    list(loader)
    (path,) = tmp_path.glob("*.ledger")
    content = path.read_bytes()
    heads = [record.place for record in records_in(content)]
    for place, length in [(head + part, 4) for head in heads for part in (0, 4, 8, 12, 20)] + [(512, 512)]:
        path.write_bytes(content[:place] + bytes(length) + content[place + length :])
        with suppress(MidepochError):
            assert sum(one.once for one in read_run(tmp_path).epochs) <= ROWS


def test_skipped_rows_of_lost_steps_do_not_count(make_files: Any, tmp_path: Path) -> None:
    def not_sevens(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 7 == 0:
            raise ValueError("seven")
        return {}

    ds = midepoch.from_files(make_files([40])).map(not_sevens, on_error="skip")
    for number, position in enumerate((0, 10)):
        loader = ds.loader(5, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at(loader, position))
        list(loader)
    assert read_run(tmp_path).epochs[0].skipped == 6


def test_a_ledger_that_fails_does_not_end_the_run(
    ds: midepoch.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ds.loader(4, audit=tmp_path / "run")
    passing = iter(loader)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").touch()
    assert len(list(passing)) == 10
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "The run continues" in caplog.text
    (tmp_path / "run").unlink()
    list(loader)
    run = read_run(tmp_path / "run")
    assert told(run, 0) == (40, 0, 0, 0, 0) and run.epochs[0].epoch == 1


def test_an_emptied_order_is_written_again(ds: midepoch.Dataset, tmp_path: Path) -> None:
    take(ds.loader(4, audit=Ledger(tmp_path, attempt="1")), 1)
    (order,) = tmp_path.glob("*.order")
    order.write_bytes(b"")
    with pytest.raises(midepoch.StateError, match="cannot be read, so rows cannot be identified"):
        read_run(tmp_path).rows_of_step(1)
    take(ds.loader(4, audit=Ledger(tmp_path, attempt="2")), 1)
    assert len(read_run(tmp_path).rows_of_step(1)) == 4


def test_torchrun_on_one_machine_names_its_starts(ds: midepoch.Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    """Without a process group: by the agent that started the ranks. Over several machines there is no such name."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    take(ds.loader(4, last_batch="drop", audit=tmp_path), 1)
    (path,) = tmp_path.glob("*.ledger")
    assert f"-{os.getppid()}." in read_file(path).passes[0].header.attempt
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="Initialise torch.distributed or jax.distributed before the loader"):
        ds.loader(4, last_batch="drop", audit=tmp_path)


def test_a_loop_from_epoch_0_after_a_resume_repeats(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    list(first)
    take(first, 2)
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(first.state_dict())
    for epoch in range(2):  # and not range(second.epoch, 2)
        second.set_epoch(epoch)
        list(second)
    run = read_run(tmp_path)
    assert told(run)[:2] == (0, 40) and not run.exact


def test_a_look_before_the_state_is_loaded(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 5)
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    next(iter(second))  # a sample to build the model from
    second.load_state_dict(first.state_dict())
    list(second)
    run = read_run(tmp_path)
    assert told(run) == (40, 0, 0, 0, 0) and run.exact and run.steps == 10


def test_a_run_that_was_killed_behind_its_first_step(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 1)
    assert told(read_run(tmp_path)) == (4, 0, 0, 0, 36)
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(first.state_dict())
    list(second)
    assert told(read_run(tmp_path)) == (40, 0, 0, 0, 0)


def test_a_loader_for_every_epoch(ds: midepoch.Dataset, tmp_path: Path) -> None:
    for epoch in range(4):
        loader = ds.loader(4, audit=Ledger(tmp_path, attempt=str(epoch // 2)))
        loader.set_epoch(epoch)
        list(loader)
    run = read_run(tmp_path)
    assert run.exact and [told(run, epoch)[0] for epoch in range(4)] == [40] * 4


def test_an_epoch_of_one_step_is_no_look(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(40, audit=tmp_path)
    for _ in range(3):
        loader.set_epoch(0)
        list(loader)
    assert told(read_run(tmp_path))[:2] == (0, 40)


def test_a_look_at_another_epoch(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(4, audit=tmp_path)
    loader.set_epoch(3)
    next(iter(loader))
    loader.set_epoch(0)
    list(loader)
    run = read_run(tmp_path)
    assert told(run) == (40, 0, 0, 0, 0) and run.steps == 10 and run.exact


def test_a_second_loader_between_two_passes_is_noticed(ds: midepoch.Dataset, tmp_path: Path) -> None:
    training = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(training, 5)
    list(ds.loader(8, audit=Ledger(tmp_path, attempt="1")))
    training.set_epoch(1)
    list(training)
    assert not read_run(tmp_path).exact


def test_one_rank_that_repeats_is_noticed(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loaders = [ds.loader(4, rank=r, world_size=2, audit=Ledger(tmp_path, attempt="1")) for r in range(2)]
    take(loaders[0], 3)
    loaders[0].set_epoch(0)  # begins it again
    for loader in loaders:
        list(loader)
    assert told(read_run(tmp_path))[:2] == (28, 12)


@pytest.mark.parametrize("how", ["look", "saved before the first batch"])
def test_rows_that_a_larger_batch_drops(ds: midepoch.Dataset, tmp_path: Path, how: str) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 9)
    second = ds.loader(8, last_batch="drop", audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(first.state_dict())
    passing = iter(second)
    state = second.state_dict()
    next(passing)
    if how != "look":
        next(passing)
        second = ds.loader(8, last_batch="drop", audit=Ledger(tmp_path, attempt="3"))
        second.load_state_dict(state)
    list(second)
    run = read_run(tmp_path)
    assert told(run) == (36, 0, 0, 4, 0) and told(run, 1) == (40, 0, 0, 0, 0) and run.exact


def test_a_live_audit_of_a_pass_of_one_step(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loaders = [ds.loader(20, rank=r, world_size=2, audit=Ledger(tmp_path, attempt="1")) for r in range(2)]
    take(loaders[0], 1)
    run = read_run(tmp_path)
    assert told(run) == (20, 0, 0, 0, 20) and run.exact


@pytest.mark.parametrize("lost", [0, 3, 5])
def test_a_start_with_nothing_left_to_deliver_takes_back_what_was_lost_before_it(
    ds: midepoch.Dataset, tmp_path: Path, lost: int
) -> None:
    """A crash lost steps; the start after it restores, and drops the rest of the epoch."""
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 5 + lost)
    second = ds.loader(32, last_batch="drop", audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(at(first, 20))
    run = read_run(tmp_path)
    assert run.steps == 5 and run.attempts == 2 and run.exact
    assert told(run) == (20, 0, 0, 20, 0) and run.epochs[0].again == 4 * lost


def test_only_the_last_of_several_states_loaded_counts(ds: midepoch.Dataset, tmp_path: Path) -> None:
    take(ds.loader(4, audit=Ledger(tmp_path, attempt="1")), 9)
    for number, position in enumerate([8, 4, 24]):
        loader = ds.loader(4, audit=Ledger(tmp_path, attempt=f"2{number}"))
        loader.load_state_dict(at(loader, 0))
        loader.load_state_dict(at(loader, position))
        run = read_run(tmp_path)
        assert run.exact and told(run) == (position, 0, 0, 0, 40 - position)
    list(loader)
    run = read_run(tmp_path)
    assert run.exact and told(run) == (40, 0, 0, 0, 0) and run.steps == 10


def test_a_state_loaded_in_the_middle_of_a_pass_takes_back_its_steps(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """A loop that goes back after a spike of the loss, in one process."""
    loader = ds.loader(4, audit=tmp_path)
    batches = iter(loader)
    state = loader.state_dict()
    for step in range(7):
        next(batches)
        state = loader.state_dict() if step == 2 else state
    loader.load_state_dict(state)
    assert told(read_run(tmp_path)) == (12, 0, 0, 0, 28)
    list(loader)
    run = read_run(tmp_path)
    assert run.exact and told(run) == (40, 0, 0, 0, 0) and run.epochs[0].again == 16


def test_a_state_loaded_into_the_dataset_is_recorded(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 8)
    ds.load_state_dict(at(first, 20))
    ds.loader(32, last_batch="drop", audit=Ledger(tmp_path, attempt="2"))
    run = read_run(tmp_path)
    assert told(run) == (20, 0, 0, 20, 0) and run.attempts == 2 and run.exact


def test_what_a_start_would_drop_counts_only_if_it_is_the_last(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(first, 6)
    for number, (batch, dropped, pending) in enumerate([(32, 16, 0), (4, 0, 16)]):
        loader = ds.loader(batch, last_batch="drop", audit=Ledger(tmp_path, attempt=f"2{number}"))
        loader.load_state_dict(first.state_dict())
        assert told(read_run(tmp_path)) == (24, 0, 0, dropped, pending)


def test_a_run_of_one_step_into_which_an_older_state_is_loaded_before_its_own(
    ds: midepoch.Dataset, tmp_path: Path
) -> None:
    first = ds.loader(4, audit=Ledger(tmp_path, attempt="1"))
    states = [first.state_dict()]
    take(first, 1)
    states.append(first.state_dict())
    second = ds.loader(4, audit=Ledger(tmp_path, attempt="2"))
    for state in states:
        second.load_state_dict(state)
    list(second)
    run = read_run(tmp_path)
    assert run.exact and told(run) == (40, 0, 0, 0, 0) and run.steps == 10


def test_starts_of_one_name_and_other_ranks_are_not_taken_for_lost_rows_without_a_word(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDEPOCH_RUN_ID", "again")

    def train(rank: int, ranks: int) -> bool:
        list(ds.loader(2, rank=rank, world_size=ranks, last_batch="drop", audit=tmp_path))
        return True

    for ranks in (2, 4):
        assert together(*(lambda rank=rank, ranks=ranks: train(rank, ranks) for rank in range(ranks))) == [0] * ranks
    run = read_run(tmp_path)
    assert not run.exact and "set a new name for every start" in run.problems[-1]


def test_the_name_of_a_start_is_found_once(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What named it, a process group for one, may be gone when the next pass begins."""
    monkeypatch.setenv("MIDEPOCH_RUN_ID", "one")
    loader = ds.loader(4, rank=0, world_size=2, last_batch="drop", audit=tmp_path)
    list(loader)
    monkeypatch.delenv("MIDEPOCH_RUN_ID")
    list(loader)
    assert read_run(tmp_path).attempts == 1


def test_a_fork_says_nothing_of_the_ledger_of_its_parent(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """It frees a loader with steps whose cursors are not written yet."""
    gc.collect()  # of other tests: what they say is not meant
    passing: Any = iter(ds.filter(lambda row: True).loader(4, audit=tmp_path))
    next(passing)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]

    def free() -> bool:
        nonlocal passing
        assert passing._ledger.lanes.pending
        logging.getLogger("midepoch").addHandler(handler)
        passing = None
        gc.collect()
        return not said

    assert forked(free) == 0
    next(passing)
    assert read_run(tmp_path).steps == 2


def test_steps_of_padding_are_recorded_after_others(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """A rank that has reached its end before others has a cursor at each of these steps, and no chunk."""
    loader = ds.filter(lambda row: True).with_lanes(1).loader(4, audit=tmp_path)
    passing = iter(loader)
    next(passing)
    record, cursor = loader._ledger, loader._run.cursor
    assert record is not None
    for steps in (2, 3):
        record.add(cursor)
        record.counters[Count.STEPS] = steps
    record.flush()
    (track,) = read_run(tmp_path).every[0].tracks.values()
    assert track.recorded == 3 and [track.taken(0, step) for step in range(4)] == [0, 4, 4, 4]


MIXES: dict[str, tuple[str, list[float]]] = {
    "weights": ("ab", [3, 1]),
    "order": ("ba", [1, 1]),
    "joined": ("abc", [1, 1, 1]),
    "left": ("a", [1]),
}


def _is_odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def _mixed(names: str, weights: list[float], way: str, lanes: int) -> midepoch.Dataset:
    first = {"a": 0, "b": 100, "c": 200}
    parts = {
        name: midepoch.from_dict({"id": list(range(first[name], first[name] + 30))}).shuffle(seed=1) for name in names
    }
    if way == "filter":
        parts = {name: part.filter(_is_odd) for name, part in parts.items()}
    return midepoch.mix(parts, weights, seed=2, stop="all").with_lanes(lanes)


@pytest.mark.parametrize(("change", "way", "lanes"), [*((c, "rows", 1) for c in MIXES), ("order", "filter", 2)])
@pytest.mark.parametrize("provenance", [False, True])
def test_a_run_that_is_resumed_with_another_mix(
    change: str, way: str, lanes: int, provenance: bool, tmp_path: Path
) -> None:
    """It stays one run, whose steps and rows have the names of the mix that it has now."""
    names, weights = MIXES[change]
    before, after = _mixed("ab", [1, 1], way, lanes), _mixed(names, weights, way, lanes)
    seen: dict[int, list[int]] = {}
    state: dict[str, Any] = {}
    for number, (ds, last) in enumerate(((before, 5), (after, 7), (after, 100))):
        loader = ds.loader(4, provenance=provenance, audit=Ledger(tmp_path, attempt=str(number)))
        if state:
            loader.load_state_dict(state)
        for batch in loader:
            seen[loader.steps] = batch["id"].tolist()
            if loader.steps == last:
                break
        state = loader.state_dict()
        loader.close()
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert len(read_runs(tmp_path)) == 1 and run.steps == len(seen)
    assert run.exact and proof.complete, (run.problems, run.epochs)
    assert [one.step for one in run.weight_changes] == [6]
    ids = {row for batch in seen.values() for row in batch}
    assert proof.once - proof.filtered == len(ids) and (proof.filtered > 0) == (way == "filter")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names + "ab"))}
    for step in (3, 6, 8):
        found = run.documents_of_step(step) if provenance else run.rows_of_step(step)
        named = sorted((one.source, one.row) for one in found or () if one.row % 2 or way == "rows")
        assert named == sorted((numbers["abc"[row // 100]], row % 100) for row in seen[step])
    row = next(row for row in seen[2] if row >= 100)
    find = run.documents_of_row if provenance else run.steps_of_row
    assert {one.step for one in find(row % 100, numbers["b"]) or ()} == {s for s, rows in seen.items() if row in rows}


def test_steps_without_a_record_before_another_mix_are_not_proven(tmp_path: Path) -> None:
    loader = _mixed("ab", [1, 1], "rows", 1).loader(4, audit=Ledger(tmp_path, attempt="1"))
    take(loader, 3)
    state = loader.state_dict()
    loader.close()
    loader = _mixed("ab", [1, 1], "rows", 1).loader(4)
    loader.load_state_dict(state)
    take(loader, 2)
    state = {**loader.state_dict(), "more": state["more"]}  # as if it were of the branch
    loader = _mixed("ba", [2, 1], "rows", 1).loader(4, audit=Ledger(tmp_path, attempt="2"))
    loader.load_state_dict(state)
    list(loader)
    loader.close()
    run = read_run(tmp_path)
    assert not run.exact and run.epochs[0].never >= 8


def test_lanes_of_a_rank_that_leases_the_next_epoch(tmp_path: Path) -> None:
    """A state of all ranks says of them only that they have ended: what was acknowledged of them stays delivered."""
    ds = PIPELINES["filter"]()
    ranks = [ds.loader(2, rank=rank, world_size=2, audit=Ledger(tmp_path, attempt="1")) for rank in range(2)]
    with ranks[0].lease() as items:
        for lease in items:
            lease.ack()
    with ranks[0].lease() as early, ranks[1].lease() as items:
        kept = next(early)
        for _ in range(2):
            next(items).ack()
        states = [loader.state_dict() for loader in ranks]
    assert kept is not None and [state["epoch"] for state in states] == [1, 0]
    loader = ds.loader(2, audit=Ledger(tmp_path, attempt="2"))
    loader.load_state_dict(states)
    list(loader)
    loader.close()
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete and run.epochs[0].once == ROWS - 2
