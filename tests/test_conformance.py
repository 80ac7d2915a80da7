"""One list of pipelines, held to G1, G2 and G3. A new transform is one more entry, and gets every case for free."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch  # noqa: F401  (the global generators follow its seed once it is there)
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from midepoch.testing import assert_resumes_exactly, same

Pipeline = Callable[[midepoch.Dataset], midepoch.Dataset]


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["id"] * 2}


def group_sum(batch: dict[str, Any]) -> dict[str, Any]:
    """Depends on which rows are handed over together: a group that differs on resume would show."""
    return {"sum": [sum(batch["id"])] * len(batch["id"])}


def noise(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"noise": float(generator.random())}


def global_noise(row: dict[str, Any]) -> dict[str, Any]:
    return {"noise": random.random() + float(np.random.rand())}


def not_sevens(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 7 == 0:
        raise ValueError("seven")
    return {}


PIPELINES: dict[str, Pipeline] = {
    "in order": lambda ds: ds,
    "rows": lambda ds: ds.shuffle(seed=1),
    "window": lambda ds: ds.shuffle(seed=1, scope="window", window=3),
    "files": lambda ds: ds.shuffle(seed=1, scope="files"),
    "slice": lambda ds: ds.slice(3, 31).shuffle(seed=2),
    "select": lambda ds: ds.select([30, 2, 2, 17, 8, 9, 10, 11]).shuffle(seed=2, scope="window", window=1),
    "map": lambda ds: ds.shuffle(seed=1).map(double),
    "batched map": lambda ds: ds.shuffle(seed=1).map(group_sum, batched=True, batch_size=5),
    "two batched maps": lambda ds: ds.map(group_sum, batched=True, batch_size=4).map(
        group_sum, batched=True, batch_size=3
    ),
    "random map": lambda ds: ds.shuffle(seed=3).map(noise, with_generator=True),
    "global generators": lambda ds: ds.shuffle(seed=3).map(global_noise),
    "cast": lambda ds: ds.shuffle(seed=1).map(double).cast({"double": "int16", "text": pa.large_string()}),
    "skipping map": lambda ds: ds.shuffle(seed=4).map(not_sevens, on_error="skip"),
    "columns": lambda ds: ds.rename_columns({"id": "n"}).select_columns(["n", "tokens"]).shuffle(seed=5),
    "torch": lambda ds: ds.shuffle(seed=1).with_format("torch"),
    "arrow": lambda ds: ds.shuffle(seed=1, scope="window", window=2).with_format("arrow"),
    "shard": lambda ds: ds.shuffle(seed=1).shard(3, 1, mode="example"),
    "file shard": lambda ds: ds.shuffle(seed=1, scope="files").shard(2, 1, mode="file"),
}


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    return lambda: midepoch.from_files(small_files)


def resumes(make: Callable[[], Any], far: bool, ends: list[int], **options: Any) -> int:
    """At moments around the ``ends`` of epochs all that follows; at every third other, 4 items. Far: all at every one."""
    if far:
        return assert_resumes_exactly(make, **options)
    around = [0, *(end + near for end in ends for near in (-1, 0, 1))]
    some = sorted({*around, *range(2, 3 * ends[-1], 3)})
    return assert_resumes_exactly(make, tail=4, steps=some, **options) + assert_resumes_exactly(
        make, steps=around, **options
    )


far = pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["near", "far"])


@far
@pytest.mark.parametrize("name", PIPELINES)
def test_rows_resume_exactly(name: str, far: bool, open_ds: Callable[[], midepoch.Dataset]) -> None:
    assert resumes(lambda: PIPELINES[name](open_ds()), far, ends=[37]) > 10


# What is dropped depends on how many rows there are: fewer by a skipping map, or by a shard.
DROPPING = ["rows", "batched map", "skipping map", "file shard"]
DROPPED = [pytest.param(True, name, marks=() if name in DROPPING else pytest.mark.slow) for name in PIPELINES]


@far
@pytest.mark.parametrize(("drop_last", "name"), [*((False, name) for name in PIPELINES), *DROPPED])
def test_loader_resumes_exactly(name: str, drop_last: bool, far: bool, open_ds: Callable[[], midepoch.Dataset]) -> None:
    make = lambda: PIPELINES[name](open_ds()).loader(3, drop_last=drop_last)  # noqa: E731
    assert resumes(make, far, ends=[13, 27], epochs=3) > 5


FEW, SOME, MORE = [1, 8, 9], [0, 1, 7, 8, 9], [0, 1, 3, 4, 7, 8, 9, 15]


# 12 worker processes a moment if it was saved with two of them: at fewer moments then.
@pytest.mark.parametrize(
    ("saved_with", "steps"),
    [(0, SOME), (2, FEW), *(pytest.param(workers, MORE, marks=pytest.mark.slow) for workers in (0, 2))],
    ids=["0-some", "2-few", "0-more", "2-more"],
)
@pytest.mark.parametrize("name", ["rows", "batched map", "skipping map", "file shard"])
def test_loader_resumes_with_other_workers(
    name: str, saved_with: int, steps: list[int], open_ds: Callable[[], midepoch.Dataset]
) -> None:
    def make(workers: int, **options: Any) -> Callable[[], midepoch.Loader]:
        return lambda: PIPELINES[name](open_ds()).loader(5, num_workers=workers, **options)

    others = [make(0), make(1), make(3, persistent_workers=True)]
    assert_resumes_exactly(make(saved_with), resume_with=others, steps=steps, tail=9)


@pytest.mark.parametrize("name", PIPELINES)
def test_order_does_not_depend_on_workers(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    """G3."""
    expected = list(PIPELINES[name](open_ds()).loader(4))
    for workers in (1, 2, 3):
        found = list(PIPELINES[name](open_ds()).loader(4, num_workers=workers))
        assert same(found, expected)


def ids(batches: Iterator[Any]) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def run_world(ds: midepoch.Dataset, state: Any, world: int, batch: int, steps: int | None) -> tuple[list[int], Any]:
    """All ranks of a world for some steps each (or to the end of the epoch): the rows they got, and rank 0's state."""
    rows: list[int] = []
    states = []
    for rank in range(world):
        loader = ds.loader(batch, rank=rank, world_size=world)
        if state is not None:
            loader.load_state_dict(state)
        epoch = loader.epoch
        iterator = iter(loader)
        taken = 0
        while steps is None or taken < steps:
            found = next(iterator, None)
            if found is None:
                break
            rows += [int(i) for i in found["id"]]
            taken += 1
        states.append(loader.state_dict())
        assert epoch == 0
        loader.close()
    return rows, states[0]


@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 4)), max_size=4),
    last=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    scope=st.sampled_from([None, "rows", "window", "files"]),
)
@settings(max_examples=150)
def test_every_row_once_over_changing_worlds(
    small_files: list[str], shape: list[tuple[int, int, int]], last: tuple[int, int], scope: str | None
) -> None:
    """G2: several changes of world size and batch size within one epoch, each row of it exactly once."""
    ds = midepoch.from_files(small_files)
    if scope is not None:
        ds = ds.shuffle(seed=1, scope=scope, window=2)
    seen: list[int] = []
    state = None
    for world, batch, steps in shape:
        if len(seen) + world * batch * steps >= 37:
            continue  # stay within the epoch
        rows, state = run_world(ds, state, world, batch, steps)
        seen += rows
    rows, _ = run_world(ds, state, *last, steps=None)
    assert sorted(seen + rows) == list(range(37))


@given(
    shape=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 5), st.sampled_from(["auto", "file", "example"])), max_size=3
    ),
    last=st.integers(1, 6),
    scope=st.sampled_from(["rows", "files"]),
)
@settings(max_examples=150)
def test_every_row_once_over_changing_shards(
    small_files: list[str], shape: list[tuple[int, int, str]], last: int, scope: str
) -> None:
    """G2 for ``shard`` and plain iteration; the state of any one shard restores all."""
    base = midepoch.from_files(small_files).shuffle(seed=1, scope=scope)
    seen: list[int] = []
    state = None
    for number, (shards, taken, mode) in enumerate(shape):
        if len(seen) + shards * taken >= 37:
            continue
        states = []
        for index in range(shards):
            ds = base.shard(shards, index, mode=mode)
            if state is not None:
                ds.load_state_dict(state)
            iterator = iter(ds)
            seen += [next(iterator)["id"] for _ in range(taken)]
            states.append(ds.state_dict())
        assert all(one == states[0] for one in states)
        state = states[number % shards]
    for index in range(last):
        ds = base.shard(last, index)
        if state is not None:
            ds.load_state_dict(state)
        seen += [row["id"] for row in ds]
    assert sorted(seen) == list(range(37))


def test_batch_size_changes_within_an_epoch(open_ds: Callable[[], midepoch.Dataset]) -> None:
    whole = ids(iter(open_ds().shuffle(seed=1).loader(1)))
    seen: list[int] = []
    state = open_ds().shuffle(seed=1).loader(1).state_dict()
    for size, steps in ((3, 2), (7, 1), (2, 5), (30, 9)):
        loader = open_ds().shuffle(seed=1).loader(size)
        loader.load_state_dict(state)
        for number, batch in enumerate(loader, 1):
            seen += batch["id"].tolist()
            state = loader.state_dict()
            if number == steps:
                break
    assert seen == whole
