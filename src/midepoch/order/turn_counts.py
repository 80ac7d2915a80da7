"""Counts of sources among draws, without a label for each draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midepoch.order.turns import Turns

Int64Array = npt.NDArray[np.int64]

_PIECE = 1 << 16


def count(turns: Turns, stop: int) -> Int64Array:
    """Return the number of draws of each source among the draws [0, stop).

    >>> count(Turns((0.75, 0.25), 10, 0, 0, 0, 0), 8).tolist()
    [6, 2]
    """
    size, exact = turns._size
    spans = (stop if turns.rows is None else min(stop, turns.rows)) // size
    sources = len(turns.weights)
    if exact:
        found: Int64Array = spans * turns._counts(np.array([0]), size)[0]
    else:
        found = np.zeros(sources, np.int64)
        for first in range(0, spans, _PIECE):
            found += turns._counts(np.arange(first, min(spans, first + _PIECE)), size).sum(axis=0)
    rest = turns.sources(spans * size, stop)
    return found + np.bincount(rest, minlength=sources)


def draw_of(turns: Turns, source: int, number: int) -> int | None:
    """Return the draw in which a source occurs for the given time, counted from 0. None if it has fewer draws.

    >>> turns = Turns((0.75, 0.25), 100, 0, 0, 0, 0)
    >>> turns.sources(0, 100).tolist().index(1) == draw_of(turns, 1, 0)
    True
    """
    if not turns.weights[source]:
        return None
    high = number + 1 if turns.rows is None else turns.rows
    while count(turns, high)[source] <= number:
        if turns.rows is not None:
            return None
        high *= 2
    low = 0  # among the draws [0, low) it occurs at most ``number`` times, among [0, high) more often
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(turns, middle)[source] <= number else (low, middle)
    return low
