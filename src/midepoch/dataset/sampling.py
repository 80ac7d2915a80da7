"""Orders by the values of a column: draws by weight, draws of equal classes, and sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.checks import integer
from midepoch._internal.progress import shown
from midepoch.dataset.reading import Reading
from midepoch.errors import ColumnError
from midepoch.order import Shard, Weighted
from midepoch.order.weights import checked
from midepoch.pipeline.node import Node
from midepoch.transforms.columns import check_columns
from midepoch.transforms.default_collate import ITEMS

Self = TypeVar("Self", bound="Sampling")


class Sampling(Reading):
    """The methods of a dataset that order rows by values. Every call returns a new dataset."""

    def weighted(
        self: Self,
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

    def balanced(self: Self, column: str, *, num_samples: int | None = None, seed: int | None = None) -> Self:
        """Draw rows at random, so that all values of a column come equally often.

        Every row has the weight 1 / (number of rows with its value), see ``weighted``. The column is read once.
        """
        self._selection("balanced")
        values = column_values(self, column, "balanced")
        if values.null_count:
            raise ColumnError(
                f"balanced: column {column!r} is null in {values.null_count} rows, which have no class. Leave them out "
                "with select(), or give them a class with map()."
            )
        if values.type.num_fields:
            raise ColumnError(f"balanced: column {column!r} contains {values.type}. Map it to numbers or texts first.")
        classes = values.dictionary_encode().combine_chunks().indices.to_numpy()
        return self._drawn(1 / np.bincount(classes)[classes], num_samples, True, seed)

    def sort(
        self: Self, by: str | Callable[[dict[str, Any]], Any], *, reverse: bool = False, length: bool = False
    ) -> Self:
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

    def _drawn(self: Self, weights: Any, num_samples: int | None, replacement: bool, seed: int | None) -> Self:
        leaf, values = self.pipeline.base, checked(weights)
        if len(values) != (rows := len(leaf.order.selection)):
            raise ValueError(f"expected {rows} weights, one for each row, got {len(values)}")
        most = rows if replacement else int(np.count_nonzero(values))
        samples = most if num_samples is None else integer(num_samples, "num_samples", 1)
        chosen, drawn, agreed = self._seed(seed)
        order = replace(leaf.order, shuffle=Weighted(values, chosen, samples, bool(replacement)))
        leaf = replace(leaf, order=order, seed_drawn=drawn, seed_agreed=agreed, defaults=frozenset())
        return self._with_leaf(leaf)

    def _in_order(self: Self, format: str = "arrow") -> Self:
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


def column_values(dataset: Sampling, column: str, what: str) -> pa.ChunkedArray:
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
