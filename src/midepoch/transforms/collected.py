"""Arrays that a function returns for each row, copied immediately to where the batch is assembled.

They are in the processor's cache then, and their memory can be used for the next row.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import numpy as np

from midepoch._internal.imports import loaded
from midepoch.transforms.formats import Allocate

_LEAST_BYTES = 4096
"""Bytes of a row below which the column is assembled faster in one piece."""


class Collected:
    """The arrays of the rows of a batch. ``rows``: the maximum number of rows."""

    def __init__(self, allocate: Allocate, rows: int) -> None:
        self._allocate, self._rows = allocate, rows
        self._names: Set[str] | None = None
        self._columns: dict[str, CollectedRows] = {}

    def take(self, result: Any) -> Any:
        """Take the arrays of the result for a row, and return the rest. None if the first row has none."""
        if self._names is None:
            if type(result) is not dict:
                return None
            self._names = result.keys()
            for name, value in result.items():
                array = _array(value)
                if array is not None and array.nbytes >= _LEAST_BYTES:
                    self._columns[name] = CollectedRows(array, self._allocate, self._rows)
            if not self._columns:
                return None
        if type(result) is not dict or result.keys() != self._names:
            return result  # an error, which names the row
        for name, column in self._columns.items():
            column.add(result[name])
        return {name: None if name in self._columns else value for name, value in result.items()}

    def columns(self) -> dict[str, Any]:
        """Return the collected columns."""
        return {name: rows.column() for name, rows in self._columns.items()}


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
