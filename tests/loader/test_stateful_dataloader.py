"""torchdata's StatefulDataLoader, real workers included, held to G1."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from fast_hf_loader_simple import SimpleArrowIterableDataset
from midepoch.errors import CheckpointMismatchError
from midepoch.testing import assert_resumes_exactly

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([row["id"] for row in rows])


def make_loader(ds: midepoch.Dataset, workers: int, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(ds, batch_size=5, num_workers=workers, collate_fn=collate, **options)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchdata waits 5 s for each worker of an iterator that failed when it was made, and only then ends it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    yield
    gc.collect()  # here, not in another test


FEW, SOME, MORE = [8], [2, 8, 9], [0, 1, 2, 5, 7, 8, 9, 12]


WAYS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (0, {"snapshot_every_n_steps": 3}),
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"persistent_workers": True}),
    (2, {"snapshot_every_n_steps": 3}),
    (2, {"drop_last": True}),
]


def ways() -> list[Any]:
    """A dataset in most ways; the one of another name, which is a thin layer on it, in two of them. All by -m slow."""
    slow = pytest.mark.slow
    found = [
        pytest.param(
            midepoch.from_files,
            workers,
            options,
            SOME,
            marks=slow if workers in (1, 3) or (workers and options) else (),
        )
        for workers, options in WAYS
    ]
    for workers, options in WAYS:
        marks = () if (workers, options) in ((0, {}), (2, {})) else slow
        found.append(pytest.param(SimpleArrowIterableDataset, workers, options, FEW, marks=marks))
        found += [
            pytest.param(kind, workers, options, MORE, marks=slow)
            for kind in (midepoch.from_files, SimpleArrowIterableDataset)
        ]
    return found


@pytest.mark.parametrize(("kind", "workers", "options", "steps"), ways())
def test_resumes_exactly(
    small_files: list[str],
    kind: Callable[..., midepoch.Dataset],
    workers: int,
    options: dict[str, Any],
    steps: list[int],
) -> None:
    make = lambda: make_loader(kind(small_files).shuffle(seed=1), workers, **options)  # noqa: E731
    assert_resumes_exactly(make, steps=None if steps is MORE and not workers else steps, tail=7)


def spawning(files: list[str]) -> StatefulDataLoader:
    return make_loader(midepoch.from_files(files).shuffle(seed=1), 2, multiprocessing_context="spawn")


@pytest.mark.slow
def test_spawned_workers(small_files: list[str]) -> None:
    """Saved and resumed with spawned workers, in mid-epoch: what comes is what forked ones would have given."""
    forking = make_loader(midepoch.from_files(small_files).shuffle(seed=1), 2)
    expected = [batch.tolist() for batch in forking]
    source = spawning(small_files)
    iterator = iter(source)
    found = [next(iterator).tolist() for _ in range(3)]
    state = json.loads(json.dumps(source.state_dict()))
    del iterator, source
    resumed = spawning(small_files)
    resumed.load_state_dict(state)
    found += [batch.tolist() for batch in resumed]
    assert found == expected


@pytest.mark.slow
def test_spawned_workers_in_every_way(small_files: list[str]) -> None:
    assert_resumes_exactly(lambda: spawning(small_files), epochs=1, steps=[3], tail=4)


def test_rows_are_shared_out_among_workers(small_files: list[str]) -> None:
    for workers in (0, 1, 2, 4):
        for loader in (StatefulDataLoader, DataLoader):
            ds = midepoch.from_files(small_files).shuffle(seed=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batches = list(loader(ds, batch_size=5, num_workers=workers, collate_fn=collate))
            assert sorted(torch.cat(batches).tolist()) == list(range(37))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_workers_and_resumes(small_files: list[str], workers: int, persistent: bool) -> None:
    """A loop with set_epoch, saved at every step of the second epoch and resumed with the loop's own epoch."""
    if persistent and not workers:
        pytest.skip("persistent workers need workers")
    options = {"persistent_workers": True} if persistent else {}

    def run(start: int, state: Any = None, save: bool = False) -> tuple[list[Any], list[Any]]:
        ds = midepoch.from_files(small_files).shuffle(seed=1)
        loader = make_loader(ds, workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        batches, states = [], []
        for epoch in range(start, 3):
            ds.set_epoch(epoch)
            for batch in loader:
                batches.append((epoch, batch.tolist()))
                if save:
                    states.append(json.loads(json.dumps(loader.state_dict())))
        return batches, states

    whole, states = run(0, save=True)
    rows = [sorted(i for e, batch in whole if e == epoch for i in batch) for epoch in range(3)]
    assert rows == [list(range(37))] * 3
    assert len({json.dumps([batch for e, batch in whole if e == epoch]) for epoch in range(3)}) == 3
    last_of_second = max(i for i, (epoch, _) in enumerate(whole) if epoch == 1)
    for step in (8, 11, last_of_second - 1, last_of_second):
        found, _ = run(1, states[step])
        assert found == whole[step + 1 :], step
    if workers:  # with none, torchdata itself remembers that the last, shorter batch ended the pass
        found, _ = run(2, states[last_of_second])  # a loop that counts the finished epoch as done
        assert found == whole[last_of_second + 1 :]


def test_rank_zeros_state_restores_every_rank(small_files: list[str]) -> None:
    def loader(rank: int, workers: int) -> StatefulDataLoader:
        ds = SimpleArrowIterableDataset(small_files).shuffle(seed=1).shard(2, rank)
        return StatefulDataLoader(ds, batch_size=3, num_workers=workers, collate_fn=collate)

    for workers in (0, 2):
        seen: list[int] = []
        states = []
        for rank in range(2):
            source = loader(rank, workers)
            iterator = iter(source)
            for _ in range(3):
                seen += next(iterator).tolist()
            states.append(source.state_dict())
        for rank in range(2):
            source = loader(rank, workers)
            source.load_state_dict(states[0])
            seen += [i for batch in source for i in batch.tolist()]
        assert sorted(seen) == list(range(37))


@pytest.mark.usefixtures("impatient")
def test_another_number_of_shards_is_refused_for_worker_states(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    source = make_loader(ds.shard(2, 0), 2)
    next(iter(source))
    state = source.state_dict()
    other = make_loader(ds.shard(3, 0), 2)
    other.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match=r"ds.loader"):
        next(iter(other))


@pytest.mark.usefixtures("impatient")
def test_wrong_state_is_refused(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files)
    for workers in (0, 2):
        source = make_loader(ds.shuffle(seed=1), workers)
        next(iter(source))
        other = make_loader(ds.shuffle(seed=2), workers)
        other.load_state_dict(source.state_dict())
        with pytest.raises(CheckpointMismatchError, match="seed"):
            next(iter(other))


def test_taken_for_map_style(small_files: list[str]) -> None:
    """Only if torch was imported after the dataset was created, and nothing was derived from it since."""
    code = """
import sys, midepoch
ds = midepoch.from_files(sys.argv[1:])
from torch.utils.data import DataLoader
try:
    next(iter(DataLoader(ds, batch_size=2)))
except TypeError as problem:
    print(problem)
print(next(iter(DataLoader(ds.select_columns("id"), batch_size=2)))["id"].tolist())
"""
    found = subprocess.run([sys.executable, "-c", code, *small_files], capture_output=True, text=True, check=True)
    message, batch = found.stdout.splitlines()
    assert "Import torch first" in message and batch == "[0, 1]"
