"""Row filters: pyarrow expressions, or lists of ``(column, operator, value)`` as in Parquet readers."""

from __future__ import annotations

import hashlib
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.sources.schemas import as_arrow, taken

if TYPE_CHECKING:
    import pyarrow.compute as pc


# Anything except comparisons of columns with values, joined by "and" and "or".
_MAY_PASS_NAN = re.compile(r"!=|\w\(|\)\s*[=<>]|[=<>]\s*\(")


@dataclass(frozen=True, eq=False)
class Filter:
    """An expression, and the text that identifies it in indexes and states."""

    expression: pc.Expression
    text: str

    @property
    def never_nan(self) -> bool:
        """True if the filter consists of plain comparisons, which NaN never passes. File statistics ignore NaN."""
        return _MAY_PASS_NAN.search(self.text.replace("is_valid(", "(")) is None

    @property
    def digest(self) -> str:
        """Hash that distinguishes filters of the same text, such as numbers of 32 and of 64 bits."""
        return hashlib.blake2b(pickle.dumps(self.expression), digest_size=8).hexdigest()

    def columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns that the expression uses, found by trying: pyarrow does not list them."""
        table = comparable(pa.table([pa.nulls(0, kind) for kind in schema.types], schema=schema))
        if (problem := self._problem(table)) is not None:
            columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            reason = str(problem).partition(" in ")[0] if "No match for" in str(problem) else str(problem)
            several = " For several values, use ('label', 'in', ['a', 'b'])." if "list<item" in self.text else ""
            raise ColumnError(
                f"the filter {self.text} cannot be used: {reason}.{several} Compare a column with a value of its type, "
                f"and a field of a struct as pyarrow.compute.field('a', 'b'). The columns are: {columns}."
            )
        named = [name for name in schema.names if name in self.text]  # a few of possibly thousands
        if self._problem(table.select(named)) is not None:
            named = schema.names
        return [name for name in named if self._problem(table.select([each for each in named if each != name]))]

    def _problem(self, table: pa.Table) -> Exception | None:
        """Return the reason why the expression cannot be used with the columns of a table."""
        try:
            table.filter(self.expression)
        except (pa.ArrowException, KeyError) as problem:
            return problem
        return None

    def apply(self, table: pa.Table, columns: list[str]) -> pa.Table:
        """Return the rows that pass. ``columns`` are those that the expression uses."""
        try:
            return table.filter(self.expression)
        except pa.ArrowNotImplementedError:  # another column has a type that pyarrow cannot filter
            numbered = comparable(table.select(columns)).append_column("", as_arrow(np.arange(len(table))))
            places = numbered.filter(self.expression).column("").combine_chunks().to_numpy()
            arrays = [taken(pa.concat_arrays(column.chunks), places) for column in table.columns]
            return pa.table(arrays, schema=table.schema)


def comparable(table: pa.Table) -> pa.Table:
    """Return a table with bytes in place of UUIDs, which pyarrow does not compare."""
    for i, kind in enumerate(table.schema.types):
        if isinstance(kind, pa.UuidType):
            table = table.set_column(i, table.field(i).name, table.column(i).cast(kind.storage_type))
    return table


def _bytes(value: Any) -> Any:
    return value.bytes if isinstance(value, UUID) else value


def _plain(filters: Any) -> Any:
    """Return conditions as tuples and their values as lists in a fixed order, also for JSON, sets and arrays."""
    if isinstance(filters, (list, tuple)) and len(filters) == 3 and isinstance(filters[0], str):
        column, operator, value = filters
        if isinstance(value, (set, frozenset)):
            value = sorted(value)
        elif hasattr(value, "tolist") or isinstance(value, (pa.Array, pa.ChunkedArray)):
            value = value.to_pylist() if hasattr(value, "to_pylist") else value.tolist()
        values = [_bytes(each) for each in value] if isinstance(value, (list, tuple)) else _bytes(value)
        return (column, operator, values)
    return [_plain(each) for each in filters] if isinstance(filters, (list, tuple)) else filters


def _named(expression: pc.Expression) -> Filter:
    """Return the filter with its text, and with a digest if the text is shortened."""
    text = str(expression)
    if "..." in text:
        text += f" {Filter(expression, text).digest}"
    return Filter(expression, text)


def parse_filter(filters: Any) -> Filter | None:
    """Return the filter for a user's argument, or None for no filter."""
    if filters is None or (isinstance(filters, (list, tuple)) and not filters):
        return None
    import pyarrow.compute as pc  # 35 ms, not needed without a filter
    import pyarrow.parquet as pq

    if isinstance(filters, pc.Expression):
        return _named(filters)

    try:
        if not isinstance(filters, (list, tuple)):
            raise TypeError(f"it is a {type(filters).__name__}")
        for one in filters:
            if isinstance(one, (list, tuple)) and len(one) == 3 and "in" in str(one[1]) and isinstance(one[2], str):
                raise TypeError(f"{one[1]!r} takes a list of values, [{one[2]!r}]")
        return _named(pq.filters_to_expression(_plain(filters)))
    except (ValueError, TypeError, LookupError, AttributeError, pa.ArrowException) as problem:
        raise ValueError(
            f"filters must be a pyarrow expression or a list of (column, operator, value), got {filters!r}: "
            f"{str(problem).rstrip('.')}. "
            'Write pyarrow.compute.field("label") == 1, or [("label", "==", 1)].'
        ) from None
