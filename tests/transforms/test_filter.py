"""Filters: functions and expressions keep the same rows."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc

import midepoch
from data import Numbers

ROWS = 300


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_functions_and_expressions_keep_the_same_rows(docs: midepoch.Dataset) -> None:
    shuffled = docs.shuffle(seed=4)
    expected = [i for i in ids(shuffled) if i % 3 == 0]
    mod = pc.subtract(pc.field("id"), pc.multiply(pc.divide(pc.field("id"), 3), 3))
    assert ids(shuffled.filter(lambda row: row["id"] % 3 == 0)) == expected
    assert ids(shuffled.filter(lambda n: n % 3 == 0, input_columns="id")) == expected
    assert ids(shuffled.filter(lambda batch: [n % 3 == 0 for n in batch["id"]], batched=True, batch_size=7)) == expected
    assert ids(shuffled.filter(mod == 0)) == expected
    assert ids(shuffled.map(lambda row: {"double": row["id"] * 2}).filter(pc.field("double") < 20)) == [
        i for i in ids(shuffled) if i < 10
    ]
    assert ids(docs.filter(pc.field("tokens").is_valid())) == [i for i in range(ROWS) if i % 29 != 5]


def test_an_expression_is_computed_where_a_chunk_is_all_null(numbers: Numbers) -> None:
    stream = numbers(0, 4000).map(lambda row: {"s": None if row["n"] < 3000 else "abc"})
    assert len(list(stream.filter(pc.utf8_length(pc.field("s")) > 2))) == 1000
