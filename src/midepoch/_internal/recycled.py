"""Memory for large arrays, used again once nothing refers to it.

The system clears new memory page by page, which takes five times as long as filling it with packed sequences.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST, _HELD = 1 << 17, 1 << 26
"""Bytes. Smaller memory is used again by malloc itself. Free blocks are held up to the second."""


class _Blocks:
    """Free blocks. All operations on them are atomic: a block may become free in any thread, and in the middle of any
    of these methods.
    """

    def __init__(self, held: int) -> None:
        self.free: deque[npt.NDArray[np.uint8]] = deque()
        self._held = held  # not the global, which may be gone at exit

    def give(self, block: npt.NDArray[np.uint8]) -> None:
        self.free.append(block)
        try:
            while sum(map(len, self.free.copy())) > self._held:
                self.free.popleft()
        except IndexError:  # another thread took the last one
            pass

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        for _ in range(len(self.free)):
            try:
                block = self.free.pop()  # the last one that was used, which may still be in a cache
            except IndexError:
                break
            if size <= len(block) <= 2 * size:
                return block
            self.free.appendleft(block)
        step = 1 << size.bit_length() - 3  # the same block for sizes that differ a little; pages not used cost nothing
        return np.empty((size // step + 1) * step, np.uint8)


_blocks = _Blocks(_HELD)


class _Lease:
    """A block in use. Arrays made from it hold it, and so does everything made from them."""

    def __init__(self, block: npt.NDArray[np.uint8], blocks: _Blocks) -> None:
        self._block, self._blocks = block, blocks  # not the global, which may be gone at exit
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._blocks.give(self._block)


def empty(count: int | tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Return a new array like ``numpy.empty``, possibly in memory that was used before."""
    shape = count if isinstance(count, tuple) else (count,)
    dtype = np.dtype(dtype)
    size = prod(shape) * dtype.itemsize
    if not _LEAST <= size <= _HELD // 2:
        return np.empty(shape, dtype)
    array: npt.NDArray[Any] = np.asarray(_Lease(_blocks.take(size), _blocks))[:size].view(dtype)
    return array.reshape(shape)
