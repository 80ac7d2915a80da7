"""From outputs of a stream to what is handed over: presented, padded, collated, as tensors, pinned."""

from __future__ import annotations

from typing import Any

import numpy as np

from midepoch.flow.chunk import Items, Refs, real
from midepoch.loader.collation import collated, marked
from midepoch.loader.options import PADDING, Options
from midepoch.loader.pinned import pinner
from midepoch.transforms import Batch, finish, present
from midepoch.transforms.generators import Generators


class Presenter:
    """Makes batches of outputs."""

    def __init__(self, kind: str | None, options: Options, generators: Generators) -> None:
        plain = options.collate_fn is None or options.collate_columns
        self._format = kind or ("torch" if plain else "python")
        self._options, self._generators = options, generators
        self._pin = pinner() if options.pin_memory else None
        self._pads = options.batch_size if options.ends == "pad" else None
        self._arrays = options.collate_fn is None and self._format in ("numpy", "torch", "jax")

    def batch(self, items: Items, epoch: int) -> Any:
        """A batch of outputs, filled up with some of them if it is to be padded."""
        genuine = len(items)
        if self._pads is not None and genuine < self._pads:
            items = items.keep(np.arange(self._pads) % genuine)
        return self._made(items, genuine, epoch)

    def padding(self, items: Items, epoch: int) -> Any:
        """A batch that is nothing but padding, made of some outputs."""
        assert self._pads is not None
        return self._made(items.keep(np.arange(self._pads) % len(items)), 0, epoch)

    def _made(self, items: Items, genuine: int, epoch: int) -> Any:
        if self._arrays and isinstance(items, Refs) and items.located is not None:
            columns: Any = {name: column.array(0, len(items)) for name, column in items.located.items()}
            if self._pads is not None:
                columns[PADDING] = np.arange(len(items)) >= genuine
            value = finish(columns, self._format)
        else:
            batch = real(items)
            batch = batch if self._pads is None else marked(batch, np.arange(len(batch)) >= genuine)
            value = self._presented(batch, epoch)
        return value if self._pin is None else self._pin(value)

    def _presented(self, batch: Batch, epoch: int) -> Any:
        if self._options.collate_fn is None:
            return finish(present(batch, self._format), self._format)
        return collated(batch, self._format, self._options, self._generators, epoch)
