"""Weighted and balanced draws and sorting of a dataset: what they deliver, refuse, save, and how the ledger names it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import midepoch
from data import dataset_of
from midepoch.audit import Ledger, read_run
from midepoch.cli.app import app
from midepoch.errors import CheckpointMismatchError, ColumnError
from midepoch.testing import same
from midepoch.tools.describe import describe
from midepoch.tools.plan import plan_resume
from midepoch.tools.report import collect

ROWS = 60
KINDS = ["rare" if i % 20 == 0 else "some" if i % 4 == 0 else "many" for i in range(ROWS)]
TABLE = pa.table(
    {
        "id": range(ROWS),
        "kind": KINDS,
        "weight": [float(i % 3) for i in range(ROWS)],
        "text": ["é" * (i * 7 % 11) for i in range(ROWS)],
        "tokens": [list(range(i * 5 % 9)) for i in range(ROWS)],
        "score": [None if i % 10 == 3 else float("nan") if i % 10 == 4 else (i * 7 % 10) / 2 for i in range(ROWS)],
    }
)


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return dataset_of(tmp_path, TABLE, 7)


def ids(rows: Any) -> list[int]:
    return [int(row["id"]) for row in rows]


def noise(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"noise": float(generator.random())}


def test_weights_are_an_array_a_tensor_a_list_or_a_column(ds: midepoch.Dataset) -> None:
    weights = np.arange(ROWS) % 3
    for given in (weights, torch.tensor(weights), weights.tolist()):
        assert ids(ds.weighted(given, seed=1)) == ids(ds.weighted("weight", seed=1))
    drawn = ids(ds.weighted("weight", seed=1))
    assert len(drawn) == ROWS and all(number % 3 for number in drawn) and len(set(drawn)) < ROWS
    assert ids(ds.weighted("weight", seed=2)) != drawn


def test_length_and_epochs(ds: midepoch.Dataset) -> None:
    drawn = ds.weighted("weight", num_samples=500, seed=1)
    assert len(drawn) == 500 and len(drawn.loader(32)) == 16
    first = ids(drawn)
    drawn.set_epoch(1)
    assert ids(drawn) != first and drawn[499]["id"] == ids(drawn)[499]
    once = ds.weighted("weight", replacement=False, seed=1)
    assert sorted(ids(once)) == [i for i in range(ROWS) if i % 3] and "without replacement" in repr(once)
    assert len(ds.weighted("weight", replacement=False, num_samples=5, seed=1)) == 5


def test_weights_belong_to_the_selected_rows(ds: midepoch.Dataset) -> None:
    part = ds.slice(10, 30)
    assert set(ids(part.weighted([1.0] + [0.0] * 18 + [1.0], num_samples=40, seed=1))) == {10, 29}
    assert ids(part.shuffle(seed=3).weighted("weight", seed=1)) == ids(part.weighted("weight", seed=1))
    mapped = ds.map(lambda row: {"mine": row["id"] == 7})
    assert set(ids(mapped.weighted("mine", seed=1))) == {7}
    assert ids(ds.shard(2, 1).weighted("weight", seed=1)) == ids(ds.weighted("weight", seed=1))[1::2]


def test_balanced_classes_come_equally_often(ds: midepoch.Dataset) -> None:
    drawn = ds.balanced("kind", num_samples=9000, seed=1)
    counts = Counter(drawn["kind"])
    assert set(counts) == {"rare", "some", "many"} and all(abs(count - 3000) < 4 * 45 for count in counts.values())
    rare = [number for number in drawn["id"] if KINDS[number] == "rare"]
    assert {KINDS[i] for i in set(rare)} == {"rare"} and set(rare) == {0, 20, 40}
    encoded = ds.class_encode_column("kind").balanced("kind", num_samples=9000, seed=1)
    assert ids(encoded) == ids(drawn)


@pytest.mark.parametrize("through", ["rows", "loader", "lanes", "workers"])
def test_a_row_drawn_twice_gets_other_random_numbers(ds: midepoch.Dataset, through: str) -> None:
    drawn = ds.weighted([1.0] + [0.0] * (ROWS - 1), num_samples=12, seed=1).map(noise, with_generator=True)
    if through == "rows":
        values = [row["noise"] for row in drawn]
    elif through == "lanes":
        values = [row["noise"] for row in drawn.filter(lambda row: True)]
    else:
        loader = drawn.loader(5, num_workers=2 * (through == "workers"))
        values = [float(value) for batch in loader for value in batch["noise"]]
    assert len(values) == len(set(values)) == 12
    assert values == pytest.approx([row["noise"] for row in drawn])


def test_rows_that_are_only_read_in_lanes_get_other_numbers_too(ds: midepoch.Dataset) -> None:
    one = ds.weighted([1.0] + [0.0] * (ROWS - 1), num_samples=6, seed=1)
    both = midepoch.concat([ds.take(2), one]).map(noise, with_generator=True)
    values = [row["noise"] for row in both]
    assert len(set(values)) == 8


def test_row_numbers_stay_those_of_the_dataset(ds: midepoch.Dataset) -> None:
    drawn = ds.weighted("weight", num_samples=200, seed=1).map(lambda row, i: {"number": i}, with_indices=True)
    assert [row["number"] for row in drawn] == ids(drawn)


SORTED: dict[str, tuple[Any, dict[str, Any], Callable[[int], Any]]] = {
    "number": ("id", {"reverse": True}, lambda i: -i),
    "text": ("kind", {}, lambda i: KINDS[i]),
    "length of a text": ("text", {"length": True}, lambda i: i * 7 % 11),
    "length of a list": ("tokens", {"length": True, "reverse": True}, lambda i: -(i * 5 % 9)),
    "function": (lambda row: row["id"] % 7, {}, lambda i: i % 7),
    "function of a length": (lambda row: row["tokens"], {"length": True}, lambda i: i * 5 % 9),
    "null and nan": (
        "score",
        {},
        lambda i: (2, 0) if i % 10 == 3 else (1, 0) if i % 10 == 4 else (0, i * 7 % 10),
    ),
    "null and nan last": (
        "score",
        {"reverse": True},
        lambda i: (2, 0) if i % 10 == 3 else (1, 0) if i % 10 == 4 else (0, -(i * 7 % 10)),
    ),
}


@pytest.mark.parametrize("name", SORTED)
def test_sort_is_stable_and_fixed(name: str, ds: midepoch.Dataset) -> None:
    by, options, key = SORTED[name]
    expected = sorted(range(ROWS), key=key)
    ordered = ds.sort(by, **options)
    assert ids(ordered) == expected
    ordered.set_epoch(3)
    assert ids(ordered) == expected
    assert ids(ds.shuffle(seed=1).sort(by, **options)) == expected
    assert ids(ds.slice(20, 40).sort(by, **options)) == [i for i in expected if 20 <= i < 40]


def test_sort_before_other_orders(ds: midepoch.Dataset) -> None:
    ordered = ds.sort("id", reverse=True)
    assert ids(ordered.take(3)) == [59, 58, 57] and ids(ordered.sort("kind").take(2)) == [59, 58]
    assert sorted(ids(ordered.shuffle(seed=1))) == list(range(ROWS))
    assert set(ids(ordered.weighted([1.0] + [0.0] * (ROWS - 1), seed=1))) == {59}
    assert ids(ordered.cache()) == ids(ordered)


def test_what_is_refused(ds: midepoch.Dataset) -> None:
    drawn = ds.weighted("weight", seed=1)
    for again in (
        lambda: drawn.take(3),
        lambda: drawn.skip(3),
        lambda: drawn.slice(1, 2),
        lambda: drawn.select([1]),
        lambda: drawn.train_test_split(0.1),
        lambda: drawn.sort("id"),
        lambda: drawn.weighted("weight", seed=1),
        lambda: drawn.balanced("kind", seed=1),
    ):
        with pytest.raises(ValueError, match=r"before weighted\(\) or balanced\(\)"):
            again()
    with pytest.raises(ValueError, match=r"Omit shuffle\(\)"):
        drawn.shuffle(seed=1)
    with pytest.raises(ValueError, match=r"cache\(\) before shuffle\(\)"):
        drawn.cache()
    for step in (lambda ds: ds.weighted("weight"), lambda ds: ds.balanced("kind"), lambda ds: ds.sort("id")):
        with pytest.raises(TypeError, match="before the steps that change the number of rows"):
            step(ds.filter(lambda row: True))
    with pytest.raises(ValueError, match="expected 60 weights, one for each row, got 2"):
        ds.weighted([1, 2])
    with pytest.raises(TypeError, match="weights must be numbers"):
        ds.weighted(["a"] * ROWS)
    with pytest.raises(ValueError, match=r"num_samples must be in \[1, 40\]"):
        ds.weighted("weight", num_samples=41, replacement=False)
    for problem, wrong in (
        ("contains string, expected numbers", lambda: ds.weighted("kind")),
        ("is null in 6 rows", lambda: ds.weighted("score")),
        ("is null in 6 rows, which have no class", lambda: ds.balanced("score")),
        ("Map it to numbers", lambda: ds.balanced("tokens")),
        ("which has no order. Use length=True", lambda: ds.sort("tokens")),
        ("which has no length", lambda: ds.sort("id", length=True)),
        ("nothere", lambda: ds.weighted("nothere")),
        ("54 values for 60 rows", lambda: ds.map(_fails, on_error="skip").weighted("weight")),
    ):
        with pytest.raises(ColumnError, match=problem):
            wrong()


def _fails(row: dict[str, Any]) -> dict[str, Any]:
    if row["score"] is None:
        raise ValueError("null")
    return {}


def test_a_state_of_other_weights_is_refused(ds: midepoch.Dataset) -> None:
    """G5."""
    loader = ds.weighted("weight", seed=1).loader(4)
    next(loader)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 400
    weights = np.arange(ROWS) % 3
    others = {
        "weights": ds.weighted(weights + 1, seed=1),
        "seed": ds.weighted(weights, seed=2),
        "rows": ds.weighted(weights, seed=1, num_samples=61),
        "scope": ds.weighted(weights + 1, seed=1, replacement=False),
    }
    for field, other in others.items():
        with pytest.raises(CheckpointMismatchError) as raised:
            other.loader(4).load_state_dict(state)
        assert raised.value.field == field
    with pytest.raises(CheckpointMismatchError) as raised:
        ds.shuffle(seed=1).loader(4).load_state_dict(state)
    assert raised.value.field == "scope"
    allowed = others["weights"].loader(4)
    allowed.load_state_dict(state, allow=["weights"])
    assert allowed.pipeline.changes and len(list(allowed)) == 14


def test_a_drawn_seed_is_taken_from_the_state(ds: midepoch.Dataset) -> None:
    loader = ds.weighted("weight").loader(4)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), list(batches)
    other = ds.weighted("weight").loader(4)
    other.load_state_dict(state)
    assert same(list(other), rest)


@pytest.mark.parametrize("replacement", [True, False])
def test_two_ranks_become_three(ds: midepoch.Dataset, replacement: bool) -> None:
    """The draws of an epoch on two ranks, then on three: those of one process, in the same positions."""
    drawn = ds.weighted("weight", seed=1, num_samples=38, replacement=replacement)
    seen: list[tuple[int, int]] = []
    states = []
    for rank in range(2):
        loader = drawn.loader(3, rank=rank, world_size=2)
        for step in range(3):
            seen += [(step * 6 + 2 * i + rank, int(number)) for i, number in enumerate(next(loader)["id"])]
        states.append(loader.state_dict())
    assert states[0] == states[1]
    for rank in range(3):
        loader = drawn.loader(2, rank=rank, world_size=3, last_batch="uneven")
        loader.load_state_dict(states[0])
        numbers = [int(number) for batch in loader for number in batch["id"]]
        seen += [(18 + (rank - 18) % 3 + 3 * i, number) for i, number in enumerate(numbers)]
    assert [number for _, number in sorted(seen)] == ids(drawn)


def test_parquet_is_drawn_like_arrow(ds: midepoch.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(TABLE, path, row_group_size=7)
    fetched = midepoch.from_files(str(path))
    for make in (
        lambda ds: ds.weighted("weight", num_samples=100, seed=1),
        lambda ds: ds.balanced("kind", seed=1),
        lambda ds: ds.weighted("weight", replacement=False, seed=1),
        lambda ds: ds.sort("tokens", length=True),
    ):
        assert ids(make(fetched)) == ids(make(ds))
        assert sorted(i for batch in make(fetched).loader(8, num_workers=2) for i in batch["id"].tolist()) == sorted(
            ids(make(ds))
        )


@pytest.mark.parametrize("lanes", [False, True])
def test_the_ledger_names_rows_and_counts_no_repetition(ds: midepoch.Dataset, lanes: bool, tmp_path: Path) -> None:
    drawn = ds.weighted("weight", num_samples=90, seed=1)
    loader = (drawn.filter(lambda row: True) if lanes else drawn).loader(9, audit=Ledger(tmp_path / "run", attempt="1"))
    batches = [batch["id"].tolist() for batch in loader]
    loader.close()
    run = read_run(tmp_path / "run")
    assert run.exact and run.epochs[0].once == 90 and run.epochs[0].repeated == 0
    assert [[one.row for one in run.rows_of_step(step)] for step in range(1, 11)] == batches
    for row in (1, 59, 3):
        steps = [step for step, batch in enumerate(batches, 1) for number in batch if number == row]
        assert [one.step for one in run.steps_of_row(row)] == steps
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["audit", str(tmp_path / "run"), "--step", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert [one["row"] for one in json.loads(done.stdout)] == batches[1]


def test_plan_and_inspect(ds: midepoch.Dataset, tmp_path: Path) -> None:
    drawn = ds.weighted("weight", seed=1)
    loader = drawn.loader(4)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), [batch["id"].tolist() for batch in batches]
    found = plan_resume(state, drawn, batch_size=2, world_size=2, steps=2)
    assert found.accepted and [sorted(a + b) for a, b in found.batches] == [sorted(one) for one in expected[:2]]
    assert not plan_resume(state, ds.weighted(np.ones(ROWS), seed=1), batch_size=2, world_size=1).accepted
    alone = plan_resume(state, batch_size=4, world_size=1)
    assert alone.steps_left == 14 and not alone.batches and any("weights" in note for note in alone.notes)
    assert "weighted, 60 weights" in describe(state).order
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    for command in (["inspect", path], ["plan", "--checkpoint", path, "--batch-size", "4", "--world-size", "1"]):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in command])
        assert done.exit_code == 0, done.output


def test_the_report_of_a_weighted_run(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.weighted("weight", num_samples=20, seed=1).loader(5, audit=Ledger(tmp_path / "run", attempt="1"))
    list(loader)
    loader.close()
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--output", str(page)])
    assert done.exit_code == 0 and page.stat().st_size, done.output


def test_a_random_split_is_shuffled_as_well_as_all_rows(tmp_path: Path) -> None:
    """It cuts blocks into runs of a few rows. Windows of as many runs as there are blocks are too small."""
    for part in range(5):
        pq.write_table(pa.table({"id": range(4000)}), tmp_path / f"{part}.parquet", row_group_size=500)
    train = midepoch.from_files(tmp_path).train_test_split(test_size=0.1, seed=1)["train"]
    for ds in (train, train.select(list(reversed(range(9000))))):
        found = collect(dataset=ds.shuffle(seed=2), batch_size=64)["shuffle"]
        assert found["mine"]["imbalance"]["mean"] < 1.2 * found["true"]["imbalance"]["mean"]
