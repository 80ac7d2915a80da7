"""Best-fit-decreasing: pieces into as few bins as it finds."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from midepoch._native import library
from midepoch._native.ranges import Int64Array, address


class Bins(NamedTuple):
    """Bins, numbered by their first piece. Pieces of a bin are in order.

    ``bins``, ``offsets``, ``numbers``: of each piece its bin, its offset there, and its number there, from 1.
    ``rooms``: what is left of each bin.
    """

    bins: Int64Array
    offsets: Int64Array
    numbers: Int64Array
    rooms: Int64Array


def best_fit(sizes: Int64Array, length: int) -> Bins:
    """Put pieces into bins of ``length``.

    Each piece, from the largest on, goes into the bin in which it leaves the least room. Of equal pieces the first
    comes first, of equal bins the oldest.
    """
    sizes = np.require(sizes, np.int64, ["C", "A"])
    if sizes.ndim != 1 or not 1 <= length <= np.iinfo(np.int32).max:
        raise ValueError(f"sizes must be flat and length a positive int32, got {sizes.shape} and {length}")
    if (kernel := library.kernel()) is not None:
        found = np.empty((4, len(sizes)), np.int64)
        made = library.check(kernel.midepoch_best_fit(address(sizes), len(sizes), length, *map(address, found)))
        return Bins(found[0], found[1], found[2], found[3][:made])
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= length:
        raise ValueError(f"sizes must be in [1, {length}], got {sizes.min()} to {sizes.max()}")
    listed = sizes.tolist()
    bins, offsets, numbers = (np.empty(len(sizes), np.int64) for _ in range(3))
    rooms = []
    for number, pieces in enumerate(sorted(map(sorted, _bins(listed, length)), key=lambda each: each[0])):
        used = 0
        for place, piece in enumerate(pieces, 1):
            bins[piece], offsets[piece], numbers[piece] = number, used, place
            used += listed[piece]
        rooms.append(length - used)
    return Bins(bins, offsets, numbers, np.array(rooms, np.int64))


def _bins(sizes: list[int], length: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, (sizes[i], -1))
        if place == len(rooms):
            bins.append([i])
            room, number = length - sizes[i], len(bins) - 1
        else:
            room, number = rooms.pop(place)
            bins[number].append(i)
            room -= sizes[i]
        if room:
            insort(rooms, (room, number))
    return bins
