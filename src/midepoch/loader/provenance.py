"""The documents that ``provenance=True`` adds to batches, and the names of sources."""

from __future__ import annotations

from collections.abc import Container, Iterator, KeysView, Mapping
from itertools import takewhile
from typing import Any

import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.schemas import as_arrow
from midepoch.transforms import Batch
from midepoch.transforms.formats import as_tensor
from midepoch.transforms.packing import PackSpec
from midepoch.transforms.provenance import (
    BOUNDS,
    DOCUMENTS,
    MOST_SOURCES,
    ROW,
    SOURCE,
    START,
    DocumentTable,
)

ROWS, PACKED = "rows", "packed"
"""Kinds of provenance: the row that each row is made of, or the documents of each packed sequence."""


def provenance_of(spec: PipelineSpec, wanted: Any) -> str:
    """Return the kind of provenance of batches, or "" for none. Raise ColumnError if columns have the same names."""
    if not wanted:
        return ""
    if (sources := len(spec.node.leaves)) > MOST_SOURCES:
        raise ValueError(f"provenance=True numbers up to {MOST_SOURCES:,} sources, and there are {sources:,}.")
    kind = PACKED if _packs(spec.node) else ROWS
    check_names(spec.node.known_columns or ())
    return kind


def _packs(node: Node) -> bool:
    parts = () if isinstance(node.base, Leaf) else node.base.parts
    return any(isinstance(stage, PackSpec) for stage in node.stages) or any(map(_packs, parts))


def check_names(names: Container[str]) -> None:
    """Raise ColumnError if a column has the name of the one that provenance adds."""
    if DOCUMENTS in names:
        raise ColumnError(
            f"provenance=True adds the column {DOCUMENTS!r} to batches, which the data already has. Rename that column "
            "(rename_columns), or remove it."
        )


def with_documents(batch: Batch, kind: str) -> Batch:
    """Return a batch with its documents, for formats in which each row has a value of its own."""
    check_names(batch.columns)
    arrays = {name: as_arrow(values) for name, values in batch.traced.arrays(packed=kind == PACKED).items()}
    bounds = arrays.pop(BOUNDS, None)
    pieces = pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
    documents = pieces if bounds is None else pa.ListArray.from_arrays(bounds, pieces)
    return batch.with_columns({**batch.columns, DOCUMENTS: documents})


class DocumentIds(Mapping[str, Any]):
    """The rows or documents of a batch, as tensors that are made when one of them is looked at.

    It is what a dict of them would be: it is iterated, unpacked, collated, pickled and moved to a device like one.
    """

    __slots__ = ("_packed", "_values")

    def __init__(self, values: Mapping[str, Any] | DocumentTable, packed: bool = False) -> None:
        self._values, self._packed = values, packed

    @property
    def _made(self) -> Mapping[str, Any]:
        values = self._values
        if type(values) is DocumentTable:
            self._values = values = _tensors(values, self._packed)
        return values  # type: ignore[return-value]

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def keys(self) -> KeysView[str]:
        """Return the names. (Those of the dict itself are three times as fast.)"""
        return self._made.keys()

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return DocumentIds, (dict(self._made),)


_MOST_PARTS, _MOST_CUTS = 256, 8


def _tensors(table: DocumentTable, packed: bool) -> dict[str, Any]:
    """Return the documents of a batch: parts of copies that all batches of a chunk share, since users may write."""
    whole, (first, stop) = table.whole, table.pieces
    copies = whole.copies
    if not copies:
        copies[SOURCE], copies[ROW] = (as_tensor(column.copy()) for column in whole.identified)
    if packed:
        if START not in copies:
            copies[START] = as_tensor(whole.columns.start.copy())
        return {name: copies[name][first:stop] for name in (SOURCE, ROW, START)} | {BOUNDS: as_tensor(table.bounds)}
    size = stop - first
    if not size or whole.count > _MOST_PARTS * size or len(copies) > _MOST_CUTS:
        return {SOURCE: copies[SOURCE][first:stop], ROW: copies[ROW][first:stop]}
    # All batches of a chunk are cut in one call: 1 µs for each tensor, and 3 µs one by one.
    number, offset = divmod(first, size)
    if (parts := copies.get((size, offset))) is None:
        cut = (copies[name][offset:].split(size) for name in (SOURCE, ROW))
        parts = copies[size, offset] = [{SOURCE: source, ROW: row} for source, row in zip(*cut, strict=True)]
    return parts[number]  # type: ignore[no-any-return]


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
