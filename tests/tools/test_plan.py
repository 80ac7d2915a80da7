"""Plans of a resume: what they accept and refuse, and what each rank would get."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch.tools.describe import describe
from midepoch.tools.plan import plan_resume
from states import at_row, lanes_of


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_plan_says_which_lanes_a_rank_runs_and_what_is_left(docs: midepoch.Dataset) -> None:
    kept = docs.shuffle(seed=1).filter(odd).with_lanes(4)
    loader = kept.loader(5)
    for _ in islice(loader, 6):
        pass
    plan = plan_resume(loader.state_dict(), kept, world_size=2, batch_size=4, machines=2)
    assert plan.accepted and plan.checked == "dataset" and (plan.epoch, plan.position) == (0, 30)
    assert plan.lanes == ((0, 2), (1, 3)) and plan.global_batch == 8
    rows = [lanes_of(loader.state_dict())[lane]["at"][0] for lane in range(4)]
    assert [machine.rows for machine in plan.machines] == [150 - rows[0] - rows[2], 150 - rows[1] - rows[3]]
    assert all(machine.blocks and machine.bytes for machine in plan.machines)
    assert 10 <= plan.steps_left <= 20, "an estimate of (150 - 30) / 8"
    uneven = plan_resume(loader.state_dict(), kept, world_size=3, batch_size=4)
    assert uneven.accepted and any("do not divide" in note for note in uneven.notes)
    refused = plan_resume(loader.state_dict(), docs.shuffle(seed=1), world_size=2, batch_size=4)
    assert not refused.accepted and "pipeline differs" in str(refused.problem)
    alone = plan_resume(loader.state_dict(), world_size=2, batch_size=4)
    assert alone.accepted and alone.checked == "nothing" and alone.lanes == plan.lanes


def test_plans_refuse_what_loaders_refuse(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    state = ds.state_dict()
    bad: dict[str, dict[str, Any]] = {
        "worker": {"worker": 0, "workers": 2},
        "shard": {"shard": 0, "shards": 2},
        "position": at_row(state, 99),
        "selection": {"selection": "0:5"},
        "scope": {"scope": "bogus"},
    }
    for name, change in bad.items():
        for dataset in (None, ds):
            plan = plan_resume({**state, **change}, dataset, world_size=2, batch_size=3)
            assert not plan.accepted and plan.problem, name
    plan = plan_resume(state, ds, world_size=30, batch_size=4, last_batch="drop")
    assert not plan.accepted and "no batch would be left" in str(plan.problem)
    assert plan_resume(state, ds.loader(4, last_batch="pad"), world_size=3, batch_size=4).padded == 11


def test_batches_by_tokens_are_planned(tmp_path: Path) -> None:
    """The rows, ranks and steps that a plan announces are those that the resumed loaders deliver."""
    table = pa.table({"id": range(200), "input_ids": [[1] * (1 + 7 * i % 40) for i in range(200)]})
    ds = midepoch.from_files(str(write_arrow(tmp_path / "a.arrow", table, 30))).shuffle(seed=2)
    loader = ds.loader(max_tokens=120, bucket_window=60)
    for _ in range(9):
        next(loader)
    state = loader.state_dict()
    for given in (loader, ds):
        plan = plan_resume(state, given, world_size=3, steps=4)
        assert plan.accepted and plan.position == loader.position and plan.rows == 200
        ranks = []
        for rank in range(3):
            resumed = ds.loader(max_tokens=120, bucket_window=60, rank=rank, world_size=3)
            resumed.load_state_dict(state)
            ranks.append([batch["id"].tolist() for batch in resumed])
        assert plan.steps_left == max(map(len, ranks))
        assert plan.batches == tuple(tuple(tuple(rank[step]) for rank in ranks) for step in range(4))
    resumed = ds.loader(max_tokens=120, bucket_window=60, rank=0, world_size=2, last_batch="drop")
    resumed.load_state_dict(state)
    plan = plan_resume(state, ds, world_size=2, last_batch="drop")
    assert plan.steps_left == len(list(resumed)) and plan.steps_per_epoch == len(list(resumed))  # of the next epoch
    without = plan_resume(state, world_size=3)
    assert without.accepted and not without.batches and "max_tokens" in without.notes[0]
    assert not plan_resume(state, ds.loader(4), world_size=3).accepted
    summary = describe(state)
    assert summary.batches is not None and "9 delivered" in summary.batches and "max_tokens=120" in str(summary)
    with pytest.raises(TypeError, match="plan needs the batch size"):
        plan_resume(ds.loader(4).state_dict(), ds, world_size=3)
