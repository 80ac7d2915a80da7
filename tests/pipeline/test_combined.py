"""Concat and zip: the rows of plain Python, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

import midepoch
from data import Numbers
from midepoch.errors import ColumnError


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_concat_and_zip_give_the_rows_of_plain_python(docs: midepoch.Dataset) -> None:
    parts = [docs.slice(0, 5), docs.slice(100, 105).filter(odd), docs.slice(7, 9)]
    assert ids(midepoch.concat(parts)) == [0, 1, 2, 3, 4, 101, 103, 7, 8]
    assert len(midepoch.concat([docs.take(5), docs.take(7)])) == 12
    other = docs.select_columns("id").rename_columns({"id": "other"}).skip(200)
    both = midepoch.zip([docs.filter(odd).select_columns("id"), other])
    assert [(row["id"], row["other"]) for row in both] == [(2 * i + 1, 200 + i) for i in range(100)]
    with pytest.raises(ColumnError, match="'id'"):
        midepoch.zip([docs, docs])


def test_zip_pairs_the_same_on_any_number_of_ranks(numbers: Numbers) -> None:
    left = midepoch.concat([numbers(0, 5), numbers(5, 10)]).rename_columns({"n": "left"})
    zipped = midepoch.zip([left, numbers(100, 110)])
    expected = [(i, 100 + i) for i in range(10)]
    assert [(row["left"], row["n"]) for row in zipped] == expected
    found = [
        (row["left"], row["n"])
        for rank in range(3)
        for batch in zipped.loader(2, collate_fn=list, rank=rank, world_size=3)
        for row in batch
    ]
    assert sorted(found) == expected
    with pytest.raises(ValueError, match="has one lane"):
        zipped.with_lanes(2)
    alike = midepoch.zip([numbers(0, 10).rename_columns({"n": "left"}), numbers(100, 110)]).with_lanes(3)
    assert sorted((row["left"], row["n"]) for row in alike) == expected
