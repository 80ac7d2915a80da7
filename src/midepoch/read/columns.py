"""Gathering of columns from mapped blocks: vectorised reads at given addresses.

The buffer addresses of each block are recorded when it is first used. A gather is then array arithmetic and one copy.
Columns of other layouts (structs, lists of lists, views, …) are read with pyarrow's ``take`` instead.

``Table.take`` over many chunks costs 30 µs per row, a Python loop over blocks 1.6 µs. Here numpy's indexing gathers
from a view of overlapping rows over a buffer: 0.7 µs for 4 KB, nearly all of it for the copy. One view covers a group
of neighbouring buffers, since the system maps files next to each other: a batch from a thousand files is one call.

Views are bounded by the buffers. All arithmetic is relative to the first address of a group, so that no address is too
large. A ``Memory`` holds its buffers, so that no address becomes stale. Every offset inside a block is checked when the
block is opened.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.recycled import empty
from midepoch._native import copy_ranges
from midepoch.errors import CorruptBlockError
from midepoch.sources.schemas import offset_dtype

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


Int64Array = npt.NDArray[np.int64]

_PAGE = mmap.PAGESIZE


def gatherer(kind: pa.DataType, blocks: int) -> Gatherer | None:
    """Return the gatherer of a type, or None if only pyarrow supports it."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if is_list else kind
    offset = None if pa.types.is_map(kind) else offset_dtype(kind)
    width = 1 if offset is not None and not is_list else fixed_width(item)
    if pa.types.is_fixed_size_list(kind):
        width = (width or 0) * kind.list_size
    if pa.types.is_boolean(kind) or width:
        return Gatherer(kind, item if is_list else None, offset, width or 0, blocks)
    return None


def is_plain(kind: pa.DataType) -> bool:
    """Return True for types of one shape per row: numbers, booleans, dates, text, fixed-size lists of numbers."""
    if pa.types.is_fixed_size_list(kind):
        return number_dtype(kind.value_type) is not None
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(text or binary or pa.types.is_primitive(kind))


def fixed_width(kind: pa.DataType) -> int | None:
    """Return the bytes per value of a type that is stored as one plain buffer, else None."""
    plain = pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    if not plain or pa.types.is_boolean(kind) or kind.bit_width % 8:
        return None
    return kind.bit_width // 8 or None


@dataclass(frozen=True)
class Located:
    """Addresses of some rows of a plain column, and the shape and dtype of the array that they form."""

    memory: Memory
    addresses: Int64Array
    width: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def array(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return a copy of the values of rows start to stop."""
        data = self.memory.gather(self.addresses[start:stop], self.width)
        return data.view(self.dtype).reshape(stop - start, *self.shape)

    def at(self, places: Any) -> Located:
        """Return the rows at some places: a slice, or an array of indices."""
        return replace(self, addresses=self.addresses[places])

    def alike(self, other: Located) -> bool:
        """Return True if both form arrays of the same width, dtype and shape."""
        return (self.width, self.dtype, self.shape) == (other.width, other.dtype, other.shape)

    @staticmethod
    def join(parts: Sequence[Located]) -> Located:
        """Concatenate the rows of several sources."""
        addresses = np.concatenate([part.addresses for part in parts])
        return replace(parts[0], memory=Memory.union([part.memory for part in parts]), addresses=addresses)

    def touch(self, start: int, stop: int) -> None:
        """Load the pages of rows start to stop into memory by reading one byte of each."""
        addresses = self.addresses[start:stop]
        for offset in (*range(0, self.width - 1, _PAGE), self.width - 1):
            self.memory.gather(addresses + offset, 1)


def number_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the numpy dtype of an Arrow number type, else None."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    return np.dtype({"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind)))


class Gatherer:
    """Gatherer of one column. It opens blocks one by one and gathers rows of opened blocks only.

    ``item``: type of the items of a list. ``offset``: type of the offsets of text, binary and lists of any length, into
    one buffer of items. Other types have one plain buffer. ``width``: bytes of an item, or of a plain row; booleans,
    which take one bit each, have 0.
    """

    def __init__(
        self,
        kind: pa.DataType,
        item: pa.DataType | None,
        offset: np.dtype[np.signedinteger] | None,
        width: int,
        blocks: int,
    ) -> None:
        self._kind, self._item, self._offset, self._width = kind, item, offset, width
        self.dtype = number_dtype(kind if item is None else item) if offset is None else None
        """Of numbers and fixed-size lists of numbers, whose rows have addresses. None for others."""
        self._validity, self._offsets, self._values = np.zeros((3, blocks), dtype=np.int64)

    def open(self, block: int, column: pa.Array) -> bool:
        """Record a block's buffer addresses. Return False if it cannot be gathered. Raise CorruptBlockError."""
        items = None if self._item is None else column.values
        if column.offset or (items is not None and (items.offset or items.null_count)):
            return False
        buffers = column.buffers()
        data = buffers[-1]
        size = 0 if data is None else data.size
        if self._offset is not None:
            offsets = buffers[1]
            if offsets is None or offsets.size < (len(column) + 1) * self._offset.itemsize:
                return False
            ends = np.frombuffer(offsets, self._offset, len(column) + 1)
            # Checked in full once per block: no gather can read outside of it, and a corrupt block is corrupt for
            # every row.
            if ends[0] < 0 or ends[-1] > size // self._width or (ends[1:] < ends[:-1]).any():
                raise CorruptBlockError("it contains offsets that point outside its own data")
            self._offsets[block] = offsets.address
        elif size < (len(column) * self._width or (len(column) + 7) // 8):
            return False
        self._validity[block] = buffers[0].address if buffers[0] is not None and column.null_count else 0
        self._values[block] = 0 if data is None else data.address
        return True

    def locate(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> Located:
        """Return the addresses of rows of opened blocks. Only for columns with a ``dtype``."""
        assert self.dtype is not None
        shape = () if self._item is None else (self._kind.list_size,)
        return Located(memory, self._values[blocks] + rows * self._width, self._width, self.dtype, shape)

    def gather(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Array:
        """Return the values at (block, row in block) as a new array that owns its memory. ``memory`` holds those
        blocks.
        """
        buffers, values = [self._nulls(memory, blocks, rows)], self._values[blocks]
        if self._offset is not None:
            size = self._offset.itemsize
            ends = memory.gather(self._offsets[blocks] + rows * size, 2 * size).view(self._offset).astype(np.int64)
            total = np.zeros(len(rows) + 1, dtype=np.int64)
            np.cumsum(ends[:, 1] - ends[:, 0], out=total[1:])
            if total[-1] > np.iinfo(self._offset).max:
                raise OverflowError(f"{len(rows)} rows of {self._kind} exceed 2 GiB in one batch. Use smaller batches.")
            buffers.append(pa.py_buffer(total.astype(self._offset)))
            data = pa.py_buffer(memory.join(values + ends[:, 0] * self._width, total * self._width))
        elif self._width:
            data = pa.py_buffer(memory.gather(values + rows * self._width, self._width))
        else:
            data = pa.py_buffer(np.packbits(_bits(memory, values, rows), bitorder="little"))
        if self._item is None:
            return pa.Array.from_buffers(self._kind, len(rows), [*buffers, data])
        count = len(rows) * self._kind.list_size if self._offset is None else int(total[-1])
        items = pa.Array.from_buffers(self._item, count, [None, data])
        return pa.Array.from_buffers(self._kind, len(rows), buffers, children=[items])

    def _nulls(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Buffer | None:
        """Return the validity bitmap, the first buffer of every layout. None without nulls."""
        address = self._validity[blocks]
        some = address != 0
        if not some.any():
            return None
        valid = np.ones(len(rows), dtype=bool)
        valid[some] = _bits(memory, address[some], rows[some])
        return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _bits(memory: Memory, address: Int64Array, rows: Int64Array) -> npt.NDArray[np.bool_]:
    return (memory.gather(address + (rows >> 3), 1)[:, 0] >> (rows & 7).astype(np.uint8) & 1).astype(bool)
