"""Reading rows, columns and types of a dataset, other than by iterating it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import shown
from midepoch.dataset.rows import Rows
from midepoch.errors import ColumnError
from midepoch.iteration.access import RandomAccess
from midepoch.iteration.state import IterationState, is_registered
from midepoch.order import Shard
from midepoch.pipeline.chunk import materialize
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.pipeline.stage_specs import Local
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
from midepoch.transforms.cast import common_type
from midepoch.transforms.columns import check_columns
from midepoch.transforms.encode import ClassCodes
from midepoch.transforms.features import import_datasets

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Self = TypeVar("Self", bound="Reading")

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
        if spec.has_positions:
            return self._by_number().first(self.epoch, min(len(self), _LOOK)) if len(self) else None
        cursor = Cursor(self.epoch)
        taken = type(self._iteration)(spec, cursor).open_lanes(cursor).take(1)
        return None if taken is None else materialize(taken.items)

    def __getitem__(self, key: Any) -> Any:
        """Return row i of this epoch's order, equal to ``list(ds)[i]``.

        A slice or list of numbers returns columns. The name of a column returns that column, read when it is used.
        """
        if isinstance(key, str):
            return Column(self, key)
        if not self.pipeline.has_positions:
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
        if not spec.has_positions:
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

    def class_encode_column(self: Self, column: str) -> Self:
        """Replace the values of a column by the numbers of their classes. Reads the column once.

        The classes are the sorted values, and are then ``ds.features[column].names``.
        """
        values = self._unique(column, replace(self.pipeline, shard=Shard()))  # the same classes on all ranks
        return self._with_classes(column, tuple(sorted({str(value) for value in values if value is not None})))

    def _with_classes(self: Self, column: str, names: tuple[str, ...]) -> Self:
        made = self._function(ClassCodes(column, names), "class_encode_column", True, 1000, False, False, column)
        return self._with_step(Map(**made, rowwise=True, seed_globals=False))

    def _tables(self, spec: PipelineSpec, column: str | None = None) -> Iterator[pa.Table]:
        """Yield all rows as tables, in the order of iteration, whatever the cursor."""
        if column is not None and self._columns is not None:
            check_columns([column], self._columns, "unique")
        ds = type(self)(replace(spec, format="arrow"), Cursor(self.epoch))
        if column is not None:
            ds = ds.select_columns(column)
        total = len(ds) if spec.has_positions else 0
        with shown("reading", "rows") as report:
            done = 0
            for table in ds.iter(_BATCH):
                yield table
                done += table.num_rows
                report(done, total)


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
    """One column of a dataset, like a list, but read when it is used. ``column[:]`` reads all of it."""

    def __init__(self, dataset: Reading, name: str) -> None:
        fresh = type(dataset)(dataset.pipeline, Cursor(dataset.epoch))  # whatever state was loaded: this only reads
        self._dataset, self.name = fresh.select_columns(name), name

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        """Return one value, or those of a slice or list of numbers."""
        if isinstance(key, str):
            raise TypeError(f"a column is indexed by row numbers, got {key!r}")
        found = self._dataset[key]
        return found.column(0) if isinstance(found, pa.Table) else found[self.name]

    def __iter__(self) -> Iterator[Any]:
        spec = self._dataset.pipeline
        fresh = type(self._dataset)(spec, Cursor(self._dataset.epoch))
        for batch in fresh.iter(_BATCH):
            yield from batch.column(0) if isinstance(batch, pa.Table) else batch[self.name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(list(self), dtype=dtype)

    def __repr__(self) -> str:
        return f"Column({self.name!r} of {self._dataset!r})"
