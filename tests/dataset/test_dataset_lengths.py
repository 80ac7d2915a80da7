"""``ds.lengths``: one number for each chosen row, of a column that comes unchanged from the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from midepoch.errors import ColumnError


@pytest.fixture
def expected(docs: midepoch.Dataset) -> np.ndarray[Any, Any]:
    return np.array([0 if tokens is None else len(tokens) for tokens in docs["tokens"][:]])


@pytest.mark.parametrize(
    "change",
    [
        lambda ds: ds.shuffle(seed=3),
        lambda ds: ds.shard(3, 1),
        lambda ds: ds.select_columns(["tokens"]),
        lambda ds: ds.with_format("numpy"),
        lambda ds: ds.cast({"id": "int32"}),
        lambda ds: ds.cast({"id": "int32"}).remove_columns("id"),
    ],
)
def test_lengths_before_any_shuffle(
    change: Callable[[midepoch.Dataset], midepoch.Dataset], docs: midepoch.Dataset, expected: np.ndarray[Any, Any]
) -> None:
    lengths = change(docs).lengths("tokens")
    assert lengths.dtype == np.int64
    assert np.array_equal(lengths, expected)


def test_lengths_of_chosen_rows(docs: midepoch.Dataset, expected: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(docs.slice(20, 90).lengths("tokens"), expected[20:90])
    assert np.array_equal(docs.select([7, 5, 299]).shuffle(seed=1).lengths("tokens"), expected[[7, 5, 299]])
    assert docs.take(0).lengths("tokens").tolist() == []


def test_lengths_agree_with_the_order(docs: midepoch.Dataset) -> None:
    ds = docs.slice(10, 200).shuffle(seed=5)
    lengths = dict(zip(range(10, 200), ds.lengths("text").tolist(), strict=True))
    assert all(lengths[row["id"]] == len(row["text"].encode()) for row in ds)


def test_renamed_columns(docs: midepoch.Dataset, expected: np.ndarray[Any, Any]) -> None:
    renamed = docs.rename_columns({"tokens": "text", "text": "tokens"})
    assert np.array_equal(renamed.lengths("text"), expected)
    late = docs.cast({"id": "int32"}).rename_columns({"tokens": "text", "text": "tokens"})
    assert np.array_equal(late.lengths("text"), expected)
    assert np.array_equal(late.lengths("tokens"), docs.lengths("text"))


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [*(row["tokens"] or []), 1]}


def test_columns_that_a_step_may_change(docs: midepoch.Dataset, expected: np.ndarray[Any, Any]) -> None:
    for ds, step in (
        (docs.map(longer), r"map\(longer\)"),
        (docs.cast({"tokens": pa.large_list(pa.int32())}), "cast"),
        (docs.map(longer).rename_column("tokens", "ids").rename_column("ids", "tokens"), r"map\(longer\)"),
    ):
        with pytest.raises(ColumnError, match=rf"lengths: {step} may change column 'tokens', .* cache\(\)"):
            ds.lengths("tokens")
    assert np.array_equal(docs.map(longer).cache().lengths("tokens"), expected + 1)


def test_unknown_columns(docs: midepoch.Dataset) -> None:
    with pytest.raises(ColumnError, match="lengths: no column 'x'. There are: id, text, tokens"):
        docs.lengths("x")
    with pytest.raises(ColumnError, match="lengths: no column 'text'. There are: tokens"):
        docs.select_columns("tokens").lengths("text")
    with pytest.raises(ColumnError, match="lengths: column 'id' contains int64"):
        docs.lengths("id")


def test_datasets_without_positions(docs: midepoch.Dataset) -> None:
    for ds in (docs.filter(lambda row: row["id"] % 2 == 0), midepoch.concat([docs, docs])):
        with pytest.raises(TypeError, match="lengths: this dataset has no positions"):
            ds.lengths("tokens")
