"""Steps of leases in the ledger: the rows that each block delivered, also after a block was left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch.audit import Ledger, Run, read_run
from midepoch.errors import DataNotFoundError

ROWS = 96


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_arrow(tmp_path / "data.arrow", pa.table({"id": range(ROWS)}), 16))


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


def pipeline(data: str, lanes: bool) -> midepoch.Dataset:
    ds = midepoch.from_files(data).shuffle(seed=1).with_format("numpy")
    return ds.filter(keeps).with_lanes(2) if lanes else ds


def take(items: Any, count: int | None, delivered: list[list[int]]) -> list[Any]:
    leases = [lease for _, lease in zip(range(ROWS if count is None else count), items, strict=False)]
    delivered += [lease.batch["id"].tolist() for lease in leases]
    return leases


def named(run: Run, lanes: bool) -> dict[int, list[int]]:
    """The rows of each step, except for those that the filter drops."""
    steps = {step: [one.row for one in run.rows_of_step(step)] for step in range(1, run.steps + 1)}
    return {step: [row for row in rows if not lanes or row % 3] for step, rows in steps.items()}


@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_a_lease_that_is_delivered_again_keeps_the_number_of_its_step(data: str, lanes: bool, tmp_path: Path) -> None:
    delivered: list[list[int]] = []
    loader = pipeline(data, lanes).loader(8, audit=tmp_path / "run", provenance=lanes)
    for count, acked in ((5, (1, 2, 4)), (3, (1,)), (None, range(ROWS))):
        with loader.lease() as items:
            leases = take(items, count, delivered)
            for number in acked:
                if number < len(leases):
                    leases[number].ack()
    run = read_run(tmp_path / "run")
    assert run.exact and run.epochs[0].complete and run.epochs[0].steps == len(delivered)
    distinct = [batch for number, batch in enumerate(delivered) if batch not in delivered[:number]]
    assert loader.steps == run.steps == len(distinct) < len(delivered)
    steps = named(run, lanes)
    assert list(map(sorted, steps.values())) == list(map(sorted, distinct))  # lanes are named one after the other
    for row in range(0, ROWS, 5):
        wanted = [step for step, rows in steps.items() if row in rows]
        if wanted or not lanes:
            assert [one.step for one in run.steps_of_row(row)] == wanted
            assert not lanes or [one.step for one in run.documents_of_row(row) or ()] == wanted
    for step, rows in zip(steps, distinct, strict=True) if lanes else ():
        assert [one.row for one in run.documents_of_step(step) or ()] == rows


def test_ranks_that_acknowledged_different_steps(data: str, tmp_path: Path) -> None:
    delivered: list[list[list[int]]] = [[], []]
    for rank, acked in enumerate((0, 2)):
        ledger = Ledger(tmp_path / "run", attempt="1")
        loader = pipeline(data, False).loader(4, rank=rank, world_size=2, audit=ledger)
        with loader.lease() as items:
            take(items, 3, delivered[rank])[acked].ack()
        with loader.lease() as items:
            take(items, 4, delivered[rank])
    run = read_run(tmp_path / "run")
    for rank, batches in enumerate(delivered):
        for number in range(3):
            found = [one.row for one in run.rows_of_step(number + 1) if one.rank == rank]
            assert found in ([], batches[number])  # acknowledged before the last block, or delivered in it


@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_ranks_with_blocks_that_do_not_correspond_have_no_common_steps(data: str, lanes: bool, tmp_path: Path) -> None:
    for rank, blocks in enumerate((1, 2)):
        ledger = Ledger(tmp_path / "run", attempt="1")
        loader = pipeline(data, lanes).loader(4, rank=rank, world_size=2, last_batch="uneven", audit=ledger)
        for _ in range(blocks):
            with loader.lease() as items:
                take(items, 3, [])[0].ack()
    run = read_run(tmp_path / "run")
    assert run.exact
    questions: list[Callable[[int], Any]] = [run.rows_of_step, run.steps_of_row, run.documents_of_step]
    for question in questions:
        with pytest.raises(DataNotFoundError, match="steps of the ranks have no common numbers"):
            question(1)


def test_steps_after_a_resume_count_on_from_what_was_acknowledged(data: str, tmp_path: Path) -> None:
    delivered: list[list[int]] = []
    loader = pipeline(data, False).loader(8, audit=Ledger(tmp_path / "run", attempt="1"))
    with loader.lease() as items:
        for lease in take(items, 4, [])[::2]:
            lease.ack()
        state = loader.state_dict()
    assert state["steps"] == 2
    loader = pipeline(data, False).loader(8, audit=Ledger(tmp_path / "run", attempt="2"))
    loader.load_state_dict(state)
    with loader.lease() as items:
        take(items, 5, delivered)
    run = read_run(tmp_path / "run")
    assert run.steps == 7 and [named(run, False)[step] for step in range(3, 8)] == delivered
