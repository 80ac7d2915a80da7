"""The columns that ``provenance=True`` adds to batches, and the names of sources."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms import Batch
from midepoch.transforms.formats import split
from midepoch.transforms.packing import PackSpec, arrow_values
from midepoch.transforms.provenance import BOUNDS, DOCUMENTS, MOST_SOURCES, DocumentTable, added_columns

ROWS, PACKED = "rows", "packed"
"""Kinds of provenance: a row number for each row, or the documents of each packed sequence."""


def provenance_of(spec: PipelineSpec, wanted: Any) -> str:
    """Return the kind of provenance of batches, or "" for none. Raise ColumnError if columns have the same names."""
    if not isinstance(wanted, bool):
        raise TypeError(f"loader(provenance=…) takes True or False, got {wanted!r:.60}")
    if not wanted:
        return ""
    if (sources := len(spec.node.leaves)) > MOST_SOURCES:
        raise ValueError(f"provenance=True numbers up to {MOST_SOURCES:,} sources, and there are {sources:,}.")
    kind = PACKED if _packs(spec.node) else ROWS
    check_names(spec.node.known_columns or (), kind)
    return kind


def _packs(node: Node) -> bool:
    parts = () if isinstance(node.base, Leaf) else node.base.parts
    return any(isinstance(stage, PackSpec) for stage in node.stages) or any(map(_packs, parts))


def check_names(names: Container[str], kind: str) -> None:
    """Raise ColumnError if columns have the names of those that provenance adds."""
    if taken := [name for name in added_columns(kind == PACKED) if name in names]:
        raise ColumnError(
            f"provenance=True adds the column {taken[0]!r} to batches, which the data already has. Rename that column "
            "(rename_columns), or remove it."
        )


def with_columns(batch: Batch, kind: str) -> Batch:
    """Return a batch with the columns of provenance: for formats in which each row has a value of its own."""
    check_names(batch.columns, kind)
    if kind == ROWS:
        columns = {name: arrow_values(values) for name, values in batch.traced.arrays(packed=False).items()}
    else:
        arrays = {name: arrow_values(values) for name, values in batch.traced.table.arrays().items()}
        bounds = arrays.pop(BOUNDS)
        pieces = pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
        columns = {DOCUMENTS: pa.ListArray.from_arrays(bounds, pieces)}
    return batch.with_columns({**batch.columns, **columns})


class DocumentsAhead:
    """The documents of batches as tensors, made for all batches of a chunk in one call: 6 µs less for each array."""

    _MOST = 64

    def __init__(self) -> None:
        self._edges: Any = None
        self._size, self._made = 0, dict[int, dict[str, Any]]()

    def take(self, table: DocumentTable) -> dict[str, Any]:
        """Return the documents of a batch, and make those of the next ones of its chunk, which have the same size."""
        found = self._made.pop(table.begin, None) if self._edges is table.edges else None
        if found is None:
            self._edges, self._made = table.edges, self._ahead(table)
            found = self._made.pop(table.begin, None)
        return table.arrays() if found is None or self._size != table.sequences else found

    def _ahead(self, table: DocumentTable) -> dict[int, dict[str, Any]]:
        edges, size = table.edges, table.sequences
        self._size = size
        count = min((len(edges) - 1 - table.begin) // size, self._MOST) if size else 0
        if count < 2:
            return {}
        begins = table.begin + size * np.arange(count + 1)
        many = table._replace(end=int(begins[-1]))
        ends = (edges[begins] - edges[table.begin]).tolist()
        columns = {name: split(array, ends, "torch") for name, array in many.arrays().items() if name != BOUNDS}
        bounds = edges[begins[:-1, None] + np.arange(size + 1)] - edges[begins[:-1], None]
        columns[BOUNDS] = split(bounds.reshape(-1), range(0, bounds.size + 1, size + 1), "torch")
        values = zip(*columns.values(), strict=True)
        made = (dict(zip(columns, each, strict=True)) for each in values)
        return dict(zip(begins.tolist(), made, strict=False))


def source_names(spec: PipelineSpec) -> tuple[str, ...]:
    """Return a name for each source: that in its mix, else its files, or its number if they do not tell it apart."""
    found = list(_names(spec.node, ""))
    return tuple(name if name and found.count(name) == 1 else str(number) for number, name in enumerate(found))


def _names(node: Node, before: str) -> Iterator[str]:
    base = node.base
    if isinstance(base, Leaf):
        yield before or _files(base)
        return
    names = base.names if isinstance(base, Mix) else ()
    for number, part in enumerate(base.parts):
        name = names[number] if names else str(number) if before else ""
        yield from _names(part, f"{before}/{name}".strip("/"))


def _files(leaf: Leaf) -> str:
    """Return the path of the file of a source, or the folder of all of its files."""
    paths = [leaf.source.name(file) for file in leaf.source.files] or [""]
    first, last = min(paths).split("/"), max(paths).split("/")
    return "/".join(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(first, last, strict=False)))
