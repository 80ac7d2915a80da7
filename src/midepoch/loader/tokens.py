"""Tokens in a batch, where its columns have the names that the field uses."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

_COLUMNS = ("input_ids", "tokens", "token_ids")
_MASK = "attention_mask"
_SAMPLE = 8
"""Rows of a mask that are summed: 64 rows of 2,048 places would take 60 µs."""


def token_counts(batch: Any) -> tuple[float, float | None] | None:
    """Return the places for tokens in a batch, and the tokens without padding, or None for what is not known.

    Padding is known from an attention mask in the memory of the CPU. Lists of different lengths have none.
    """
    if not isinstance(batch, Mapping):
        return None
    column = next((batch[name] for name in _COLUMNS if name in batch), None)
    shape = getattr(column, "shape", None)
    if shape is not None and len(shape) == 2:
        slots = float(shape[0] * shape[1])
        share = _share(batch.get(_MASK), tuple(shape)) if _MASK in batch else None
        return slots, None if share is None else slots * share
    if shape is not None and len(shape) == 1 and "cu_seqlens" in batch:  # one row after the other
        ends = batch["cu_seqlens"]
        return float(shape[0]), float(ends[-1]) if len(ends) and _is_here(ends) else None
    if isinstance(column, (list, tuple)) and column and all(_is_row(row) for row in column[:_SAMPLE]):
        sample = column[:: max(1, len(column) // _SAMPLE)]
        slots = sum(map(len, sample)) * len(column) / len(sample)
        return slots, slots
    return None


def _is_row(row: Any) -> bool:
    return isinstance(row, Sized) and not isinstance(row, (str, bytes, Mapping)) and getattr(row, "ndim", 1) == 1


def _share(mask: Any, shape: tuple[int, ...]) -> float | None:
    """Return the share of a mask that is set. None if it is elsewhere: reading it would wait for the device."""
    if tuple(getattr(mask, "shape", ())) != shape or not all(shape) or not _is_here(mask):
        return None
    sample = mask[:: max(1, shape[0] // _SAMPLE)]
    return float((sample != 0).sum()) / (len(sample) * shape[1])


def _is_here(array: Any) -> bool:
    device = getattr(array, "device", None)
    return device is None or str(getattr(device, "type", device)) == "cpu"
