"""Arrays that a function returns for each row, copied at once to where the batch is assembled.

They are in the processor's cache then, and their memory can be used for the next row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from midepoch._internal.imports import loaded
from midepoch.transforms.formats import Allocate

_LEAST_BYTES = 4096
"""Bytes of a row below which the column is assembled faster in one piece."""


def collect_rows(first: Mapping[str, Any], allocate: Allocate, rows: int) -> dict[str, CollectedRows]:
    """Return a column for each array of the first row. ``rows``: the maximum number of rows."""
    if type(first) is not dict:
        return {}
    arrays = {name: _array(value) for name, value in first.items()}
    return {
        name: CollectedRows(array, allocate, rows)
        for name, array in arrays.items()
        if array is not None and array.nbytes >= _LEAST_BYTES
    }


class CollectedRows:
    """A column of arrays of one shape and type: one array. A list if a row is different."""

    def __init__(self, first: Any, allocate: Allocate, rows: int) -> None:
        shape = (rows, *first.shape)
        room = allocate(shape, first.dtype)
        self._rows = np.empty(shape, first.dtype) if room is None else room
        self._count, self._is_tensor = 0, False
        self._others: list[Any] | None = None

    def add(self, value: Any) -> None:
        """Add the value of the next row."""
        array = _array(value) if self._others is None else None
        is_tensor = type(value) is not np.ndarray
        if array is None or array.shape != self._rows.shape[1:] or array.dtype != self._rows.dtype:
            self._others = self._apart() if self._others is None else self._others
        elif self._count and is_tensor != self._is_tensor:
            self._others = self._apart()
        if self._others is not None:
            self._others.append(value)
            return
        self._rows[self._count] = array
        self._count, self._is_tensor = self._count + 1, is_tensor

    def column(self) -> Any:
        """Return the column."""
        return self._rows[: self._count] if self._others is None else self._others

    def _apart(self) -> list[Any]:
        """Return the rows so far as they were returned."""
        rows = list(self._rows[: self._count])
        return [sys.modules["torch"].from_numpy(row) for row in rows] if self._is_tensor else rows


def _array(value: Any) -> Any:
    """Return a value as a numpy array without a copy, or None if it is not an array of numbers."""
    if type(value) is np.ndarray:
        return value if value.ndim and value.dtype.kind in "biufc" and value.dtype.isnative else None
    torch = loaded("torch")
    if torch is None or type(value) is not torch.Tensor or not value.is_cpu or value.requires_grad or not value.ndim:
        return None
    try:
        return value.numpy()
    except (TypeError, RuntimeError):  # bfloat16, sparse, …
        return None
