"""From outputs of lanes to a batch: presented, padded, collated."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from midepoch.loader.collation import added, arranged, arrays_of, collated, completed, marked, named
from midepoch.loader.options import PADDING, Options
from midepoch.loader.provenance import PACKED, DocumentIds, RowsAhead
from midepoch.pipeline.chunk import Bunches, Items, RowRefs, materialize
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms import present
from midepoch.transforms.generators import Generators
from midepoch.transforms.provenance import DOCUMENTS, DocumentTable


class Presented(NamedTuple):
    """A batch, and the provenance of its rows without padding, if it is traced."""

    value: Any
    traced: DocumentTable | None


class Presenter:
    """Makes batches of outputs. The loader only has to ``finish`` them."""

    def __init__(self, spec: PipelineSpec, options: Options) -> None:
        plain = options.collate_fn is None or options.collate_columns
        self._format = spec.format or ("torch" if plain else "python")
        self._options, self._generators = options, Generators(spec.node.seed, spec.global_seed or 0)
        self._pads = options.batch_size if options.last_batch == "pad" else None
        arranges = options.collate_fn is not None or options.layout is not None
        self._arrays = not arranges and self._format in ("numpy", "torch", "jax")
        self._ahead = RowsAhead()

    def batch(self, items: Items, epoch: int) -> Presented:
        """Return a batch of outputs, filled with some of them if it is padded."""
        genuine = len(items)
        if self._pads is not None and genuine < self._pads:
            items = items.keep(np.arange(self._pads) % genuine)
        return self._made(items, genuine, epoch)

    def padding(self, items: Items, epoch: int) -> Presented:
        """Return a batch of nothing but padding, made of some outputs."""
        assert self._pads is not None
        return self._made(items.keep(np.arange(self._pads) % len(items)), 0, epoch)

    def _made(self, items: Items, genuine: int, epoch: int) -> Presented:
        kind, options = self._format, self._options
        if self._arrays and isinstance(items, RowRefs) and items.located is not None:
            columns: Any = {name: column.array(0, len(items)) for name, column in items.located.items()}
            if self._pads is not None:
                columns[PADDING] = np.arange(len(items)) >= genuine
            if not options.provenance:
                return Presented(completed(columns, kind, options, None), None)
            return self._traced(columns, items.traced, genuine)
        batch = materialize(items)
        if self._pads is not None or isinstance(items, Bunches):
            bounds = items.batches.bounds if isinstance(items, Bunches) else np.arange(len(batch) + 1)
            genuine = int(bounds[genuine] - bounds[0])
        if self._pads is not None:
            batch = marked(batch, np.arange(len(batch)) >= genuine)
        if options.collate_fn is not None:
            value = collated(batch, kind, options, self._generators, epoch)
        elif options.layout is not None:
            value = completed(arranged(batch, kind, options), kind, options, added(batch, options))
        else:
            columns = present(named(batch, kind, options), kind)
            if options.provenance:
                return self._traced(columns, batch.traced, genuine)
            value = completed(columns, kind, options, None)
        return Presented(value, batch.traced.slice(0, genuine) if options.provenance else None)

    def _traced(self, columns: Any, traced: DocumentTable, genuine: int) -> Presented:
        """Return a batch with the columns of provenance: tensors that are made ahead or later, or numpy arrays."""
        if self._format != "torch":
            more = arrays_of(traced, self._options)
        elif self._options.provenance == PACKED:
            more = {DOCUMENTS: DocumentIds(traced)}
        else:
            more = self._ahead.take(traced)
        value = completed(columns, self._format, self._options, more)
        return Presented(value, traced.slice(0, genuine))
