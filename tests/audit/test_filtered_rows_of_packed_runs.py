"""The number of filtered rows of packed documents does not depend on where a run was resumed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.audit import read_run

ROWS = 60


@pytest.fixture
def documents(tmp_path: Path) -> midepoch.Dataset:
    table = pa.table({"id": range(ROWS), "input_ids": [[1] * (5 + i % 17) for i in range(ROWS)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=16)
    return midepoch.from_files(tmp_path / "0.parquet").shuffle(seed=1)


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
@pytest.mark.parametrize("limit", [ROWS, 40])
def test_filtered_rows_are_those_of_the_filter(
    documents: midepoch.Dataset, strategy: str, limit: int, tmp_path: Path
) -> None:
    kept = documents.filter(lambda number: number < limit, input_columns="id")
    packed = kept.pack(32, strategy=strategy, pad=0, window=8)
    steps = sum(1 for _ in packed.loader(2))
    for stop in range(1, steps):
        folder = tmp_path / f"{strategy}-{stop}"
        loader = packed.loader(2, audit=folder)
        for _ in range(stop):
            next(loader)
        state = loader.state_dict()
        [epoch] = read_run(folder).epochs
        assert epoch.filtered <= ROWS - limit
        resumed = packed.loader(2, audit=folder)
        resumed.load_state_dict(state)
        for _ in resumed:
            pass
        epoch = read_run(folder).epochs[0]
        assert (epoch.once, epoch.repeated, epoch.never, epoch.filtered) == (ROWS, 0, 0, ROWS - limit), stop


def test_a_source_that_is_first_drawn_from_in_the_middle_of_a_chunk_is_recorded(tmp_path: Path) -> None:
    """Steps before it end between documents, and those after it within one."""
    web, code = (
        midepoch.from_dict({"input_ids": [[row] * length for row in range(count)]}).shuffle(seed=1).filter(bool)
        for count, length in ((200, 4), (20, 6))
    )
    loader = midepoch.mix([web, code], [30, 1], seed=2).pack(4).with_lanes(1).loader(1, audit=tmp_path)
    steps = sum(1 for _ in loader)
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete and run.steps == steps > 200
