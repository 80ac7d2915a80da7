"""The loader of a stream: its length, and what it does with rows that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    lanes=st.integers(1, 4),
    world=st.integers(1, 4),
    batch=st.integers(1, 3),
    ends=st.sampled_from(["drop", "pad", "uneven"]),
    windowed=st.booleans(),
)
@settings(max_examples=60)
def test_the_length_is_the_number_of_batches_of_each_rank(
    make_files: Callable[..., list[str]],
    sizes: list[int],
    lanes: int,
    world: int,
    batch: int,
    ends: str,
    windowed: bool,
) -> None:
    """Also of a rank without a row in the last step."""
    files = make_files([9, 9, 9])
    parts = [midepoch.from_files(path).take(size) for path, size in zip(files, sizes, strict=False)]
    stream: Any = midepoch.concat(parts).with_lanes(lanes)
    if windowed:
        stream = stream.shuffle(seed=1, window=4)
    for rank in range(world):
        try:
            loader = stream.loader(batch, rank=rank, world_size=world, ends=ends)
            length = len(loader)
        except (midepoch.WorldError, TypeError):
            continue  # ranks with lanes of their own, which are not connected here or whose outputs are not counted
        assert length == len(list(loader))
        assert loader.estimated_len == length
