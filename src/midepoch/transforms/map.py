"""map: a user's function over rows or groups of rows. It returns one row for each row by default.

flat_map and unbatch: any number of rows from each row. batch: one row from several.

Arrays that a function returns for each row are copied immediately to where the batch is assembled: they are in
the processor's cache then, and their memory can be used for the next row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from inspect import isgenerator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch._internal.values import loaded
from midepoch.errors import ColumnError, MapError
from midepoch.sources.schemas import as_arrow
from midepoch.transforms.arrow_values import flat_numbers, is_list, without_extension
from midepoch.transforms.batch import Batch, Encoded, check_columns, join_columns, pick
from midepoch.transforms.formats import Allocate, own_copy, room
from midepoch.transforms.function import Function, RunContext

_LEAST_BYTES = 4096
"""Bytes of a row below which the column is assembled faster in one piece."""


class Collected:
    """The arrays of the rows of a batch. ``rows``: the maximum number of rows."""

    def __init__(self, allocate: Allocate, rows: int) -> None:
        self._allocate, self._rows = allocate, rows
        self._names: Set[str] | None = None
        self._columns: dict[str, CollectedRows] = {}

    def take(self, result: Any) -> Any:
        """Take the arrays of the result for a row, and return the rest. None if the first row has none."""
        if self._names is None:
            if type(result) is not dict:
                return None
            self._names = result.keys()
            for name, value in result.items():
                array = _array(value)
                if array is not None and array.nbytes >= _LEAST_BYTES:
                    self._columns[name] = CollectedRows(type(value), array, self._allocate, self._rows)
            if not self._columns:
                return None
        if type(result) is not dict or result.keys() != self._names:
            return result  # an error, which names the row
        for name, column in self._columns.items():
            column.add(result[name])
        return {name: None if name in self._columns else value for name, value in result.items()}

    def columns(self) -> dict[str, Any]:
        """Return the collected columns."""
        return {name: rows.column() for name, rows in self._columns.items()}


class CollectedRows:
    """A column of arrays of one shape and type: one array. A list if a row is different."""

    def __init__(self, kind: type, first: Any, allocate: Allocate, rows: int) -> None:
        """``kind``: of the values, arrays or tensors. ``first``: the first of them, as an array."""
        self._rows, self._kind, self._count = room((rows, *first.shape), first.dtype, allocate), kind, 0
        self._others: list[Any] | None = None

    def add(self, value: Any) -> None:
        """Add the value of the next row."""
        rows, count = self._rows, self._count
        if self._others is None:
            array = _array(value) if type(value) is self._kind else None
            if array is not None and array.shape == rows.shape[1:] and array.dtype == rows.dtype:
                rows[count] = array
                self._count = count + 1
                return
            self._others = list(rows[:count])  # the rows so far, as they were returned
            if count and self._kind is not np.ndarray:
                self._others = [sys.modules["torch"].from_numpy(row) for row in self._others]
        self._others.append(value)

    def column(self) -> Any:
        """Return the column."""
        return self._rows[: self._count] if self._others is None else self._others


def _array(value: Any) -> Any:
    """Return a value as a numpy array without a copy, or None if it is not an array of numbers."""
    if type(value) is np.ndarray:
        return value if value.ndim and value.dtype.kind in "biufc" and value.dtype.isnative else None
    torch = loaded("torch")
    if torch is None or type(value) is not torch.Tensor or not value.is_cpu or value.requires_grad or not value.ndim:
        return None
    try:
        return value.numpy()
    except (TypeError, RuntimeError):  # bfloat16, sparse, …
        return None


class DifferentColumnsError(MapError):
    """A function returned different columns for different rows: no single row is the wrong one."""


@dataclass(frozen=True, eq=False)
class Map(Function):
    """One call of ``Dataset.map``.

    ``one_to_one``: the returned columns are added to the given rows. Otherwise (batched only), the returned rows
    replace the given ones, in any number. ``rowwise``: the function is batched only for speed, and its result does not
    depend on the grouping of rows.
    """

    remove_columns: tuple[str, ...] = ()
    one_to_one: bool = True
    rowwise: bool = False
    drop_last: bool = False
    """Drop an incomplete last group."""

    @property
    def outputs(self) -> tuple[str, ...] | None:
        """The columns that the function returns, if it says so. None if they are known only after it has run."""
        return getattr(self.function, "outputs", None) if self.one_to_one else None

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        """Return the batch with the function's columns. Rows that fail are dropped if ``on_error`` is "skip"."""
        check_columns(self.remove_columns, list(batch.columns), f"map({self.name}, remove_columns=…)")
        kept, made = self.computed(batch, run)
        places = np.array(kept, dtype=np.int64)
        if not self.one_to_one:
            return batch.made_of(dict(made), places)
        if len(kept) < len(batch):
            batch = batch.keep(places)
        columns = {name: column for name, column in batch.columns.items() if name not in self.remove_columns}
        if isinstance(made, TableColumns):
            columns = {}
        nullable = {name: paths for name, paths in batch.nullable.items() if name not in made}
        return batch.with_columns({**columns, **made}, nullable)

    def _rows(self, given: Batch, run: RunContext) -> tuple[list[int], dict[str, Any]]:
        """Return the places of the rows with results, and the columns of the results."""
        results: list[Mapping[str, Any]] = []
        kept: list[int] = []
        collected = None if run.collect is None else Collected(run.collect, len(given))
        for i, result in self.on_rows(given, run, None if collected is None else collected.take):
            check_same(self.call, result, results, int(given.rows[i]))
            results.append(result)
            kept.append(i)
        columns = _columns(results, lambda name: [result[name] for result in results])
        for name, values in columns.items():
            if isinstance(values[0], Iterator):
                raise MapError(
                    f"{self.call} returned a {type(values[0]).__name__} as column {name!r}, whose values are not made "
                    "yet. Return list(…) of it."
                )
        if collected is not None:
            columns.update(collected.columns())
        return kept, columns

    def _groups(self, given: Batch, run: RunContext) -> tuple[list[int], dict[str, Any]]:
        """Return the same for groups of rows. If they are not one to one, new rows belong to the first of a group."""
        parts: list[Mapping[str, Any]] = []
        places: list[int] = []
        if self.drop_last:
            given = given.slice(0, len(given) - len(given) % (self.batch_size or len(given)))
        for start, stop, result in self.on_groups(given, run):
            count = stop - start if self.one_to_one else next(iter(_lengths(result).values()), 0)
            if count:
                check_same(self.call, result, parts, int(given.rows[start]))
                parts.append(result)
                places += range(start, stop) if self.one_to_one else [start] * count
        return places, _columns(parts, lambda name: join_columns(name, [part[name] for part in parts]))

    def checked(self, result: Any) -> Mapping[str, Any]:
        if type(result) is dict:
            return result
        if result is None:
            warn_once(
                "%s returned None, and the row stays as it is. Return a dict of the columns that change.", self.call
            )
            return {}
        if isinstance(result, pa.RecordBatch):
            result = pa.Table.from_batches([result])
        if isinstance(result, pa.Table):
            return TableColumns.of(result, batched=self.batched)
        if not isinstance(result, Mapping):
            kind = type(result).__name__
            remedy = ", not {'name': value}"
            if isgenerator(result) or (isinstance(result, list) and result and isinstance(result[0], Mapping)):
                remedy = ". Return one dict, or use flat_map for several rows of one"
            elif result.__class__ is self.function:
                remedy = f": {kind} is a class. Create an object first: map({kind}(…))"
            raise MapError(f"the function must return a dict of columns or None, it returned {kind}{remedy}")
        return result

    def checked_group(self, result: Any, rows: int) -> Mapping[str, Any]:
        columns = self.checked(result)
        lengths = _lengths(columns)
        if self.one_to_one and (wrong := [name for name, length in lengths.items() if length != rows]):
            raise MapError(
                f"column {wrong[0]!r} has {lengths[wrong[0]]} values for {rows} rows. Return one value for each row, "
                "or pass map(…, batched=True, one_to_one=False) to return any number of rows"
            )
        if len(set(lengths.values())) > 1:
            raise MapError(f"the returned columns have different lengths: {lengths}. Return as many values in each")
        return columns


class TableColumns(dict[str, Any]):
    """Columns of an Arrow table that a function returned. They replace all columns of its rows."""

    @staticmethod
    def of(table: pa.Table, *, batched: bool) -> TableColumns:
        if batched:
            arrays = (pa.concat_arrays(c.chunks) if c.num_chunks else pa.array([], c.type) for c in table.columns)
            return TableColumns(zip(table.column_names, arrays, strict=True))
        if table.num_rows != 1:
            raise MapError(f"a function of one row must return a table of one row, it returned {table.num_rows} rows")
        return TableColumns(table.to_pylist()[0])


def check_same(call: str, result: Mapping[str, Any], before: Sequence[Mapping[str, Any]], row: int) -> None:
    """Raise MapError if the columns differ from those before. Such rows are never skipped: which of the two is wrong
    would depend on their order.
    """
    if not before or (type(result) is type(before[0]) and result.keys() == before[0].keys()):
        return
    are_tables = [isinstance(each, TableColumns) for each in (result, before[0])]
    if result.keys() != before[0].keys() or (result and are_tables[0] != are_tables[1]):
        raise DifferentColumnsError(
            f"{call} returned {_described(result)} for row {row} of the dataset but {_described(before[0])} for a row "
            "before. Return the same columns for every row, or leave rows out with filter()"
        )


def _described(result: Mapping[str, Any]) -> str:
    names = f"columns {sorted(result)}" if result else "None (no columns)"
    return f"a table of {names}" if isinstance(result, TableColumns) else names


def _columns(results: Sequence[Mapping[str, Any]], column: Callable[[str], Any]) -> dict[str, Any]:
    """Return the columns of all results. ``column``: function that joins those of one name."""
    if results and (wrong := [name for name in results[0] if not isinstance(name, str)]):
        raise MapError(f"names of columns are texts, and the function returned {wrong[0]!r}. Return {{'name': value}}.")
    columns = {name: column(name) for name in results[0]} if results else {}
    return TableColumns(columns) if results and isinstance(results[0], TableColumns) else columns


def _lengths(columns: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the length of each returned column, and of each column of a struct."""
    found: dict[str, int] = {}
    for name, column in columns.items():
        if isinstance(column, Mapping):
            found |= _lengths(column, f"{prefix}{name}.")
        elif not hasattr(column, "__len__") or isinstance(column, (str, bytes, Set)):
            raise MapError(
                f"column {f'{prefix}{name}'!r} must be a sequence with one value for each row, got the "
                f"{type(column).__name__} {column!r:.60}. Return a list, or omit batched=True"
            )
        else:
            found[f"{prefix}{name}"] = len(column)
    return found


@dataclass(frozen=True, eq=False)
class FlatMap(Function):
    """One call of ``flat_map``: the rows that the function returns for a row replace it."""

    kind: ClassVar[str] = "flat_map"

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        rows: list[Mapping[str, Any]] = []
        parents: list[int] = []
        for i, made in self.computed(batch, run):
            for row in made:
                check_same(self.call, row, rows, int(batch.rows[i]))
                rows.append(row)
                parents.append(i)
        columns = _columns(rows, lambda name: [row[name] for row in rows])
        return batch.made_of(dict(columns), np.array(parents, dtype=np.int64))

    def checked(self, result: Any) -> list[Mapping[str, Any]]:
        if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
            raise MapError(f"the function must return rows (a list of dicts), it returned {type(result).__name__}")
        rows: list[Mapping[str, Any]] = []
        again = isgenerator(result)  # one may yield the same dict again and again
        for row in result:
            if not isinstance(row, Mapping):
                raise MapError(f"the function must return rows (a list of dicts), one of them is {row!r:.60}")
            rows.append(own_copy(row) if again else row)
        return rows


@dataclass(frozen=True)
class Unbatch:
    """Conversion of lists to rows: one row for each element of the columns, which must be equally long. Other columns
    are repeated.

    ``given``: the user has named the columns. Otherwise they follow from the types of all columns.
    """

    names: tuple[str, ...]
    given: bool = True

    def apply(self, batch: Batch, run: RunContext) -> Batch:  # noqa: ARG002
        names = self.names
        check_columns(names, list(batch.columns), "unbatch")
        found = {name: _flat(name, batch.columns[name]) for name in names}
        lengths = found[names[0]][0]
        for name, (other, _) in found.items():
            if not np.array_equal(other, lengths):
                row = int(batch.rows[int(np.flatnonzero(other != lengths)[0])])
                raise MapError(
                    f"unbatch: columns {names[0]!r} and {name!r} are not equally long in row {row}. Unbatch columns of "
                    "equal lengths, or use flat_map."
                )
        parents = np.repeat(np.arange(len(batch)), lengths)
        columns = {
            name: found[name][1] if name in found else pick(column, parents) for name, column in batch.columns.items()
        }
        nullable = {
            name: frozenset(path[1:] for path in paths if path) if name in found else paths
            for name, paths in batch.nullable.items()
        }
        return replace(batch.made_of(columns, parents), nullable=nullable)


def _flat(name: str, column: Any) -> tuple[Any, Any]:
    """Return the lengths of lists, and their elements. Null is an empty list."""
    if isinstance(column, Encoded):
        column = column.decode("python")
    elif isinstance(column, pa.Array):
        column = without_extension(column)
    if isinstance(column, pa.Array) and is_list(column.type):
        import pyarrow.compute as pc

        return flat_numbers(pc.fill_null(pc.list_value_length(column), 0)), pc.list_flatten(column)
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return np.full(len(column), column.shape[1]), column.reshape(-1, *column.shape[2:])
    if isinstance(column, (pa.Array, dict)) or any(
        value is not None and (not hasattr(value, "__len__") or isinstance(value, (str, bytes, Mapping)))
        for value in column
    ):
        raise ColumnError(f"unbatch: column {name!r} does not contain lists. Name columns that do.")
    values = [() if value is None else value for value in column]
    return np.array([len(value) for value in values]), [each for value in values for each in value]


def as_one_row(batch: Batch) -> Batch:
    """Return all rows of a batch as one row with a list for each column."""
    columns = {name: _listed(column, len(batch)) for name, column in batch.columns.items()}
    nullable = {name: frozenset(("item", *path) for path in paths) for name, paths in batch.nullable.items()}
    documents = None if batch.documents is None else batch.documents.as_one()
    return replace(batch.part(slice(1), columns, batch.owned, documents), nullable=nullable)


def _listed(column: Any, count: int) -> Any:
    if isinstance(column, dict):
        return {name: _listed(inner, count) for name, inner in column.items()}
    if isinstance(column, Encoded):
        return [column.decode("python")]
    if isinstance(column, pa.Array):
        return pa.LargeListArray.from_arrays(as_arrow(np.array([0, count])), without_extension(column))
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column[None]
    return [list(column)]
