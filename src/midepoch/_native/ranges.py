"""Copies and numbers of ranges of flat arrays. Ranges are given by their starts and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._native import library

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

_ITEM_SIZES = (1, 2, 4, 8)


def copy_ranges(source: Values, starts: Int64Array, sizes: Int64Array, out: Values, targets: Int64Array) -> None:
    """Copy ranges of one array to other places of another one of the same type."""
    _check_flat(out)
    if source.ndim != 1 or source.dtype != out.dtype:
        raise ValueError(f"source must be flat and {out.dtype}, got {source.ndim} dimensions of {source.dtype}")
    starts, sizes, targets = _numbers(starts, sizes, targets)
    kernel = library.kernel()
    if kernel is not None and out.itemsize in _ITEM_SIZES:
        source = np.ascontiguousarray(source)
        places = address(starts), address(sizes), address(targets), len(starts)
        arrays = address(source), len(source), address(out), len(out), out.itemsize
        library.check(kernel.midepoch_copy_ranges(*arrays, *places))
        return
    _check_ranges(starts, sizes, len(source))
    _check_ranges(targets, sizes, len(out))
    for start, size, target in zip(starts.tolist(), sizes.tolist(), targets.tolist(), strict=True):
        out[target : target + size] = source[start : start + size]


def fill_ranges(out: Values, value: Any, starts: Int64Array, sizes: Int64Array) -> None:
    """Fill ranges of an array with one value."""
    _check_flat(out)
    starts, sizes = _numbers(starts, sizes)
    if not len(starts):
        return
    kernel = library.kernel()
    if kernel is not None and out.itemsize in _ITEM_SIZES:
        item = np.array([value]).astype(out.dtype)
        places = address(starts), address(sizes), len(starts)
        library.check(kernel.midepoch_fill_ranges(address(out), len(out), address(item), out.itemsize, *places))
        return
    _check_ranges(starts, sizes, len(out))
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        out[start : start + size] = value


def number_ranges(
    positions: Int32Array, segments: Int32Array, starts: Int64Array, sizes: Int64Array, numbers: Int64Array
) -> None:
    """Write positions 0, 1, … and a segment number into each range."""
    _check_ids(positions, segments)
    starts, sizes, numbers = _numbers(starts, sizes, numbers)
    if (kernel := library.kernel()) is not None:
        ids, places = (address(positions), address(segments)), (address(starts), address(sizes), address(numbers))
        library.check(kernel.midepoch_number_ranges(*ids, len(positions), *places, len(starts)))
        return
    _check_ranges(starts, sizes, len(positions))
    if len(numbers) and (numbers.min() < 0 or numbers.max() > np.iinfo(np.int32).max):
        raise ValueError(f"segment numbers must fit into int32, got {numbers.min()} to {numbers.max()}")
    counted = np.arange(sizes.max() if len(sizes) else 0, dtype=np.int32)
    for start, size, number in zip(starts.tolist(), sizes.tolist(), numbers.tolist(), strict=True):
        positions[start : start + size] = counted[:size]
        segments[start : start + size] = number


def number_concatenated(positions: Int32Array, segments: Int32Array, documents: Int64Array, length: int) -> None:
    """Write positions and segment numbers of documents that lie one after the other in sequences of ``length``.

    ``documents``: their lengths, together at least as many tokens as the arrays hold. Positions begin again with each
    document and each sequence, segment numbers at 1 with each sequence.
    """
    _check_ids(positions, segments)
    (documents,) = _numbers(documents)
    if not 1 <= length <= np.iinfo(np.int32).max:
        raise ValueError(f"length must be a positive int32, got {length}")
    if (kernel := library.kernel()) is not None:
        arrays = address(positions), address(segments), len(positions), address(documents), len(documents)
        library.check(kernel.midepoch_number_concatenated(*arrays, length))
        return
    total, ends = len(positions), np.cumsum(documents)
    if (ends[-1] if len(ends) else 0) < total or (documents < 0).any():
        raise ValueError(f"the documents must have {total} tokens or more")
    starts = np.concatenate([np.zeros(1, np.int64), ends[ends < total], np.arange(0, total, length)])
    starts = np.unique(starts) if total else starts[:0]
    sizes, sequences = np.diff(starts, append=total), starts // length
    segments[:] = np.repeat(np.arange(len(starts)) - np.searchsorted(sequences, sequences) + 1, sizes)
    positions[:] = np.arange(total) - np.repeat(starts, sizes)


def address(array: Values) -> int:
    """Return the address of the first item. It takes a third of the time of ``array.ctypes.data``."""
    found: int = array.__array_interface__["data"][0]
    return found


def _numbers(*arrays: Int64Array) -> list[Int64Array]:
    """Return aligned and contiguous arrays of int64, and check that they are equally long."""
    found = [np.require(array, np.int64, ["C", "A"]) for array in arrays]
    if any(array.ndim != 1 or len(array) != len(found[0]) for array in found):
        raise ValueError(f"starts, sizes and targets must be equally long, got shapes {[a.shape for a in found]}")
    return found


def _check_flat(out: Values) -> None:
    if out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("the output must be a flat, contiguous, writable array")


def _check_ids(positions: Int32Array, segments: Int32Array) -> None:
    for array in (positions, segments):
        _check_flat(array)
        if array.dtype != np.int32 or not array.flags.aligned or len(array) != len(positions):
            raise ValueError("positions and segments must be equally long, aligned arrays of int32")


def _check_ranges(starts: Int64Array, sizes: Int64Array, items: int) -> None:
    if ((starts < 0) | (sizes < 0) | (sizes > items) | (starts > items - sizes)).any():
        raise ValueError("a range is out of bounds")
