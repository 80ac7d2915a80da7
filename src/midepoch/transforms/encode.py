"""Functions that midepoch passes to a map: class labels as numbers, text as tokens, transforms as
``with_transform`` runs them, and ``ds[i]`` of a map-style dataset.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch.errors import MapError
from midepoch.sources.schemas import as_arrow
from midepoch.transforms.batch import Batch
from midepoch.transforms.formats import ITEM
from midepoch.transforms.function import RunContext, failed, name_of
from midepoch.transforms.map import Map, TableColumns

NAME_COLUMNS = "Name its parts when you open it: from_map_style(ds, columns=['x', 'y'])."


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
    method: ClassVar[str] = "with_transform"
    gets_lists: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return name_of(self.function)

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


@dataclass(frozen=True)
class Tokenize:
    """Function of a batched map, from a list of texts to columns of tokens. Null is tokenized as the empty text.

    A tokenizer of ``tokenizers`` is called directly, as is the one inside a fast tokenizer of ``transformers`` if no
    options are given. The call of ``transformers`` takes 1.5 times as long, because it converts the results to lists.
    """

    tokenizer: Any
    output: str = "input_ids"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return f"tokenize with {type(self.tokenizer).__name__}"

    @property
    def outputs(self) -> tuple[str, ...] | None:
        """The columns that it returns, or None if that depends on its options."""
        plain = self.options.keys() <= {"add_special_tokens", "truncation", "max_length", "is_pretokenized"}
        return (self.output,) if plain else None

    @property
    def pads(self) -> bool:
        """True if the tokenizer itself is set to pad. (One of ``transformers`` is configured again by every call.)"""
        return hasattr(self.tokenizer, "encode_batch") and getattr(self.tokenizer, "padding", None) is not None

    def __call__(self, texts: Any) -> dict[str, Any]:
        texts = list(texts)
        if any(text is None for text in texts):
            warn_once(
                "tokenize: some texts are null, and are tokenized as empty ones. To leave them out, filter before."
            )
            texts = ["" if text is None else text for text in texts]
        first = texts[0] if texts else ""
        if isinstance(first, list) and first and isinstance(first[0], Mapping):
            raise MapError(
                "a tokenizer takes text, but the column holds conversations. Use map(lambda row: "
                "tokenizer.apply_chat_template(row['messages'], return_dict=True)) with a tokenizer of transformers."
            )
        if not isinstance(first, str | list | tuple):
            raise MapError(f"a tokenizer takes text, but the column holds {type(first).__name__}: {first!r:.60}")
        if isinstance(first, list) and not self.options.keys() & {"is_pretokenized", "is_split_into_words"}:
            raise MapError(
                "a tokenizer takes text, but the column holds lists of texts. Make a row of each with unbatch(), join "
                "them with map, or pass is_split_into_words=True (is_pretokenized=True for tokenizers) for words."
            )
        backend = self._backend()
        if backend is not None:
            encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
            return {self.output: lists_of([encoding.ids for encoding in encode(texts, **self.options)])}
        padded = self.options.get("padding") not in (None, False, "do_not_pad")
        options = {"return_attention_mask": padded, "return_token_type_ids": False, **self.options}
        columns = self.tokenizer(texts, **options)
        if "input_ids" not in columns:
            raise MapError(f"the tokenizer returned {', '.join(columns)}: there are no input_ids")
        return {self.output if name == "input_ids" else name: _column(columns[name]) for name in columns}

    def _backend(self) -> Any:
        if hasattr(self.tokenizer, "encode_batch"):
            return self.tokenizer
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        plain = backend is not None and not self.options and backend.truncation is None and backend.padding is None
        return backend if plain else None


def is_tokenizer(given: Any) -> bool:
    """Return True for a tokenizer of ``tokenizers``, or a callable that takes the options of ``transformers``."""
    if isinstance(given, type) or not callable(given):
        return hasattr(given, "encode_batch") and hasattr(given, "token_to_id") and not isinstance(given, type)
    if inspect.isroutine(given):
        try:
            inspect.signature(given).bind([], return_attention_mask=False, return_token_type_ids=False)
        except TypeError:
            return False
    return True


def _column(values: Any) -> Any:
    return lists_of(values) if isinstance(values, list) and values and isinstance(values[0], list) else values


def lists_of(rows: list[list[int]]) -> pa.Array:
    """Return lists of token ids as one Arrow column, which is sent between processes as two buffers."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    np.cumsum(lengths, out=offsets[1:])
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(as_arrow(offsets), as_arrow(values))


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

    def __call__(self, number: int) -> tuple[Any, ...]:
        """Return the values of one row, in the order of ``outputs``."""
        return self._values(number, self.dataset[number])

    def many(self, numbers: list[int]) -> list[tuple[Any, ...]]:
        """Return the values of several rows, by one call if possible."""
        get = getattr(self.dataset, "__getitems__", None)
        found = get(numbers) if callable(get) else [self.dataset[number] for number in numbers]
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
            raise MapError(f"item {number} has {len(values)} parts, columns= names {len(self.columns)}. Name each.")
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
        return name_of(self.function)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The column that it returns."""
        return (ITEM,)

    def __call__(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.function(item, *args, **kwargs)
        if self.kind == "filter":
            return result
        if self.kind == "flat_map":
            are_items = isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping))
            return [{ITEM: each} for each in result] if are_items else result  # else an error, which names the row
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
