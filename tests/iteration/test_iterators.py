"""Row iteration and batches over shards: states of any shard, and of all together, against every row once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from data import Numbers, write_arrow
from midepoch.errors import CheckpointMismatchError, MidepochError

Make = Callable[[int, int, int, bool], Any]


@pytest.fixture(scope="module")
def make_shards(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("iterate")

    def dataset(rows: int) -> midepoch.Dataset:
        path: Path = folder / f"{rows}.arrow"
        table = pa.table({"id": range(rows)})
        if not path.exists():
            write_arrow(path, table, 4)
        return midepoch.from_files(path)

    def make(rows: int, lanes: int, shards: int, stream: bool) -> list[Any]:
        ds = dataset(rows)
        source: Any = ds.filter(lambda row: row["id"] % 5 != 3) if stream else ds
        return [source.with_lanes(lanes).shard(shards, shard) for shard in range(shards)]

    return make


def taken_of(shards: list[Any], turns: int, size: int | None) -> list[int]:
    """The ids of so many rows (or batches) of each shard, whose iterators stay alive."""
    found: list[int] = []
    for shard in shards:
        shard.alive = iter(shard) if size is None else shard.iter(size)
        for _ in range(turns):
            part = next(shard.alive, None)
            if part is not None:
                found += [part["id"]] if size is None else part["id"]
    return found


@given(
    rows=st.integers(5, 23),
    lanes=st.integers(1, 4),
    shards=st.integers(1, 5),
    turns=st.integers(0, 8),
    size=st.sampled_from([None, None, 2, 3]),
    stream=st.booleans(),
    resumed_shards=st.integers(1, 5),
)
@settings(max_examples=50)
def test_any_shards_state_resumes_all_shards_with_every_row_once(
    make_shards: Make,
    rows: int,
    lanes: int,
    shards: int,
    turns: int,
    size: int | None,
    stream: bool,
    resumed_shards: int,
) -> None:
    """Shards that have taken as many turns stand at the same place, also where the last ones have nothing left."""
    before = make_shards(rows, lanes, shards, stream)
    seen = taken_of(before, turns, size)
    states = [shard.state_dict() for shard in before]
    whole = [i for i in range(rows) if not stream or i % 5 != 3]
    choices: list[Any] = [states, *(states if before[0].state_is_global else [])]
    for state in choices:
        rest: list[int] = []
        for shard in make_shards(rows, lanes, resumed_shards, stream):
            shard.load_state_dict(state)
            shard.set_epoch(0)  # of an epoch that is over nothing is left
            rest += [row["id"] for row in shard]
        assert sorted(seen + rest) == whole


def test_shards_of_one_lane_stand_at_the_same_position(make_shards: Make) -> None:
    shards = make_shards(10, 1, 4, False)
    stream = [shard.filter(lambda row: True) for shard in shards]
    assert sorted(taken_of(stream, 2, None)) == list(range(8))
    assert [shard.state_dict()["position"] for shard in stream] == [8, 8, 8, 8]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_short_last_batch_is_left_out_if_asked(make_shards: Make, shards: int) -> None:
    for shard in make_shards(23, 1, shards, True):
        rows = len(list(shard))
        batches = [batch["id"] for batch in shard.iter(4, drop_last_batch=True)]
        assert [len(batch) for batch in batches] == [4] * (rows // 4)


def always(row: dict[str, Any]) -> bool:
    return True


def ns(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_a_shard_has_a_state_before_its_first_output(numbers: Numbers) -> None:
    make = lambda index: numbers(0, 12).filter(always).shard(2, index)  # noqa: E731
    fresh = make(0)
    state = copied(fresh.state_dict())
    again = make(0)
    again.load_state_dict(state)
    assert ns(again) == ns(fresh) and sorted(ns(make(0)) + ns(make(1))) == list(range(12))


def test_lanes_that_were_given_stay_when_sharded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(60)}), tmp_path / "a.parquet", row_group_size=10)
    ds = midepoch.from_files(tmp_path).shuffle(seed=1, window=2).with_lanes(6)
    whole = [row["x"] for row in ds]
    shards = [[row["x"] for row in ds.shard(3, index)] for index in range(3)]
    assert [shards[i % 3][i // 3] for i in range(60)] == whole


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def first_rows_fail(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] in (0, 2, 4):
        raise ValueError(row["id"])
    return {}


def test_ranks_do_not_drift_apart_when_rows_are_skipped(ds: midepoch.Dataset) -> None:
    skipping = ds.map(first_rows_fail, on_error="skip")
    with pytest.raises(MidepochError, match="one step ahead"):
        list(skipping.loader(1, rank=0, world_size=2))
    parts = [skipping.shard(2, index, mode="example") for index in range(2)]
    iterators = [iter(part) for part in parts]
    seen = [next(iterator)["id"] for iterator in iterators for _ in range(3)]
    states = [part.state_dict() for part in parts]
    with pytest.raises(CheckpointMismatchError, match="each needs a state"):
        skipping.shard(2, 1, mode="example").load_state_dict(states[0])
    for index, state in enumerate(states):
        part = skipping.shard(2, index, mode="example")
        part.load_state_dict(state)
        seen += [row["id"] for row in part]
    assert sorted(seen) == [i for i in range(37) if i not in (0, 2, 4)]
