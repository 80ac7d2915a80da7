"""Items of a map-style dataset: the step that calls ``ds[i]`` for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from midepoch.errors import MapError
from midepoch.transforms.batch import Batch
from midepoch.transforms.formats import ITEM
from midepoch.transforms.function import RunContext, failed
from midepoch.transforms.map import Map

NAME_COLUMNS = "Name its parts when you open it: from_map_style(ds, columns=['x', 'y'])."


@dataclass(frozen=True, eq=False)
class Items:
    """The objects of a map-style dataset. ``columns``: names for the parts of an item, None for items as they are."""

    dataset: Any
    columns: tuple[str, ...] | None = None

    @property
    def __name__(self) -> str:
        return type(self.dataset).__name__

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns of a row."""
        return (ITEM,) if self.columns is None else self.columns

    @cached_property
    def gets_many(self) -> bool:
        """True if the dataset returns several items in one call. A ``Subset`` of torch does so if its dataset does."""
        inner = self.dataset
        while type(inner).__module__.startswith("torch.utils.data") and hasattr(inner, "dataset"):
            inner = inner.dataset
        return callable(getattr(inner, "__getitems__", None)) and callable(getattr(self.dataset, "__getitems__", None))

    def __call__(self, number: int) -> tuple[Any, ...]:
        """Return the values of one row, in the order of ``outputs``."""
        return self._values(number, self.dataset[number])

    def many(self, numbers: list[int]) -> list[tuple[Any, ...]]:
        """Return the values of several rows, by one call if possible."""
        dataset = self.dataset
        found = dataset.__getitems__(numbers) if self.gets_many else [dataset[number] for number in numbers]
        if len(found) != len(numbers):
            raise MapError(f"{self.__name__}.__getitems__ returned {len(found)} items for {len(numbers)} numbers")
        return [self._values(number, item) for number, item in zip(numbers, found, strict=True)]

    def _values(self, number: int, item: Any) -> tuple[Any, ...]:
        if self.columns is None:
            return (item,)
        if isinstance(item, Mapping):
            missing = [name for name in self.columns if name not in item]
            if missing:
                raise MapError(f"item {number} has no {missing[0]!r}, only {', '.join(map(repr, item))}")
            return tuple(item[name] for name in self.columns)
        values = item if isinstance(item, (tuple, list)) else (item,)
        if len(values) != len(self.columns):
            raise MapError(f"item {number} has {len(values)} parts, columns= names {len(self.columns)}")
        return tuple(values)


@dataclass(frozen=True, eq=False)
class OfItem:
    """A user's function of an item, as a function of the column of items.

    The result of a map replaces the item; a dict is put into an item that is a dict. ``kind``: "map", "filter",
    "flat_map".
    """

    function: Callable[..., Any]
    kind: str

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    @property
    def outputs(self) -> tuple[str, ...]:
        """The column that it returns."""
        return (ITEM,)

    def __call__(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.function(item, *args, **kwargs)
        if self.kind == "filter":
            return result
        if self.kind == "flat_map" and isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping)):
            return [{ITEM: each} for each in result]
        if self.kind == "flat_map":
            return result  # an error, which names the row
        merges = isinstance(item, dict) and isinstance(result, Mapping)
        return {ITEM: {**item, **result} if merges else item if result is None else result}


@dataclass(frozen=True, eq=False)
class ItemMap(Map):
    """The first step after a map-style dataset. Its function is an ``Items``.

    Random numbers are seeded for each item, so that they depend on nothing else. A dataset that returns many items in
    one call is called so only if that draws none.
    """

    @property
    def items(self) -> Items:
        assert isinstance(self.function, Items)
        return self.function

    def _rows(self, given: Batch, run: RunContext) -> tuple[list[int], dict[str, Any]]:
        numbers = run.source_rows(given.rows).tolist()
        found: list[tuple[int, Any]] | None = None
        if run.seeds is None and self.on_error == "raise":
            with suppress(Exception):  # one by one then, which names the item
                found = list(enumerate(self.items.many(numbers)))
        if found is None:
            found = self.on_rows(given, run, rows=numbers)
        columns = zip(*(values for _, values in found), strict=True) if found else ([] for _ in self.items.outputs)
        made = {name: list(column) for name, column in zip(self.items.outputs, columns, strict=True)}
        return [i for i, _ in found], made

    def checked(self, result: Any) -> Any:
        return result

    def failed(self, problem: Exception, run: RunContext, rows: list[int], given: Any = None) -> None:  # noqa: ARG002
        number = run.source_rows(np.array(rows))[0]
        failed(f"{self.name}[{number}] failed", self.on_error, problem, run, len(rows))
