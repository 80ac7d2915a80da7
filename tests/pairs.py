"""Cross products of parameters as covering arrays: any two values of different axes meet in the default suite.

A defect that one value causes, or two of them together, is found by a tenth of a large product. The rest of it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], names: Sequence[Any] | None = None) -> list[Any]:
    """Return the product of the axes as parameters of pytest, marked slow where no pair of values needs them.

    ``names``: what stands for each value in the name of a case, a function or None for each axis.
    """
    return _marked(axes, array([len(axis) for axis in axes]), names)


def _marked(axes: Sequence[Sequence[Any]], chosen: set[tuple[int, ...]], names: Sequence[Any] | None) -> list[Any]:
    named = names or [None] * len(axes)
    found = []
    for row in product(*(range(len(axis)) for axis in axes)):
        values = [axis[at] for axis, at in zip(axes, row, strict=True)]
        texts = [(name or str)(value) for name, value in zip(named, values, strict=True)]
        marks = () if row in chosen else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks, id="-".join(texts)))
    return found


def alternating(*axes: Sequence[Any], names: Sequence[Any] | None = None) -> list[Any]:
    """Return the product of the axes as parameters of pytest, marked slow but for one row with each value of the longest.

    Of the other axes, the values take turns. For axes whose values do not act on each other.
    """
    longest = max(axes, key=len)
    chosen = {tuple(number % len(axis) for axis in axes) for number in range(len(longest))}
    return _marked(axes, chosen, names)


def array(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Return rows, one index for each axis, in which any two indexes of any two axes meet: the best row again and again."""
    rows = list(product(*map(range, sizes)))
    pairs = {row: {(a, row[a], b, row[b]) for a, b in combinations(range(len(sizes)), 2)} for row in rows}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
