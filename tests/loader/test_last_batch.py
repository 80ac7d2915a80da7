"""The end of an epoch over several ranks: equal steps, padding that is marked, every row once, at any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import CheckpointMismatchError
from midepoch.testing import assert_resumes_exactly
from pairs import covering
from states import at_row


def numbers(column: Any) -> list[int]:
    return column.tolist() if hasattr(column, "tolist") else list(column)


def genuine(batch: dict[str, Any]) -> list[int]:
    return [i for i, padding in zip(numbers(batch["id"]), numbers(batch["is_padding"]), strict=True) if not padding]


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["id"] * 2}


def not_sevens(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 7 == 0:
        raise ValueError("seven")
    return {}


@pytest.fixture(params=["arrow", "parquet"])
def open_ds(request: pytest.FixtureRequest, make_files: Callable[..., list[str]], tmp_path: Any) -> midepoch.Dataset:
    files = make_files([9, 1, 12, 8, 7])
    if request.param == "arrow":
        return midepoch.from_files(files)
    import pyarrow.ipc

    for number, file in enumerate(files):
        with pyarrow.ipc.open_stream(file) as reader:
            pq.write_table(reader.read_all(), tmp_path / f"{number}.parquet", row_group_size=5)
    return midepoch.from_files(str(tmp_path))


STEPS: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "numbers": lambda ds: ds.select_columns("id").shuffle(seed=1),
    "text": lambda ds: ds.shuffle(seed=1),
    "map": lambda ds: ds.shuffle(seed=1).map(double),
    "numpy": lambda ds: ds.with_format("numpy"),
    "python": lambda ds: ds.with_format("python"),
}


# Of 15 ranks 13 have rows, as of 50.
@pytest.mark.parametrize(
    ("open_ds", "steps", "shape"),
    [
        *covering(["arrow", "parquet"], list(STEPS), [(4, 3, 0), (1, 5, 0), (3, 15, 0), (37, 1, 0)]),
        pytest.param("arrow", "map", (3, 50, 0), id="arrow-map-(3, 50, 0)"),
        *(pytest.param("parquet", steps, (4, 3, 2), marks=pytest.mark.slow) for steps in STEPS),
    ],
    indirect=["open_ds"],
)
def test_padded_ranks_take_equal_steps_of_equal_size(
    open_ds: midepoch.Dataset, steps: str, shape: tuple[int, int, int]
) -> None:
    batch, world, workers = shape
    seen, lengths = [], set()
    for rank in range(world):
        loader = STEPS[steps](open_ds).loader(batch, workers, last_batch="pad", rank=rank, world_size=world)
        batches = list(loader)
        assert len(batches) == len(loader)
        lengths.add(len(batches))
        assert all(len(numbers(one["id"])) == batch for one in batches)
        assert not any(any(numbers(one["is_padding"])) for one in batches[:-1])
        seen += [row for one in batches for row in genuine(one)]
        assert loader.epoch == 1
    assert len(lengths) == 1
    assert len(seen) == len(set(seen))
    assert sorted(seen) == list(range(37))


@pytest.mark.parametrize("kind", ["arrow", "collate", "collate columns"])
def test_the_mark_is_there_in_every_form(open_ds: midepoch.Dataset, kind: str) -> None:
    if kind == "arrow":
        batches = [table.to_pydict() for table in open_ds.with_format("arrow").loader(5, last_batch="pad")]
    elif kind == "collate":
        rows = open_ds.loader(5, last_batch="pad", collate_fn=lambda rows: rows)
        batches = [{name: [row[name] for row in batch] for name in batch[0]} for batch in rows]
    else:
        batches = list(open_ds.loader(5, last_batch="pad", collate_fn=lambda columns: columns, collate_columns=True))
    assert [sum(map(int, numbers(batch["is_padding"]))) for batch in batches] == [0] * 7 + [3]
    assert sorted(sum(map(genuine, batches), [])) == list(range(37))


def test_padding_is_marked_where_rows_are_skipped(open_ds: midepoch.Dataset) -> None:
    batches = list(open_ds.map(not_sevens, on_error="skip").loader(5, last_batch="pad"))
    assert sorted(sum(map(genuine, batches), [])) == [i for i in range(37) if i % 7]
    # 35 is skipped; 0, with which the padding begins, is as well
    assert numbers(batches[-1]["is_padding"]) == [False, True, True]


@pytest.mark.parametrize("world", [1, 2, 5, 40])
def test_dropped_ranks_take_equal_steps(open_ds: midepoch.Dataset, world: int) -> None:
    make = lambda rank: open_ds.shuffle(seed=1).loader(3, last_batch="drop", rank=rank, world_size=world)  # noqa: E731
    if world * 3 > 37:
        with pytest.raises(ValueError, match="no batch would be left: the 37 rows are fewer than a global batch of 3"):
            make(0)
        return
    passes = [[numbers(batch["id"]) for batch in make(rank)] for rank in range(world)]
    assert {len(one) for one in passes} == {37 // (3 * world)}
    assert {len(batch) for one in passes for batch in one} == {3}
    seen = np.concatenate([batch for one in passes for batch in one])
    assert len(np.unique(seen)) == len(seen) == 37 // (3 * world) * 3 * world


@pytest.mark.parametrize(("rows", "world"), [(37, 5), (2, 4), (1, 3)])
def test_uneven_ranks_get_every_row_once(open_ds: midepoch.Dataset, rows: int, world: int) -> None:
    ds = open_ds.take(rows).shuffle(seed=1)
    passes = [
        [numbers(batch["id"]) for batch in ds.loader(3, last_batch="uneven", rank=rank, world_size=world)]
        for rank in range(world)
    ]
    assert sorted(sum(sum(passes, []), [])) == list(range(rows))
    assert all(batch for one in passes for batch in one)  # never an empty batch


@pytest.mark.parametrize("ends", ["drop", "pad"])
@pytest.mark.parametrize("steps", ["numbers", "map"])
def test_resumes_exactly(small_files: list[str], ends: str, steps: str) -> None:
    for rank in (0, 2):
        make = lambda workers=0, rank=rank: STEPS[steps](midepoch.from_files(small_files)).loader(  # noqa: E731
            4, workers, last_batch=ends, rank=rank, world_size=3
        )
        assert_resumes_exactly(make, tail=4)
        if rank and steps == "map":
            assert_resumes_exactly(make, resume_with=[lambda make=make: make(2)], steps=[1, 3, 4])


def test_padding_counts_for_nothing_on_resume(small_files: list[str]) -> None:
    """Another world goes on behind the genuine rows, and pads for itself."""
    make = lambda rank, world, batch: (  # noqa: E731
        midepoch.from_files(small_files).shuffle(seed=3).loader(batch, last_batch="pad", rank=rank, world_size=world)
    )
    first = [make(rank, 2, 5) for rank in range(2)]
    seen = [row for loader in first for row in genuine(next(loader))]
    others = [make(rank, 7, 2) for rank in range(7)]
    for loader in others:
        loader.load_state_dict(first[0].state_dict())
        batches = list(loader)
        assert len(batches) == 2
        seen += [row for batch in batches for row in genuine(batch)]
        assert loader.epoch == 1
    assert sorted(seen) == list(range(37))


def test_what_contradicts_or_is_in_the_way_is_refused(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files)
    with pytest.raises(ValueError, match="last_batch must be one of 'drop', 'pad', 'uneven', got 'loop'"):
        ds.loader(4, last_batch="loop")
    with pytest.raises(ValueError, match="drop_last=True and last_batch='pad' contradict"):
        ds.loader(4, drop_last=True, last_batch="pad")
    with pytest.raises(ValueError, match="the dataset has a column 'is_padding'"):
        ds.rename_columns({"id": "is_padding"}).loader(4, last_batch="pad")
    with pytest.raises(midepoch.MapError, match="a map created a column 'is_padding'"):
        next(iter(ds.map(lambda row: {"is_padding": 1}).loader(4, last_batch="pad")))
    assert len(ds.loader(4, drop_last=True, last_batch="drop")) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_whose_end_was_not_asked_for_is_over(small_files: list[str], workers: int) -> None:
    """Loops that know how many batches there are take just as many, and never see StopIteration."""
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    whole = [[batch["id"].tolist() for batch in loader] for loader in [ds.loader(5)] for _ in range(3)]
    with ds.loader(5, num_workers=workers) as loader:
        for epoch in range(3):
            passing = iter(loader)
            assert [next(passing)["id"].tolist() for _ in range(len(loader))] == whole[epoch]
            assert loader.epoch == epoch + 1 and loader.position == 0
        state = loader.state_dict()
        passing = iter(loader)
        resumed = ds.loader(5)
        resumed.load_state_dict(state)
        assert next(iter(resumed))["id"].tolist() == next(passing)["id"].tolist()
        del passing  # a break moves nothing, still
        assert loader.position == 5
        assert len(list(loader)) == len(loader) and loader.epoch == 4


def test_an_epoch_that_is_named_again_is_gone_through_again(small_files: list[str]) -> None:
    loader = midepoch.from_files(small_files).shuffle(seed=1).loader(5)
    loader.set_epoch(2)
    passing = iter(loader)
    first = [next(passing)["id"].tolist() for _ in range(len(loader))]
    loader.set_epoch(2)
    assert [batch["id"].tolist() for batch in loader] == first
    assert loader.epoch == 3


def test_all_ranks_go_on_together_where_the_last_step_is_not_for_all(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files).take(9)
    loaders = [ds.loader(2, rank=rank, world_size=4, last_batch="uneven") for rank in range(4)]
    assert [len(loader) for loader in loaders] == [2, 1, 1, 1]
    for epoch in range(3):
        for loader in loaders:
            passing = iter(loader)
            for _ in range(len(loader)):
                next(passing)
            del passing
        assert [loader.epoch for loader in loaders] == [epoch + 1] * 4


def test_ranks_that_leave_the_loop_around_a_last_step_that_only_some_have_resume_together(
    small_files: list[str],
) -> None:
    """18 rows: two steps of four ranks, and one with rows for the first two of them."""
    ds = midepoch.from_files(small_files).take(18).shuffle(seed=1)

    def after(steps: list[int]) -> tuple[list[int], list[Any]]:
        loaders = [ds.loader(2, rank=rank, world_size=4, last_batch="uneven") for rank in range(4)]
        found = [batch for loader, count in zip(loaders, steps, strict=True) for batch in islice(loader, count)]
        return [row for batch in found for row in batch["id"].tolist()], [loader.state_dict() for loader in loaders]

    whole = sorted(row for batch in ds.loader(3) for row in batch["id"].tolist())
    for steps in ([2, 2, 2, 2], [3, 3, 2, 2]):
        found, states = after(steps)
        resumed = ds.loader(3)
        resumed.load_state_dict(states)
        found += [row for batch in resumed for row in batch["id"].tolist()] if resumed.epoch == 0 else []
        assert sorted(found) == whole
    for steps in ([2, 3, 2, 2], [3, 2, 2, 2]):
        with pytest.raises(CheckpointMismatchError, match="not at the same step"):
            ds.loader(3).load_state_dict(after(steps)[1])


@pytest.mark.parametrize("at", [4, 7])
def test_a_batch_that_fails_on_its_way_is_not_handed_over(
    small_files: list[str], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 rows, 8 batches: also the last one."""
    from midepoch.loader import passes as module

    finish, made = module.finish, []

    def interrupted(value: Any, kind: str) -> Any:
        made.append(1)
        if len(made) == at + 1:
            raise KeyboardInterrupt
        return finish(value, kind)

    monkeypatch.setattr(module, "finish", interrupted)
    loader = midepoch.from_files(small_files).loader(5)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    loader.close()
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 5 * at)


def fails_on(*bad: int) -> Any:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in bad:
            raise ValueError("bad")
        return {}

    return check


def test_padding_that_is_skipped_is_made_of_other_rows(small_files: list[str]) -> None:
    """Rows 0 to 3 cannot be used: what pads the last batch is taken from behind them, on every rank."""
    ds = midepoch.from_files(small_files).take(9).map(fails_on(0, 1, 2, 3), on_error="skip")
    for rank in range(2):
        loader = ds.loader(2, last_batch="pad", rank=rank, world_size=2)
        loader.load_state_dict(at_row(loader.state_dict(), 4))
        batches = list(loader)
        assert len(batches) == 2
        assert batches[-1]["is_padding"].tolist() == ([False] if rank == 0 else [True] * len(batches[-1]["id"]))
    whole = ds.loader(4, last_batch="pad")
    with pytest.raises(midepoch.MidepochError):
        list(
            ds.loader(2, last_batch="pad", rank=0, world_size=2)
        )  # a batch of which nothing is left, from its beginning
    list(whole)
    assert whole.skipped == 4  # genuine rows only


def test_a_rank_without_rows_has_length_0(small_files: list[str]) -> None:
    from operator import length_hint

    loader = midepoch.from_files(small_files).take(3).loader(2, last_batch="uneven", rank=3, world_size=4)
    assert len(loader) == length_hint(iter(loader)) == len(list(loader)) == 0
