"""Steps that select, remove, rename and cast columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.transforms.arrow_values import Paths, is_list, plain_values
from midepoch.transforms.batch import Batch, Encoded, check_columns, import_datasets
from midepoch.transforms.function import RunContext


class ColumnStep:
    """A step that changes only which columns there are, and their names."""

    def renamed(self, before: Sequence[str]) -> dict[str, str]:
        """Return the columns after the step by their names before it. Raise ColumnError if they do not fit."""
        raise NotImplementedError

    def columns(self, before: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the columns after the step."""
        return tuple(self.renamed(before).values())

    def apply(self, batch: Batch, run: RunContext) -> Batch:  # noqa: ARG002
        names = self.renamed(list(batch.columns))
        nullable = {new: batch.nullable[old] for old, new in names.items() if old in batch.nullable}
        return batch.with_columns({new: batch.columns[old] for old, new in names.items()}, nullable)


@dataclass(frozen=True)
class SelectColumns(ColumnStep):
    """Selection of these columns, in this order. ``caller``: the method that selects them."""

    names: tuple[str, ...]
    caller: str = "select_columns"

    def renamed(self, before: Sequence[str]) -> dict[str, str]:
        check_columns(self.names, before, self.caller)
        _check_once(self.names, "select_columns: {} named twice.")
        return {name: name for name in self.names}


@dataclass(frozen=True)
class RemoveColumns(ColumnStep):
    """Removal of these columns."""

    names: tuple[str, ...]

    def renamed(self, before: Sequence[str]) -> dict[str, str]:
        check_columns(self.names, before, "remove_columns")
        return {name: name for name in before if name not in self.names}


@dataclass(frozen=True)
class RenameColumns(ColumnStep):
    """New names for some columns. The others keep theirs."""

    mapping: tuple[tuple[str, str], ...]

    def renamed(self, before: Sequence[str]) -> dict[str, str]:
        names = dict(self.mapping)
        check_columns(list(names), before, "rename_columns")
        after = {name: names.get(name, name) for name in before}
        _check_once(after.values(), "rename_columns: two columns would be named {}.")
        return after


def _check_once(names: Iterable[str], message: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ColumnError(message.format(", ".join(map(repr, twice))))


@dataclass(frozen=True)
class Cast:
    """One call of ``Dataset.cast``: the types of these columns in every batch."""

    types: tuple[tuple[str, pa.DataType], ...]

    def apply(self, batch: Batch, run: RunContext) -> Batch:  # noqa: ARG002
        check_columns([name for name, _ in self.types], list(batch.columns), "cast")
        columns, nullable = dict(batch.columns), dict(batch.nullable)
        for name, kind in self.types:
            column = columns[name]
            if isinstance(column, pa.Array) and name in nullable:
                nullable[name] = renamed_paths(nullable[name], column.type, kind)
            columns[name] = converted(name, column, kind)
        return batch.with_columns(columns, nullable)

    @property
    def text(self) -> str:
        return f"cast[{' '.join(f'{name}:{kind}' for name, kind in self.types)}]"


def type_named(name: str, given: Any) -> pa.DataType:
    """Return the Arrow type for a user's argument: the type itself, its name, a numpy type, or a feature."""
    if isinstance(given, pa.DataType):
        return given
    if type(given).__module__.partition(".")[0] == "datasets" or isinstance(given, (dict, list)):
        feature = type(given).__name__
        if feature in ("Image", "Audio", "Video"):
            options = "sampling_rate=…" if feature == "Audio" else "size=…"
            raise TypeError(f"cast: files of {feature.lower()} are decoded by ds.decode({name!r}, {options})")
        datasets = import_datasets("features are a thing of Hugging Face's")
        return datasets.Features({name: given}).arrow_schema.field(name).type
    try:
        return pa.type_for_alias(given) if isinstance(given, str) else pa.from_numpy_dtype(np.dtype(given))
    except (ValueError, TypeError, pa.ArrowException):
        raise TypeError(
            f"cast: column {name!r} cannot become {given!r}. Name an Arrow type, such as pa.list_(pa.int32()) or "
            "'int32'"
        ) from None


def converted(name: str, column: Any, kind: pa.DataType) -> Any:
    """Return a column as an Arrow array of a type. Raise ColumnError if a value does not fit."""
    if isinstance(column, pa.Array) and same_type(column.type, kind):
        return column
    try:
        if isinstance(column, Encoded):
            return Encoded(column.name, column.array.cast(kind), column.schema)
        if isinstance(column, pa.Array):
            return column.cast(kind)
        if isinstance(column, dict):
            fields = [kind.field(i) for i in range(kind.num_fields)]
            parts = [converted(f"{name}.{field.name}", column[field.name], field.type) for field in fields]
            return pa.StructArray.from_arrays(parts, fields=fields)
        return pa.array(plain_values(column), type=kind)
    except (pa.ArrowException, TypeError, ValueError, KeyError, OverflowError) as problem:
        found = column.type if isinstance(column, pa.Array) else _described(column)
        raise ColumnError(
            f"column {name!r} ({found}) cannot become {kind}: {problem}. Return values of that type, or choose another "
            "type with cast()."
        ) from None


def _described(column: Any) -> str:
    if isinstance(column, np.ndarray):
        return f"numpy {column.dtype}"
    first = next((value for value in column if value is not None), None) if hasattr(column, "__iter__") else column
    return f"values of type {type(first).__name__}"


def renamed_paths(paths: Paths, before: pa.DataType, after: pa.DataType) -> Paths:
    """Return the paths of nulls inside a column of one type, with the names of the children of another type."""
    if not any(paths) or before.num_fields == 0 or after.num_fields == 0:
        return paths
    found = {path for path in paths if not path}
    for i in range(before.num_fields):
        old = before.field(i)
        same = after.get_field_index(old.name) if pa.types.is_struct(after) else i
        new = after.field(same) if 0 <= same < after.num_fields else old
        inner = frozenset(path[1:] for path in paths if path and path[0] == old.name)
        found |= {(new.name, *path) for path in renamed_paths(inner, old.type, new.type)}
    return frozenset(found)


def same_type(a: pa.DataType, b: pa.DataType) -> bool:
    """Return True if types are equal including the names of list items, which pyarrow's concatenation requires."""
    return bool(a.equals(b)) and (not a.num_fields or str(a) == str(b))


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of two types of the same kind. None if a cast would change values.

    Integers and floats get the wider type. An integer never becomes a float, and a number never becomes text.
    """
    t = pa.types
    if same_type(a, b) or t.is_null(b):
        return a
    if t.is_null(a):
        return b
    if t.is_integer(a) and t.is_integer(b):
        wide = np.promote_types(str(a), str(b))
        return None if wide.kind == "f" else pa.from_numpy_dtype(wide)
    if t.is_floating(a) and t.is_floating(b):
        return a if a.bit_width >= b.bit_width else b
    for family in (TEXT, BINARY):
        if a in family and b in family:
            return family[family[1] in (a, b)]
    if is_list(a) and is_list(b):
        values = common_type(a.value_type, b.value_type)
        return None if values is None else _list_of(values, a, b)
    if t.is_struct(a) and t.is_struct(b):
        kinds: dict[str, pa.DataType] = {}
        for field in (*a, *b):
            both = common_type(kinds.get(field.name, field.type), field.type)
            if both is None:
                return None
            kinds[field.name] = both
        return pa.struct(list(kinds.items()))
    return a if a.equals(b) else None


TEXT = (pa.string(), pa.large_string(), pa.string_view())
BINARY = (pa.binary(), pa.large_binary(), pa.binary_view())


def _list_of(item: pa.DataType, a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the type of lists of an item that holds lists as long as those of two types."""
    if all(map(pa.types.is_fixed_size_list, (a, b))) and a.list_size == b.list_size:
        return pa.list_(item, a.list_size)
    return pa.large_list(item) if any(map(pa.types.is_large_list, (a, b))) else pa.list_(item)


def inside(column: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """Return the type of lists whose items are numbers of this type, if the column is one of lists of numbers."""
    if not (pa.types.is_primitive(kind) and is_list(column)):
        return kind
    return _list_of(inside(column.value_type, kind), column, column)


def types_by_name(columns: Mapping[str, Any] | pa.Schema) -> tuple[tuple[str, pa.DataType], ...]:
    """Return the arguments of ``cast`` as pairs of a name and a type."""
    if isinstance(columns, pa.Schema):
        return tuple((field.name, field.type) for field in columns)
    if not isinstance(columns, Mapping) or not columns:
        raise TypeError(f"cast takes columns and their types: cast({{'label': 'int32'}}), got {columns!r:.60}")
    if none := [name for name, kind in columns.items() if kind is None]:
        raise TypeError(f"cast: column {none[0]!r} needs a type, got None. Name one, such as 'int32', or omit it.")
    return tuple((name, type_named(name, kind)) for name, kind in columns.items())
