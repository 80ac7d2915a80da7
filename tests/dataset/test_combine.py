"""Combining datasets: wrong arguments, and sources that were looked at."""

from __future__ import annotations

from typing import Any

import pytest

import midepoch
from data import Numbers


def always(row: dict[str, Any]) -> bool:
    return True


def test_wrong_arguments_of_mix_and_zip_are_named(numbers: Numbers) -> None:
    a, b = numbers(0, 5), numbers(10, 15)
    with pytest.raises(TypeError, match="require sources by name"):
        midepoch.mix([a, b], {"a": 1, "b": 2})
    with pytest.raises(TypeError, match=r"zip\(\[a, b\]\)"):
        midepoch.zip(a, b)
    with pytest.raises(ValueError, match="the same name"):
        midepoch.mix({1: a, "1": b})  # type: ignore[dict-item]


def test_a_look_at_a_source_moves_nothing(numbers: Numbers) -> None:
    a = numbers(0, 9)
    next(iter(a))
    stream = a.filter(always)
    next(iter(stream))
    assert len(list(midepoch.mix([a, stream], seed=1))) > 0
