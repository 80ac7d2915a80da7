"""Marking of padding, and the call of ``collate_fn``, for all sources of batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import MapError
from midepoch.loader.options import PADDING, Options
from midepoch.loader.provenance import PACKED, check_names, with_columns
from midepoch.transforms import Batch, finish, present, present_rows
from midepoch.transforms.default_collate import ITEMS
from midepoch.transforms.formats import Allocate, as_tensor, can_repeat
from midepoch.transforms.generators import Generators, Seeds
from midepoch.transforms.provenance import DOCUMENTS, DocumentTable

_log = logging.getLogger("midepoch")
_warned = False


def marked(batch: Batch, padding: npt.NDArray[np.bool_]) -> Batch:
    """Add a column that is true for padding."""
    if PADDING in batch.columns:
        raise MapError(
            f'a map created a column {PADDING!r}, which last_batch="pad" adds to mark padding rows. Rename it.'
        )
    bits = np.packbits(padding, bitorder="little")  # pa.array would import pandas: 0.6 s
    mark = pa.Array.from_buffers(pa.bool_(), len(batch), [None, pa.py_buffer(bits.tobytes())])
    return batch.with_columns({**batch.columns, PADDING: mark})


def named(batch: Batch, kind: str, options: Options) -> Batch:
    """Add the columns of provenance, if a format has a value of its own for each row."""
    return (
        with_columns(batch, options.provenance) if options.provenance and kind in ("python", "arrow", ITEMS) else batch
    )


def added(batch: Batch, options: Options) -> dict[str, Any] | None:
    """Return the columns of provenance as numpy arrays, or None if there are none."""
    return arrays_of(batch.traced, options) if options.provenance else None


def arrays_of(traced: DocumentTable, options: Options) -> dict[str, Any]:
    """Return the columns of provenance as numpy arrays."""
    packed = options.provenance == PACKED
    arrays = traced.arrays(packed)
    return {DOCUMENTS: arrays} if packed else arrays


def completed(columns: Any, kind: str, options: Options, more: dict[str, Any] | None) -> Any:
    """Return presented columns as this rank gets them: its part of every sequence, and ``more`` of provenance."""
    if options.context is not None and options.layout is None:
        columns = options.context.cut(columns, pads=options.pads)
    if more is None or kind in ("python", "arrow", ITEMS):
        return columns
    if not more.keys().isdisjoint(columns):
        check_names(columns, options.provenance)
    columns.update(more)
    return columns


def arranged(batch: Batch, kind: str, options: Options, allocate: Allocate | None = None) -> dict[str, Any]:
    """Lay out the rows of a batch. Warn once if it has more tokens than the budget by which its rows were chosen."""
    global _warned
    layout, budget = options.layout, options.budget
    assert layout is not None
    columns = layout.arrange(batch, allocate, kind)
    if budget is not None and layout.context is None and not _warned:
        places = int(np.size(columns[layout.column]))
        if places > budget.tokens:
            _warned = True
            _log.warning(
                "a batch has %d places for tokens, more than max_tokens=%d: the lengths given as length= are not those "
                "of column %r.",
                places, budget.tokens, layout.column,
            )  # fmt: skip
    return columns


def collated(batch: Batch, kind: str, options: Options, generators: Generators, epoch: int, where: str = "") -> Any:
    """Call ``collate_fn`` on the rows or columns of a batch, with seeded global generators."""
    function: Any = options.collate_fn

    def collate(seeds: Seeds | None) -> Any:
        if options.collate_columns:
            columns = present(named(batch, kind, options), kind)
            rows: Any = finish(completed(columns, kind, options, added(batch, options)), kind)
        else:
            rows = present_rows(with_columns(batch, options.provenance) if options.provenance else batch, kind)
        if seeds is not None:
            first = batch.slice(0, 1)
            seeds.set(seeds.of(first.rows, first.ordinals)[0])
        return function(rows)

    try:
        value = generators.run("collate_fn", ("collate", 0, epoch), collate, repeatable=can_repeat(batch))
    except Exception as problem:  # a StopIteration would end the epoch silently
        raise MapError(
            f"collate_fn failed on a batch of {len(batch)} rows{where}: {type(problem).__name__}: {problem}"
        ) from problem
    return value if options.context is None or options.collate_columns else _split(value, options)


def _split(value: Any, options: Options) -> Any:
    """Return this rank's part of every sequence of a batch that a function of the user made."""
    assert options.context is not None
    if not isinstance(value, Mapping):
        raise MapError(
            f"context_parallel splits batches that are dicts of arrays or tensors, and collate_fn returned a "
            f"{type(value).__name__}. Return a dict."
        )
    arrays = {name: column.numpy() if hasattr(column, "numpy") else column for name, column in value.items()}
    parts = options.context.cut(arrays, pads=options.pads)
    tensors = any(hasattr(column, "numpy") for column in value.values())
    return {name: as_tensor(part) if tensors and isinstance(part, np.ndarray) else part for name, part in parts.items()}
