"""One list of pipelines, held to G1, G2 and G3, and to one set of rules. A new transform is one more entry, and gets every case for free."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import midepoch
import native
from data import numbered
from midepoch.audit import Ledger, read_run
from midepoch.loader import feeds, movers
from midepoch.testing import assert_resumes_exactly, same
from pairs import alternating
from states import lanes_of

ROWS = 37
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


def noisy_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "noise": [float(torch.rand(())) for _ in batch["text"]], "class": batch["text"]}


def not_sevens(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 7 == 0:
        raise ValueError("seven")
    return {}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def odd_of_group(batch: dict[str, Any]) -> list[bool]:
    return [(n + len(batch["id"])) % 2 == 1 for n in batch["id"]]


def some_copies(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "copy": copy} for copy in range(row["id"] % 3)]


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"][::2], "of": [len(batch["id"])] * len(batch["id"][::2])}


def odd_or_fails(row: dict[str, Any]) -> bool:
    return bool(not_sevens(row) or row["id"] % 2)


def drawn(row: dict[str, Any]) -> dict[str, Any]:
    """An image of its own for each row, as a file."""
    stream = io.BytesIO()
    Image.new("RGB", (9 + row["id"] % 3, 8), (row["id"], 2 * row["id"], 3)).save(stream, "PNG")
    return {"image": stream.getvalue()}


def flipped(row: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return {"image": row["image"].flip(2) if torch.rand((), generator=generator) < 0.5 else row["image"] + 1}


class Items(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset that draws."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"id": i, "noise": torch.rand(2), "text": f"item {i}"}


def other(ds: midepoch.Dataset) -> midepoch.Dataset:
    return ds.slice(0, 20).shuffle(seed=6)


PHASES = midepoch.Schedule(
    [
        midepoch.Phase("warm-up", {"a": 1}, rows=12),
        midepoch.Phase("main", {"a": 2, "b": 1}, rows=17),
        midepoch.Phase("anneal", rows=16, final_weights={"b": 1}),
    ],
    max_passes={"b": 1},
)
TOKENS = midepoch.Schedule(
    [midepoch.Phase("main", {"a": 1, "b": 2}, tokens=100), midepoch.Phase("end", {"a": 1}, tokens=60)]
)

PIPELINES: dict[str, Pipeline] = {
    "in order": lambda ds: ds,
    "rows": lambda ds: ds.shuffle(seed=1),
    "window": lambda ds: ds.shuffle(seed=1, scope="window", window=3),
    "files": lambda ds: ds.shuffle(seed=1, scope="files"),
    "slice": lambda ds: ds.slice(3, 31).shuffle(seed=2),
    "select": lambda ds: ds.select([30, 2, 2, 17, 8, 9, 10, 11]).shuffle(seed=2, scope="window", window=1),
    "split": lambda ds: ds.train_test_split(0.3, seed=2)["train"].shuffle(seed=2, scope="window", window=2),
    "cached": lambda ds: ds.filter(odd).map(double).cache().shuffle(seed=1),
    "transform": lambda ds: ds.shuffle(seed=1).class_encode_column("text").with_transform(noisy_batch),
    "weighted": lambda ds: ds.weighted(np.arange(ROWS) % 5, seed=1),
    "weighted once": lambda ds: ds.weighted("id", replacement=False, num_samples=33, seed=1).map(double),
    "weighted noise": lambda ds: ds.weighted("id", num_samples=50, seed=1).map(noise, with_generator=True),
    "balanced": lambda ds: ds.balanced("text", seed=2).map(group_sum, batched=True, batch_size=4),
    "sort": lambda ds: ds.sort("tokens", length=True, reverse=True).map(noise, with_generator=True),
    "map": lambda ds: ds.shuffle(seed=1).map(double),
    "batched map": lambda ds: ds.shuffle(seed=1).map(group_sum, batched=True, batch_size=5),
    "two batched maps": lambda ds: ds.map(group_sum, batched=True, batch_size=4).map(
        group_sum, batched=True, batch_size=3
    ),
    "random map": lambda ds: ds.shuffle(seed=3).map(noise, with_generator=True),
    "global generators": lambda ds: ds.shuffle(seed=3).map(global_noise),
    "cast": lambda ds: ds.shuffle(seed=1).map(double).cast({"double": "int16", "text": pa.large_string()}),
    "decode": lambda ds: ds.shuffle(seed=3).map(drawn).decode("image", size=6).map(flipped, with_generator="torch"),
    "skipping map": lambda ds: ds.shuffle(seed=4).map(not_sevens, on_error="skip"),
    "columns": lambda ds: ds.rename_columns({"id": "n"}).select_columns(["n", "tokens"]).shuffle(seed=5),
    "memory": lambda _: midepoch.from_arrow(numbered(0, ROWS)).shuffle(seed=1).map(double),
    "map style": lambda _: midepoch.from_map_style(Items(), columns=["id", "noise", "text"]).shuffle(seed=1),
    "torch": lambda ds: ds.shuffle(seed=1).with_format("torch"),
    "arrow": lambda ds: ds.shuffle(seed=1, scope="window", window=2).with_format("arrow"),
    "shard": lambda ds: ds.shuffle(seed=1).shard(3, 1, mode="example"),
    "file shard": lambda ds: ds.shuffle(seed=1, scope="files").shard(2, 1, mode="file"),
    "filter": lambda ds: ds.shuffle(seed=1).filter(odd),
    "filter in order": lambda ds: ds.filter(odd),
    "batched filter": lambda ds: ds.shuffle(seed=1).filter(odd_of_group, batched=True, batch_size=4),
    "expression": lambda ds: ds.shuffle(seed=1).filter(pc.field("id") > 11),
    "skipping filter": lambda ds: ds.shuffle(seed=1).filter(odd_or_fails, on_error="skip"),
    "weighted filter": lambda ds: ds.weighted("id", seed=1).filter(odd).map(noise, with_generator=True),
    "flat map": lambda ds: ds.shuffle(seed=1).flat_map(some_copies),
    "to any": lambda ds: ds.map(group_sum, batched=True, batch_size=5).map(halves, True, 4, one_to_one=False),
    "batch": lambda ds: ds.shuffle(seed=1).select_columns("id").batch(3).with_format("python"),
    "pack": lambda ds: ds.shuffle(seed=1).filter(odd).pack(8, column="tokens", pad=-1),
    "best fit": lambda ds: ds.shuffle(seed=1).pack(
        24, column="tokens", strategy="best_fit", window=7, labels=True, mask_first=True
    ),
    "shuffled outputs": lambda ds: ds.filter(odd).shuffle(seed=3, window=5).map(noise, with_generator=True),
    "take": lambda ds: ds.shuffle(seed=1).filter(odd).take(11),
    "skip": lambda ds: ds.shuffle(seed=1).filter(odd).skip(4).map(double),
    "mix": lambda ds: midepoch.mix([ds.shuffle(seed=1).filter(odd), other(ds)], [2, 1], seed=5, stop="all"),
    "schedule": lambda ds: midepoch.mix({"a": ds.shuffle(seed=1).filter(odd), "b": other(ds)}, PHASES, seed=5),
    "plain schedule": lambda ds: midepoch.mix({"a": ds.shuffle(seed=1), "b": other(ds)}, PHASES, seed=5),
    "schedule by tokens": lambda ds: midepoch.mix({"a": ds, "b": other(ds)}, TOKENS, seed=5).pack(8, "tokens", pad=-1),
    "plain mix": lambda ds: midepoch.mix([ds.shuffle(seed=1), other(ds)], [2, 1], seed=5),
    "concat": lambda ds: midepoch.concat([ds.shuffle(seed=1).filter(odd), other(ds)]),
    "zip": lambda ds: midepoch.zip(
        [ds.shuffle(seed=1).filter(odd), other(ds).rename_columns({"id": "b", "text": "c"}).select_columns(["b", "c"])]
    ),
    "weighted mix": lambda ds: midepoch.mix(
        [ds.weighted("id", seed=1).filter(odd), other(ds).weighted(np.arange(20), replacement=False, seed=2)], seed=5
    ),
    "packed mix": lambda ds: midepoch.mix([ds.shuffle(seed=1), other(ds)], seed=5, stop="all").pack(
        16, column="tokens"
    ),
    "filter shard": lambda ds: ds.shuffle(seed=1).filter(odd).shard(2, 1),
}
IN_LANES = list(PIPELINES)[list(PIPELINES).index("filter") :]
GROUPED = ["batched filter", "to any", "best fit", "shuffled outputs", "batch"]  # rows count when their group is over
SHARDS = [name for name in PIPELINES if "shard" in name]

REPEATED = ["rows", "window", "slice", "transform", "weighted", "weighted once", "weighted noise", "map", "batched map"]
REPEATED += ["two batched maps", "random map", "decode", "memory", "torch", "filter", "filter in order"]
REPEATED += ["batched filter", "skipping filter", "pack", "plain schedule"]
"""Each branch of order/, pipeline/, state/, loader/, iteration/ and audit/ that one of these takes in a test of this
file is taken by another pipeline in the same test. In most tests they run under ``-m slow``; in the default suite each
has its order with threads, and the rows of half of them are resumed."""


def unrepeated(names: Iterable[str] = PIPELINES, besides: Iterable[str] = ()) -> list[Any]:
    """Parameters: these names, of which the repeated ones, except ``besides``, run under ``-m slow``."""
    slow = set(REPEATED) - set(besides)
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    return lambda: midepoch.from_files(small_files)


@pytest.fixture
def same_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    """The files are opened once, which is a fifth of the time of a resume; each call makes a new dataset of them."""
    pipeline = midepoch.from_files(small_files).pipeline
    return lambda: midepoch.Dataset(pipeline)


BETWEEN = (1, 8, 10, 14, 27)
"""Items into the first epoch: at every place of groups of 3, 4 and 5, at the ends of blocks and within them."""


def resumes(make: Callable[[], Any], far: bool, between: Sequence[int] = BETWEEN) -> int:
    """At moments ``between`` of the first epoch, and around the ends of two, 4 items; at the first end an epoch. Far: all, always.

    The second epoch has no moments but those around its end: a state one item before it has the epoch, and a position
    far within it.
    """
    if far:
        return assert_resumes_exactly(make)
    source = make()
    end = sum(1 for _ in source)
    if hasattr(source, "close"):
        source.close()
    around = [0, end - 1, end, end + 1, 2 * end, 2 * end + 1]
    moments = (*(moment for moment in between if moment < end), *around)
    return assert_resumes_exactly(make, steps={**dict.fromkeys(moments, 4), end: end + 2})


far = pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["near", "far"])


@far
@pytest.mark.parametrize("name", unrepeated(besides=REPEATED[1::2]))
def test_rows_resume_exactly(name: str, far: bool, same_ds: Callable[[], midepoch.Dataset]) -> None:
    assert resumes(lambda: PIPELINES[name](same_ds()), far, BETWEEN[::2]) > 10  # those of the others are below


PACKED = ["pack", "best fit", "packed mix", "schedule by tokens"]


@pytest.mark.parametrize("name", PACKED)
def test_what_the_kernel_packs_numpy_resumes(
    name: str, open_ds: Callable[[], midepoch.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pipeline that is made changes the path, so each compares or resumes what the other delivered."""
    by_kernel = cycle([True, False])

    def make() -> midepoch.Dataset:
        native.use(monkeypatch, next(by_kernel))
        return PIPELINES[name](open_ds())

    assert same(list(make()), list(make()))
    assert resumes(make, far=False) > 10
    assert resumes(lambda: make().loader(3), far=False) > 5


# What is dropped depends on how many rows there are: fewer by a skipping map, or by a shard.
DROPPING = ["skipping map", "file shard"]
DROPPED = [
    pytest.param(True, name, marks=() if name in DROPPING else pytest.mark.slow)
    for name in PIPELINES
    if name not in SHARDS or name not in IN_LANES  # a shard with lanes of its own cannot ask the others
]
KEPT = [
    pytest.param(False, *each.values, marks=each.marks)
    for each in unrepeated(besides=("memory", "batched filter", "pack"))
]


@far
@pytest.mark.parametrize(("drop_last", "name"), [*KEPT, *DROPPED])
def test_loader_resumes_exactly(name: str, drop_last: bool, far: bool, same_ds: Callable[[], midepoch.Dataset]) -> None:
    make = lambda: PIPELINES[name](same_ds()).loader(3, drop_last=drop_last)  # noqa: E731
    assert resumes(make, far, BETWEEN[1::2]) > 5


FEW, MORE = [1, 8], [0, 1, 3, 4, 7, 8, 9, 15]


# In the middle of an epoch, and at its end: with and without workers, each for one with positions and one with lanes.
@pytest.mark.parametrize(
    ("name", "saved_with", "steps"),
    [
        *(("batched map", 0, FEW), ("skipping map", 2, FEW), ("file shard", 0, FEW), ("pack", 2, FEW), ("mix", 0, FEW)),
        *(
            pytest.param(name, workers, steps, marks=pytest.mark.slow)
            for name in ("rows", "batched map", "skipping map", "file shard", "pack", "mix")
            for workers in (0, 2)
            for steps in (FEW, MORE)
        ),
    ],
)
def test_loader_resumes_with_other_workers(
    name: str, saved_with: int, steps: list[int], open_ds: Callable[[], midepoch.Dataset]
) -> None:
    def make(workers: int, **options: Any) -> Callable[[], midepoch.Loader]:
        return lambda: PIPELINES[name](open_ds()).loader(5, num_workers=workers, **options)

    others = [make(0 if saved_with else 1), make(3, persistent_workers=True)]
    # Those of FEW are in the first epoch, and what follows extends into the second.
    assert_resumes_exactly(make(saved_with), resume_with=others, epochs=1 if steps == FEW else 2, steps=steps, tail=9)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *(
            pytest.param(name, (1 + number % 3,), marks=pytest.mark.slow if name in REPEATED else ())
            for number, name in enumerate(PIPELINES)
        ),
        *(pytest.param(name, (1, 2, 3), marks=pytest.mark.slow) for name in PIPELINES),
    ],
)
def test_order_does_not_depend_on_workers(
    name: str, numbers: tuple[int, ...], open_ds: Callable[[], midepoch.Dataset]
) -> None:
    """G3."""
    expected = list(PIPELINES[name](open_ds()).loader(4))
    for workers in numbers:
        found = list(PIPELINES[name](open_ds()).loader(4, num_workers=workers))
        assert same(found, expected)


# Its numbers come from ``random``, of which there is one for all threads.
REFUSED = ["global generators"]


# Resumes with threads: one pipeline of every kind of cursor, and those that draw or read with an object of the user.
IN_THREADS = ["window", "weighted", "batched map", "random map", "decode", "skipping map", "map style", "file shard"]
IN_THREADS += ["flat map", "to any", "best fit", "shuffled outputs", "take", "schedule", "mix", "concat", "zip"]
IN_THREADS += ["filter shard"]


@pytest.mark.parametrize("name", PIPELINES)
def test_order_does_not_depend_on_the_kind_of_worker(name: str, same_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(workers: int) -> midepoch.Loader:
        return PIPELINES[name](same_ds()).loader(4, num_workers=workers, worker_type="thread")

    if name in REFUSED:
        with pytest.raises(midepoch.MidepochError, match="global generator"):
            next(iter(make(2)))
        return
    assert same(list(make(2)), list(make(0)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_THREADS else pytest.mark.slow)
        for name in PIPELINES
        if name not in REFUSED
    ],
)
def test_threads_resume_with_other_workers(name: str, same_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(workers: int) -> Callable[[], midepoch.Loader]:
        return lambda: PIPELINES[name](same_ds()).loader(4, num_workers=workers, worker_type="thread")

    assert_resumes_exactly(make(2), resume_with=[make(0), make(3)], steps=[4, 10], tail=6)


def counted(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the numbers of its lanes only.

    A cursor is before or after rows that yield nothing, depending on the size of a chunk, which depends on time.
    """
    lanes = {number: {**lane, "at": None} for number, lane in lanes_of(state).items()}
    return {**state, "cursor": lanes}


@pytest.mark.parametrize(
    ("name", "workers"),
    alternating([name for name in PIPELINES if name not in REPEATED], [0, 2])
    + [pytest.param(name, workers, marks=pytest.mark.slow) for name in REPEATED for workers in (0, 2)],
)
def test_state_follows_delivery_not_what_was_moved_ahead(
    name: str, workers: int, open_ds: Callable[[], midepoch.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: dict[str, Any]) -> list[Any]:
        kind = "process" if name in REFUSED else "thread"
        loader = PIPELINES[name](open_ds()).loader(4, num_workers=workers, worker_type=kind, **options)
        return [(batch, counted(loader.state_dict()), loader.epoch) for _ in range(2) for batch in loader]

    expected = run({})
    # A real move to a device that is here: what is under way is the same for a GPU.
    monkeypatch.setattr(feeds, "mover_for", lambda _: movers.TorchMover(torch.device("cpu")))
    assert same(run({}), expected)


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
@settings(max_examples=60)
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
@settings(max_examples=60)
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


# Rules that are the same for every pipeline


def batches_of_epoch(make: Callable[[], midepoch.Loader], epoch: int) -> list[Any]:
    loader = make()
    loader.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("name", unrepeated())
def test_the_last_batch_delivered_is_the_end_of_the_pass(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    make = lambda: PIPELINES[name](open_ds()).loader(4)  # noqa: E731
    first, second = batches_of_epoch(make, 0), batches_of_epoch(make, 1)
    loader = make()
    for number, _ in enumerate(loader, 1):
        if number == len(first):
            break
    assert same(list(loader), second) and loader.epoch == 2
    if name in SHARDS:
        return  # another shard may have a row left: then a resumed pass is there for that one
    resumed = make()
    loader = make()
    for number, _ in enumerate(loader, 1):
        if number == len(first):
            resumed.load_state_dict(loader.state_dict())
            break
    assert same(list(resumed), second)


@pytest.mark.parametrize("name", ["filter", "filter in order", "pack", "mix", "take", "flat map"])
def test_every_rank_ends_its_pass_with_its_own_last_batch(
    name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path
) -> None:
    """Also where ranks run lanes of their own, and the ledger says that nothing is missing."""
    ledger = Ledger(tmp_path, attempt="1")
    for rank in range(2):
        make = lambda rank=rank, **more: PIPELINES[name](open_ds()).loader(  # noqa: E731
            2, rank=rank, world_size=2, last_batch="uneven", **more
        )
        expected = [batches_of_epoch(make, epoch) for epoch in range(3)]
        loader = make(audit=ledger)
        for epoch in expected:
            found = []
            for batch in loader:
                found.append(batch)
                if len(found) == len(epoch):
                    break
            assert same(found, epoch)
        list(loader)
        loader.close()
    run = read_run(tmp_path)
    assert run.exact and all(epoch.complete for epoch in run.epochs), (run.problems, run.epochs)


@pytest.mark.parametrize("name", ["filter", "filter in order", "pack", "mix", "take", "flat map"])
def test_a_run_killed_after_the_last_batch_of_an_epoch_proves_itself(
    name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path
) -> None:
    """Nobody asked for another batch, so that the end of the epoch is known only from the lanes, or from the resume."""
    make = lambda **more: PIPELINES[name](open_ds()).loader(2, **more)  # noqa: E731
    count = len(list(make()))
    loader = make(audit=Ledger(tmp_path, attempt="1"))
    for _ in range(count):
        next(loader)
    state = loader.state_dict()
    loader.close()
    resumed = make(audit=Ledger(tmp_path, attempt="2"))
    resumed.load_state_dict(state)
    list(resumed)
    resumed.close()
    run = read_run(tmp_path)
    assert run.exact and [epoch.complete for epoch in run.epochs] == [True, True], (run.problems, run.epochs)


@pytest.mark.parametrize("name", unrepeated())
def test_a_pass_that_was_left_continues_if_the_data_is_shuffled(
    name: str, open_ds: Callable[[], midepoch.Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    make = lambda: PIPELINES[name](open_ds()).loader(1)  # noqa: E731
    whole = batches_of_epoch(make, 0)
    loader = make()
    assert same([next(iter(loader)), next(iter(loader))], [whole[0], whole[0]])  # a look moves nothing
    left = []
    for batch in loader:
        left.append(batch)
        if len(left) == 3:
            break
    state = loader.state_dict()
    rest = list(loader)
    warnings = [record.message for record in caplog.records if "begins again" in record.message]
    if loader.pipeline.node.shuffled:
        assert same(left + rest, whole) and not warnings
        resumed = make()
        resumed.load_state_dict(state)
        assert same(list(resumed), rest)  # in the process and after a resume alike
    else:
        assert same(rest, whole) and len(warnings) == 1


@pytest.mark.parametrize("name", ["rows", "in order", "filter", "filter in order"])
def test_naming_an_epoch_begins_it(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    make = lambda: PIPELINES[name](open_ds()).loader(2)  # noqa: E731
    loader, whole = make(), batches_of_epoch(make, 0)
    for _ in range(3):
        loader.set_epoch(0)
        assert same([batch for batch, _ in zip(loader, range(3), strict=False)], whole[:3])
    for more in (1, 2):  # a look, or a few batches, after a pass that was left
        loader.set_epoch(0)
        for count in (2, more):
            assert len([batch for batch, _ in zip(loader, range(count), strict=False)]) == count
        loader.set_epoch(0)
        assert same(next(iter(loader)), whole[0])
    loader.set_epoch(0)
    resumed = make()
    batches = iter(loader)
    next(batches), next(batches)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)  # as loops do that name every epoch: it resumes
    next(iter(resumed))  # nor does a look change that
    resumed.set_epoch(0)
    assert same(list(resumed), whole[2:])


def test_groups_of_batched_functions_are_at_fixed_positions(open_ds: Callable[[], midepoch.Dataset]) -> None:
    """Whether rows are iterated, indexed or loaded, with any batch size and any number of workers."""
    ds = open_ds().shuffle(seed=1).map(group_sum, batched=True, batch_size=5)
    expected = [(row["id"], row["sum"]) for row in ds]
    order = [row for row, _ in expected]
    assert [sums for _, sums in expected] == [sum(order[i - i % 5 : i - i % 5 + 5]) for i in range(ROWS)]
    for size, workers in ((4, 0), (3, 0), (5, 2), (37, 0), (1, 1)):
        batches = list(ds.loader(size, num_workers=workers))
        found = [pair for b in batches for pair in zip(b["id"].tolist(), b["sum"].tolist(), strict=True)]
        assert found == expected, (size, workers)
    assert [(ds[i]["id"], ds[i]["sum"]) for i in range(ROWS)] == expected
    assert [pair for b in ds.iter(7) for pair in zip(b["id"], b["sum"], strict=True)] == expected


def test_groups_stay_where_they_are_when_the_world_changes(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds().shuffle(seed=1).map(group_sum, batched=True, batch_size=5)

    def ranks(world: int) -> list[midepoch.Loader]:
        return [ds.loader(6 // world, rank=rank, world_size=world, last_batch="uneven") for rank in range(world)]

    def pairs(loader: midepoch.Loader) -> set[tuple[int, int]]:
        return {pair for b in loader for pair in zip(b["id"].tolist(), b["sum"].tolist(), strict=True)}

    expected = set().union(*(pairs(loader) for loader in ranks(2)))
    for world in (1, 3):
        seen: set[tuple[int, int]] = set()
        begun = ranks(2)
        for loader in begun:
            batches = iter(loader)
            for batch in (next(batches), next(batches)):
                seen |= set(zip(batch["id"].tolist(), batch["sum"].tolist(), strict=True))
        for loader in ranks(world):
            loader.load_state_dict(begun[0].state_dict())
            seen |= pairs(loader)
        assert seen == expected and len(seen) == ROWS


@pytest.mark.parametrize("name", PIPELINES)
def test_methods_mean_the_same_for_all(name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    ds = PIPELINES[name](open_ds())
    loader = ds.loader(4)
    rows = list(ds)
    names = rows[0].schema.names if isinstance(rows[0], pa.Table) else list(rows[0])
    assert sorted(ds.column_names) == sorted(names)
    count = sum(1 for _ in loader.progress())
    assert loader.stats().batches == count and loader.stats().rows == len(rows)
    assert loader.estimated_len == count and ds.changes == loader.changes == ()
    assert (loader.skipped > 0) == ("skipping" in name)
    assert repr(ds).startswith("Dataset(") and repr(loader).startswith("Loader(")
    assert "<table" in ds._repr_html_() and "<table" in loader._repr_html_()
    if name in IN_LANES:
        for wrong in (lambda: len(ds), lambda: ds[0], lambda: ds.slice(0, 3), lambda: ds.select([1])):
            with pytest.raises(TypeError, match=r"estimated_len|before the steps"):
                wrong()
    if name not in SHARDS:
        shards = [list(ds.shard(2, index)) for index in range(2)]
        assert sum(map(len, shards)) >= len(rows) - 2 * len(rows) // 3
        if name in IN_LANES and name not in ("best fit", "shuffled outputs"):
            few = list(ds.take(3))
            assert len(few) == 3 and same(list(ds.skip(3).take(2)), list(ds.take(5))[3:])


def run_ranks(name: str, ds: midepoch.Dataset, world: int, states: Any, steps: int | None, ledger: Any) -> list[Any]:
    """All ranks of a world for some steps each (or to the end): their states."""
    found = []
    for rank in range(world):
        loader = PIPELINES[name](ds).loader(
            2 if name == "skipping map" else 1, rank=rank, world_size=world, last_batch="uneven", audit=ledger
        )
        if states is not None:
            loader.load_state_dict(states if loader.takes_states_of_all_ranks else states[0])
        for number, _ in enumerate(loader, 1):
            if number == steps:
                break
        found.append(loader.state_dict())
        loader.close()
    return found


@pytest.mark.parametrize("name", unrepeated(name for name in PIPELINES if name not in SHARDS))
def test_the_ledger_proves_every_pipeline(name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    """On one rank, then on two, then on one; what a start had done after its last checkpoint was done again."""
    states = None
    for attempt, (world, steps) in enumerate(((1, 2), (2, 1), (1, 2), (1, None))):
        ledger = Ledger(tmp_path, attempt=f"start {attempt}")
        saved = run_ranks(name, open_ds(), world, states, steps, ledger)
        if attempt != 2:  # killed before it saved
            states = saved
    run = read_run(tmp_path)
    (epoch,) = run.epochs
    rows = PIPELINES[name](open_ds()).pipeline.rows
    assert run.exact and epoch.complete, (run.problems, epoch)
    assert epoch.once + epoch.dropped == rows and (epoch.again > 0 or name in GROUPED)
    assert run.attempts == 4 and run.worlds == [1, 2, 1]
    seen: dict[tuple[int, int], set[int]] = {}
    for step in range(1, run.steps + 1):
        for one in run.rows_of_step(step):
            seen.setdefault((one.row, one.source), set()).add(step)
    assert seen == {key: {one.step for one in run.steps_of_row(*key)} for key in seen}, (
        "by step and by row, the ledger says the same"
    )
    if name in FILTERED:
        assert epoch.filtered == FILTERED[name]


FILTERED = {"filter": 19, "filter in order": 19, "pack": 19, "mix": 19, "concat": 19, "expression": 12, "flat map": 13}
"""Rows that become nothing: 19 of 37 numbers are even, 12 are not above 11, and 13 are multiples of 3."""


@pytest.mark.parametrize("name", ["rows", "filter", "pack", "mix"])
def test_the_ledger_shows_a_rank_without_a_record(
    name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, attempt="1")
    list(PIPELINES[name](open_ds()).loader(2, rank=0, world_size=2, last_batch="uneven", audit=ledger))
    run = read_run(tmp_path)
    assert not run.exact and not run.epochs[0].complete and "no record of rank 1" in run.problems[0]
    assert run.epochs[0].never + run.epochs[0].pending > 0


@pytest.mark.parametrize("name", ["filter", "pack", "mix", "concat"])
def test_the_ledger_shows_rows_that_were_lost_or_repeated(
    name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path
) -> None:
    def start(folder: str, attempt: str, state: Any, steps: int | None) -> Any:
        ledger = Ledger(tmp_path / folder, attempt=attempt)
        return run_ranks(name, open_ds(), 1, state, steps, ledger)

    early, late = start("x", "x", None, 1), start("y", "y", None, 4)
    start("lost", "a", None, 1)
    start("lost", "b", late, None)  # a state of another run: what came before it was not seen here
    lost = read_run(tmp_path / "lost")
    assert not lost.exact and lost.epochs[0].never > 0 and not lost.epochs[0].repeated
    loader = PIPELINES[name](open_ds()).loader(1, audit=Ledger(tmp_path / "again", attempt="a"))
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    ledger, loader._ledger = loader._ledger, None
    loader.load_state_dict(early)  # as a fault would: back, and nothing says so
    loader._ledger = ledger
    list(loader)
    again = read_run(tmp_path / "again")
    assert not again.exact and again.epochs[0].repeated > 0


# Exclusions


def rows_in(batches: Iterator[Any]) -> list[str]:
    """All rows of batches, as text, sorted."""
    found: list[str] = []
    for batch in batches:
        columns = batch.to_pydict() if isinstance(batch, (pa.Table, pa.RecordBatch)) else batch
        lists = [values.tolist() if hasattr(values, "tolist") else list(values) for values in columns.values()]
        found += map(repr, zip(*lists, strict=True))
    return sorted(found)


@far
@pytest.mark.parametrize("name", unrepeated())
def test_an_excluded_range_is_resumed_exactly(name: str, far: bool, same_ds: Callable[[], midepoch.Dataset]) -> None:
    """Around it (far: at every step), with workers, and on other world sizes: all batches but the excluded ones."""

    def make(workers: int = 0, **options: Any) -> midepoch.Loader:
        kind = "process" if name in REFUSED else "thread"
        return PIPELINES[name](same_ds()).loader(3, num_workers=workers, worker_type=kind, **options)

    whole = batches_of_epoch(make, 0)
    first = max(1, len(whole) // 3)
    stop = min(first + 3, len(whole) - 1)
    expected = whole[:first] + whole[stop:]

    def excluding(workers: int = 0) -> midepoch.Loader:
        loader = make(workers)
        excluded = range(first + 1, stop + 1)  # steps are counted from 1
        assert loader.exclude(steps=excluded) >= len(rows_in(iter(whole[first:stop]))) and loader.steps == 0
        return loader

    loader = excluding()
    assert same(list(loader), expected)
    assert loader.steps - len(expected) in ((0, 1) if name in SHARDS else (0,))  # the last may be of other shards only
    assert same(list(loader), batches_of_epoch(make, 1))
    moments = None if far else [0, first]
    assert_resumes_exactly(excluding, resume_with=[make], epochs=2 if far else 1, steps=moments, tail=3)
    assert same(list(excluding(1)), expected)

    loader = make()
    batches = iter(loader)
    delivered = [next(batches) for _ in range(first - 1)]
    loader.exclude(steps=range(first + 1, stop + 1))
    for number in range(first - 1, len(expected) - 1):
        if (far or number == first - 1) and name not in (*SHARDS, "skipping map"):
            world, left = 2 + number % 2, rows_in(iter(expected[number:]))
            ranks = [make(rank=rank, world_size=world, last_batch="uneven") for rank in range(world)]
            for rank in ranks:
                rank.load_state_dict(loader.state_dict())
            assert sorted(row for rank in ranks for row in rows_in(iter(rank))) == left
        delivered.append(next(batches))
    assert same(delivered, expected[:-1])


@pytest.mark.parametrize("name", unrepeated(name for name in PIPELINES if name not in SHARDS))
def test_the_ledger_counts_what_is_excluded(name: str, open_ds: Callable[[], midepoch.Dataset], tmp_path: Path) -> None:
    whole = batches_of_epoch(lambda: PIPELINES[name](open_ds()).loader(3), 0)
    loader = PIPELINES[name](open_ds()).loader(3, audit=Ledger(tmp_path, attempt="1"))
    batches = iter(loader)
    next(batches)
    count = loader.exclude(steps=range(2, 4 if len(whole) > 3 else 3))
    list(batches)
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete and proof.excluded + proof.excluded_outputs == count > 0
    assert proof.once + proof.dropped + proof.excluded == proof.rows
