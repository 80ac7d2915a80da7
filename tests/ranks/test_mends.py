"""What reviews of ranks, ends, lists of states and plans found, so that it stays mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from fast_hf_loader_simple import SimpleArrowIterableDataset
from midepoch.checkpoint import saving
from midepoch.tools.plan import plan_resume


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"id": np.arange(60)}), tmp_path / "lake" / "x.parquet", row_group_size=5)
    return tmp_path / "lake"


def fails_on(*bad: int) -> Any:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in bad:
            raise ValueError("bad")
        return {}

    return check


def test_a_dataset_keeps_the_lanes_of_a_state_at_the_beginning_of_an_epoch(lake: Path) -> None:
    make = lambda: midepoch.from_files(lake).shuffle(seed=1)  # noqa: E731
    before = make().loader(5, rank=0, world_size=4)
    list(before)
    before.set_epoch(1)
    state = before.state_dict()
    assert (state["epoch"], state["position"], state["lanes"]) == (1, 0, 4)
    rows = []
    for way in ("dataset", "loader", "shard"):
        ds = make()
        if way != "loader":
            ds.load_state_dict(state)
        loader = ds.shard(2, 1).loader(10) if way == "shard" else ds.loader(10, rank=1, world_size=2)
        if way == "loader":
            loader.load_state_dict(state)
        rows.append([batch["id"].tolist() for batch in loader])
    assert rows[0] == rows[1] == rows[2]


def test_sharded_datasets_of_the_documented_interface_stand_at_one_place(small_files: list[str]) -> None:
    """Their states tell of each shard's own file: that is no difference in where the run stands."""
    states = []
    for shard in range(2):
        ds = SimpleArrowIterableDataset(small_files).shuffle(seed=1).shard(2, shard)
        rows = iter(ds)
        for _ in range(6):
            next(rows)
        states.append(ds.state_dict())
    assert states[0] != states[1]
    assert saving.common_state(states[0], True) == saving.common_state(states[1], True)
    fresh = SimpleArrowIterableDataset(small_files).shuffle(seed=1).shard(2, 1)
    fresh.load_state_dict(states)


def test_a_list_of_documented_states_at_the_end_of_an_epoch(small_files: list[str]) -> None:
    documented = []
    names = (
        "current_file_index",
        "current_example_index",
        "shuffle_seed",
        "shard_config",
        "arrow_files",
        "shuffled_files",
    )
    for shard in range(2):
        ds = SimpleArrowIterableDataset(small_files).shard(2, shard)
        list(ds)
        state = ds.state_dict()
        documented.append({key: state[key] for key in names})
    SimpleArrowIterableDataset(small_files).shard(2, 0).load_state_dict(documented)


def test_lists_of_states(small_files: list[str]) -> None:
    loader = midepoch.from_files(small_files).shuffle(seed=1).loader(4)
    state = loader.state_dict()
    over, begun = {**state, "position": 37}, {**state, "epoch": 1}
    loader.load_state_dict([over, begun])  # one place: the end of an epoch is the beginning of the next
    assert (loader.epoch, loader.position) == (1, 0)
    with pytest.raises(midepoch.CheckpointMismatchError, match="rank 0: epoch 0, position 0; rank 1: epoch 0, posit"):
        loader.load_state_dict([state, {**state, "position": 4}])
    with pytest.raises(midepoch.CheckpointMismatchError, match="states of different runs: seed is 1 on rank 0 and 2"):
        loader.load_state_dict([state, {**state, "seed": 2}])
    with pytest.raises(midepoch.StateError, match="is empty"):
        loader.load_state_dict([])
    with pytest.raises(midepoch.StateError, match="got NoneType"):
        loader.load_state_dict([state, None])
    assert (loader.epoch, loader.position) == (1, 0)


def test_states_of_shards_that_skip_are_for_those_shards(small_files: list[str]) -> None:
    make = lambda: midepoch.from_files(small_files).map(fails_on(3), on_error="skip")  # noqa: E731
    states = []
    for shard, rows in enumerate((8, 3)):
        ds = make().shard(2, shard)
        passing = iter(ds)
        for _ in range(rows):
            next(passing)
        states.append(ds.state_dict())
    second = make().shard(2, 1)
    second.load_state_dict(states)
    assert second.state_dict()["position"] == states[1]["position"]
    with pytest.raises(midepoch.CheckpointMismatchError, match="each shard has its own position"):
        make().loader(4, rank=1, world_size=2).load_state_dict(states)
    with pytest.raises(midepoch.CheckpointMismatchError, match="states of different runs"):
        second.load_state_dict([states[0], {**states[1], "data": "x"}])


def test_padding_that_is_skipped_is_made_of_other_rows(small_files: list[str]) -> None:
    """Rows 0 to 3 cannot be used: what pads the last batch is taken from behind them, on every rank."""
    ds = midepoch.from_files(small_files).take(9).map(fails_on(0, 1, 2, 3), on_error="skip")
    for rank in range(2):
        loader = ds.loader(2, last_batch="pad", rank=rank, world_size=2)
        loader.load_state_dict({**loader.state_dict(), "position": 4})
        batches = list(loader)
        assert len(batches) == 2
        assert batches[-1]["is_padding"].tolist() == ([False] if rank == 0 else [True] * len(batches[-1]["id"]))
    whole = ds.loader(4, last_batch="pad")
    with pytest.raises(midepoch.MidepochError):
        list(
            ds.loader(2, last_batch="pad", rank=0, world_size=2)
        )  # a batch of which nothing is left, from its beginning
    list(whole)
    assert whole.skipped == 4  # genuine rows only


def test_num_ranks_alone_is_not_rank_0(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda **ranks: midepoch.StructuredDataset.create_dataloader(str(lake), num_workers=0, **ranks)[1]  # noqa: E731
    with pytest.raises(ValueError, match="num_ranks=4 needs rank=…, too: 1 ranks were found here"):
        make(num_ranks=4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert make(num_ranks=4)._loader.shard.index == 2
    assert make(num_ranks=2, rank=1)._loader.shard.index == 1
    assert make(num_ranks=1)._loader.shard.count == 1


def test_what_is_left_of_a_pass(small_files: list[str]) -> None:
    from operator import length_hint

    loader = midepoch.from_files(small_files).take(3).loader(2, last_batch="uneven", rank=3, world_size=4)
    assert len(loader) == length_hint(iter(loader)) == len(list(loader)) == 0


def test_plans_refuse_what_loaders_refuse(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    state = ds.state_dict()
    bad: dict[str, dict[str, Any]] = {
        "worker": {"worker": 0, "workers": 2},
        "shard": {"shard": 0, "shards": 2},
        "position": {"position": 99},
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
