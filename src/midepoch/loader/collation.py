"""From outputs to a batch: presented, padded, collated."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import warn_once
from midepoch.errors import MapError
from midepoch.loader.options import PADDING, Options
from midepoch.loader.provenance import PACKED, ROWS, DocumentIds, check_names, with_documents
from midepoch.pipeline.chunk import Bunches, Items, RowRefs, materialize
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.schemas import as_arrow
from midepoch.transforms import Batch, finish, present, present_rows
from midepoch.transforms.formats import ITEMS, Allocate, as_tensor, can_repeat
from midepoch.transforms.generators import Generators, Seeds
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
        self._traces_rows = options.provenance == ROWS and self._format == "torch" and options.context is None

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
            if not self._traces_rows:
                return self._completed(columns, items, genuine)
            traced = items.traced
            columns[DOCUMENTS] = DocumentIds(traced)  # the names of columns were compared with it before
            return Presented(columns, traced.slice(0, genuine))
        batch = materialize(items)
        if self._pads is not None or isinstance(items, Bunches):
            bounds = items.batches.bounds if isinstance(items, Bunches) else np.arange(len(batch) + 1)
            genuine = int(bounds[genuine] - bounds[0])
        if self._pads is not None:
            batch = marked(batch, np.arange(len(batch)) >= genuine)
        if options.collate_fn is not None:
            value = collated(batch, kind, options, self._generators, epoch)
        elif options.layout is not None:
            return self._completed(arranged(batch, kind, options), batch, genuine)
        else:
            return self._completed(present(named(batch, kind, options), kind), batch, genuine)
        return Presented(value, batch.traced.slice(0, genuine) if options.provenance else None)

    def _completed(self, columns: Any, rows: Batch | RowRefs, genuine: int) -> Presented:
        """Return presented columns with the documents of their rows."""
        kind, options = self._format, self._options
        traced = rows.traced if options.provenance else None
        value = completed(columns, kind, options, added(traced, options, later=kind == "torch"))
        return Presented(value, None if traced is None else traced.slice(0, genuine))


_log = logging.getLogger("midepoch")
_warned = False


def marked(batch: Batch, padding: npt.NDArray[np.bool_]) -> Batch:
    """Add a column that is true for padding."""
    if PADDING in batch.columns:
        raise MapError(
            f'a map created a column {PADDING!r}, which last_batch="pad" adds to mark padding rows. Rename it.'
        )
    return batch.with_columns({**batch.columns, PADDING: as_arrow(padding)})


def named(batch: Batch, kind: str, options: Options) -> Batch:
    """Add the documents, if a format has a value of its own for each row."""
    if not options.provenance or kind not in ("python", "arrow", ITEMS):
        return batch
    return with_documents(batch, options.provenance)


def added(traced: DocumentTable | None, options: Options, *, later: bool = False) -> Mapping[str, Any] | None:
    """Return the documents of a batch as numpy arrays, or None if they are not traced.

    ``later``: as tensors that are made when they are looked at, for a batch that is not sent.
    """
    if traced is None or not options.provenance:
        return None
    packed = options.provenance == PACKED
    return DocumentIds(traced, packed=packed) if later else traced.arrays(packed)


def completed(columns: Any, kind: str, options: Options, documents: Mapping[str, Any] | None) -> Any:
    """Return presented columns as this rank gets them: its part of every sequence, and the documents."""
    if options.context is not None and options.layout is None:
        columns = options.context.cut(columns, pads=options.pads)
    if documents is not None and kind not in ("python", "arrow", ITEMS):
        check_names(columns)
        columns[DOCUMENTS] = documents
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
            rows: Any = finish(completed(columns, kind, options, added(batch.traced, options)), kind)
        else:
            rows = present_rows(with_documents(batch, options.provenance) if options.provenance else batch, kind)
        if seeds is not None:
            first = batch.slice(0, 1)
            seeds.set(seeds.of(first.rows, first.ordinals)[0])
        return function(rows)

    try:
        value = generators.run("collate_fn", ("collate", 0, epoch), collate, repeatable=can_repeat(batch))
    except Exception as problem:  # a StopIteration would end the epoch silently
        gets = "a dict of columns" if options.collate_columns else "a list of rows"
        hint = "" if options.collate_columns else ", and a row is a dict: row['text']"
        hint = f". It gets {gets}{hint}." if isinstance(problem, _OF_ROWS) or "unpack" in str(problem) else ""
        if "but got dict" in str(problem):
            hint = ". It gets a list of rows, and a row is a dict: row['text']."
        elif "expected Tensor as element" in str(problem):
            hint = ". Values are as the format of the dataset has them: use ds.with_format('torch') for tensors."
        elif _UNLIKE.search(str(problem)):
            hint = (
                ". If lists of a column have different lengths, omit collate_fn and pass layout='padded'. Columns of "
                "text have no tensors: leave them out with select_columns(), or use ds.tokenize(tokenizer)."
            )
        raise MapError(
            f"collate_fn failed on a batch of {len(batch)} rows{where}: {type(problem).__name__}: {problem}{hint}"
        ) from problem
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if PADDING in batch.columns and not (isinstance(value, Mapping) and PADDING in value):
        warn_once(
            "collate_fn %s leaves out 'is_padding', so that the rows that fill the last batch count as rows. Copy "
            "row['is_padding'], or pass last_batch=\"uneven\".", name,
        )  # fmt: skip
    if value is None:
        warn_once("collate_fn %s returned None, so that is the batch. Return the batch.", name)
    elif type(value) in (list, tuple) and value and all(type(one) is str and one in batch.columns for one in value):
        warn_once("collate_fn %s returned names of columns. A row is a dict: row['text'], not a tuple.", name)
    return value if options.context is None or options.collate_columns else _split(value, options)


_OF_ROWS = (TypeError, KeyError, IndexError, AttributeError)
_UNLIKE = re.compile(
    "equal size|expected sequence of length|too many dimensions|create tensor|text input must be|supply an encoding"
)
"""Messages of torch and transformers about rows that do not make one tensor."""


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
