"""Memory that is used again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from midepoch._internal import recycled


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    recycled._blocks.free.clear()
    first = recycled.empty((3, 1 << 16), np.int32)
    assert first.shape == (3, 1 << 16) and first.dtype == np.int32 and first.flags.writeable and first.flags.aligned
    address, view = first.__array_interface__["data"][0], memoryview(first[1])
    del first
    other = recycled.empty(3 << 16, np.int32)
    assert other.__array_interface__["data"][0] != address, "a view of it is still held"
    del view
    assert recycled.empty((3 << 16) - 5, np.int32).__array_interface__["data"][0] == address
    assert recycled.empty(3, np.int8).shape == (3,)


def test_free_memory_is_bounded_and_found_by_size() -> None:
    recycled._blocks.free.clear()
    held = [recycled.empty(size << 20, np.uint8) for size in range(1, 17)]
    addresses = [array.__array_interface__["data"][0] for array in held]
    while held:
        held.pop(0)
    assert 0 < sum(map(len, recycled._blocks.free)) <= recycled._HELD
    last = recycled.empty(16 << 20, np.uint8)
    assert last.__array_interface__["data"][0] == addresses[-1]
    free = list(recycled._blocks.free)  # held here: their addresses are nobody else's
    small = recycled.empty(1 << 20, np.uint8)
    assert min(map(len, free)) > 2 << 20
    assert small.__array_interface__["data"][0] not in [block.__array_interface__["data"][0] for block in free]


def test_threads_share_the_memory() -> None:
    """Each fills arrays and finds in them what it wrote: no block is in use twice."""

    def work(number: int) -> bool:
        kept = []
        for turn in range(200):
            array = recycled.empty(1 << 15, np.int64)
            array[:] = number * 1000 + turn
            kept.append((array, number * 1000 + turn))
            if not all((each == value).all() for each, value in kept):
                return False
            kept = kept[-3:]
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
