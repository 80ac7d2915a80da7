"""Exclusions and leases in one epoch: the ledger tells what was excluded, acknowledged and skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch.audit import EpochProof, Ledger, read_run
from midepoch.order.intervals import Intervals
from states import lanes_of, with_lane

ROWS, KEPT = 92, 61
STEPS: dict[str, Any] = {"steps": range(3, 5)}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_arrow(tmp_path / "data.arrow", pa.table({"id": range(ROWS)}), 16))


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


def start(data: str, attempt: int, lanes: bool = False, state: Any = None, **options: Any) -> midepoch.Loader:
    ds = midepoch.from_files(data).shuffle(seed=1).with_format("numpy")
    ds = ds.filter(keeps).with_lanes(2) if lanes else ds
    loader = ds.loader(8, audit=Ledger(Path(data).with_name("run"), attempt=str(attempt)), **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def acknowledge(loader: midepoch.Loader, count: int = ROWS) -> list[int]:
    with loader.lease() as items:
        leases = [lease for _, lease in zip(range(count), items, strict=False)]
        return [row for lease in leases if lease.ack() for row in lease.batch["id"].tolist()]


def proof(data: str) -> EpochProof:
    run = read_run(Path(data).with_name("run"))
    assert not run.problems
    return run.epochs[0]


def counts(found: EpochProof) -> tuple[int, ...]:
    assert found.leases is not None
    acknowledged = found.leases.acknowledged
    return (found.rows, found.once, acknowledged, found.excluded, found.never, found.repeated, found.pending)


@pytest.mark.parametrize("exclusion", [STEPS, {"rows": range(20, 30)}], ids=["steps", "rows"])
@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_what_is_excluded_before_leases_is_not_missing(data: str, lanes: bool, exclusion: Any) -> None:
    loader = start(data, 1, lanes)
    excluded = loader.exclude(**exclusion)
    rows = acknowledge(loader)
    assert len(rows) == len(set(rows)) < (KEPT if lanes else ROWS)
    if lanes and "rows" in exclusion:
        excluded = 0  # they have no outputs
    found = proof(data)
    assert counts(found) == (len(rows) + excluded, len(rows), len(rows), excluded, 0, 0, 0)
    assert found.exact and found.complete


@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_exclusions_between_blocks_and_starts(data: str, lanes: bool) -> None:
    loader = start(data, 1, lanes)
    rows = acknowledge(loader, 1)
    assert loader.exclude(**STEPS) == 16
    with loader.lease() as items:  # the first of them stays out
        rows += [row for lease in [next(items), next(items)][1:] if lease.ack() for row in lease.batch["id"].tolist()]
    state = loader.state_dict()
    loader = start(data, 2, lanes, state)
    assert loader.exclude(steps=range(5, 6)) == 8
    rows += acknowledge(loader, 2)
    found = proof(data)
    assert found.exact and (found.excluded, found.never, found.repeated) == (24, 0, 0)
    rows += acknowledge(start(data, 3, lanes, loader.state_dict()))
    total = KEPT if lanes else ROWS
    assert len(rows) == len(set(rows)) == total - 24
    found = proof(data)
    assert counts(found) == (total, total - 24, total - 24, 24, 0, 0, 0)
    assert found.exact and found.complete


def test_exclusions_before_batches_without_leases(data: str) -> None:
    loader = start(data, 1)
    assert loader.exclude(**STEPS) == 16
    rows = [row for _ in range(3) for row in next(loader)["id"].tolist()]
    rows += acknowledge(start(data, 2, state=loader.state_dict()))
    assert len(rows) == len(set(rows)) == ROWS - 16
    assert counts(proof(data)) == (ROWS, ROWS - 16, ROWS - 16, 16, 0, 0, 0)


def test_what_is_dropped_at_the_end_beside_exclusions(data: str) -> None:
    loader = start(data, 1, last_batch="drop")
    loader.exclude(rows=range(10))
    rows = acknowledge(loader)
    assert len(rows) == (ROWS - 10) // 8 * 8
    found = proof(data)
    assert found.exact and found.complete
    assert (found.once, found.excluded, found.dropped, found.pending) == (len(rows), 10, 2, 0)


def test_what_was_neither_excluded_nor_acknowledged_is_found(data: str) -> None:
    """The state says of 8 positions too many that they were acknowledged ahead."""
    loader = start(data, 1)
    loader.exclude(**STEPS)
    acknowledge(loader, 1)
    state = loader.state_dict()
    excluded = Intervals.decode(lanes_of(state)[0]["excluded"])
    assert (excluded.starts.tolist(), excluded.stops.tolist()) == ([16], [32])
    acknowledge(start(data, 2, state=with_lane(state, 0, ahead=Intervals.of(32, 40).encode())))
    found = proof(data)
    assert not found.exact
    assert (found.never, found.excluded, found.examples) == (8, 16, tuple(range(32, 40)))


def test_an_exclusion_that_a_resume_takes_back(data: str) -> None:
    loader = start(data, 1)
    acknowledge(loader, 1)
    state = loader.state_dict()
    loader.exclude(**STEPS)
    acknowledge(loader, 1)
    second = start(data, 2, state=state)
    acknowledge(second, 1)
    found = proof(data)
    assert found.exact and (found.once, found.excluded, found.pending) == (16, 0, ROWS - 16)
    acknowledge(second)
    found = proof(data)
    assert found.exact and found.complete
    assert (found.once, found.excluded, found.again) == (ROWS, 0, 8)
