"""The ledger of batches by tokens, of changing batch sizes, and of passes of a number of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch import audit
from midepoch.audit import orders

ROWS = 300
MAKERS: dict[str, Callable[..., midepoch.Loader]] = {
    "tokens": lambda ds, **kw: ds.loader(max_tokens=200, bucket_window=60, **kw),
    "balanced": lambda ds, **kw: ds.loader(max_tokens=200, bucket_window=60, balance="quadratic", **kw),
    "varlen": lambda ds, **kw: ds.loader(max_tokens=200, bucket_window=60, layout="varlen", **kw),
    "sizes": lambda ds, **kw: ds.select_columns("id").loader({0: 3, 4: 5, 9: 8}, **kw),
    "steps": lambda ds, **kw: ds.select_columns("id").loader(7, steps_per_epoch=5, **kw),
    "run time": lambda ds, **kw: ds.map(doubled).loader(max_tokens=300, bucket_window=30, **kw),
}


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"] * 2}


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    lengths = np.minimum(np.random.default_rng(2).lognormal(2.5, 0.8, ROWS).astype(int), 60).tolist()
    table = pa.table({"id": np.arange(ROWS), "input_ids": [list(range(length)) for length in lengths]})
    return midepoch.from_files(str(write_arrow(tmp_path / "a.arrow", table, 40))).shuffle(seed=4)


def run(
    ds: midepoch.Dataset, name: str, folder: Path, world: int, steps: int | None, state: Any, attempt: str
) -> tuple[list[list[list[int]]], Any]:
    """Run some steps, or to the end of the epoch. Return the ids by rank and step, and the state (of all ranks)."""
    loaders = [
        MAKERS[name](ds, rank=rank, world_size=world, last_batch="uneven", audit=audit.Ledger(folder, attempt=attempt))
        for rank in range(world)
    ]
    seen: list[list[list[int]]] = [[] for _ in loaders]
    for rank, loader in enumerate(loaders):
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        while steps is None or len(seen[rank]) < steps:
            batch = next(batches, None)
            if batch is None:
                break
            seen[rank].append([int(each) for each in batch["id"]])
    states = [loader.state_dict() for loader in loaders]
    return seen, states if name == "run time" else states[0]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "steps"])
def test_the_ledger_proves_and_names_every_row(name: str, ds: midepoch.Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, state = run(ds, name, folder, 2, 5, None, "a")
    run(ds, name, folder, 2, 2, state, "b")  # crashes: its steps are repeated by the next start
    rest, _ = run(ds, name, folder, 2 if name == "run time" else 3, None, state, "c")
    history = audit.read_run(folder)
    (proof,) = history.epochs
    assert history.exact and proof.complete and not history.problems
    assert proof.again > 0 and history.unit == "rows" and proof.once == ROWS
    steps = [[rank[step] for rank in first] for step in range(5)]
    steps += [[rank[step] if step < len(rank) else [] for rank in rest] for step in range(max(map(len, rest)))]
    assert history.steps == len(steps)
    if name == "run time":
        return
    for number, by_rank in enumerate(steps, 1):
        found = history.rows_of_step(number)
        assert sorted(each.row for each in found) == sorted(sum(by_rank, []))
        for rank, ids in enumerate(by_rank):
            assert sorted(each.row for each in found if each.rank == rank) == sorted(ids)
    for row in (0, 17, ROWS - 1):
        (delivery,) = history.steps_of_row(row)
        assert row in sum(steps[delivery.step - 1], [])
    other = tmp_path / "other"
    run(ds, name, other, 1, 10**6, None, "d")
    assert history.overlap(audit.read_run(other)) == (ROWS, ROWS, ROWS)


def test_a_gap_is_seen(ds: midepoch.Dataset, tmp_path: Path) -> None:
    _, state = run(ds, "tokens", tmp_path / "run", 2, 5, None, "a")
    later, newer = run(ds, "tokens", tmp_path / "away", 2, 3, state, "b")
    run(ds, "tokens", tmp_path / "run", 2, None, newer, "c")
    history = audit.read_run(tmp_path / "run")
    assert not history.exact and history.epochs[0].never == sum(len(ids) for rank in later for ids in rank)


def test_an_epoch_whose_batches_are_not_counted(
    ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for very many rows: exact so far, complete at its end; rows are not named."""
    monkeypatch.setattr("midepoch.loader.counting.MOST_ROWS", 10)
    monkeypatch.setattr(orders, "MOST_ROWS", 10)
    _, state = run(ds, "tokens", tmp_path / "run", 2, 5, None, "a")
    half = audit.read_run(tmp_path / "run")
    assert half.exact and not half.epochs[0].complete and half.epochs[0].once == 10
    run(ds, "tokens", tmp_path / "run", 3, None, state, "b")
    whole = audit.read_run(tmp_path / "run")
    assert whole.exact and whole.epochs[0].complete
    with pytest.raises(midepoch.StateError, match="lengths are not beside the ledger"):
        whole.rows_of_step(1)


def test_passes_of_steps_are_one_run(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = MAKERS["steps"](ds, audit=tmp_path / "run")
    for _ in range(10):
        assert len(list(loader)) == 5
    history = audit.read_run(tmp_path / "run")
    assert history.exact and history.steps == 50 and [one.complete for one in history.epochs] == [True, False]


def test_every_epoch_is_judged_by_its_own_batches(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """Epochs have different numbers of batches, and the budget may change: what is compared is rows."""
    loader = MAKERS["tokens"](ds, audit=tmp_path / "run")
    assert len(list(loader)) != len(list(loader)) or len(list(loader))
    history = audit.read_run(tmp_path / "run")
    assert history.exact and [proof.complete for proof in history.epochs[:2]] == [True, True]
    assert [proof.once for proof in history.epochs[:2]] == [ROWS, ROWS]


def test_rows_that_another_budget_leaves_out_are_found(ds: midepoch.Dataset, tmp_path: Path) -> None:
    first = MAKERS["tokens"](ds, audit=audit.Ledger(tmp_path / "run", attempt="a"))
    batches = iter(first)
    seen = sum(len(next(batches)["id"]) for _ in range(7))
    state = first.state_dict()
    second = ds.loader(max_tokens=130, bucket_window=60, audit=audit.Ledger(tmp_path / "run", attempt="b"))
    second.load_state_dict(state)
    rest = iter(second)
    seen += sum(len(next(rest)["id"]) for _ in range(2))
    assert audit.read_run(tmp_path / "run").epochs[0].once == seen
    second.set_epoch(1)  # the rest of epoch 0 is left out
    list(second)
    history = audit.read_run(tmp_path / "run")
    assert not history.exact and (history.epochs[0].once, history.epochs[0].never) == (seen, ROWS - seen)
    assert history.epochs[1].complete and history.epochs[1].exact
