"""Gathering of one column from mapped blocks.

The buffer addresses of each block are recorded when it is first used. A gather is then array arithmetic and one copy.
Columns of other layouts (structs, lists of lists, views, …) are read with pyarrow's ``take`` instead.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import CorruptBlockError
from midepoch.read.memory import Memory

Int64Array = npt.NDArray[np.int64]

_PAGE = mmap.PAGESIZE


def gatherer(kind: pa.DataType, blocks: int) -> Gatherer | None:
    """Return the gatherer of a type, or None if only pyarrow supports it."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if is_list else kind
    offset: np.dtype[np.signedinteger] | None = None
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind):
        offset = np.dtype(np.int32)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind):
        offset = np.dtype(np.int64)
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
                raise CorruptBlockError(f"block {block} contains offsets that point outside its own data")
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
