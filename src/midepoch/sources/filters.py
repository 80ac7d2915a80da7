"""Filters of rows: pyarrow expressions, or lists of ``(column, operator, value)`` as Parquet readers take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midepoch.errors import ColumnError


@dataclass(frozen=True, eq=False)
class Filter:
    """An expression, and a text that names it in indexes and states."""

    expression: pc.Expression
    text: str

    def columns(self, schema: pa.Schema) -> list[str]:
        """The columns that the expression asks for; pyarrow does not tell, but complains about each that is missing."""
        whole = schema.empty_table()
        self._try(whole)
        return [name for name in schema.names if not self._passes(whole.drop_columns([name]))]

    def _try(self, table: pa.Table) -> None:
        try:
            table.filter(self.expression)
        except (pa.ArrowException, KeyError) as problem:
            raise ColumnError(
                f"the filter {self.text} cannot be used: {problem}. The columns are: {table.schema.to_string()}"
            ) from None

    def _passes(self, table: pa.Table) -> bool:
        try:
            table.filter(self.expression)
        except (pa.ArrowException, KeyError):
            return False
        return True


def _tuples(filters: Any) -> Any:
    """Conditions as tuples, also where they came as lists, from JSON or YAML."""
    if isinstance(filters, (list, tuple)) and len(filters) == 3 and isinstance(filters[0], str):
        return tuple(filters)
    return [_tuples(each) for each in filters] if isinstance(filters, (list, tuple)) else filters


def parse_filter(filters: Any) -> Filter | None:
    """What the user gave, or None for no filter."""
    if filters is None or (isinstance(filters, (list, tuple)) and not filters):
        return None
    if isinstance(filters, pc.Expression):
        return Filter(filters, str(filters))
    import pyarrow.parquet as pq

    try:
        expression = pq.filters_to_expression(_tuples(filters))
        return Filter(expression, str(expression))
    except (ValueError, TypeError, IndexError) as problem:
        raise ValueError(
            f"filters must be a pyarrow expression or a list of (column, operator, value), got {filters!r}: {problem}"
        ) from None
