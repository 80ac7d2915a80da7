"""Vectorised reads at given addresses, through views that are bounded by the buffers.

``Table.take`` over many chunks costs 30 µs per row, a Python loop over blocks 1.6 µs. Here numpy's indexing gathers
from a view of overlapping rows over a buffer: 0.7 µs for 4 KB, nearly all of it for the copy. One view covers a group
of neighbouring buffers, since the system maps files next to each other: a batch from a thousand files is one call.

All arithmetic is relative to the first address of a group, so that no address is too large. A ``Memory`` holds its
buffers, so that no address becomes stale. Callers check every offset inside a block when they open the block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.recycled import empty
from midepoch._native import copy_ranges

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_REACH = 1 << 30
"""Largest gap in bytes between buffers that share a view. The gap is never read."""
_WIDE = 1 << 15
"""Bytes of a row from which rows are copied one by one: 0.3 µs of Python each, where the copy takes 5 µs or more.

Views of narrower rows cannot exceed numpy's 2⁶³ elements: a group would have to span 2⁴⁸ bytes.
"""
_MANY = 256
"""Ranges from which the kernel copies them: it saves 0.2 µs for each, and a call takes 40 µs."""


def grouped(starts: Int64Array, stops: Int64Array, reach: int = _REACH) -> tuple[Int64Array, Int64Array]:
    """Group neighbouring ranges of addresses, sorted by start. Return the first address and the end of each group."""
    if not len(starts):
        return starts, stops
    ends = np.maximum.accumulate(stops)
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > reach) + 1
    return starts[np.concatenate([[0], cuts])], ends[np.concatenate([cuts - 1, [len(ends) - 1]])]


class Memory:
    """Buffers, and those of other memories, read by address. Immutable; keeps the buffers alive."""

    def __init__(self, buffers: Sequence[pa.Buffer] = (), others: Sequence[Memory] = ()) -> None:
        own = [buffer for buffer in buffers if buffer.size]
        addresses = np.array([buffer.address for buffer in own], dtype=np.int64)
        sizes = np.array([buffer.size for buffer in own], dtype=np.int64)
        starts = np.concatenate([addresses, *(other._starts for other in others)])
        stops = np.concatenate([addresses + sizes, *(other._stops for other in others)])
        order = np.argsort(starts)
        self.buffers: tuple[pa.Buffer, ...] = sum((other.buffers for other in others), tuple(own))
        self._starts: Int64Array
        self._stops: Int64Array
        self._starts, self._stops = grouped(starts[order], stops[order])
        extents = zip(self._starts.tolist(), self._stops.tolist(), strict=True)
        self._groups = [_Group(start, stop, self.buffers) for start, stop in extents]
        self._only = self._groups[0] if len(self._groups) == 1 else None

    @staticmethod
    def union(parts: Sequence[Memory]) -> Memory:
        """Return the memory over the buffers of several."""
        distinct = list(dict.fromkeys(parts))
        return distinct[0] if len(distinct) == 1 else Memory(others=distinct)

    def gather(self, addresses: Int64Array, width: int) -> Bytes:
        """Return ``width`` bytes from each address as a new array of shape (len(addresses), width)."""
        if self._only is not None:
            return self._only.gather(addresses, width)
        out = np.empty((len(addresses), width), dtype=np.uint8)
        for group, own in self._grouped(addresses):
            out[own] = group.gather(addresses[own], width)
        return out

    def join(self, starts: Int64Array, ends: Int64Array) -> Bytes | bytearray:
        """Return the concatenated bytes of ranges, copied once. ``ends``: 0, then the end of each in the result."""
        if self._only is not None and len(starts) < _MANY:
            return self._only.join(starts, ends)
        targets, sizes = ends[:-1], np.diff(ends)
        if not sizes.all():  # an empty range may be outside of all buffers
            some = np.flatnonzero(sizes)
            starts, targets, sizes = starts[some], targets[some], sizes[some]
        out: Bytes = empty(int(ends[-1]), np.uint8)
        for group, own in self._grouped(starts):
            copy_ranges(group.flat, starts[own] - group.start, sizes[own], out, targets[own])
        return out

    def _grouped(self, addresses: Int64Array) -> Iterator[tuple[_Group, Any]]:
        """Yield the groups of some addresses, and which of these each has."""
        if self._only is not None:
            yield self._only, slice(None)
        elif len(addresses):
            owner = self._starts.searchsorted(addresses, side="right") - 1
            for number in np.unique(owner).tolist():
                yield self._groups[number], owner == number


class _Group:
    """Range from the first to the last byte of neighbouring buffers."""

    def __init__(self, start: int, stop: int, buffers: tuple[pa.Buffer, ...]) -> None:
        self.start = start
        self.flat: Bytes = np.frombuffer(pa.foreign_buffer(start, stop - start, base=buffers), np.uint8)
        self._views: dict[int, Bytes] = {}

    def view(self, width: int) -> Bytes:
        """Return a view of rows of ``width`` bytes that begin at every byte. No memory is read until it is indexed."""
        view = self._views.get(width)
        if view is None:
            rows = len(self.flat) - width + 1
            view = self._views[width] = np.ndarray((rows, width), np.uint8, self.flat, strides=(1, 1))
        return view

    def gather(self, addresses: Int64Array, width: int) -> Bytes:
        places = addresses - self.start
        if width < _WIDE:
            return self.view(width)[places]
        out = np.empty((len(places), width), dtype=np.uint8)
        for row, place in zip(out, places.tolist(), strict=True):
            row[:] = self.flat[place : place + width]
        return out

    def join(self, starts: Int64Array, ends: Int64Array) -> bytearray:
        data, places = memoryview(self.flat.data), starts - self.start
        ranges = zip(places.tolist(), (places + np.diff(ends)).tolist(), strict=True)
        return bytearray().join([data[start:stop] for start, stop in ranges])


class HeldBuffers:
    """Buffers by key, and the memory over all of them."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Sequence[pa.Buffer]] = {}
        self._memory = Memory()
        self._added: list[pa.Buffer] = []
        self._removed = False

    def add(self, key: Hashable, buffers: Sequence[pa.Buffer]) -> None:
        self._buffers[key] = buffers
        self._added.extend(buffers)

    def remove(self, key: Hashable) -> None:
        if self._buffers.pop(key, None) is not None:
            self._removed = True

    @property
    def memory(self) -> Memory:
        if self._removed:
            self._memory = Memory([buffer for each in self._buffers.values() for buffer in each])
        elif self._added:  # beside the others: a thousand files are not sorted a thousand times
            self._memory = Memory(self._added, [self._memory])
        self._added, self._removed = [], False
        return self._memory
