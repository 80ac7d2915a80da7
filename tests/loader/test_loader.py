from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import midepoch
from midepoch.errors import MapError, MidepochError
from midepoch.loader.direct import MadeAhead
from midepoch.pipeline.spec import PipelineSpec
from states import at_row


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def test_batches_are_tensors(ds: midepoch.Dataset) -> None:
    batch = next(iter(ds.loader(5)))
    assert batch["id"].dtype == torch.int64
    assert batch["score"].dtype == torch.float64
    assert batch["tokens"].shape == (5, 4)
    assert batch["tokens"].dtype == torch.int32
    assert batch["text"] == [f"row {i} " + "é" * (i % 5) for i in range(5)]
    assert isinstance(next(iter(ds.with_format("numpy").loader(5)))["id"], np.ndarray)
    assert next(iter(ds.with_format("python").loader(2)))["id"] == [0, 1]
    assert next(iter(ds.with_format("arrow").loader(2))).num_rows == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_advance_by_themselves(ds: midepoch.Dataset, workers: int) -> None:
    loader = ds.shuffle(seed=1).loader(10, num_workers=workers)
    passes = [sum(ids(loader), []) for _ in range(3)]
    assert loader.epoch == 3 and "at epoch 3, position 0)" in repr(loader)
    assert len({tuple(one) for one in passes}) == 3
    assert all(sorted(one) == list(range(37)) for one in passes)
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert sum(ids(loader), []) == passes[1]
    assert sum(ids(loader), []) == passes[2]
    by_name = ds.shuffle(seed=1)
    by_name.set_epoch(2)
    assert [row["id"] for row in by_name] == passes[2]  # the same order as plain iteration


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "world"), [(5, 1), (37, 1), (100, 1), (4, 3), (6, 4)])
def test_length(ds: midepoch.Dataset, batch: int, world: int, drop_last: bool) -> None:
    for rank in range(world):
        loader = ds.loader(batch, drop_last=drop_last, rank=rank, world_size=world)
        assert len(loader) == len(list(loader))


def test_break_moves_nothing(ds: midepoch.Dataset) -> None:
    loader = ds.shuffle(seed=1).loader(5)
    whole = ids(loader)
    loader.set_epoch(0)
    for _ in loader:
        break
    assert loader.state_dict()["position"] == 5
    assert ids(loader) == whole
    assert loader.epoch == 1
    loader.load_state_dict(at_row(loader.state_dict(), 20, epoch=0))
    next(iter(loader))  # a look at the first batch after a resume
    assert ids(loader) == whole[4:]


def test_end_of_epoch_states(ds: midepoch.Dataset) -> None:
    """Behind the last batch, before and after StopIteration; with and without naming epochs. Never empty by surprise."""
    make = lambda: ds.shuffle(seed=1).loader(5)  # noqa: E731
    loader = make()
    first = ids(loader)
    second = ids(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    behind_last = loader.state_dict()
    assert behind_last["position"] == 37
    assert next(iterator, None) is None
    after_stop = loader.state_dict()
    assert after_stop == behind_last

    for state in (behind_last, after_stop):
        plain = make()
        plain.load_state_dict(state)
        assert plain.epoch == 1
        assert ids(plain) == second
    named = make()
    named.load_state_dict(behind_last)
    passes = {}
    for epoch in range(3):
        named.set_epoch(epoch)
        passes[epoch] = ids(named)
    assert passes[0] == []  # epoch 0 had been gone through when the state was saved
    assert passes[1] == second
    skipping_first = make()  # the loop of the documentation: set_epoch for all but the resumed epoch
    skipping_first.load_state_dict(behind_last)
    rolled = ids(skipping_first)
    skipping_first.set_epoch(1)
    assert (rolled, ids(skipping_first)) == (second, [])
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_naming_the_epoch_that_a_state_was_saved_at_the_end_of_repeats_nothing(
    ds: midepoch.Dataset, stream: bool
) -> None:
    """A loop that saves after an epoch, with its number, and names every epoch."""
    chosen: Any = ds.shuffle(seed=1).filter(lambda row: row["id"] % 3 > 0) if stream else ds.shuffle(seed=1)
    loader = chosen.loader(5)
    whole = [ids(loader), ids(loader)]
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in whole[0]:
        next(iterator)
    assert next(iterator, None) is None
    state = loader.state_dict()
    assert (loader.epoch, loader.position) == (1, 0)
    resumed = chosen.loader(5)
    resumed.load_state_dict(state)
    passes = []
    for epoch in range(2):
        resumed.set_epoch(epoch)
        passes.append(ids(resumed))
    assert passes == [[], whole[1]]
    unnamed = chosen.loader(5)
    unnamed.load_state_dict(state)
    assert (unnamed.epoch, ids(unnamed)) == (1, whole[1])
    loader.set_epoch(0)  # in the run itself it is a wish to have it again
    assert ids(loader) == whole[0]


def test_state_loaded_and_saved_again_is_the_same(ds: midepoch.Dataset) -> None:
    loader = ds.shuffle(seed=1).loader(4)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    other = ds.shuffle(seed=1).loader(4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    iterator = iter(other)
    assert other.state_dict() == state
    next(iterator)
    assert other.state_dict() != state


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_fn_gets_rows(ds: midepoch.Dataset, workers: int) -> None:
    def collate(rows: list[dict[str, Any]]) -> Any:
        return (
            torch.tensor([row["id"] for row in rows]),
            [row["text"] for row in rows],
            torch.ones(2, dtype=torch.bfloat16),
        )

    found = list(ds.loader(20, num_workers=workers, collate_fn=collate))
    assert [batch[0].tolist() for batch in found] == [list(range(20)), list(range(20, 37))]
    assert found[0][1][3] == "row 3 " + "é" * 3
    assert found[0][2].dtype == torch.bfloat16


def test_ranks_share_global_batches(ds: midepoch.Dataset) -> None:
    """With an equal global batch the batches themselves do not depend on the number of ranks (G3)."""
    alone = [sorted(batch) for batch in ids(ds.shuffle(seed=1).loader(12))]
    for world in (2, 3, 4):
        parts = [ids(ds.shuffle(seed=1).loader(12 // world, rank=r, world_size=world)) for r in range(world)]
        together = [sorted(sum((part[i] for part in parts if i < len(part)), [])) for i in range(len(alone))]
        assert together == alone


def test_world_and_shard(ds: midepoch.Dataset) -> None:
    assert ids(ds.shard(3, 1).loader(4)) == ids(ds.shard(3, 1, mode="file").loader(4))
    with pytest.raises(ValueError, match="already shard 1 of 3"):
        ds.shard(3, 1).loader(4, rank=0, world_size=2)
    with pytest.raises(ValueError, match="both rank and world_size"):
        ds.loader(4, rank=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        ds.loader(4, rank=2, world_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": 4, "num_workers": -1},
        {"batch_size": 4, "prefetch": 0},
        {"batch_size": 4, "persistent_workers": True},
        {"batch_size": 4, "collate_fn": 5},
    ],
)
def test_bad_arguments(ds: midepoch.Dataset, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        ds.loader(**options)


def test_threads_end(ds: midepoch.Dataset) -> None:
    before = threading.active_count()
    loader = ds.loader(2)
    iterator = iter(loader)
    next(iterator)
    del iterator
    for _ in loader:
        break
    list(loader)
    loader.close()
    assert threading.active_count() <= before  # those of other tests may end meanwhile


def test_two_loaders_of_one_dataset(ds: midepoch.Dataset) -> None:
    a, b = ds.shuffle(seed=1).loader(5), ds.shuffle(seed=1).loader(5, num_workers=2)
    assert [x["id"].tolist() == y["id"].tolist() for x, y in zip(a, b, strict=True)] == [True] * 8


def test_a_changed_file_is_named_by_the_reading_thread(make_files: Callable[..., list[str]]) -> None:

    (path,) = make_files([40])
    ds = midepoch.from_files(path)
    os.truncate(path, 50)
    for workers in (0, 2):
        with pytest.raises(midepoch.DataChangedError, match="has changed"):
            list(ds.loader(4, num_workers=workers))


def test_a_loader_may_be_collected_in_its_own_reading_thread() -> None:
    """A loader and its pass refer to each other: the collector ends them wherever it happens to run."""
    threads: list[threading.Thread] = []

    def make() -> int:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            ahead.close()
        return len(threads)

    ahead = MadeAhead(make, 1)
    assert [ahead.next(), ahead.next()] == [1, 2]
    assert threads[0] is threading.current_thread() is not threads[1]  # the first one is made here
    ahead.taken()
    threads[1].join(timeout=60)
    assert len(threads) == 3 and not threads[1].is_alive() and ahead.next() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_stops_is_an_error_and_one_that_returns_none_is_not(
    ds: midepoch.Dataset, workers: int
) -> None:
    def stops(rows: list[Any]) -> Any:
        return next(iter([])) if rows[0]["id"] >= 20 else rows

    with pytest.raises(MapError, match="collate_fn failed on a batch of 10 rows"):
        list(ds.loader(10, num_workers=workers, collate_fn=stops))
    for made in (ds, ds.filter(lambda row: row["id"] >= 0)):
        assert list(made.loader(10, num_workers=workers, collate_fn=lambda rows: None)) == [None] * 4


def test_a_second_iteration_does_not_end_the_first_silently(ds: midepoch.Dataset) -> None:
    loader = ds.loader(5)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(MidepochError, match="another iter"):
        next(first)


def test_a_state_that_is_saved_while_a_batch_is_delivered_takes_nothing_back(
    small_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread."""
    loader = midepoch.from_files(small_files).map(lambda row: row).loader(5)
    batches = iter(loader)
    next(batches)
    original = PipelineSpec.seeded

    def seeded(spec: PipelineSpec) -> PipelineSpec:
        monkeypatch.setattr(PipelineSpec, "seeded", original)
        next(batches)
        return original(spec)

    monkeypatch.setattr(PipelineSpec, "seeded", seeded)
    loader.state_dict()
    assert loader.steps == 2 and loader.position == 10


def test_a_pass_of_one_batch_that_failed_is_no_look() -> None:
    """Only a break after the first batch is one: the loop has trained on a batch that came before an error."""
    failing = [True]

    def check(row: dict[str, Any]) -> dict[str, Any]:
        if failing[0] and row["id"] == later:
            raise ValueError("not now")
        return {}

    ds = midepoch.from_dict({"id": list(range(20))}).shuffle(seed=1)
    expected = [batch["id"].tolist() for batch in ds.loader(4)]
    later, found = expected[1][2], []
    loader = ds.map(check).loader(4)
    with pytest.raises(midepoch.MapError):
        for batch in loader:
            found.append(batch["id"].tolist())
    failing[0] = False
    assert found + [batch["id"].tolist() for batch in loader] == expected
