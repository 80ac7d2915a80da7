"""unbatch without names: which columns hold lists follows from their types, never from the rows of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch.errors import CheckpointMismatchError, ColumnError, MapError
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
    with pytest.raises(ColumnError, match="none of the columns id, text contains lists"):
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


def test_outputs_are_in_the_order_of_the_rows_they_are_made_of(docs: midepoch.Dataset) -> None:
    stream = docs.flat_map(lambda row: [{"id": row["id"], "k": k} for k in range(row["id"] % 4)])
    assert [(row["id"], row["k"]) for row in stream] == [(i, k) for i in range(300) for k in range(i % 4)]
    rows = list(docs.select_columns(["id", "tokens"]).unbatch("tokens"))
    expected = [(row["id"], token) for row in docs for token in row["tokens"] or []]
    assert [(row["id"], row["tokens"]) for row in rows] == expected


def test_a_batched_map_may_return_any_number_of_rows(docs: midepoch.Dataset) -> None:
    def pairs(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pair": [batch["id"][i : i + 2] for i in range(0, len(batch["id"]), 2)]}

    assert [row["pair"] for row in docs.map(pairs, True, 5, one_to_one=False)][:4] == [[0, 1], [2, 3], [4], [5, 6]]
    with pytest.raises(MapError, match="one_to_one=False"):
        list(docs.map(pairs, True, 5))
    with pytest.raises(MapError, match="different lengths"):
        list(docs.map(lambda batch: {"a": [1], "b": [1, 2]}, True, 5, one_to_one=False))


def test_arrays_of_features_are_batched_and_unbatched(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"m": datasets.Array2D((2, 2), "int64"), "n": datasets.Value("int64")})
    made = datasets.Dataset.from_dict(
        {"m": [[[i, i], [i, i]] for i in range(6)], "n": list(range(6))}, features=features
    )
    made.save_to_disk(str(tmp_path / "hf"))
    ds = midepoch.load_from_disk(str(tmp_path / "hf"))
    batch = next(iter(ds.batch(3)))
    assert np.asarray(batch["m"]).tolist() == [[[i, i], [i, i]] for i in range(3)]
    assert [np.asarray(row["m"]).tolist() for row in ds.take(2).unbatch("m")] == [[0, 0], [0, 0], [1, 1], [1, 1]]
