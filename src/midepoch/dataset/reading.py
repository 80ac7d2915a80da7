"""The methods of a dataset that read rows, columns and types, other than by iterating it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import no_attribute, warn_once
from midepoch._internal.progress import shown
from midepoch.dataset.functions import with_classes
from midepoch.errors import ColumnError
from midepoch.iteration.iterators import RandomAccess
from midepoch.order import Shard
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Local, Node
from midepoch.sources.lengths import lengths_of
from midepoch.sources.schemas import plain_schema
from midepoch.transforms import (
    Batch,
    Decode,
    Function,
    RenameColumns,
    present,
)
from midepoch.transforms.batch import check_columns, import_datasets
from midepoch.transforms.columns import common_type
from midepoch.transforms.encode import ClassCodes

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from midepoch.dataset.dataset import Dataset

D = TypeVar("D", bound="Dataset")


_LOOK = 64
"""Number of rows to run for the columns of a map: the first ones may be skipped."""

_BATCH = 10_000
_PIECE = 1 << 20


def column_names(self: D) -> list[str]:
    """Return the columns of a row. If they are known only after a function has run, run the first rows."""
    known = self._columns
    if known is not None:
        return list(known)
    first = _first_rows(self)
    return [] if first is None else list(first.columns)


def schema(self: D) -> pa.Schema:
    """Return the Arrow schema of a row. If it is known only after a function has run, run the first rows."""
    first = None if self.pipeline.node.known.certain else _first_rows(self)
    table: Any = None if first is None else present(first, "arrow")
    return schema_before_running(self) if table is None else table.schema


def schema_before_running(self: D) -> pa.Schema:
    """Return the Arrow schema as far as it is known without running a function."""
    node = self.pipeline.node
    if isinstance(node.base, Leaf) and not (node.base.tail or node.stages):
        schema = plain_schema(node.base.source.schema)
        fields = [schema.field(old).with_name(new) for new, old in node.base.head.items()]
        return pa.schema(fields, metadata=schema.metadata)
    return pa.schema({name: column.kind for name, column in node.known.columns.items()})


def features_of(self: D, schema: pa.Schema) -> Any:
    """Return the ``datasets.Features`` of rows with a schema."""
    datasets = import_datasets("features are a thing of Hugging Face's")
    stored: dict[str, Any] = {}
    for leaf in reversed(self.pipeline.node.leaves):
        inside = plain_schema(leaf.source.schema)
        features = datasets.Features.from_arrow_schema(inside)
        stored |= {new: (inside.field(old).type, features[old]) for new, old in leaf.head.items()}
    found = dict(datasets.Features.from_arrow_schema(schema.remove_metadata()))
    found |= {name: stored[name][1] for name in found if stored.get(name, (None,))[0] == schema.field(name).type}
    for name, classes in classes_of(self).items():
        if name in found and schema.field(name).type == pa.int64():
            found[name] = datasets.ClassLabel(names=list(classes))
    return datasets.Features(found)


def classes_of(self: D) -> dict[str, tuple[str, ...]]:
    """Return the names of the classes of columns that were encoded here, by their names after all steps."""
    node = self.pipeline.node
    found: dict[str, tuple[str, ...]] = {}
    stages = [step for stage in node.stages if isinstance(stage, Local) for step in stage.steps]
    for leaf in node.leaves:
        for step in (*leaf.steps, *stages):
            if isinstance(step, RenameColumns):
                found = {dict(step.mapping).get(name, name): names for name, names in found.items()}
            elif isinstance(step, Function) and isinstance(codes := step.function, ClassCodes):
                found[codes.column] = codes.names
    return found


def _first_rows(self: D) -> Batch | None:
    """Run the first rows, and return them. None without rows."""
    spec = self.pipeline
    if spec.numbered is not None:
        return by_number(self).read(self.epoch, np.arange(min(len(self), _LOOK))) if len(self) else None
    cursor = Cursor(self.epoch)
    taken = type(self._iteration)(spec, cursor).open_lanes(cursor).take(1)
    return None if taken is None else materialize(taken.items)


def by_number(self: D) -> RandomAccess:
    """Return the access to rows by their numbers, made once."""
    if self._access is None:
        spec = self._iteration.seeded
        self._access = RandomAccess(spec.leaf, spec.groups or spec.shard.count)
    return self._access


def unique(self: D, column: str) -> list[Any]:
    """Return the different values of a column, in the order in which they occur. Reads the column once."""
    return _unique(self, column, "unique")


def _unique(self: D, column: str, what: str) -> list[Any]:
    found = pa.chunked_array([[]], pa.null())
    for table in _tables(self, column, what):
        kind = common_type(found.type, table.schema.types[0])
        if kind is None or kind.num_fields:
            raise ColumnError(
                f"{what}: column {column!r} contains {'values of several types' if kind is None else kind}. Map it "
                "to numbers or texts first."
            )
        chunks = (*found.chunks, *table.column(0).chunks)
        found = pa.chunked_array([pa.chunked_array([chunk.cast(kind) for chunk in chunks], kind).unique()])
    return cast("list[Any]", found.to_pylist())


def lengths(self: D, column: str) -> npt.NDArray[np.int64]:
    """Return the length of a column in each row, before any shuffle, over all shards.

    Lists count their items, text and bytes the bytes as stored (UTF-8, not characters). A null has length 0. The
    lengths are read once and kept beside the index. The column must come unchanged from the files.
    """
    spec = self.pipeline
    if spec.numbered is None:
        raise TypeError(
            f"lengths: this dataset has no positions ({spec.node.text}). Call lengths on a dataset that it was "
            "made from, or cache() this one first."
        )
    if self._columns is not None:
        check_columns([column], self._columns, "lengths")
    leaf = spec.base
    stored, step = leaf.stored_column(column)
    if step is not None:
        changed = step.call if isinstance(step, Function) else step.name if isinstance(step, Decode) else "cast"
        raise ColumnError(
            f"lengths: {changed} may change column {column!r}, so that its lengths in the files are not those of the "
            "rows. Call lengths before that step, or cache() the dataset first."
        )
    assert stored is not None  # one of the columns
    found, selection = lengths_of(leaf.source, stored, skip_corrupt=leaf.on_error == "skip"), leaf.order.selection
    lengths = np.empty(len(selection), np.int64)
    for start in range(0, len(lengths), _PIECE):
        rows = np.arange(start, min(start + _PIECE, len(lengths)), dtype=np.int64)
        lengths[start : start + _PIECE] = found.of(selection.source_rows(rows))
    return lengths


def to_pandas(self: D) -> pd.DataFrame:
    """Return all rows as a pandas frame, in memory. For a part of them: ``ds.take(1000).to_pandas()``."""
    tables = list(_tables(self))
    if not tables:
        return schema_before_running(self).empty_table().to_pandas()
    return pa.concat_tables(tables, promote_options="permissive").to_pandas()


def class_encode_column(self: D, column: str) -> D:
    """Replace the values of a column by the numbers of their classes. Reads the column once.

    The classes are the sorted values, and are then ``ds.features[column].names``.
    """
    spec = replace(self.pipeline, shard=Shard())  # the same classes on all ranks
    whole = type(self)(spec, Cursor(self.epoch))
    if spec.numbered is not None and len(spec.base.order.selection) < spec.base.source.rows:
        warn_once(
            "class_encode_column: the classes are those of the %s rows selected here. Another part may number them in "
            "another way: call it before train_test_split, select or slice.", f"{spec.numbered:,}",
        )  # fmt: skip
    values = _unique(whole, column, "class_encode_column")
    return with_classes(self, column, tuple(sorted({str(value) for value in values if value is not None})))


def _tables(self: D, column: str | None = None, what: str = "") -> Iterator[pa.Table]:
    """Yield all rows as tables, in the order of iteration, whatever the cursor."""
    spec = self.pipeline
    ds = type(self)(replace(spec, format="arrow"), Cursor(self.epoch))
    if column is not None:
        if self._columns is not None:
            check_columns([column], self._columns, what)
        ds = ds.select_columns(column)
    total = spec.shard.before(spec.numbered or 0)
    with shown("reading", "rows") as report:
        done = 0
        for table in ds.iter(_BATCH):
            yield table
            done += table.num_rows
            report(done, total)


def strata(self: D, column: str, what: str) -> npt.NDArray[np.int32]:
    values = column_values(self, column, what)
    if values.null_count:
        raise ColumnError(
            f"{what}: column {column!r} is null in {values.null_count} rows, which have no class. Leave them out "
            "with select(), or give them a class with map()."
        )
    if values.type.num_fields:
        raise ColumnError(f"{what}: column {column!r} contains {values.type}. Map it to numbers or texts first.")
    return cast("npt.NDArray[np.int32]", values.dictionary_encode().combine_chunks().indices.to_numpy())


def in_order(self: D, format: str = "arrow") -> D:
    """Return the dataset without its order and shard: the row at position p is row p."""
    spec = self.pipeline
    leaf = replace(spec.base, order=replace(spec.base.order, shuffle=None, lanes=1))
    return type(self)(replace(spec, node=Node(leaf), shard=Shard(), lanes=1, lanes_chosen=False, format=format))


class Column(Sequence[Any]):
    """One column of a dataset, like a list, but read when it is used. ``column[:]`` reads all of it.

    ``fields``: names of fields in a struct, outermost first: ``ds["meta"]["lang"]`` is a column, too.
    """

    def __init__(self, dataset: Dataset, name: str, fields: tuple[str, ...] = ()) -> None:
        fresh = type(dataset)(dataset.pipeline, Cursor(dataset.epoch))  # whatever state was loaded: this only reads
        self._dataset, self.name, self._fields = fresh.select_columns(name), name, fields

    def __len__(self) -> int:
        return len(self._dataset)

    def _refuse(self, other: Any, sign: str = ">") -> Any:
        hint = f"ds.filter(pyarrow.compute.field({self.name!r}) {sign} {other!r:.20})"
        raise TypeError(
            f"a column is not computed with or compared as a whole. To choose rows, use {hint}; for an array of all "
            f"values, np.asarray(ds[{self.name!r}])."
        )

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __hash__ = Sequence.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, Column)):
            return self is other or list(self) == list(other)
        return bool(self._refuse(other, "=="))

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("a column", name, (), {name: "Its values are column[:], or np.asarray(column)."})

    def __getitem__(self, key: Any) -> Any:
        """Return one value, or those of a slice or list of numbers; for the name of a field of structs, its column."""
        if not isinstance(key, str):
            return self._of(self._dataset[key])
        kind = self._dataset.schema.field(self.name).type
        for name in self._fields:
            kind = kind.field(name).type
        if not pa.types.is_struct(kind):
            raise TypeError(f"{self!r} is {kind}, which has no fields: it is indexed by row numbers, got {key!r}")
        check_columns([key], [kind.field(at).name for at in range(kind.num_fields)], repr(self))
        return Column(self._dataset, self.name, (*self._fields, key))

    def _of(self, rows: Any) -> Any:
        """Return the values of a row, or of rows in any format."""
        values = rows.column(0) if isinstance(rows, pa.Table) else rows[self.name]
        for name in self._fields:
            if isinstance(values, pa.ChunkedArray):
                import pyarrow.compute as pc

                values = pc.struct_field(values, name)
            elif isinstance(values, (list, np.ndarray)):
                values = [None if value is None else value[name] for value in values]
            else:
                values = None if values is None else values[name]
        return values

    def __iter__(self) -> Iterator[Any]:
        fresh = type(self._dataset)(self._dataset.pipeline, Cursor(self._dataset.epoch))
        for batch in fresh.iter(_BATCH):
            yield from _rows(self._of(batch))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(list(self), dtype=dtype)

    def __repr__(self) -> str:
        path = "".join(f"[{name!r}]" for name in (self.name, *self._fields))
        return f"Column({path[1:-1] if not self._fields else path} of {self._dataset!r})"


def _rows(values: Any) -> Iterator[Any]:
    """Yield the values of a column. Structs in the formats of arrays are a dict of columns."""
    if not isinstance(values, dict):
        yield from values
        return
    for row in zip(*map(_rows, values.values()), strict=True):
        yield dict(zip(values, row, strict=True))


def column_values(dataset: Dataset, column: str, what: str) -> pa.ChunkedArray:
    """Read a column of all rows, by their numbers: before any shuffle, over all shards."""
    ds = in_order(dataset)
    tables = list(_tables(ds, column, what))
    values = pa.concat_tables(tables, promote_options="permissive").column(0) if tables else pa.chunked_array([[]])
    if len(values) != len(ds):
        raise ColumnError(
            f"{what}: column {column!r} has {len(values)} values for {len(ds)} rows, because rows that fail are "
            "skipped. Compute a value for each row of the data first."
        )
    if isinstance(values.type, pa.UuidType):  # which pyarrow does not compare
        return values.cast(values.type.storage_type)
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
