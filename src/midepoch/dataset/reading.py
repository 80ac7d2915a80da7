"""Reading rows, columns and types of a dataset, and orders by the values of a column: draws and sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import shown
from midepoch._internal.values import integer
from midepoch.dataset.rows import Rows
from midepoch.errors import ColumnError
from midepoch.iteration.iterators import RandomAccess
from midepoch.iteration.state import IterationState, is_registered
from midepoch.order import Shard, Weighted
from midepoch.order.weights import checked
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Local, Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.read.blocks import plain_schema
from midepoch.sources.lengths import lengths_of
from midepoch.transforms import (
    Batch,
    Decode,
    Function,
    Map,
    RenameColumns,
    Step,
    present,
)
from midepoch.transforms.batch import check_columns
from midepoch.transforms.columns import common_type
from midepoch.transforms.encode import ClassCodes
from midepoch.transforms.features import import_datasets
from midepoch.transforms.formats import ITEMS

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from typing_extensions import Self


_LOOK = 64
"""Number of rows to run for the columns of a map: the first ones may be skipped."""

_BATCH = 10_000
_PIECE = 1 << 20


class Reading(Rows):
    """The methods of a dataset that read rows, columns and types, other than by iterating it."""

    _iteration: IterationState
    _access: RandomAccess | None

    def __init__(self, spec: PipelineSpec, cursor: Cursor | None = None, *, named: bool = False) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Iterate batches."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch of ``iter()``."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """The number of rows, as ``len()`` returns it."""
        return len(self)

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self.column_names)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        return len(self), self.num_columns

    @property
    def column_names(self) -> list[str]:
        """The columns of a row. If they are known only after a function has run, this runs the first rows."""
        known = self._columns
        if known is not None:
            return list(known)
        first = self._first_rows()
        return [] if first is None else list(first.columns)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of a row. If it is known only after a function has run, this runs the first rows."""
        first = None if self.pipeline.node.known.certain else self._first_rows()
        if first is None:
            return self._schema_before_running
        table: Any = present(first, "arrow")
        return table.schema

    @property
    def _schema_before_running(self) -> pa.Schema:
        """The Arrow schema as far as it is known without running a function."""
        node = self.pipeline.node
        if isinstance(node.base, Leaf) and not (node.base.tail or node.stages):
            schema = plain_schema(node.base.source.schema)
            fields = [schema.field(old).with_name(new) for new, old in node.base.head.items()]
            return pa.schema(fields, metadata=schema.metadata)
        return pa.schema({name: column.kind for name, column in node.known.columns.items()})

    @property
    def features(self) -> Any:
        """The ``datasets.Features`` of a row. Columns that keep their type keep their feature (class names, …)."""
        return self._features_of(self.schema)

    def _features_of(self, schema: pa.Schema) -> Any:
        datasets = import_datasets("features are a thing of Hugging Face's")
        stored: dict[str, Any] = {}
        for leaf in reversed(self.pipeline.node.leaves):
            inside = plain_schema(leaf.source.schema)
            features = datasets.Features.from_arrow_schema(inside)
            stored |= {new: (inside.field(old).type, features[old]) for new, old in leaf.head.items()}
        found = dict(datasets.Features.from_arrow_schema(schema.remove_metadata()))
        found |= {name: stored[name][1] for name in found if stored.get(name, (None,))[0] == schema.field(name).type}
        for name, classes in self._classes().items():
            if name in found and schema.field(name).type == pa.int64():
                found[name] = datasets.ClassLabel(names=list(classes))
        return datasets.Features(found)

    def _classes(self) -> dict[str, tuple[str, ...]]:
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

    def _first_rows(self) -> Batch | None:
        """Run the first rows, and return them. None without rows."""
        spec = self.pipeline
        if spec.numbered is not None:
            return self._by_number().first(self.epoch, min(len(self), _LOOK)) if len(self) else None
        cursor = Cursor(self.epoch)
        taken = type(self._iteration)(spec, cursor).open_lanes(cursor).take(1)
        return None if taken is None else materialize(taken.items)

    def __getitem__(self, key: Any) -> Any:
        """Return row i of this epoch's order, equal to ``list(ds)[i]``.

        A slice or list of numbers returns columns. The name of a column returns that column, read when it is used.
        """
        if isinstance(key, str):
            check_columns([key], self._columns or [key], f"ds[{key!r}]")
            return Column(self, key)
        if self.pipeline.numbered is None:
            raise TypeError(
                f"this dataset has no positions to index by ({self.pipeline.node.text}), and its length is only "
                "estimated (estimated_len). Iterate it, or index the dataset that it was made from."
            )
        return self._by_number().get(key, self.epoch, len(self))

    def __getitems__(self, keys: Sequence[int]) -> Any:
        """Raise TypeError: torch requests batches of a map-style dataset in this way, and this one is iterable."""
        if is_registered(type(self)):
            raise TypeError(
                "torch's Subset and random_split make a map-style dataset of this one, which cannot be resumed. Use "
                "ds.train_test_split(test_size=0.1), ds.slice('90%') or ds.select(indices), and ds.loader(batch_size)."
            )
        raise TypeError(
            "DataLoader treats this dataset as map-style, because torch was imported after it was created. Import "
            "torch first, or use ds.loader(batch_size, num_workers=…)."
        )

    def _by_number(self) -> RandomAccess:
        if self._access is None:
            spec = self._iteration.seeded
            self._access = RandomAccess(spec.leaf, spec.groups or spec.shard.count)
        return self._access

    def unique(self, column: str) -> list[Any]:
        """Return the different values of a column, in the order in which they occur. Reads the column once."""
        return self._unique(column, self.pipeline)

    def _unique(self, column: str, spec: PipelineSpec) -> list[Any]:
        import pyarrow.compute as pc

        found: pa.Array | None = None
        for table in self._tables(spec, column):
            values = table.column(0)
            kind = values.type if found is None else common_type(found.type, values.type)
            if kind is None or kind.num_fields:
                raise ColumnError(
                    f"unique: column {column!r} contains {'values of several types' if kind is None else kind}. Map it "
                    "to numbers or texts first."
                )
            chunks = [chunk.cast(kind) for chunk in (*([] if found is None else [found]), *values.chunks)]
            found = pc.unique(pa.chunked_array(chunks, kind))
        return [] if found is None else found.to_pylist()

    def lengths(self, column: str) -> npt.NDArray[np.int64]:
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
        found = lengths_of(leaf.source, _unchanged(leaf, column), skip_corrupt=leaf.on_error == "skip")
        selection = leaf.order.selection
        lengths = np.empty(len(selection), np.int64)
        for start in range(0, len(lengths), _PIECE):
            rows = np.arange(start, min(start + _PIECE, len(lengths)), dtype=np.int64)
            lengths[start : start + _PIECE] = found.of(selection.source_rows(rows))
        return lengths

    def to_pandas(self) -> pd.DataFrame:
        """Return all rows as a pandas frame, in memory. For a part of them: ``ds.take(1000).to_pandas()``."""
        tables = list(self._tables(self.pipeline))
        if not tables:
            return self._schema_before_running.empty_table().to_pandas()
        return pa.concat_tables(tables, promote_options="permissive").to_pandas()

    def class_encode_column(self, column: str) -> Self:
        """Replace the values of a column by the numbers of their classes. Reads the column once.

        The classes are the sorted values, and are then ``ds.features[column].names``.
        """
        values = self._unique(column, replace(self.pipeline, shard=Shard()))  # the same classes on all ranks
        return self._with_classes(column, tuple(sorted({str(value) for value in values if value is not None})))

    def _with_classes(self, column: str, names: tuple[str, ...]) -> Self:
        made = self._function(ClassCodes(column, names), "class_encode_column", True, 1000, False, False, column)
        return self._with_step(Map(**made, rowwise=True, seed_globals=False))

    def _tables(self, spec: PipelineSpec, column: str | None = None) -> Iterator[pa.Table]:
        """Yield all rows as tables, in the order of iteration, whatever the cursor."""
        if column is not None and self._columns is not None:
            check_columns([column], self._columns, "unique")
        ds = type(self)(replace(spec, format="arrow"), Cursor(self.epoch))
        if column is not None:
            ds = ds.select_columns(column)
        total = spec.shard.before(spec.numbered or 0)
        with shown("reading", "rows") as report:
            done = 0
            for table in ds.iter(_BATCH):
                yield table
                done += table.num_rows
                report(done, total)

    def weighted(
        self,
        weights: str | Sequence[float] | npt.NDArray[Any],
        *,
        num_samples: int | None = None,
        replacement: bool = True,
        seed: int | None = None,
    ) -> Self:
        """Draw rows at random, in proportion to their weights: other draws every epoch.

        ``weights``: a number of at least 0 for each row, or the name of a column of numbers, which is read once. An
        epoch has ``num_samples`` draws. By default it has as many as there are rows or, without replacement, rows with
        a positive weight.

        ``replacement=False``: a row comes at most once an epoch, and heavier rows tend to come earlier.

        It takes the place of ``shuffle()``. A draw is computed from the seed, the epoch and the position, so a resume
        is exact on any number of ranks and workers. The state contains a digest of the weights.
        """
        self._selection("weighted")
        values = _numbers(column_values(self, weights, "weighted"), weights) if isinstance(weights, str) else weights
        return self._drawn(values, num_samples, replacement, seed)

    def balanced(self, column: str, *, num_samples: int | None = None, seed: int | None = None) -> Self:
        """Draw rows at random, so that all values of a column come equally often.

        Every row has the weight 1 / (number of rows with its value), see ``weighted``. The column is read once.
        """
        self._selection("balanced")
        classes = self._strata(column, "balanced")
        return self._drawn(1 / np.bincount(classes)[classes], num_samples, True, seed)

    def _strata(self, column: str, what: str) -> npt.NDArray[np.int32]:
        values = column_values(self, column, what)
        if values.null_count:
            raise ColumnError(
                f"{what}: column {column!r} is null in {values.null_count} rows, which have no class. Leave them out "
                "with select(), or give them a class with map()."
            )
        if values.type.num_fields:
            raise ColumnError(f"{what}: column {column!r} contains {values.type}. Map it to numbers or texts first.")
        return cast("npt.NDArray[np.int32]", values.dictionary_encode().combine_chunks().indices.to_numpy())

    def sort(self, by: str | Callable[[dict[str, Any]], Any], *, reverse: bool = False, length: bool = False) -> Self:
        """Order the rows by the values of a column, or by what a function returns for each row. Read once.

        Rows of equal values keep their order, and null and NaN come last. ``length=True`` sorts by the lengths of the
        texts or lists of a column. The order is the same in every epoch. An earlier ``shuffle()`` is removed, and a
        later one has its effect.
        """
        selection = self._selection("sort")
        values = column_values(self, by, "sort") if isinstance(by, str) else self._results(by)
        if length:
            values = _lengths(values, by)
        if values.type.num_fields:
            raise ColumnError(
                f"sort: {_named(by)} contains {values.type}, which has no order. length=True sorts by the number of "
                "values of a list."
            )
        import pyarrow.compute as pc

        rows = pc.sort_indices(values, sort_keys=[("", "descending" if reverse else "ascending")])
        leaf = self.pipeline.base
        order = replace(leaf.order, selection=selection.select(rows.to_numpy().astype(np.int64)), shuffle=None)
        leaf = replace(leaf, order=order, seed_drawn=False, seed_agreed=False, defaults=frozenset())
        return self._with_leaf(leaf)

    def _drawn(self, weights: Any, num_samples: int | None, replacement: bool, seed: int | None) -> Self:
        leaf, values = self.pipeline.base, checked(weights)
        if len(values) != (rows := len(leaf.order.selection)):
            raise ValueError(f"expected {rows} weights, one for each row, got {len(values)}")
        most = rows if replacement else int(np.count_nonzero(values))
        samples = most if num_samples is None else integer(num_samples, "num_samples", 1)
        chosen, drawn, agreed = self._seed(seed)
        order = replace(leaf.order, shuffle=Weighted(values, chosen, samples, bool(replacement)))
        leaf = replace(leaf, order=order, seed_drawn=drawn, seed_agreed=agreed, defaults=frozenset())
        return self._with_leaf(leaf)

    def _in_order(self, format: str = "arrow") -> Self:
        """Return the dataset without its order and shard: the row at position p is row p."""
        spec = self.pipeline
        leaf = replace(spec.base, order=replace(spec.base.order, shuffle=None, lanes=1))
        return type(self)(replace(spec, node=Node(leaf), shard=Shard(), lanes=1, lanes_chosen=False, format=format))

    def _results(self, function: Callable[[dict[str, Any]], Any]) -> pa.ChunkedArray:
        """Return what a function returns for each row, by their numbers."""
        if not callable(function):
            raise TypeError(
                f"sort: expected the name of a column or a function of a row, got {function!r:.60}. To sort by several "
                "columns, sort by the last one first: rows of equal values keep their order."
            )
        ds = self._in_order(ITEMS if self.pipeline.format == ITEMS else "python")
        values = []
        with shown("sorting", "rows") as report:
            for row in cast(Iterable[dict[str, Any]], ds):
                values.append(function(row))
                report(len(values), len(ds))
        if len(values) != len(ds):
            raise ColumnError(f"sort: {len(values)} of {len(ds)} rows can be read, and all are needed.")
        return pa.chunked_array([pa.array(values)])


def _unchanged(leaf: Leaf, column: str) -> str:
    """Return the name of a column in the source. Raise ColumnError if a step may have changed its values."""
    name, step = leaf.stored_column(column)
    if step is not None:
        raise ColumnError(
            f"lengths: {_described(step)} may change column {column!r}, so that its lengths in the files are not "
            "those of the rows. Call lengths before that step, or cache() the dataset first."
        )
    if name is None:
        check_columns([column], list(leaf.head), "lengths")
    assert name is not None
    return name


def _described(step: Step) -> str:
    return step.call if isinstance(step, Function) else step.name if isinstance(step, Decode) else "cast"


class Column(Sequence[Any]):
    """One column of a dataset, like a list, but read when it is used. ``column[:]`` reads all of it.

    ``fields``: names of fields in a struct, outermost first: ``ds["meta"]["lang"]`` is a column, too.
    """

    def __init__(self, dataset: Reading, name: str, fields: tuple[str, ...] = ()) -> None:
        fresh = type(dataset)(dataset.pipeline, Cursor(dataset.epoch))  # whatever state was loaded: this only reads
        self._dataset, self.name, self._fields = fresh.select_columns(name), name, fields

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Any: ...
    @overload
    def __getitem__(self, key: str) -> Column: ...
    def __getitem__(self, key: Any) -> Any:
        """Return one value, or those of a slice or list of numbers; for the name of a field of structs, its column."""
        if isinstance(key, str):
            self._check_field(key)
            return Column(self._dataset, self.name, (*self._fields, key))
        found = self._dataset[key]
        return self._of(found.column(0) if isinstance(found, pa.Table) else found[self.name])

    def _check_field(self, key: str) -> None:
        kind = self._dataset.schema.field(self.name).type
        for name in self._fields:
            kind = kind.field(name).type
        if not pa.types.is_struct(kind):
            raise TypeError(f"{self!r} is {kind}, which has no fields: it is indexed by row numbers, got {key!r}")
        check_columns([key], [kind.field(at).name for at in range(kind.num_fields)], repr(self))

    def _of(self, values: Any) -> Any:
        """Return the field of a struct, of many in any format, or of one."""
        for name in self._fields:
            if isinstance(values, (pa.Array, pa.ChunkedArray)):
                import pyarrow.compute as pc

                values = pc.struct_field(values, name)
            elif isinstance(values, (list, np.ndarray)):
                values = [None if value is None else value[name] for value in values]
            else:
                values = None if values is None else values[name]
        return values

    def __iter__(self) -> Iterator[Any]:
        spec = self._dataset.pipeline
        fresh = type(self._dataset)(spec, Cursor(self._dataset.epoch))
        for batch in fresh.iter(_BATCH):
            values = self._of(batch.column(0) if isinstance(batch, pa.Table) else batch[self.name])
            yield from _rows(values)

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


def column_values(dataset: Reading, column: str, what: str) -> pa.ChunkedArray:
    """Read a column of all rows, by their numbers: before any shuffle, over all shards."""
    if dataset._columns is not None:
        check_columns([column], dataset._columns, what)
    ds = dataset._in_order()
    tables = list(ds._tables(ds.pipeline, column))
    values = pa.concat_tables(tables, promote_options="permissive").column(0) if tables else pa.chunked_array([[]])
    if len(values) != len(ds):
        raise ColumnError(
            f"{what}: column {column!r} has {len(values)} values for {len(ds)} rows, because rows that fail are "
            "skipped. Compute a value for each row of the data first."
        )
    if isinstance(values.type, pa.UuidType):  # which pyarrow does not compare
        return values.cast(values.type.storage_type)
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _numbers(values: pa.ChunkedArray, column: str) -> npt.NDArray[np.float64]:
    """Return the values of a column as numbers. Raise ColumnError for any that is not."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ColumnError(f"weighted: column {column!r} contains {kind}, expected numbers.")
    if values.null_count:
        raise ColumnError(f"weighted: column {column!r} is null in {values.null_count} rows. Weight 0 is never drawn.")
    return np.asarray(values.to_numpy(), dtype=np.float64)


def _lengths(values: pa.ChunkedArray, by: Any) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(values)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pc.list_value_length(values)
    raise ColumnError(f"sort: {_named(by)} contains {kind}, which has no length. Omit length=True.")


def _named(by: Any) -> str:
    return f"column {by!r}" if isinstance(by, str) else "the result of the function"
