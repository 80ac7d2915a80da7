"""Lengths: exact where they are known, estimated elsewhere."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import midepoch
from data import Numbers


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_lengths_are_estimated_where_rows_are_dropped(docs: midepoch.Dataset) -> None:
    stream = docs.shuffle(seed=1).filter(odd)
    with pytest.raises(TypeError, match="estimated_len"):
        len(stream)
    assert stream.estimated_len is None
    loader = stream.loader(10)
    for number, _ in enumerate(loader):
        assert loader.estimated_len is not None
        if number > 3:
            assert abs(loader.estimated_len - 15) <= 4
    fresh = stream.loader(10)
    fresh.load_state_dict(loader.state_dict())
    assert fresh.estimated_len == loader.estimated_len == 15, "of the epoch that was gone through"
    mixed = midepoch.mix([docs.filter(odd), docs.filter(odd)], [0.75, 0.25])
    for _ in islice(mixed, 60):
        assert mixed.estimated_len is None or mixed.estimated_len > 0
    assert abs(len(list(midepoch.mix([docs.filter(odd), docs.filter(odd)], [0.75, 0.25]))) - 200) < 8
    assert len(midepoch.zip([docs, docs.rename_columns({"id": "a", "text": "b", "tokens": "c"}).take(9)])) == 9


def always(row: dict[str, Any]) -> bool:
    return True


def test_lengths_of_a_finished_pass_are_exact(numbers: Numbers) -> None:
    parts = midepoch.concat([numbers(0, 5).map(lambda r: {}), numbers(5, 10).map(lambda r: {})])
    assert len(parts) == 10
    with pytest.raises(TypeError, match="not known"):
        len(parts.shard(2, 0))
    loader = numbers(0, 9).filter(always).loader(4)
    list(loader)
    assert loader.estimated_len == 3
    dropping = numbers(0, 11).filter(always).loader(4, drop_last=True)
    list(dropping)
    assert dropping.estimated_len == 2
    windowed = numbers(0, 2000).filter(lambda row: row["n"] % 3 > 0).shuffle(seed=1, window=100)
    for number, _ in enumerate(windowed):
        if number in (500, 900):
            assert windowed.estimated_len is not None and abs(windowed.estimated_len - 1333) < 15


def test_estimates_of_a_concat_with_lanes(numbers: Numbers) -> None:
    stream = midepoch.concat([numbers(0, 600).filter(always), numbers(1000, 1600).filter(always)]).with_lanes(4)
    for number, _ in enumerate(stream):
        if number == 900:
            assert stream.estimated_len is not None and abs(stream.estimated_len - 1200) < 60
