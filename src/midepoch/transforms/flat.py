"""flat_map and unbatch: any number of rows from each row. batch: one row from several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from midepoch.errors import ColumnError, MapError
from midepoch.transforms.arrow_values import as_arrow, flat_numbers, is_list, plain_array
from midepoch.transforms.batch import Batch, Encoded, check_columns, pick
from midepoch.transforms.function import Function, RunContext
from midepoch.transforms.map import check_same


@dataclass(frozen=True, eq=False)
class FlatMap(Function):
    """One call of ``flat_map``: the rows that the function returns for a row replace it."""

    kind: ClassVar[str] = "flat_map"

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        rows: list[Mapping[str, Any]] = []
        parents: list[int] = []
        given = self.given(batch)
        for i, made in self.seeded(given, run, lambda run: self.on_rows(given, run)):
            for row in made:
                check_same(self.call, row, rows, int(batch.rows[i]))
                rows.append(row)
                parents.append(i)
        names = list(rows[0]) if rows else []
        columns = {name: [row[name] for row in rows] for name in names}
        return batch.made_of(columns, np.array(parents, dtype=np.int64))

    def checked(self, result: Any) -> list[Mapping[str, Any]]:
        if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
            raise MapError(f"the function must return rows (a list of dicts), it returned {type(result).__name__}")
        rows = list(result)
        for row in rows:
            if not isinstance(row, Mapping):
                raise MapError(f"the function must return rows (a list of dicts), one of them is {row!r:.60}")
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
        found = {name: _flat(name, _plain(batch.columns[name])) for name in names}
        lengths = found[names[0]][0]
        for name, (other, _) in found.items():
            if not np.array_equal(other, lengths):
                row = int(batch.rows[int(np.flatnonzero(other != lengths)[0])])
                raise MapError(f"unbatch: columns {names[0]!r} and {name!r} are not equally long in row {row}.")
        parents = np.repeat(np.arange(len(batch)), lengths)
        columns = {
            name: found[name][1] if name in found else pick(column, parents) for name, column in batch.columns.items()
        }
        nullable = {
            name: frozenset(path[1:] for path in paths if path) if name in found else paths
            for name, paths in batch.nullable.items()
        }
        return replace(batch.made_of(columns, parents), nullable=nullable)


def _plain(column: Any) -> Any:
    if isinstance(column, Encoded):
        return column.decode("python")
    return plain_array(column) if isinstance(column, pa.Array) else column


def _is_list(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping)))


def _flat(name: str, column: Any) -> tuple[Any, Any]:
    """Return the lengths of lists, and their elements. Null is an empty list."""
    if isinstance(column, pa.Array) and is_list(column.type):
        import pyarrow.compute as pc

        return flat_numbers(pc.fill_null(pc.list_value_length(column), 0)), pc.list_flatten(column)
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return np.full(len(column), column.shape[1]), column.reshape(-1, *column.shape[2:])
    if isinstance(column, (pa.Array, dict)) or not all(map(_is_list, column)):
        raise ColumnError(f"unbatch: column {name!r} does not contain lists.")
    values = [() if value is None else value for value in column]
    return np.array([len(value) for value in values]), [each for value in values for each in value]


def as_one_row(batch: Batch) -> Batch:
    """Return all rows of a batch as one row with a list for each column."""
    columns = {name: _listed(column, len(batch)) for name, column in batch.columns.items()}
    nullable = {name: frozenset(("item", *path) for path in paths) for name, paths in batch.nullable.items()}
    ordinals = None if batch.ordinals is None else batch.ordinals[:1]
    leaves = batch.leaves if isinstance(batch.leaves, int) else int(batch.leaves[0])
    documents = None if batch.documents is None else batch.documents.as_one()
    return Batch(columns, batch.rows[:1], batch.places[:1], batch.owned, nullable, ordinals, leaves, documents)


def _listed(column: Any, count: int) -> Any:
    if isinstance(column, dict):
        return {name: _listed(inner, count) for name, inner in column.items()}
    if isinstance(column, Encoded):
        return [column.decode("python")]
    if isinstance(column, pa.Array):
        return pa.LargeListArray.from_arrays(as_arrow(np.array([0, count])), plain_array(column))
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column[None]
    return [list(column)]
