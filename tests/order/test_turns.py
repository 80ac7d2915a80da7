"""Draws by changing weights: fixed forever, and the same however they are cut into calls."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.order.turns import Turns

GOLDEN = {
    "exact": (((0.6, 0.3, 0.1), None, 1, 0, 0, 0), [1, 0, 1, 0, 0, 0, 1, 2], [3000, 1500, 500], 654654324),
    "exact, with a rest": (((0.6, 0.3, 0.1), 1234, 1, 0, 2, 5), [2, 1, 1, 1, 0, 0, 0, 0], [741, 370, 123], 3535751996),
    "rounded": (((0.6123, 0.31, 0.1), None, 7, 1, 0, 3), [0, 0, 0, 1, 1, 1, 0, 1], [2993, 1518, 489], 3909856254),
    "paused": (
        ((0.5123, 0, 0.4), 5432, 7, 1, 1, (3 << 20) + 1),
        [2, 0, 0, 0, 2, 0, 0, 2],
        [3050, 0, 2382],
        2720472575,
    ),
    "shorter than a span": (
        ((1 / 3, 1 / 7, 0.5, 0.011), 900, 2**40, 3, 0, 9),
        [2, 2, 0, 2, 1, 0, 0, 2],
        [304, 130, 456, 10],
        1683739636,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_draws_never_change(name: str) -> None:
    arguments, first, counts, checksum = GOLDEN[name]
    sources = Turns(*arguments).sources(0, arguments[1] or 5000)
    assert sources[:8].tolist() == first
    assert np.bincount(sources).tolist() == counts
    assert zlib.crc32(sources.astype("<i8").tobytes()) == checksum


@given(st.sampled_from(sorted(GOLDEN)), st.lists(st.integers(0, 2500), max_size=6))
@settings(max_examples=60)
def test_draws_do_not_depend_on_the_calls(name: str, sizes: list[int]) -> None:
    arguments = GOLDEN[name][0]
    stop = arguments[1] or 5000
    turns, expected = Turns(*arguments), Turns(*arguments).sources(0, stop)
    cuts = [min(stop, cut) for cut in np.cumsum([0, *sizes]).tolist()] + [stop]
    found = [turns.sources(a, b) for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(found), expected)
