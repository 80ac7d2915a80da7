"""The carrier of rows through a pipeline: columns side by side, with the numbers of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.transforms.arrow_values import Paths

Int64Array = npt.NDArray[np.int64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Columns of equal length. A column is an Arrow array as read, or any sequence that a map made.

    ``rows`` are the row numbers in the dataset before it was shuffled; ``places`` say which of the positions asked for
    each row answers, since rows may have been skipped. ``owned``: Arrow columns may be handed out for writing.
    ``nullable``: where in the columns of the source some row, maybe not one of these, is null.
    """

    columns: dict[str, Any]
    rows: Int64Array
    places: Int64Array
    owned: bool
    nullable: Mapping[str, Paths] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> Batch:
        columns = {name: cut(column, start, stop) for name, column in self.columns.items()}
        return replace(self, columns=columns, rows=self.rows[start:stop], places=self.places[start:stop])

    def keep(self, places: Int64Array) -> Batch:
        """Only the rows at these places."""
        columns = {name: pick(column, places) for name, column in self.columns.items()}
        return replace(self, columns=columns, rows=self.rows[places], places=self.places[places])

    def with_columns(self, columns: dict[str, Any], nullable: Mapping[str, Paths] | None = None) -> Batch:
        return replace(self, columns=columns, nullable=self.nullable if nullable is None else nullable)


def cut(column: Any, start: int, stop: int) -> Any:
    """``column[start:stop]``, also of a struct column presented as a dict."""
    if isinstance(column, dict):
        return {name: cut(inner, start, stop) for name, inner in column.items()}
    return column[start:stop]


def pick(column: Any, places: Int64Array) -> Any:
    if isinstance(column, dict):
        return {name: pick(inner, places) for name, inner in column.items()}
    if hasattr(column, "take") and not isinstance(column, np.ndarray) and hasattr(column, "null_count"):
        return column.take(places)
    return [column[int(i)] for i in places]


def at(column: Any, i: int) -> Any:
    if isinstance(column, dict):
        return {name: at(inner, i) for name, inner in column.items()}
    return column[i]


def as_rows(columns: dict[str, Any], length: int) -> list[Row]:
    """Columns as already presented (lists, arrays, tensors) to one dict a row."""
    if not columns:
        return [{} for _ in range(length)]
    if all(isinstance(value, list) for value in columns.values()):
        return _row_maker(len(columns))(*columns, zip(*columns.values(), strict=True))
    return [{name: at(column, i) for name, column in columns.items()} for i in range(length)]


@lru_cache(maxsize=64)
def _row_maker(count: int) -> Callable[..., list[Row]]:
    """A function of ``count`` names and an iterable of tuples of values, spelled out as a namedtuple's are: dicts made
    by it take half the time of ``dict(zip(names, values))``.
    """
    names, values = ([f"{letter}{i}" for i in range(count)] for letter in "nv")
    items = ", ".join(map("{}: {}".format, names, values))
    made: Callable[..., list[Row]] = eval(
        f"lambda {', '.join(names)}, rows: [{{{items}}} for {', '.join(values)}, in rows]"
    )
    return made
