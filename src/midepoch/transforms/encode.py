"""Functions for columns: class labels as numbers, and transforms as Hugging Face's ``with_transform`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from midepoch.errors import MapError
from midepoch.transforms.map import TableColumns


@dataclass(frozen=True)
class ClassCodes:
    """Function of a batched map, from class names to their numbers. Null stays null, and numbers stay as they are."""

    column: str
    names: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return "class_encode_column"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that it returns."""
        return (self.column,)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def __call__(self, values: list[Any]) -> dict[str, Any]:
        return {self.column: pa.array([self._number(value) for value in values], pa.int64())}

    def _number(self, value: Any) -> int | None:
        if value is None:
            return None
        number = self._numbers.get(str(value))
        if number is None and isinstance(value, int) and 0 <= value < len(self.names):
            return value
        if number is None:
            raise MapError(f"column {self.column!r}: {value!r} is not one of the classes {', '.join(self.names)}")
        return number


@dataclass(frozen=True)
class Transform:
    """Function of a row for a transform of batches: it gets a batch of one row, and its columns replace all others."""

    function: Callable[[dict[str, Any]], Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def __call__(self, row: Mapping[str, Any]) -> Any:
        result = self.function({name: [value] for name, value in row.items()})
        if not isinstance(result, Mapping):
            raise MapError(f"a transform must return a dict of columns, it returned {type(result).__name__}")
        for name, values in result.items():
            if not hasattr(values, "__len__") or isinstance(values, (str, bytes)) or len(values) != 1:
                raise MapError(
                    f"a transform gets a batch and returns one: column {name!r} must have one value for each row, got "
                    f"{values!r:.60} for one row. Use map for a function of single rows"
                )
        return TableColumns({name: values[0] for name, values in result.items()})
