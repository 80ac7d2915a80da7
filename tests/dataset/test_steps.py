"""Wrong arguments of the steps of a dataset."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import pytest

import midepoch
from midepoch.errors import ColumnError, MapError


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_wrong_arguments_are_named(docs: midepoch.Dataset) -> None:
    with pytest.raises(TypeError, match="filter takes a function or a pyarrow expression"):
        docs.filter("id > 3")
    with pytest.raises(ColumnError, match="no column 'nothing'"):
        docs.filter(lambda n: n, input_columns="nothing")
    with pytest.raises(ColumnError, match="nothing"):
        docs.filter(pc.field("nothing") > 3)
    with pytest.raises(MapError, match=r"filter\(<lambda>\) failed on row 0 of the dataset"):
        list(docs.filter(lambda row: row["missing"]))
    with pytest.raises(MapError, match="must return rows"):
        list(docs.flat_map(lambda row: {"id": 1}))
    with pytest.raises(ValueError, match="Use flat_map for a function of one row"):
        docs.map(lambda row: {}, one_to_one=False)
    with pytest.raises(TypeError, match="no positions to index"):
        docs.filter(odd)[3]
    with pytest.raises(ValueError, match="2 weights for 3 sources"):
        midepoch.mix([docs, docs, docs], weights=[1, 2])
    with pytest.raises(ValueError, match="weights must be 0 or more"):
        midepoch.mix([docs, docs], weights=[1, -1])
    with pytest.raises(ColumnError, match="source 1 has id"):
        midepoch.mix([docs, docs.select_columns("id")]).loader(4)
    with pytest.raises(TypeError, match="expected a Dataset to combine"):
        midepoch.mix([docs, [1, 2]])
    with pytest.raises(ValueError, match="stop must be one of"):
        midepoch.mix([docs, docs], stop="later")
    with pytest.raises(ValueError, match="strategy must be"):
        docs.pack(8, "tokens", "worst")
    skipping = docs.filter(lambda row: 1 / (row["id"] % 10) > 0, on_error="skip")
    assert len(list(skipping)) == 270
