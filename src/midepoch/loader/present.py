"""From outputs of a stream to what is handed over: presented, padded, collated, as tensors, pinned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import MapError
from midepoch.flow.chunk import Items, Refs, real
from midepoch.loader.options import PADDING, Options
from midepoch.loader.pinned import pinner
from midepoch.transforms import Batch, finish, present, present_rows


class Presenter:
    """Makes batches of outputs."""

    def __init__(self, kind: str | None, options: Options) -> None:
        plain = options.collate_fn is None or options.collate_columns
        self._format = kind or ("torch" if plain else "python")
        self._collate, self._columns = options.collate_fn, options.collate_columns
        self._pin = pinner() if options.pin_memory else None
        self._pads = options.batch_size if options.ends == "pad" else None
        self._arrays = options.collate_fn is None and self._format in ("numpy", "torch", "jax")

    def batch(self, items: Items) -> Any:
        """A batch of outputs, filled up with some of them if it is to be padded."""
        genuine = len(items)
        if self._pads is not None and genuine < self._pads:
            items = items.keep(np.arange(self._pads) % genuine)
        return self._made(items, genuine)

    def padding(self, items: Items) -> Any:
        """A batch that is nothing but padding, made of some outputs."""
        assert self._pads is not None
        return self._made(items.keep(np.arange(self._pads) % len(items)), 0)

    def _made(self, items: Items, genuine: int) -> Any:
        if self._arrays and isinstance(items, Refs) and items.located is not None:
            columns: Any = {name: column.array(0, len(items)) for name, column in items.located.items()}
            if self._pads is not None:
                columns[PADDING] = np.arange(len(items)) >= genuine
            value = finish(columns, self._format)
        else:
            value = self._presented(self._marked(real(items), genuine))
        return value if self._pin is None else self._pin(value)

    def _presented(self, batch: Batch) -> Any:
        if self._collate is None:
            return finish(present(batch, self._format), self._format)
        if self._columns:
            rows = finish(present(batch, self._format), self._format)
        else:
            rows = present_rows(batch, self._format)
        try:
            return self._collate(rows)
        except Exception as problem:  # a StopIteration would end the epoch silently
            raise MapError(
                f"collate_fn failed on a batch of {len(batch)} rows: {type(problem).__name__}: {problem}"
            ) from problem

    def _marked(self, batch: Batch, genuine: int) -> Batch:
        if self._pads is None:
            return batch
        if PADDING in batch.columns:
            raise MapError(f'there is a column {PADDING!r}, which ends="pad" marks padding rows with: rename it.')
        bits = np.packbits(np.arange(len(batch)) >= genuine, bitorder="little")  # pa.array would import pandas: 0.6 s
        mark = pa.Array.from_buffers(pa.bool_(), len(batch), [None, pa.py_buffer(bits.tobytes())])
        return batch.with_columns({**batch.columns, PADDING: mark})
