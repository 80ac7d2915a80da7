"""Gathering of one column from mapped blocks: one class for each memory layout of Arrow.

Each class keeps the buffer addresses by block, recorded when a block is first used. A gather is then array arithmetic
and one copy. Columns of other layouts (structs, lists of lists, views, …) are read with pyarrow's ``take`` instead.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import CorruptBlockError
from midepoch.read.memory import Memory

Int64Array = npt.NDArray[np.int64]

_PAGE = mmap.PAGESIZE


class Gatherer(Protocol):
    """Gatherer of one column. It opens blocks one by one and gathers rows of opened blocks only."""

    def open(self, block: int, column: pa.Array) -> bool:
        """Record a block's buffer addresses. Return False if it cannot be gathered. Raise CorruptBlockError."""

    def gather(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Array:
        """Return the values at (block, row in block) as a new array that owns its memory. ``memory`` holds those
        blocks.
        """


def gatherer(kind: pa.DataType, blocks: int) -> Gatherer | None:
    """Return the gatherer of a type, or None if only pyarrow supports it."""
    if pa.types.is_boolean(kind):
        return _Bits(kind, blocks)
    if (width := fixed_width(kind)) is not None:
        return Fixed(kind, width, blocks)
    if pa.types.is_fixed_size_list(kind) and (width := fixed_width(kind.value_type)) and kind.list_size:
        return Fixed(kind, width * kind.list_size, blocks)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _Variable(kind, np.dtype(np.int32), 1, blocks)
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _Variable(kind, np.dtype(np.int64), 1, blocks)
    if pa.types.is_list(kind) and (width := fixed_width(kind.value_type)):
        return _Variable(kind, np.dtype(np.int32), width, blocks)
    if pa.types.is_large_list(kind) and (width := fixed_width(kind.value_type)):
        return _Variable(kind, np.dtype(np.int64), width, blocks)
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


class _Nulls:
    """Validity bitmap, the first buffer of every layout."""

    def __init__(self, blocks: int) -> None:
        self._validity = np.zeros(blocks, dtype=np.int64)  # 0: no nulls in the block

    def open(self, block: int, column: pa.Array) -> None:
        bitmap = column.buffers()[0]
        self._validity[block] = bitmap.address if bitmap is not None and column.null_count else 0

    def bitmap(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Buffer | None:
        address = self._validity[blocks]
        some = address != 0
        if not some.any():
            return None
        valid = np.ones(len(rows), dtype=bool)
        valid[some] = _bits(memory, address[some], rows[some])
        return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _bits(memory: Memory, address: Int64Array, rows: Int64Array) -> npt.NDArray[np.bool_]:
    return (memory.gather(address + (rows >> 3), 1)[:, 0] >> (rows & 7).astype(np.uint8) & 1).astype(bool)


class _Bits:
    """Booleans, one bit each."""

    def __init__(self, kind: pa.DataType, blocks: int) -> None:
        self._kind, self._nulls = kind, _Nulls(blocks)
        self._values = np.zeros(blocks, dtype=np.int64)

    def open(self, block: int, column: pa.Array) -> bool:
        if column.offset:
            return False
        self._nulls.open(block, column)
        self._values[block] = column.buffers()[1].address
        return True

    def gather(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Array:
        bits = np.packbits(_bits(memory, self._values[blocks], rows), bitorder="little")
        return pa.Array.from_buffers(
            self._kind, len(rows), [self._nulls.bitmap(memory, blocks, rows), pa.py_buffer(bits)]
        )


class Fixed:
    """Numbers, dates, fixed-size binary, and fixed-size lists of them: one plain buffer."""

    def __init__(self, kind: pa.DataType, width: int, blocks: int) -> None:
        self._kind, self._width, self._nulls = kind, width, _Nulls(blocks)
        self._list = pa.types.is_fixed_size_list(kind)
        self._values = np.zeros(blocks, dtype=np.int64)

    def open(self, block: int, column: pa.Array) -> bool:
        values = column.values if self._list else column
        if column.offset or (self._list and (values.offset or values.null_count)):
            return False
        buffer = values.buffers()[1]
        if buffer.size < len(column) * self._width:
            return False
        self._nulls.open(block, column)
        self._values[block] = buffer.address
        return True

    def locate(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> Located | None:
        """Return the addresses of rows of opened blocks, or None unless they are numbers or fixed-size lists of
        numbers.
        """
        dtype = number_dtype(self._kind.value_type if self._list else self._kind)
        if dtype is None:
            return None
        shape = (self._kind.list_size,) if self._list else ()
        return Located(memory, self._values[blocks] + rows * self._width, self._width, dtype, shape)

    def gather(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Array:
        data = pa.py_buffer(memory.gather(self._values[blocks] + rows * self._width, self._width))
        nulls = self._nulls.bitmap(memory, blocks, rows)
        if not self._list:
            return pa.Array.from_buffers(self._kind, len(rows), [nulls, data])
        size = self._kind.list_size
        values = pa.Array.from_buffers(self._kind.value_type, len(rows) * size, [None, data])
        return pa.Array.from_buffers(self._kind, len(rows), [nulls], children=[values])


class _Variable:
    """Strings, binary, and lists of plain values: offsets into one buffer of items."""

    def __init__(self, kind: pa.DataType, offset: np.dtype[np.signedinteger], width: int, blocks: int) -> None:
        self._kind, self._offset, self._width, self._nulls = kind, offset, width, _Nulls(blocks)
        self._list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        self._offsets = np.zeros(blocks, dtype=np.int64)
        self._values = np.zeros(blocks, dtype=np.int64)

    def open(self, block: int, column: pa.Array) -> bool:
        values = column.values if self._list else None
        if column.offset or (values is not None and (values.offset or values.null_count)):
            return False
        offsets = column.buffers()[1]
        data = column.buffers()[2] if values is None else values.buffers()[1]
        if offsets is None or offsets.size < (len(column) + 1) * self._offset.itemsize:
            return False
        ends = np.frombuffer(offsets, self._offset, len(column) + 1)
        items = 0 if data is None else data.size // self._width
        # Checked in full once per block: no gather can read outside of it, and a corrupt block is corrupt for every
        # row.
        if ends[0] < 0 or ends[-1] > items or (ends[1:] < ends[:-1]).any():
            raise CorruptBlockError(f"block {block} contains offsets that point outside its own data")
        self._nulls.open(block, column)
        self._offsets[block] = offsets.address
        self._values[block] = 0 if data is None else data.address
        return True

    def gather(self, memory: Memory, blocks: Int64Array, rows: Int64Array) -> pa.Array:
        size = self._offset.itemsize
        ends = memory.gather(self._offsets[blocks] + rows * size, 2 * size).view(self._offset).astype(np.int64)
        start, length = self._values[blocks] + ends[:, 0] * self._width, ends[:, 1] - ends[:, 0]
        if int(length.sum()) > np.iinfo(self._offset).max:
            raise OverflowError(f"{len(rows)} rows of {self._kind} exceed 2 GiB in one batch. Use smaller batches.")
        nulls = self._nulls.bitmap(memory, blocks, rows)
        if not self._list and (array := memory.gather_bytes(start, length, nulls, self._kind)) is not None:
            return array
        total = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(length, out=total[1:])
        offsets, data = pa.py_buffer(total.astype(self._offset)), memory.join(start, start + length * self._width)
        if not self._list:
            return pa.Array.from_buffers(self._kind, len(rows), [nulls, offsets, pa.py_buffer(data)])
        values = pa.Array.from_buffers(self._kind.value_type, int(total[-1]), [None, pa.py_buffer(data)])
        return pa.Array.from_buffers(self._kind, len(rows), [nulls, offsets], children=[values])
