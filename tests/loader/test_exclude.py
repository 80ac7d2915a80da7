"""``Loader.exclude``: which steps and rows it leaves out, when it can be called, and what states and tools say of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import midepoch
from midepoch import CheckpointMismatchError, StateError
from midepoch.audit import Ledger, read_run
from midepoch.cli.app import app
from midepoch.testing import same
from midepoch.tools.describe import describe
from midepoch.tools.plan import plan_resume
from test_planned_batches import LOADERS, epoch_of, folder, ids  # noqa: F401  (a fixture)

Make = Callable[..., midepoch.Loader]
STEPS = ["sizes", "sizes of lanes", "steps", "steps of lanes", "steps of tokens"]


@pytest.fixture
def planned_ds(folder: Path) -> Callable[[], midepoch.Dataset]:  # noqa: F811
    return lambda: midepoch.from_files(str(folder / "*.arrow"))


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    return lambda: midepoch.from_files(small_files).select_columns("id")


def first_batches(loader: midepoch.Loader, count: int) -> list[list[int]]:
    """Return the next batches, over the end of an epoch, at which ``next`` stops once."""
    return [ids(next(loader, None) or next(loader)) for _ in range(count)]


@pytest.mark.parametrize("name", LOADERS)
def test_batches_by_tokens_and_steps_of_a_run(name: str, planned_ds: Callable[[], midepoch.Dataset]) -> None:
    """Also where steps are counted over the run: the batch after step 2 is that of step 5."""
    make: Make = lambda **kw: LOADERS[name](planned_ds(), **kw)  # noqa: E731
    whole = first_batches(make(), 15)
    loader = make()
    found = first_batches(loader, 2)
    assert loader.exclude(steps=range(3, 5)) > 0
    states = []
    for _ in range(6):
        states.append(loader.state_dict())
        found += first_batches(loader, 1)
    assert found == whole[:3] + whole[5:10]
    if name in STEPS:
        assert loader.steps == 10
    for number, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert first_batches(resumed, 4) == (whole[:3] + whole[5:])[2 + number : 6 + number]


@pytest.mark.parametrize("name", ["padded", "varlen", "sizes"])
def test_the_rest_of_an_epoch_on_other_world_sizes(name: str, planned_ds: Callable[[], midepoch.Dataset]) -> None:
    make: Make = lambda **kw: LOADERS[name](planned_ds(), **kw)  # noqa: E731
    whole = epoch_of(make())
    loader = make()
    seen = first_batches(loader, 2)
    loader.exclude(steps=range(4, 7))
    state = loader.state_dict()
    for world in (2, 3):
        ranks = [make(rank=rank, world_size=world, last_batch="uneven") for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        found = [each for rank in ranks for batch in epoch_of(rank) for each in batch]
        expected = [each for batch in whole[:4] + whole[7:] for each in batch]
        assert sorted(found + [each for batch in seen for each in batch]) == sorted(expected)


def test_other_batches_by_tokens_are_refused_while_some_are_excluded(
    planned_ds: Callable[[], midepoch.Dataset],
) -> None:
    def make(tokens: int, **options: Any) -> midepoch.Loader:
        return planned_ds().shuffle(seed=1).loader(max_tokens=tokens, bucket_window=40, **options)

    loader = make(200)
    loader.exclude(steps=range(3, 5))
    state = loader.state_dict()
    with pytest.raises(CheckpointMismatchError, match="Resume as before until position 5") as refused:
        make(300).load_state_dict(state)
    assert refused.value.field == "max_tokens"
    first_batches(loader, 6)
    make(300).load_state_dict(loader.state_dict())
    by_rows = planned_ds().shuffle(seed=1).loader(4)
    by_rows.exclude(steps=range(3, 5))
    with pytest.raises(CheckpointMismatchError, match="until position 20"):
        make(200).load_state_dict(by_rows.state_dict())


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_lanes(ranks: int, lanes: int, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(rank: int, world: int = ranks) -> midepoch.Loader:
        ds = open_ds().shuffle(seed=1).filter(lambda row: row["id"] != 5).with_lanes(lanes)
        return ds.loader(2, rank=rank, world_size=world, last_batch="uneven")

    whole = [epoch_of(make(rank)) for rank in range(ranks)]
    loaders = [make(rank) for rank in range(ranks)]
    for loader in loaders:
        next(loader)
    counts = {loader.exclude(steps=range(2, 4)) for loader in loaders}
    states = [loader.state_dict() for loader in loaders]
    assert [epoch_of(iter(loader)) for loader in loaders] == [each[1:2] + each[4:] for each in whole] and min(
        counts
    ) > 0
    left = sorted(row for each in whole for batch in each[1:2] + each[4:] for row in batch)
    for world in (1, 2, 4):
        resumed = [make(rank, world) for rank in range(world)]
        for loader in resumed:
            loader.load_state_dict(states)
        assert sorted(row for loader in resumed for batch in epoch_of(loader) for row in batch) == left


ROWS = {
    "rows": lambda ds: ds.shuffle(seed=1),
    "in order": lambda ds: ds,
    "window": lambda ds: ds.shuffle(seed=1, scope="window", window=2),
    "files": lambda ds: ds.shuffle(seed=1, scope="files"),
    "lanes": lambda ds: ds.shuffle(seed=1).with_lanes(4),
    "map": lambda ds: ds.shuffle(seed=1).map(lambda row: {"id": row["id"]}),
    "weighted": lambda ds: ds.weighted("id", seed=1),
    "once": lambda ds: ds.weighted("id", replacement=False, num_samples=30, seed=1),
    "filter": lambda ds: ds.shuffle(seed=1).filter(lambda row: row["id"] % 5 > 0),
    "flat map": lambda ds: ds.flat_map(lambda row: [{"id": row["id"]}] * (row["id"] % 3)),
    "batched": lambda ds: ds.filter(lambda row: row["id"] > 3).map(
        lambda b: {"id": b["id"]}, batched=True, batch_size=4
    ),
    "shuffled outputs": lambda ds: ds.filter(lambda row: row["id"] > 3).shuffle(seed=3, window=5),
}


@pytest.mark.parametrize("name", ROWS)
def test_excluded_rows_are_left_out_of_every_epoch(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(**options: Any) -> midepoch.Loader:
        return ROWS[name](open_ds()).loader(4, **options)

    excluded = {2, 3, 11, 30, 36}
    plain = make()
    epochs = [[row for row in sum(epoch_of(plain), []) if row not in excluded] for _ in range(2)]
    loader = make()
    assert loader.exclude(rows=sorted(excluded)) == 5 and loader.exclude(rows=[2, 3]) == 0
    states = []
    for expected in epochs:
        found: list[list[int]] = []
        for batch in loader:
            found.append(ids(batch))
            states.append((loader.state_dict(), len(found)))
        if name != "shuffled outputs":  # a window of the rows that are left
            assert sum(found, []) == expected
        assert sorted(sum(found, [])) == sorted(expected)
    resumed = make(num_workers=1, worker_type="thread")
    state, delivered = states[3]
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert sum(epoch_of(resumed), []) == sum(epoch_of_first(make, excluded)[delivered:], [])
    assert sorted(sum(epoch_of(resumed), [])) == sorted(epochs[1])


def epoch_of_first(make: Make, excluded: set[int]) -> list[list[int]]:
    loader = make()
    loader.exclude(rows=excluded)
    return epoch_of(loader)


def test_rows_of_several_sources(open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make() -> midepoch.Loader:
        other = open_ds().slice(20)
        return midepoch.mix({"web": open_ds(), "code": other}, [1, 1], seed=1, stop="all").loader(3)

    loader = make()
    assert loader.exclude(rows={"web": range(3, 9), 1: [0]}) == 7
    found = sum(epoch_of(loader), [])
    assert not {3, 4, 5, 6, 7, 8} & set(found) and 20 in found and found.count(20) < sum(epoch_of(make()), []).count(20)
    with pytest.raises(TypeError, match=r"by the name or number of the source \(web, code\)"):
        make().exclude(rows=[1])
    with pytest.raises(ValueError, match="no source 'books'"):
        make().exclude(rows={"books": [1]})


def test_an_iterator_continues_and_so_do_states(open_ds: Callable[[], midepoch.Dataset], caplog: Any) -> None:
    whole = epoch_of(open_ds().shuffle(seed=1).loader(4))
    for workers in (0, 2):
        loader = open_ds().shuffle(seed=1).loader(4, num_workers=workers)
        batches = iter(loader)
        assert ids(next(batches)) == whole[0]
        with caplog.at_level(logging.INFO, "midepoch"):
            assert loader.exclude(steps=range(1, 3)) == 8
        assert "steps 1 to 2 are excluded: 8 rows" in caplog.text
        assert ids(next(batches)) == whole[3]
        assert loader.exclude(steps=range(7, 10)) == 9  # the last one has one row
        assert [ids(batch) for batch in batches] == whole[4:7]
        assert loader.epoch == 1 and len(epoch_of(loader)) == 10
    # After a pass was left, it continues; at the end of an epoch, steps are those of the next.
    loader = open_ds().loader(4)
    for _ in loader:
        break
    loader.exclude(steps=range(2, 4))
    assert [batch[0] for batch in epoch_of(loader)] == [4, 16, 20, 24, 28, 32, 36]
    loader.exclude(steps=range(8))
    assert [batch[0] for batch in epoch_of(loader)] == [32, 36] and loader.epoch == 2


def test_several_exclusions_add_up(open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = open_ds().loader(4)
    assert [loader.exclude(steps=range(*pair)) for pair in ((2, 4), (3, 5), (2, 5))] == [8, 4, 0]
    assert loader.exclude(rows=[1, 2]) == 2  # the rest moves up: batches are of the rows that are left
    assert epoch_of(loader)[:3] == [[0, 3, 4, 5], [6, 7, 20, 21], [22, 23, 24, 25]]


@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_the_last_batch_counts_what_is_left(last_batch: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(rank: int) -> midepoch.Loader:
        return open_ds().loader(4, rank=rank, world_size=2, last_batch=last_batch)

    ranks = [make(rank) for rank in range(2)]
    for loader in ranks:
        loader.exclude(rows=[0, 1, 2, 3, 4, 5])
        loader.exclude(steps=range(1, 2))
    saved: list[Any] = []
    batches = []
    for loader in ranks:
        batches.append([])
        for batch in loader:
            batches[-1].append(batch)
            saved.append(loader.state_dict())
    assert [len(each) for each in batches] == ([2, 2] if last_batch == "drop" else [3, 3])
    rows = [row for each in batches for batch in each for row, padded in _with_padding(batch) if not padded]
    assert sorted(rows) == [*range(6, 14), *range(22, 30 if last_batch == "drop" else 37)]
    resumed = make(0)
    resumed.load_state_dict(saved[0])
    assert same(list(resumed), batches[0][1:])


def _with_padding(batch: Any) -> list[tuple[int, bool]]:
    padded = batch["is_padding"].tolist() if "is_padding" in batch else [False] * len(batch["id"])
    return list(zip(ids(batch), padded, strict=True))


def test_plain_iteration_leaves_them_out(open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = open_ds().loader(4)
    loader.exclude(steps=range(1, 2))
    loader.exclude(rows=[20])
    ds = open_ds()
    ds.load_state_dict(loader.state_dict())
    assert [row["id"] for row in ds] == [each for each in range(37) if each not in (4, 5, 6, 7, 20)]


def test_what_cannot_be_excluded(open_ds: Callable[[], midepoch.Dataset], planned_ds: Any) -> None:
    def filtered() -> midepoch.Loader:
        return open_ds().filter(lambda row: row["id"] > 3).loader(4)

    for make in (lambda: open_ds().loader(4), filtered):
        loader = make()
        first_batches(loader, 3)
        with pytest.raises(ValueError, match=r"step 2 is not ahead. The next step is 3\. .*load a state"):
            loader.exclude(steps=range(2, 5))
        last = len(epoch_of(make())) - 1
        with pytest.raises(ValueError, match=rf"step 11 is not in epoch 0: its last step is {last}\. Exclude"):
            loader.exclude(steps=range(3, 12))
        for wrong in ([3], range(5, 5), range(3, 9, 2), 3):
            with pytest.raises(ValueError, match="takes a range of steps"):
                loader.exclude(steps=wrong)
        with pytest.raises(TypeError, match=r"either steps= or rows="):
            loader.exclude()
        assert len(list(loader.current_pass())) == last - 2  # nothing has changed
    with pytest.raises(ValueError, match="there is no row 37: the dataset has 37 rows"):
        open_ds().loader(4).exclude(rows=[3, 37])
    with pytest.raises(TypeError, match="takes numbers of rows"):
        open_ds().loader(4).exclude(rows=["a"])
    loader = filtered()
    next(loader)
    with pytest.raises(ValueError, match="only at the beginning of an epoch"):
        loader.exclude(rows=[30])
    by_tokens = planned_ds().loader(max_tokens=200)
    with pytest.raises(ValueError, match="not possible with batches by max_tokens"):
        by_tokens.exclude(rows=[1])
    loader = planned_ds().loader(4)
    loader.exclude(rows=[1])
    with pytest.raises(CheckpointMismatchError, match="excluded"):
        by_tokens.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="'excluded' is"):
        loader.load_state_dict({**loader.state_dict(), "excluded": '{"4": ""}'})


def test_tools_say_what_is_excluded(open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    def call(*arguments: Any) -> Any:
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])

    ds = open_ds().shuffle(seed=1)
    loader = ds.loader(4, audit=Ledger(tmp_path / "ledger", attempt="1"))
    whole = epoch_of(ds.loader(4))
    batches = iter(loader)
    next(batches)
    loader.exclude(steps=range(2, 4))
    loader.exclude(rows=[whole[6][0]])
    state = loader.state_dict()
    assert describe(state).excluded == "8 rows ahead, 1 row in every epoch"
    plan = plan_resume(state, ds, world_size=1, batch_size=4)
    assert plan.excluded == 9 and plan.steps_left == 6 and plan.batches[1] == (tuple(whole[4]),)
    (tmp_path / "state.json").write_text(json.dumps(state))
    shown = call("inspect", tmp_path / "state.json").output
    assert "8 rows ahead, 1 row in every epoch" in shown
    shown = call("plan", "--checkpoint", tmp_path / "state.json", "--batch-size", 4, "--world-size", 1).output
    assert "9 positions ahead are excluded" in shown
    list(batches)
    run = read_run(tmp_path / "ledger")
    assert run.exact and run.epochs[0].complete and run.epochs[0].excluded == 9 and run.steps == 9
    assert [one.row for one in run.rows_of_step(5)] == whole[4] and run.steps_of_row(whole[2][0]) == []
    assert [one.step for one in run.steps_of_row(whole[8][0])] == [8]  # rows move up by the one that is excluded
    shown = call("audit", tmp_path / "ledger")
    assert "excluded" in shown.output and shown.exit_code == 0
    assert "step 4 was excluded" in call("audit", tmp_path / "ledger", "--step", 4).output


def test_the_ledger_over_a_crash_and_ranks(open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    """Batches after the save are lost in a crash, and delivered again. The excluded ones are neither."""

    def make(attempt: str, rank: int, world: int) -> midepoch.Loader:
        ledger = Ledger(tmp_path, attempt=attempt)
        return open_ds().shuffle(seed=1).loader(2, rank=rank, world_size=world, last_batch="uneven", audit=ledger)

    states = []
    for rank in range(2):
        loader = make("a", rank, 2)
        next(loader)
        loader.exclude(steps=range(2, 4))
        next(loader)
        states.append(loader.state_dict())
        first_batches(loader, 2 + rank)  # one rank is a step ahead
        loader.close()
    assert states[0] == states[1]
    for rank in range(3):
        loader = make("b", rank, 3)
        loader.load_state_dict(states[0])
        epoch_of(loader)
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete and (proof.once, proof.excluded, proof.again) == (29, 8, 10), (
        run.problems,
        proof,
    )


@pytest.mark.parametrize("name", ["rows", "weighted", "filter", "flat map", "mix"])
def test_the_ledger_counts_excluded_rows(name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    pipelines = {**ROWS, "mix": lambda ds: midepoch.mix([ds, ds.slice(30)], [4, 1], seed=1, stop="all")}
    loader = pipelines[name](open_ds()).loader(4, audit=Ledger(tmp_path, attempt="1"))
    rows = [2, 3, 11, 30, 36]
    loader.exclude(rows={0: rows} if name == "mix" else rows)
    list(loader)
    run = read_run(tmp_path)
    proof = run.epochs[0]
    excluded = len([row for row in epoch_rows(open_ds) if row in rows]) if name == "weighted" else len(rows)
    assert run.exact and proof.complete and proof.excluded == excluded, proof
    assert proof.once + proof.excluded == proof.rows and (proof.filtered < 10 or name == "flat map"), proof


def epoch_rows(open_ds: Callable[[], midepoch.Dataset]) -> list[int]:
    return sum(epoch_of(ROWS["weighted"](open_ds()).loader(4)), [])


def test_running_far_ahead_is_announced(
    open_ds: Callable[[], midepoch.Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs of a filter are known only when they are made. Positions are computed, however far ahead."""
    rows = len(open_ds())
    assert rows >= 10
    ds = midepoch.concat([open_ds()] * (1 + 1_200 // rows))
    loader = ds.filter(lambda row: row["id"] >= 0).loader(1)
    loader.exclude(steps=range(998, 1_000))
    assert "runs the pipeline" not in caplog.text
    loader.exclude(steps=range(1_000, 1_002))
    assert "runs the pipeline for 1002 steps, up to step 1001" in caplog.text
