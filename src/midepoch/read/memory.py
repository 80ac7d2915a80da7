"""Vectorised reads at given addresses, through views that are bounded by the buffers.

``Table.take`` over many chunks costs 30 µs per row, a Python loop over blocks 1.6 µs. Here numpy's indexing gathers
from a view of overlapping rows over a buffer: 0.7 µs for 4 KB, nearly all of it for the copy. One view covers a group
of neighbouring buffers, since the system maps files next to each other: a batch from a thousand files is one call.

All arithmetic is relative to the first address of a group, so that no address is too large. A ``Memory`` holds its
buffers, so that no address becomes stale. Callers check every offset inside a block when they open the block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.recycled import empty
from midepoch._native import copy_ranges, library

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_REACH = 1 << 30
"""Largest gap in bytes between buffers that share a view. The gap is never read."""
_WIDE = 1 << 15
"""Bytes of a row from which rows are copied one by one: 0.3 µs of Python each, where the copy takes 5 µs or more.

Views of narrower rows cannot exceed numpy's 2⁶³ elements: a group would have to span 2⁴⁸ bytes.
"""
_INLINE = 12  # bytes: a string view stores shorter values inline
_WINDOW_BITS = 30
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
    """Buffers, read by address. Immutable; keeps the buffers alive."""

    def __init__(self, buffers: Sequence[pa.Buffer] = (), *, beside: Memory | None = None) -> None:
        added = sorted((b for b in buffers if b.size), key=lambda b: (b.address, -b.size))
        starts = np.array([b.address for b in added], dtype=np.int64)
        stops = starts + np.array([b.size for b in added], dtype=np.int64)
        if beside is not None:  # insert into the sorted arrays: a thousand files are not sorted a thousand times
            places = beside._starts.searchsorted(starts)
            starts, stops = np.insert(beside._starts, places, starts), np.insert(beside._stops, places, stops)
            ordered = list(beside.buffers)
            for place, buffer in zip(reversed(places.tolist()), reversed(added), strict=True):
                ordered.insert(place, buffer)
            added = ordered
        # Buffers inside another one (columns of a mapped file) are dropped.
        outer = np.ones(len(added), dtype=bool)
        outer[1:] = stops[1:] > np.maximum.accumulate(stops)[:-1]
        outer[:-1] &= (starts[:-1] != starts[1:]) | (stops[:-1] >= stops[1:])
        self.buffers: tuple[pa.Buffer, ...] = tuple(compress(added, outer.tolist()))
        self._starts: Int64Array = starts[outer]
        self._stops: Int64Array = stops[outer]
        self._disjoint = bool((self._starts[1:] >= self._stops[:-1]).all())
        self._small = bool((self._stops - self._starts <= 1 << _WINDOW_BITS).all())
        self._windows = np.concatenate([[0], np.cumsum(((self._stops - self._starts - 1) >> _WINDOW_BITS) + 1)])
        self._firsts, ends = grouped(self._starts, self._stops)
        self._groups = [_Group(a, b, self.buffers) for a, b in zip(self._firsts.tolist(), ends.tolist(), strict=True)]
        self._only = self._groups[0] if len(self._groups) == 1 else None

    @staticmethod
    def union(parts: Sequence[Memory]) -> Memory:
        """Return the memory over the buffers of several."""
        distinct = list(dict.fromkeys(parts))
        return distinct[0] if len(distinct) == 1 else Memory([b for part in distinct for b in part.buffers])

    def gather(self, addresses: Int64Array, width: int) -> Bytes:
        """Return ``width`` bytes from each address as a new array of shape (len(addresses), width)."""
        if self._only is not None:
            return self._only.gather(addresses, width)
        out = np.empty((len(addresses), width), dtype=np.uint8)
        if len(addresses):
            owner = self._firsts.searchsorted(addresses, side="right") - 1
            for number in np.unique(owner).tolist():
                own = owner == number
                out[own] = self._groups[number].gather(addresses[own], width)
        return out

    def join(self, starts: Int64Array, stops: Int64Array) -> Bytes | bytearray:
        """Return the concatenated bytes of the ranges [start, stop), copied once."""
        if len(starts) >= _MANY and library.kernel() is not None:
            return self._copied(starts, stops - starts)
        if self._only is not None:
            return bytearray().join(self._only.slices(starts, stops))
        some = np.flatnonzero(stops > starts)
        owner = self._firsts.searchsorted(starts[some], side="right") - 1 if len(some) else some
        parts: list[memoryview] = [memoryview(b"")] * len(some)
        for number in np.unique(owner).tolist():
            own = np.flatnonzero(owner == number)
            for place, part in zip(
                own.tolist(), self._groups[number].slices(starts[some[own]], stops[some[own]]), strict=True
            ):
                parts[place] = part
        return bytearray().join(parts)

    def _copied(self, starts: Int64Array, sizes: Int64Array) -> Bytes:
        """Return the concatenated bytes of ranges, copied by the kernel: 0.1 µs of Python less for each."""
        some = np.flatnonzero(sizes > 0)
        starts, sizes = starts[some], sizes[some]
        targets = np.cumsum(sizes) - sizes
        out: Bytes = empty(int(sizes.sum()), np.uint8)
        if self._only is not None:
            copy_ranges(self._only.flat, starts - self._only.start, sizes, out, targets)
            return out
        owner = self._firsts.searchsorted(starts, side="right") - 1
        for number in np.unique(owner).tolist():
            own, group = owner == number, self._groups[number]
            copy_ranges(group.flat, starts[own] - group.start, sizes[own], out, targets[own])
        return out

    def gather_bytes(
        self, starts: Int64Array, lengths: Int64Array, nulls: pa.Buffer | None, kind: pa.DataType
    ) -> pa.Array | None:
        """Return an array of strings or bytes from ranges of memory, copied once and without a Python object for each.

        The ranges become views into the buffers, which pyarrow then copies together. Return None if a range is too long
        for a view or spans two buffers.
        """
        if not len(starts) or int(lengths.max()) >= 1 << _WINDOW_BITS:
            return None
        # Fields of a view: length, first bytes (not needed for copying), buffer, offset.
        views = np.zeros((len(starts), 4), dtype=np.int32)
        views[:, 0] = lengths
        windows: list[pa.Buffer] = []
        if int(lengths.min()) > _INLINE:
            located = self._locate(starts, lengths)
            if located is None:
                return None
            views[:, 2], views[:, 3], windows = located
        else:
            long = lengths > _INLINE
            if long.any():
                located = self._locate(starts[long], lengths[long])
                if located is None:
                    return None
                views[long, 2], views[long, 3], windows = located
            raw = views.view(np.uint8)
            for length in range(1, _INLINE + 1):
                short = lengths == length
                if short.any():
                    raw[short, 4 : 4 + length] = self.gather(starts[short], length)
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        buffers = [nulls, pa.py_buffer(views), *windows]
        views_of = pa.string_view() if text else pa.binary_view()
        return _caster()(pa.Array.from_buffers(views_of, len(starts), buffers), kind)

    def _locate(
        self, starts: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array | int, Int64Array, list[pa.Buffer]] | None:
        """Return the window and offset of each range, and the windows: pieces of buffers that 31 bits can address."""
        if len(self.buffers) == 1 and self._small:
            return 0, starts - self._starts[0], [self.buffers[0]]
        owner = self._starts.searchsorted(starts, side="right") - 1
        if not self._disjoint and (starts + lengths > self._stops[owner]).any():
            return None
        offsets = starts - self._starts[owner]
        if self._small:
            window, most = owner, len(self.buffers)
        else:
            window, most = self._windows[owner] + (offsets >> _WINDOW_BITS), int(self._windows[-1])
            offsets &= (1 << _WINDOW_BITS) - 1
        if most <= len(starts):  # passing all windows is cheaper than finding the used ones
            return window, offsets, list(self.buffers) if self._small else [self._window(i) for i in range(most)]
        numbers, which = np.unique(window, return_inverse=True)
        return which, offsets, [self._window(number) for number in numbers.tolist()]

    def _window(self, number: int) -> pa.Buffer:
        """Return up to 2 GiB of a buffer from a multiple of 1 GiB: any range below 1 GiB is inside one window."""
        if self._small:
            return self.buffers[number]
        owner = int(self._windows.searchsorted(number, side="right")) - 1
        start = (number - int(self._windows[owner])) << _WINDOW_BITS
        buffer = self.buffers[owner]
        return buffer.slice(start, min(buffer.size - start, (2 << _WINDOW_BITS) - 1))


class _Group:
    """Range from the first to the last byte of neighbouring buffers."""

    def __init__(self, start: int, stop: int, buffers: tuple[pa.Buffer, ...]) -> None:
        self.start, self._size, self._buffers = start, stop - start, buffers
        self._views: dict[int, Bytes] = {}
        self.flat = self.view(1)[:, 0]

    def view(self, width: int) -> Bytes:
        """Return a view of rows of ``width`` bytes that begin at every byte. No memory is read until it is indexed."""
        view = np.asarray(_Extent(self.start, self._size - width + 1, width, self._buffers))
        self._views[width] = view
        return view

    def gather(self, addresses: Int64Array, width: int) -> Bytes:
        places = addresses - self.start
        if width < _WIDE:
            view = self._views.get(width)
            return (self.view(width) if view is None else view)[places]
        out = np.empty((len(places), width), dtype=np.uint8)
        flat = self.flat
        for row, place in zip(out, places.tolist(), strict=True):
            row[:] = flat[place : place + width]
        return out

    def slices(self, starts: Int64Array, stops: Int64Array) -> list[memoryview]:
        data = memoryview(self.flat.data)
        begin, end = (starts - self.start).tolist(), (stops - self.start).tolist()
        return [data[a:b] for a, b in zip(begin, end, strict=True)]


class _Extent:
    """Overlapping rows of bytes, through numpy's array interface. Arrays made from it keep the buffers alive."""

    def __init__(self, start: int, rows: int, width: int, buffers: tuple[pa.Buffer, ...]) -> None:
        self._buffers = buffers
        self.__array_interface__: dict[str, Any] = {
            "data": (start, True),
            "shape": (rows, width),
            "strides": (1, 1),
            "typestr": "|u1",
            "version": 3,
        }


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
        elif self._added:
            self._memory = Memory(self._added, beside=self._memory)
        self._added, self._removed = [], False
        return self._memory


@cache
def _caster() -> Callable[[pa.Array, pa.DataType], pa.Array]:
    """Return a function that casts arrays as ``Array.cast`` does, which imports pyarrow.compute.

    That takes 40 ms, in every worker: most of the time until the first batch.
    """
    try:
        from pyarrow._compute import CastOptions, call_function
    except ImportError:  # moved, in another version
        return lambda array, kind: array.cast(kind)
    return lambda array, kind: call_function("cast", [array], CastOptions.safe(kind))
