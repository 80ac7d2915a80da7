"""Filters of rows: pyarrow expressions, or lists of ``(column, operator, value)`` as Parquet readers take them."""

from __future__ import annotations

import hashlib
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.sources.taking import taken

if TYPE_CHECKING:
    import pyarrow.compute as pc


# Anything but comparisons of columns with values, joined by "and" and "or".
_MAY_PASS_NAN = re.compile(r"!=|\w\(|\)\s*[=<>]|[=<>]\s*\(")


@dataclass(frozen=True, eq=False)
class Filter:
    """An expression, and a text that names it in indexes and states."""

    expression: pc.Expression
    text: str

    @property
    def never_nan(self) -> bool:
        """Whether NaN surely cannot pass, which statistics of a file leave out: not through plain comparisons."""
        return _MAY_PASS_NAN.search(self.text.replace("is_valid(", "(")) is None

    @property
    def digest(self) -> str:
        """Tells apart what has the same text, as a number of 32 and of 64 bits."""
        return hashlib.blake2b(pickle.dumps(self.expression), digest_size=8).hexdigest()

    def columns(self, schema: pa.Schema) -> list[str]:
        """The columns that the expression asks for; pyarrow does not tell, but complains about each that is missing."""
        whole = schema.empty_table()
        self._try(whole)
        named = [name for name in schema.names if name in self.text]  # of thousands of columns a few
        if not self._passes(whole.select(named)):
            named = schema.names
        return [name for name in named if not self._passes(whole.select([each for each in named if each != name]))]

    def apply(self, table: pa.Table, columns: list[str]) -> pa.Table:
        """The rows that pass. ``columns`` are those that the expression asks for."""
        try:
            return table.filter(self.expression)
        except pa.ArrowNotImplementedError:  # for another column, of a type that pyarrow cannot filter
            numbers = pa.Array.from_buffers(pa.int64(), len(table), [None, pa.py_buffer(np.arange(len(table)))])
            left = table.select(columns).append_column("", numbers).filter(self.expression).column("")
            places = left.combine_chunks().to_numpy()
            arrays = [taken(pa.concat_arrays(column.chunks), places) for column in table.columns]
            return pa.table(arrays, schema=table.schema)

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


def _plain(filters: Any) -> Any:
    """Conditions as tuples and values as lists in one order, however they came: from JSON, as sets, as arrays."""
    if isinstance(filters, (list, tuple)) and len(filters) == 3 and isinstance(filters[0], str):
        column, operator, value = filters
        if isinstance(value, (set, frozenset)):
            value = sorted(value)
        elif hasattr(value, "tolist") or isinstance(value, (pa.Array, pa.ChunkedArray)):
            value = value.to_pylist() if hasattr(value, "to_pylist") else value.tolist()
        return (column, operator, value)
    return [_plain(each) for each in filters] if isinstance(filters, (list, tuple)) else filters


def _named(expression: pc.Expression) -> Filter:
    """With its text, and a digest where that was shortened."""
    text = str(expression)
    if "..." in text:
        text += f" {Filter(expression, text).digest}"
    return Filter(expression, text)


def parse_filter(filters: Any) -> Filter | None:
    """What the user gave, or None for no filter."""
    if filters is None or (isinstance(filters, (list, tuple)) and not filters):
        return None
    import pyarrow.compute as pc  # 35 ms, of which a dataset without a filter has no use
    import pyarrow.parquet as pq

    if isinstance(filters, pc.Expression):
        return _named(filters)

    try:
        if not isinstance(filters, (list, tuple)):
            raise TypeError(f"it is a {type(filters).__name__}")
        return _named(pq.filters_to_expression(_plain(filters)))
    except (ValueError, TypeError, LookupError, AttributeError, pa.ArrowException) as problem:
        raise ValueError(
            f"filters must be a pyarrow expression or a list of (column, operator, value), got {filters!r}: {problem}. "
            'Write pyarrow.compute.field("label") == 1, or [("label", "==", 1)].'
        ) from None
