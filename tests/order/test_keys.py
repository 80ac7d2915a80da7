"""Keys of generators: those of many rows in one call are those of each row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midepoch.order.bijection import derive, derive_many

words = st.integers(0, 2**64 - 1)


@given(words, words, st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_many_keys_are_those_of_each_index(seed: int, epoch: int, indices: list[int]) -> None:
    found = derive_many(seed, epoch, "map", np.array(indices, np.uint64))
    assert found.tolist() == [derive(seed, epoch, "map", index, words=2).tolist() for index in indices]
