"""The columns that ``provenance=True`` adds to batches, and the names of sources."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import takewhile
from typing import Any

import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms import Batch
from midepoch.transforms.arrow_values import as_arrow
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
    PieceTable,
    added_columns,
)

ROWS, PACKED = "rows", "packed"
"""Kinds of provenance: a row number for each row, or the documents of each packed sequence."""


def provenance_of(spec: PipelineSpec, wanted: Any) -> str:
    """Return the kind of provenance of batches, or "" for none. Raise ColumnError if columns have the same names."""
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
        columns = {name: as_arrow(values) for name, values in batch.traced.arrays(packed=False).items()}
    else:
        arrays = {name: as_arrow(values) for name, values in batch.traced.arrays(packed=True).items()}
        bounds = arrays.pop(BOUNDS)
        pieces = pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
        columns = {DOCUMENTS: pa.ListArray.from_arrays(bounds, pieces)}
    return batch.with_columns({**batch.columns, **columns})


class DocumentIds(Mapping[str, Any]):
    """The documents of a batch of packed sequences, as tensors that are made when they are looked at.

    It is what a dict of them would be: it is iterated, unpacked, collated, pickled and moved to a device like one.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | DocumentTable) -> None:
        self._values = values

    @property
    def _found(self) -> dict[str, Any]:
        """The tensors by name. A table stands for those that are not made yet."""
        values = self._values
        if not isinstance(values, dict):
            made = dict.fromkeys(_NAMES, values) if isinstance(values, DocumentTable) else values
            self._values = values = dict(made)
        return values

    def __getitem__(self, name: str) -> Any:
        found = self._found
        if isinstance(value := found[name], DocumentTable):
            found[name] = value = _tensor(value, name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return DocumentIds, (dict(self),)


_NAMES = (SOURCE, ROW, START, BOUNDS)


def _tensor(table: DocumentTable, name: str) -> Any:
    """Return one column of the documents of a batch: a slice of a tensor that all batches of a chunk share."""
    if name == BOUNDS:
        return as_tensor(table.bounds)
    first, stop = table.pieces
    return _shared(table.whole, name)[first:stop]


def _shared(whole: PieceTable, name: str) -> Any:
    """Return a column of all pieces as a tensor. It is a copy, since users may write to it."""
    if name not in whole.copies:
        column = whole.columns.start if name == START else whole.identified[name == ROW]
        whole.copies[name] = as_tensor(column.copy())
    return whole.copies[name]


class RowsAhead:
    """The source and row of each row of batches as tensors, made for many batches of a chunk in one call.

    A tensor of its own takes 3 µs, and one of many 1 µs.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._whole: PieceTable | None = None
        self._next, self._size = 0, 0
        self._made: Iterator[tuple[Any, Any]] = iter(())

    def take(self, table: DocumentTable) -> dict[str, Any]:
        """Return the columns of a batch, and make those of the next ones of its chunk, which have the same size."""
        if table.whole is not self._whole or table.begin != self._next or len(table) != self._size:
            self._whole, self._size = table.whole, len(table)
            self._ahead(table)
        found = next(self._made, None)
        if found is None:
            self._ahead(table)
            found = next(self._made, None)
        self._next = table.end
        return table.arrays(packed=False) if found is None else {SOURCE: found[0], ROW: found[1]}

    def _ahead(self, table: DocumentTable) -> None:
        size, begin = self._size, table.begin
        count = min((table.whole.count - begin) // size, self._MOST) if size else 0
        self._made = iter(())
        if count > 1:
            stop = begin + count * size
            columns = (_shared(table.whole, name)[begin:stop].view(count, size).unbind() for name in (SOURCE, ROW))
            self._made = zip(*columns, strict=True)


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
