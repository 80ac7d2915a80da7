"""Memory for large arrays, used again once nothing refers to it.

The system clears new memory page by page, which takes five times as long as filling it with packed sequences.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST, _MOST = 1 << 17, 1 << 24
"""Bytes. Smaller memory is used again by malloc itself; larger memory would be held for too long."""

_free: deque[npt.NDArray[np.uint8]] = deque(maxlen=8)
"""The last blocks that became free, usually a few MiB each. All operations on it are atomic: a block may become free in
any thread, and in the middle of any of these functions.
"""


class _Lease:
    """A block in use. Arrays made from it hold it, and so does everything made from them."""

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self, free: deque[npt.NDArray[np.uint8]] = _free) -> None:  # globals may be gone at exit
        free.append(self._block)


def empty(shape: int | tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Return a new array like ``numpy.empty``, possibly in memory that was used before."""
    dtype = np.dtype(dtype)
    size = prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    if not _LEAST <= size <= _MOST:
        return np.empty(shape, dtype)
    array: npt.NDArray[Any] = np.asarray(_Lease(_block(size)))[:size].view(dtype)
    return array.reshape(shape)


def _block(size: int) -> npt.NDArray[np.uint8]:
    for _ in range(len(_free)):
        try:
            block = _free.pop()  # the last one that was used, which may still be in a cache
        except IndexError:  # another thread took it
            break
        if size <= len(block) <= 2 * size:
            return block
        _free.appendleft(block)
    step = 1 << size.bit_length() - 3  # the same block for sizes that differ a little; pages not used cost nothing
    return np.empty((size // step + 1) * step, np.uint8)
