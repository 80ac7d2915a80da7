"""filter: the rows for which a function or a pyarrow expression is true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch.errors import ColumnError, MapError
from midepoch.sources.filters import Filter, comparable
from midepoch.sources.schemas import as_arrow, taken
from midepoch.transforms.arrow_values import flat_numbers
from midepoch.transforms.batch import Batch, join
from midepoch.transforms.formats import arrow_column, present, present_rows
from midepoch.transforms.function import Function, RunContext

if TYPE_CHECKING:
    import pyarrow.compute as pc


def _is_no_answer(result: Any) -> bool:
    """Return True for objects that are true or false for another reason: an iterator, a function, or a row."""
    return isinstance(result, (Mapping, Iterator)) or callable(result)


@dataclass(frozen=True, eq=False)
class FilterRows(Function):
    """One call of ``filter`` with a function."""

    kind: ClassVar[str] = "filter"

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        kept = self.computed(batch, run)
        return batch if len(kept) == len(batch) else batch.keep(np.array(kept, dtype=np.int64))

    def _rows(self, given: Batch, run: RunContext) -> list[int]:
        if run.seeds is None and not (self.with_indices or self.with_generator or self.fn_kwargs):
            # Fast path without a wrapper call per row. If a call fails, all rows are run again below, one by one.
            function, columns, first = self.function, self.input_columns, self.fresh(given)
            try:
                values: Any = []
                if columns is None:
                    values = present_rows(first, self.input_format)
                elif len(columns) == 1 and self.input_format == "python":
                    values = present(first, "python")[columns[0]]
                results = [function(value) for value in values]
                if results and results[0] is not None and not _is_no_answer(results[0]):
                    return [i for i, kept in enumerate(results) if kept]
            except Exception:
                pass
        return [i for i, kept in self.on_rows(given, run) if kept]

    def checked(self, result: Any) -> bool:
        if _is_no_answer(result):
            remedy = ". Call it" if callable(result) else "" if isinstance(result, Mapping) else ". Use any() or all()"
            raise MapError(f"a filter must return True or False, it returned a {type(result).__name__}{remedy}")
        if result is None:
            warn_once("%s returned None, which leaves the row out. Return True or False.", self.call)
        try:
            return bool(result)
        except (ValueError, RuntimeError) as problem:  # an array of several values
            raise MapError(
                f"a filter must return True or False, it returned {type(result).__name__}: {problem}"
            ) from None

    def checked_group(self, result: Any, rows: int) -> Any:
        if not hasattr(result, "__len__") or len(result) != rows:
            raise MapError(f"a batched filter must return {rows} booleans, got {result!r:.60}")
        return result

    def _groups(self, given: Batch, run: RunContext) -> list[int]:
        groups = self.on_groups(given, run)
        return [start + i for start, _, result in groups for i, kept in enumerate(result) if kept]


@dataclass(frozen=True, eq=False)
class FilterExpression:
    """One call of ``filter`` with an expression. Null counts as false."""

    expression: pc.Expression

    def apply(self, batch: Batch, run: RunContext) -> Batch:  # noqa: ARG002
        return self.apply_to([batch], self.mask([batch]))

    def mask(self, batches: Sequence[Batch]) -> npt.NDArray[np.bool_]:
        """Return the mask of the rows of several batches for which it is true, from one evaluation."""
        arrays = _chunked(batches)
        table = pa.Table.from_arrays(list(arrays.values()), names=list(arrays))
        # For columns of only nulls several types are tried.
        nulls = [field.name for field in table.schema if pa.types.is_null(field.type)]
        problem: Exception | None = None
        for kind in (pa.null(), pa.string(), pa.int64(), pa.float64()) if nulls else (pa.null(),):
            for name in nulls:
                typed = pa.chunked_array([pa.nulls(len(table), kind)])
                table = table.set_column(table.column_names.index(name), name, typed)
            try:
                return _mask(self.expression, table)
            except (pa.ArrowException, KeyError) as other:
                problem = problem or other
        names = ", ".join(table.column_names)
        raise ColumnError(f"filter({self.expression}): {problem}. The columns are: {names}.") from None

    def apply_to(self, batches: Sequence[Batch], mask: npt.NDArray[np.bool_]) -> Batch:
        """Return the rows of several batches that a mask keeps, as one batch."""
        arrays = _chunked(batches)
        if len(batches) == 1 or not all(isinstance(column, pa.Array) for column in batches[0].columns.values()):
            ends = np.cumsum([0, *map(len, batches)])
            parts = [np.flatnonzero(mask[a:b]) for a, b in pairwise(ends)]
            return join([batch.keep(kept) for batch, kept in zip(batches, parts, strict=True)])
        kept = np.flatnonzero(mask)
        chosen = as_arrow(mask)
        columns = {name: _filtered(column, chosen, kept) for name, column in arrays.items()}
        rows, places = (np.concatenate(both)[kept] for both in zip(*((b.rows, b.places) for b in batches), strict=True))
        return Batch(columns, rows, places, True, batches[0].nullable)

    def columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns that the expression uses. Raise ColumnError if it does not fit the schema."""
        return Filter(self.expression, str(self.expression)).columns(schema) or schema.names[:1]


def _chunked(batches: Sequence[Batch]) -> dict[str, pa.ChunkedArray]:
    arrays = {}
    for name in batches[0].columns:
        with suppress(MapError):  # an expression cannot use a column that Arrow cannot represent
            arrays[name] = pa.chunked_array([arrow_column(name, batch.columns[name]) for batch in batches])
    return arrays


def _mask(expression: pc.Expression, table: pa.Table) -> npt.NDArray[np.bool_]:
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

    plan = [
        Declaration("table_source", TableSourceNodeOptions(comparable(table))),
        Declaration("project", ProjectNodeOptions([expression], ["kept"])),
    ]
    kept = Declaration.from_sequence(plan).to_table(use_threads=False).column("kept")
    if not pa.types.is_boolean(kept.type):
        raise pa.ArrowInvalid(f"expected a boolean expression, got {kept.type}")
    mask = _combined(kept.fill_null(False) if kept.null_count else kept)
    return flat_numbers(mask)  # type: ignore[no-any-return]


def _filtered(column: pa.ChunkedArray, mask: pa.Array, places: npt.NDArray[np.int64]) -> pa.Array:
    try:
        return _combined(column.filter(mask))
    except pa.ArrowNotImplementedError:
        return taken(_combined(column), places)


def _combined(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
