"""Batches by tokens, changing batch sizes, passes of a number of steps: one list, and the rules that hold for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_arrow
from midepoch import CheckpointMismatchError
from midepoch.order.bijection import derive
from midepoch.order.budget import Budget, dealt
from midepoch.testing import assert_resumes_exactly
from states import lanes_of, with_lane

ROWS = 150


def table() -> pa.Table:
    lengths = np.minimum(np.random.default_rng(5).lognormal(2.5, 0.8, ROWS).astype(int), 60)
    tokens = [None if i == 7 else list(range(i, i + length)) for i, length in enumerate(lengths.tolist())]
    return pa.table(
        {
            "id": np.arange(ROWS),
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "count": [None if each is None else len(each) for each in tokens],
            "text": ["x" * int(length) for length in lengths],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("planned")
    for i in range(3):
        write_arrow(made / f"{i}.arrow", table().slice(i * 50, 50), 20)
    pq.write_table(table(), made / "all.parquet", row_group_size=20)
    return made


@pytest.fixture
def open_ds(folder: Path) -> Callable[[], midepoch.Dataset]:
    return lambda: midepoch.from_files(str(folder / "*.arrow"))


def tokenized(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [ord(each) for each in row["text"]]}


def half(row: dict[str, Any]) -> int:
    return len(row["text"]) // 2


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def tenfold(lengths: np.ndarray[Any, Any]) -> float:
    return float((lengths**1.5).sum())


LOADERS: dict[str, Callable[..., midepoch.Loader]] = {
    "padded": lambda ds, **kw: ds.shuffle(seed=1).loader(max_tokens=200, bucket_window=40, **kw),
    "in order": lambda ds, **kw: ds.loader(max_tokens=150, bucket_window=40, pad_to_multiple_of=8, **kw),
    "one window": lambda ds, **kw: ds.shuffle(seed=1).loader(max_tokens=200, **kw),
    "varlen": lambda ds, **kw: ds.shuffle(seed=1).loader(max_tokens=100, bucket_window=40, layout="varlen", **kw),
    "most rows": lambda ds, **kw: ds.shuffle(seed=1).loader(5, max_tokens=200, bucket_window=40, **kw),
    "balanced": lambda ds, **kw: (
        ds.shuffle(seed=1).with_lanes(6).loader(max_tokens=100, bucket_window=75, balance="quadratic", **kw)
    ),
    "balanced by a function": lambda ds, **kw: (
        ds.shuffle(seed=1).with_lanes(6).loader(max_tokens=100, bucket_window=75, balance=tenfold, **kw)
    ),
    "numbers": lambda ds, **kw: (
        ds.remove_columns("input_ids")
        .shuffle(seed=1)
        .loader(max_tokens=200, bucket_window=40, length="count", collate_fn=as_columns, **kw)
    ),
    "mapped": lambda ds, **kw: (
        ds.shuffle(seed=1)
        .map(tokenized)
        .select_columns(["id", "input_ids"])
        .loader(max_tokens=200, bucket_window=40, **kw)
    ),
    "function": lambda ds, **kw: (
        ds.remove_columns("input_ids")
        .shuffle(seed=1)
        .loader(max_tokens=100, bucket_window=40, length=half, collate_fn=as_columns, **kw)
    ),
    "filtered": lambda ds, **kw: ds.shuffle(seed=1).filter(odd).loader(max_tokens=200, bucket_window=20, **kw),
    "mixed": lambda ds, **kw: (
        midepoch.mix([ds.slice(0, 100).shuffle(seed=1), ds.slice(100).map(tokenized)], [0.6, 0.4], seed=2, stop="all")
        .select_columns(["id", "input_ids"])
        .loader(max_tokens=200, bucket_window=30, **kw)
    ),
    "sizes": lambda ds, **kw: ds.shuffle(seed=1).loader({0: 2, 5: 3, 12: 7}, length="input_ids", layout="padded", **kw),
    "sizes of lanes": lambda ds, **kw: (
        ds.shuffle(seed=1).filter(odd).select_columns("id").loader({0: 2, 5: 3, 12: 7}, **kw)
    ),
    "steps": lambda ds, **kw: ds.shuffle(seed=1).select_columns("id").loader(8, steps_per_epoch=7, **kw),
    "steps of lanes": lambda ds, **kw: (
        ds.shuffle(seed=1).filter(odd).select_columns("id").loader(8, steps_per_epoch=7, **kw)
    ),
    "steps of tokens": lambda ds, **kw: ds.shuffle(seed=1).loader(
        max_tokens=200, bucket_window=40, steps_per_epoch=7, **kw
    ),
}
BY_POSITION = [
    "padded",
    "in order",
    "one window",
    "varlen",
    "most rows",
    "balanced",
    "balanced by a function",
    "numbers",
]
AT_RUN_TIME = ["mapped", "function", "filtered", "mixed"]


def as_columns(rows: list[Any]) -> dict[str, Any]:
    return {"id": np.array([row["id"] for row in rows]), "keys": sorted(rows[0])}


def ids(batch: Any) -> list[int]:
    return [int(each) for each in batch["id"]]


def epoch_of(loader: midepoch.Loader) -> list[list[int]]:
    return [ids(batch) for batch in loader]


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_resumes_exactly_with_any_workers(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    make = lambda **kw: LOADERS[name](open_ds(), **kw)  # noqa: E731
    threads = lambda: make(num_workers=2, worker_type="thread")  # noqa: E731
    assert assert_resumes_exactly(make, resume_with=[threads], tail=4, steps=[1, 7, 8, 13]) > 5


# Planned and at run time, each with lengths of a column and of a function; in lanes; sizes and steps.
IN_PROCESSES = ["varlen", "balanced by a function", "mapped", "function", "filtered", "mixed", "sizes of lanes"]
IN_PROCESSES += ["steps of tokens"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind == "thread" or name in IN_PROCESSES else pytest.mark.slow)
        for name in LOADERS
        for kind in ("process", "thread")
    ],
)
def test_batches_do_not_depend_on_workers(name: str, kind: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    expected = epoch_of(LOADERS[name](open_ds()))
    with LOADERS[name](open_ds(), num_workers=2, worker_type=kind) as loader:
        assert epoch_of(loader) == expected


@pytest.mark.parametrize("name", BY_POSITION)
def test_batches_do_not_depend_on_the_world(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    """Batch k is that of rank k mod S."""
    expected = epoch_of(LOADERS[name](open_ds()))
    for world in (2, 3, 5):
        ranks = [epoch_of(LOADERS[name](open_ds(), rank=rank, world_size=world)) for rank in range(world)]
        assert [ranks[k % world][k // world] for k in range(len(expected))] == expected
        lengths = [len(LOADERS[name](open_ds(), rank=rank, world_size=world)) for rank in range(world)]
        assert lengths == list(map(len, ranks))


def over_worlds(make: Callable[..., midepoch.Loader], legs: Any, states_of: Callable[[list[Any]], Any]) -> list[int]:
    """The ids of an epoch that is run on changing numbers of ranks, (ranks, steps) after each other; the last to its end."""
    seen: list[int] = []
    state: Any = None
    for world, steps in legs:
        loaders = [make(rank=rank, world_size=world, last_batch="uneven") for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        if steps is None:
            return seen + [each for loader in loaders for batch in epoch_of(loader) for each in batch]
        for _ in range(steps):
            seen += [each for loader in loaders for each in ids(next(loader))]
        state = states_of([loader.state_dict() for loader in loaders])
    raise AssertionError("the last leg has no end")


@pytest.mark.parametrize("name", [*BY_POSITION, "sizes"])
def test_every_row_once_over_changing_worlds(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def one(states: list[Any]) -> Any:
        assert all(each == states[0] for each in states)
        assert len(json.dumps(states[0])) < 1024
        return json.loads(json.dumps(states[0]))

    legs = ((2, 3), (3, 1), (1, 2), (4, None))
    assert sorted(over_worlds(lambda **kw: LOADERS[name](open_ds(), **kw), legs, one)) == list(range(ROWS))


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_every_row_once_over_changing_worlds_of_lanes(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    expected = sorted(each for batch in epoch_of(LOADERS[name](open_ds())) for each in batch)
    seen = over_worlds(lambda **kw: LOADERS[name](open_ds(), **kw), ((2, 2), (1, 1), (2, None)), list)
    if name != "mixed":  # a mix repeats its shorter part
        assert sorted(seen) == expected
    assert set(seen) == set(expected)


CHANGES: list[dict[str, Any]] = [
    {"max_tokens": 90},
    {"max_tokens": 400},
    {"max_tokens": 200, "bucket_window": 25},
    {"max_tokens": 200, "pad_to_multiple_of": 16},
    {"max_tokens": 200, "balance": "tokens"},
    {"max_tokens": 200, "layout": "varlen"},
    {"batch_size": 3, "max_tokens": 200},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_budget_may_change_in_the_middle_of_a_window(
    change: dict[str, Any], open_ds: Callable[[], midepoch.Dataset]
) -> None:
    """As after running out of memory: no row is lost or repeated, and the change may be repeated in one window."""
    ds = open_ds().shuffle(seed=3)
    first, options = ds.loader(max_tokens=200, bucket_window=75), {"bucket_window": 75, **change}
    seen = [each for _ in range(3) for each in ids(next(first))]
    second = ds.loader(**options)
    second.load_state_dict(first.state_dict())
    seen += [each for _ in range(2) for each in ids(next(second))]
    third = ds.loader(max_tokens=200, bucket_window=75)
    third.load_state_dict(second.state_dict())
    state = third.state_dict()
    [_, _, _, ahead], _, _ = lanes_of(state)[0]["at"]
    assert ahead and len(json.dumps(state)) < 1024
    again = ds.loader(max_tokens=200, bucket_window=75)
    again.load_state_dict(state)
    rest = epoch_of(third)
    assert rest == epoch_of(again)
    assert sorted(seen + [each for batch in rest for each in batch]) == list(range(ROWS))


def test_plain_and_planned_batches_continue_each_other(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds().shuffle(seed=3)
    plain = ds.loader(10)
    seen = [each for _ in range(3) for each in ids(next(plain))]
    planned = ds.loader(max_tokens=200, bucket_window=40)
    planned.load_state_dict(plain.state_dict())
    assert planned.position == 30
    seen += [each for _ in range(2) for each in ids(next(planned))]
    with pytest.raises(CheckpointMismatchError, match="not the first of the epoch"):
        ds.loader(10).load_state_dict(planned.state_dict())
    with pytest.raises(CheckpointMismatchError, match="not the first of the epoch"):
        open_ds().shuffle(seed=3).load_state_dict(planned.state_dict())
    seen += [each for batch in epoch_of(planned) for each in batch]
    assert sorted(seen) == list(range(ROWS))
    later = ds.loader(10)
    later.load_state_dict(planned.state_dict())
    assert ids(next(later)) == ids(next(iter(_at_epoch(ds.loader(10), 1))))


def _at_epoch(loader: midepoch.Loader, epoch: int) -> midepoch.Loader:
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("name", ["padded", "varlen", "mapped", "filtered"])
def test_every_batch_is_within_the_budget(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    budget = 100 if name == "varlen" else 200
    for batch in LOADERS[name](open_ds()):
        assert batch["input_ids"].numel() <= budget
        if name != "varlen":
            assert batch["attention_mask"].shape == batch["input_ids"].shape
            assert int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1]


@pytest.mark.parametrize("ends", ["drop", "pad", "uneven"])
def test_the_last_step(ends: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    total = len(LOADERS["padded"](open_ds()))
    ranks = [list(LOADERS["padded"](open_ds(), rank=r, world_size=4, last_batch=ends)) for r in range(4)]
    assert total % 4
    steps = {len(rank) for rank in ranks}
    assert steps == {"drop": {total // 4}, "pad": {total // 4 + 1}, "uneven": {total // 4, total // 4 + 1}}[ends]
    genuine = [
        each for rank in ranks for batch in rank for each, row in zip(ids(batch), _marks(batch), strict=True) if not row
    ]
    assert len(genuine) == len(set(genuine))
    assert (len(genuine) == ROWS) == (ends != "drop")


def _marks(batch: Any) -> list[bool]:
    return batch["is_padding"].tolist() if "is_padding" in batch else [False] * len(batch["id"])


def test_cost_is_balanced_over_ranks(tmp_path: Path) -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(5.5, 1, 20_000).astype(np.int64) + 1, 8192)
    write_arrow(tmp_path / "a.arrow", pa.table({"id": np.arange(len(lengths))}), 1000)
    ds = midepoch.from_files(str(tmp_path / "a.arrow")).shuffle(seed=1)

    def costs(**options: Any) -> Any:
        loaders = [
            ds.loader(
                max_tokens=16_384,
                length=lengths,
                collate_fn=as_columns,
                rank=r,
                world_size=8,
                last_batch="drop",
                **options,
            )
            for r in range(8)
        ]
        return np.array([[len(b["id"]) * lengths[b["id"]].max() for b in loader] for loader in loaders])

    for window in (10_000, 20_000):
        balanced = costs(balance="tokens", bucket_window=window)
        assert float((balanced.max(0) / balanced.mean(0) - 1).mean()) <= 0.01
        assert 1 - lengths.sum() / balanced.sum() <= 0.03
    plain = costs()
    assert float((plain.max(0) / plain.mean(0) - 1).mean()) > 0.02


@pytest.mark.parametrize("kind", ["padded", "varlen", "packed"])
@pytest.mark.parametrize("cut", ["contiguous", "head_tail", "per_document"])
def test_a_rank_of_context_parallelism_gets_its_part(
    kind: str, cut: str, open_ds: Callable[[], midepoch.Dataset]
) -> None:
    """The parts of all ranks are the batch; the rows are the same on all of them."""
    ds = open_ds().shuffle(seed=1).select_columns("input_ids")

    def loader(**options: Any) -> midepoch.Loader:
        if kind == "packed":
            return ds.pack(32, pad=9).loader(4, rank=0, world_size=1, **options)
        return ds.loader(max_tokens=256, bucket_window=40, layout=kind, rank=0, world_size=1, **options)

    parts = [list(loader(context_parallel=(rank, 2), cp_layout=cut)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    for first, second in zip(*parts, strict=True):
        assert first["input_ids"].shape == second["input_ids"].shape
        assert first["input_ids"].numel() <= (4 * 64 if kind == "packed" else 128)
    pad = 9 if kind == "packed" else 0

    def tokens(batches: Any) -> list[int]:
        flat = np.concatenate([np.asarray(batch["input_ids"]).ravel() for batch in batches])
        return sorted(flat[flat != pad].tolist())

    assert tokens([*parts[0], *parts[1]]) == tokens(loader())
    state = loader(context_parallel=(0, 2), cp_layout=cut).state_dict()
    assert state == loader(context_parallel=(1, 2), cp_layout=cut).state_dict()


def test_context_parallelism_needs_to_know_the_other_ranks(
    open_ds: Callable[[], midepoch.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = open_ds().select_columns("input_ids")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ds.loader(max_tokens=256, context_parallel=(1, 2)).shard.count == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="Pass data_parallel"):
        ds.loader(max_tokens=256, context_parallel=(1, 2))
    with pytest.raises(ValueError, match="multiple of it"):
        ds.pack(30).loader(4, rank=0, world_size=1, context_parallel=(0, 4))


def test_tokens_are_counted_by_batch(open_ds: Callable[[], midepoch.Dataset]) -> None:
    for layout in ("padded", "varlen"):
        loader = open_ds().shuffle(seed=1).loader(max_tokens=200, bucket_window=40, layout=layout)
        batches = list(loader)
        stats = loader.stats()
        assert stats.token_slots == pytest.approx(batches[0]["input_ids"].numel() * len(batches), abs=1)


def test_a_pass_has_the_steps_that_were_asked_for(open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = open_ds().shuffle(seed=1).select_columns("id").loader(8, steps_per_epoch=7)
    plain = open_ds().shuffle(seed=1).select_columns("id").loader(8)
    expected = [ids(batch) for _ in range(3) for batch in plain]
    assert len(loader) == 7
    found = [epoch_of(loader) for _ in range(6)]
    assert [len(one) for one in found] == [7] * 6 and sum(found, []) == expected[:42]
    assert loader.epoch == 6 and loader.steps == 42
    loader.set_epoch(6)
    with pytest.raises(ValueError, match="passes follow each other"):
        loader.set_epoch(2)
    for batch in loader:
        assert ids(batch) == expected[42]
        break
    assert epoch_of(loader) == expected[43:49]  # the rest of that pass


def test_batch_sizes_grow_with_the_steps_of_the_run(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds().shuffle(seed=1).select_columns("id")
    loader = ds.loader({0: 10, 4: 20, 20: 30})
    sizes = [[len(batch) for batch in epoch_of(loader)] for _ in range(3)]
    assert sizes[0] == [10, 10, 10, 10, 20, 20, 20, 20, 20, 10] and sizes[1] == [20] * 7 + [10]
    assert sizes[2] == [20, 20, 30, 30, 30, 20] and loader.steps == 24
    assert len(ds.loader({0: 10, 4: 20, 20: 30})) == 10
    ranks = [ds.loader({0: 5, 4: 10}, rank=rank, world_size=2) for rank in range(2)]
    first = [ids(next(rank)) for rank in ranks for _ in range(5)]
    assert sorted(map(len, first)) == [5] * 8 + [10] * 2
    resumed = ds.loader({0: 5, 4: 10})
    resumed.load_state_dict(ranks[0].state_dict())
    rest = epoch_of(resumed)
    assert {len(batch) for batch in rest} == {10}
    assert sorted(sum(first + rest, [])) == list(range(ROWS))
    with pytest.raises(ValueError, match="first step is 0"):
        ds.loader({5: 3})
    with pytest.raises(TypeError, match="dict of first steps"):
        ds.loader({0: "8"})


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_tokens": 20}, midepoch.ColumnError, "has 60 tokens"),
    ({"max_tokens": 60, "pad_to_multiple_of": 64}, ValueError, "less than 64"),
    ({"max_tokens": 60, "pad_to_multiple_of": 64, "layout": "varlen"}, ValueError, "less than 64"),
    ({"max_tokens": 0}, ValueError, "max_tokens"),
    ({"max_tokens": 200, "length": "tokens"}, midepoch.ColumnError, "there is no such column"),
    ({"max_tokens": 200, "length": [1, 2]}, ValueError, "one integer for each of the 150 rows"),
    ({"max_tokens": 200, "balance": "cost"}, ValueError, "balance must be one of"),
    ({"max_tokens": 200, "layout": "dense"}, ValueError, "layout must be one of"),
    ({"max_tokens": 200, "layout": "varlen", "collate_fn": as_columns}, ValueError, "Omit them, or collate_fn"),
    ({"batch_size": 8, "balance": "tokens"}, ValueError, "add max_tokens"),
    ({"batch_size": {0: 8}, "max_tokens": 200}, ValueError, "sizes by step give it in rows"),
    ({"batch_size": [(0, 8)]}, TypeError, "a dict such as"),
    ({"max_tokens": 200, "pad_values": {"input_ids": "x"}}, TypeError, "columns and numbers"),
    ({"max_tokens": 200, "pad_values": {"input_ids": None}}, ValueError, "always padded"),
    ({"batch_size": 8, "bucket_window": 10}, ValueError, "add max_tokens"),
    ({"batch_size": 8, "cp_layout": "head_tail"}, ValueError, "context_parallel"),
    ({"batch_size": 8, "steps_per_epoch": 0}, ValueError, "steps_per_epoch"),
    ({}, TypeError, "needs batch_size"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments_are_explained(
    options: dict[str, Any], kind: type[Exception], text: str, open_ds: Callable[[], midepoch.Dataset]
) -> None:
    with pytest.raises(kind, match=text):
        open_ds().shuffle(seed=1).loader(**options)


def test_a_state_of_other_lengths_is_refused(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds().shuffle(seed=1)
    loader = ds.loader(max_tokens=200, bucket_window=40)
    next(loader)
    other = ds.loader(max_tokens=200, bucket_window=40, length="count")
    with pytest.raises(CheckpointMismatchError, match="same length="):
        other.load_state_dict(loader.state_dict())
    lanes = ds.filter(odd)
    first = lanes.loader(max_tokens=200, bucket_window=40)
    next(first)
    for options in ({"max_tokens": 100, "bucket_window": 40}, {"max_tokens": 200}, {"batch_size": 4}):
        with pytest.raises(CheckpointMismatchError, match="change it after an epoch"):
            lanes.loader(**options).load_state_dict(first.state_dict(), allow=["pipeline"])
    for _ in first:
        pass
    for options in ({"max_tokens": 100, "bucket_window": 40}, {"batch_size": 4}):
        later, fresh = lanes.loader(**options), lanes.loader(**options)
        later.load_state_dict(first.state_dict())
        fresh.set_epoch(1)
        assert [ids(batch) for batch in later] == [ids(batch) for batch in fresh]
    [rows, begin, checksum] = lanes_of(loader.state_dict())[0]["at"]
    for at in (
        None,
        3,
        [3],
        [],
        {"rows": rows, "first": begin, "checksum": checksum},
        [3, begin, checksum],
        [rows, -1, checksum],
        [rows, begin, "x"],
    ):
        damaged = with_lane(loader.state_dict(), 0, at=at)
        for options in ({"max_tokens": 200, "bucket_window": 40}, {"max_tokens": 200}):
            with pytest.raises(midepoch.StateError, match="damaged"):
                ds.loader(**options).load_state_dict(damaged)


def test_budgets_of_run_time_change_where_no_window_is_in_progress(open_ds: Callable[[], midepoch.Dataset]) -> None:
    lanes = open_ds().shuffle(seed=1).filter(odd)
    plain = lanes.loader(10)
    seen = [each for _ in range(3) for each in ids(next(plain))]
    planned = lanes.loader(max_tokens=200, bucket_window=40)
    planned.load_state_dict(plain.state_dict())
    seen += [each for batch in epoch_of(planned) for each in batch]
    assert sorted(seen) == list(range(1, ROWS, 2))


def test_the_last_step_of_ranks_that_train_together_is_dealt_within_the_budget() -> None:
    for ranks in (2, 3, 7, 16):
        for sizes in ([40], [1, 50], [3, 3, 9], [20, 1, 1, 1]):
            if len(sizes) < ranks <= sum(sizes):
                pieces = dealt(np.array(sizes), ranks)
                assert len(pieces) == ranks and all(first < stop for _, first, stop in pieces)
                rows = [(number, row) for number, first, stop in pieces for row in range(first, stop)]
                assert rows == [(number, row) for number, size in enumerate(sizes) for row in range(size)]


def test_long_rows_may_be_left_out(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds()
    with pytest.raises(midepoch.ColumnError, match=r"row \d+ of the dataset has 60 tokens"):
        ds.loader(max_tokens=40)
    short = np.flatnonzero(ds.lengths("input_ids") <= 40)
    assert (
        sorted(each for batch in epoch_of(ds.select(short).loader(max_tokens=40)) for each in batch) == short.tolist()
    )


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers": ({"length": [5] * ROWS}, {"length": [5] * 60 + [6] * (ROWS - 60)}),
    "balance": ({"balance": lambda lengths: float(lengths.sum())}, {"balance": lambda lengths: -float(lengths.max())}),
    "run time": ({"length": lambda row: len(row["text"])}, {"length": lambda row: len(row["text"]) // 2}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_lengths_or_functions_are_refused_in_the_middle_of_a_window(
    name: str, open_ds: Callable[[], midepoch.Dataset]
) -> None:
    """Their names are the same: the batches of the window are compared."""
    before, after = CHANGED[name]
    ds = open_ds().shuffle(seed=1).with_lanes(2)
    first = ds.loader(max_tokens=200, bucket_window=60, collate_fn=as_columns, **before)
    for _ in range(3):
        next(first)
    same, other = (
        ds.loader(max_tokens=200, bucket_window=60, collate_fn=as_columns, **each) for each in (before, after)
    )
    same.load_state_dict(first.state_dict())
    assert [ids(batch) for batch in same] == [ids(batch) for batch in first.current_pass()]
    first.set_epoch(0)
    next(first)
    with pytest.raises(CheckpointMismatchError, match="rows would be lost or repeated"):
        other.load_state_dict(first.state_dict())
        epoch_of(other)


def test_groups_of_equal_cost_are_always_complete() -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        lengths = np.minimum(
            rng.lognormal(3, rng.uniform(0.2, 1.6), int(rng.integers(1, 400))).astype(np.int64) + 1, 500
        )
        group, rows = int(rng.integers(1, 12)), int(rng.integers(0, 2)) * int(rng.integers(1, 9))
        budget = Budget(500, rows, padded=bool(trial % 2), balance="quadratic", group=group)
        batches = budget.split(lengths, derive(1, 0, "batches", trial))
        assert sorted(batches.places.tolist()) == list(range(len(lengths)))
        assert len(batches) % group == 0 or len(lengths) < group * -(-len(batches) // group)
        for number in range(len(batches)):
            own = lengths[batches.at(number)]
            assert 1 <= len(own) <= (rows or 500)
            assert (len(own) * own.max() if budget.padded else own.sum()) <= 500


def test_rows_that_cannot_be_read_do_not_come_together(tmp_path: Path) -> None:
    """They count as rows of the usual length, so that no batch of a rank is left without a row."""
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=30)
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(2).column(1)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    data[start : start + group.total_compressed_size] = b"x" * group.total_compressed_size
    (tmp_path / "a.parquet").write_bytes(data)
    ds = midepoch.from_files(str(tmp_path / "a.parquet"), on_error="skip").shuffle(seed=1, scope="rows")
    ranks = [ds.loader(max_tokens=200, rank=rank, world_size=2, last_batch="pad") for rank in range(2)]
    seen = [list(rank) for rank in ranks]
    assert len(seen[0]) == len(seen[1])
    marks = [
        (each, mark) for rank in seen for batch in rank for each, mark in zip(ids(batch), _marks(batch), strict=True)
    ]
    assert sorted(each for each, mark in marks if not mark) == [each for each in range(ROWS) if not 60 <= each < 90]


def test_lengths_that_are_wrong_are_warned_about(
    open_ds: Callable[[], midepoch.Dataset], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midepoch.loader.collation._warned", False)
    list(open_ds().loader(max_tokens=100, length=[1] * ROWS))
    assert [record.message for record in caplog.records if "not those of column 'input_ids'" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_steps_of_several_ranks_are_equal(open_ds: Callable[[], midepoch.Dataset]) -> None:
    ds = open_ds().shuffle(seed=1).select_columns("id")
    with pytest.raises(ValueError, match="needs equal steps"):
        ds.loader(4, rank=0, world_size=2, steps_per_epoch=8)
    for ends in ("drop", "pad"):
        ranks = [ds.loader(4, rank=rank, world_size=4, steps_per_epoch=7, last_batch=ends) for rank in range(4)]
        for _ in range(4):
            assert [len(list(rank)) for rank in ranks] == [7] * 4
            assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


def test_an_epoch_without_a_batch_is_refused(open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = open_ds().loader(max_tokens=10_000, rank=0, world_size=3, last_batch="drop")
    with pytest.raises(ValueError, match="no batch would be left"):
        next(loader)


def test_workers_get_functions_and_lengths_once(open_ds: Callable[[], midepoch.Dataset]) -> None:
    """Of a script, in processes that are no forks; and nothing large is sent with every pass."""
    ds = open_ds().shuffle(seed=1).map(tokenized)
    lengths = ds.pipeline.rows * [40]
    options = {"max_tokens": 400, "bucket_window": 75, "balance": lambda lengths: float((lengths**2).sum())}
    expected = epoch_of(ds.with_lanes(2).loader(length=lengths, **options))
    with ds.with_lanes(2).loader(length=lengths, num_workers=2, multiprocessing_context="spawn", **options) as loader:
        assert epoch_of(loader) == expected


def test_parquet_has_the_batches_of_arrow(folder: Path, open_ds: Callable[[], midepoch.Dataset]) -> None:
    same = midepoch.from_files(str(folder / "all.parquet"))
    batches = [
        epoch_of(ds.shuffle(seed=1, scope="rows").loader(max_tokens=200, bucket_window=40)) for ds in (same, open_ds())
    ]
    assert batches[0] == batches[1]
    assert epoch_of(LOADERS["in order"](same)) == epoch_of(LOADERS["in order"](open_ds()))
