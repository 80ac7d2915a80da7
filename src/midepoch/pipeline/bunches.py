"""Batches by a budget of tokens, where lengths are known only when rows are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.order.budget import TooLongError
from midepoch.order.keys import derive
from midepoch.pipeline.chunk import Bunches, Items, Pieces, materialize
from midepoch.pipeline.planned import too_long
from midepoch.pipeline.stage_specs import HIDDEN, Buckets
from midepoch.transforms import Batch, RunContext
from midepoch.transforms.arrow_values import flat_numbers
from midepoch.transforms.columns import check_columns

Int64Array = npt.NDArray[np.int64]


def bunches(items: Items, spec: Buckets, run: RunContext) -> Bunches:
    """Return the batches of a window of outputs."""
    if isinstance(items, Pieces):
        lengths = np.zeros(len(items), np.int64)
        for number in np.unique(items.which).tolist():
            own = np.flatnonzero(items.which == number)
            lengths[own] = _lengths(items.batches[number].keep(items.places[own]), spec)
        rows: Batch | Pieces = items
        numbers = np.concatenate([batch.rows for batch in items.batches])
    else:
        rows = materialize(items)
        lengths, numbers = _lengths(rows, spec), rows.rows
    if spec.column == HIDDEN:
        rows = rows.changed(_without) if isinstance(rows, Pieces) else _without(rows)
    key = None
    if spec.shuffled:
        key = derive(run.seed, run.epoch, "batches", _first(rows, numbers))
    try:
        made = spec.budget.split(lengths, key)
    except TooLongError as problem:
        what = f"row {int(numbers[problem.place])} of the dataset" if isinstance(rows, Batch) else "a row"
        raise too_long(problem.length, spec.budget, what) from None
    return Bunches(rows, made)


def _first(rows: Batch | Pieces, numbers: Int64Array) -> int:
    """Return a number of the first output of a window: there are no positions by which to know it."""
    ordinal = 0 if not isinstance(rows, Batch) or rows.ordinals is None else int(rows.ordinals[0])
    return (int(numbers[0]) + ordinal * 0x9E3779B97F4A7C15) & (2**64 - 1)


def _without(batch: Batch) -> Batch:
    return batch.with_columns({name: values for name, values in batch.columns.items() if name != HIDDEN})


def _lengths(batch: Batch, spec: Buckets) -> Int64Array:
    check_columns([spec.column], list(batch.columns), "max_tokens")
    column: Any = batch.columns[spec.column]
    if spec.given:
        if isinstance(column, pa.Array) and column.null_count:
            import pyarrow.compute as pc

            column = pc.fill_null(column, 0)
        numbers = np.asarray(flat_numbers(column) if isinstance(column, pa.Array) else column)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or (len(numbers) and numbers.min() < 0):
            raise ColumnError(f"loader(length=…): the function must return a number of tokens, got {column!r:.60}")
        return numbers.astype(np.int64)
    return lengths_in(spec.column, column)


def lengths_in(name: str, column: Any) -> Int64Array:
    """Return the length of each value of a column. Null has none."""
    if isinstance(column, pa.Array):
        import pyarrow.compute as pc

        kind = column.type
        if pa.types.is_fixed_size_list(kind):
            return np.where(flat_numbers(column.is_valid()), kind.list_size, 0).astype(np.int64)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return np.asarray(flat_numbers(pc.fill_null(pc.list_value_length(column), 0)), np.int64)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
            return np.asarray(flat_numbers(pc.fill_null(pc.binary_length(column), 0)), np.int64)
    elif isinstance(column, np.ndarray) and column.ndim > 1:
        return np.full(len(column), column.shape[1], np.int64)
    elif all(value is None or hasattr(value, "__len__") for value in column):
        return np.array([0 if value is None else len(value) for value in column], np.int64)
    raise ColumnError(f"max_tokens: column {name!r} has no lengths. Pass length= with the name of a column of lists.")
