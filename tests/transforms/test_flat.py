"""unbatch without names: which columns hold lists follows from their types, never from the rows of a bundle."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import midepoch
from conftest import write_arrow
from midepoch.errors import CheckpointMismatchError, ColumnError
from midepoch.testing import assert_resumes_exactly

ROWS = 60
TABLE = pa.table(
    {
        "id": range(ROWS),
        "tokens": pa.array([None if i % 7 == 0 else [i] * (i % 4) for i in range(ROWS)], pa.list_(pa.int64())),
        "text": pa.array([None if i < 50 else "abc" for i in range(ROWS)]),
    }
)


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 16))


def test_lists_are_found_by_their_type(ds: midepoch.Dataset) -> None:
    expected = list(ds.unbatch("tokens"))
    assert list(ds.unbatch()) == list(ds.filter(lambda row: True).unbatch()) == expected
    renamed = ds.rename_columns({"tokens": "ids"}).select_columns(["ids", "id"]).unbatch()
    assert [row["ids"] for row in renamed] == [row["tokens"] for row in expected]
    assert list(ds.batch(7).unbatch()) == list(ds.batch(7).unbatch(["id", "tokens", "text"])) == list(ds)
    assert list(ds.batch(7).unbatch().unbatch()) == expected
    assert list(ds.pack(8, "tokens").unbatch()) == list(
        ds.pack(8, "tokens").unbatch(["tokens", "position_ids", "segment_ids"])
    )
    assert list(midepoch.concat([ds.take(9), ds.skip(9)]).unbatch()) == expected


def test_names_are_asked_for_where_types_do_not_tell(ds: midepoch.Dataset) -> None:
    for made in (ds.map(lambda row: {"x": [1]}), ds.flat_map(lambda row: [row]), ds.batch(2).map(lambda row: row)):
        with pytest.raises(ColumnError, match=r"unbatch: the columns that contain lists are not known .* Name them"):
            made.unbatch()
    with pytest.raises(ColumnError, match="none of the columns id, text holds lists"):
        ds.remove_columns("tokens").unbatch()


@pytest.mark.parametrize("name", ["unbatch", "filter and unbatch", "batch and unbatch"])
def test_any_resume_finds_the_same_columns(ds: midepoch.Dataset, name: str) -> None:
    def make() -> object:
        stream = {
            "unbatch": lambda: ds.unbatch(),
            "filter and unbatch": lambda: ds.filter(lambda row: row["id"] % 3).unbatch(),
            "batch and unbatch": lambda: ds.batch(4).unbatch(),
        }[name]()
        return stream.loader(5, collate_fn=list)

    assert_resumes_exactly(make, tail=3)


def test_states_keep_their_text(ds: midepoch.Dataset) -> None:
    assert ds.unbatch().state_dict()["pipeline"] == "unbatch"
    assert ds.unbatch("tokens").state_dict()["pipeline"] == "unbatch[tokens]"
    with pytest.raises(CheckpointMismatchError):
        ds.unbatch("tokens").load_state_dict(ds.unbatch().state_dict())
