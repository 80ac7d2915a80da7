"""Row iteration and batches over shards: states of any shard, and of all together, against every row once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch

Make = Callable[[int, int, int, bool], Any]


@pytest.fixture(scope="module")
def make_shards(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("iterate")

    def dataset(rows: int) -> midepoch.Dataset:
        path: Path = folder / f"{rows}.arrow"
        table = pa.table({"id": range(rows)})
        if not path.exists():
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
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
@settings(max_examples=150)
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
