"""Batch of rows in a pipeline: columns of equal length, with the numbers of the rows.

Columns with Hugging Face features that ``datasets`` has to decode (Image, Array2D, …) are ``Encoded``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import nearest
from midepoch._internal.values import loaded
from midepoch.errors import ColumnError, MidepochError
from midepoch.sources.schemas import taken
from midepoch.storage.damage import is_damage
from midepoch.transforms.arrow_values import Paths, to_python
from midepoch.transforms.provenance import DocumentTable, Int16Array

Int64Array = npt.NDArray[np.int64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Encoded:
    """Arrow column that ``datasets`` has to decode, with its original name and the schema that contains its feature."""

    name: str
    array: pa.Array
    schema: pa.Schema

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, places: slice) -> Encoded:
        return Encoded(self.name, self.array[places], self.schema)

    def take(self, places: Int64Array) -> Encoded:
        return Encoded(self.name, taken(self.array, places), self.schema)

    def decodes(self, place: int) -> bool:
        """Return True if one row can be decoded."""
        try:
            self[place : place + 1].decode("python")
        except Exception as problem:
            if not is_damage(problem, of_row=True):
                raise
            return False
        return True

    def decode(self, kind: str) -> Any:
        """Return the column as ``datasets`` presents it in this format."""
        formatter, field = _formatter(kind, self.name, self.schema.serialize().to_pybytes())
        array = self.array
        if isinstance(field.type, pa.BaseExtensionType) and not isinstance(array, pa.ExtensionArray):
            array = pa.ExtensionArray.from_storage(field.type, array)
        try:
            return formatter.format_batch(pa.table([array], schema=pa.schema([field])))[self.name]
        except ImportError as problem:
            raise MidepochError(
                f"column {self.name!r} cannot be decoded, because a package is missing: {problem} Install it, or leave "
                "the column out with remove_columns."
            ) from problem


@lru_cache(maxsize=64)
def _formatter(kind: str, name: str, serialized: bytes) -> tuple[Any, pa.Field]:
    """Return the formatter and the field of a column. The schema is bytes: pyarrow 20 cannot hash one with metadata."""
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))
    datasets = import_datasets(f"column {name!r} needs decoding, by ds.decode({name!r}, …) or by datasets")
    from datasets.formatting import get_formatter

    features = datasets.Features({name: datasets.Features.from_arrow_schema(schema)[name]})
    return get_formatter(None if kind == "python" else kind, features=features), features.arrow_schema.field(name)


def import_datasets(why: str) -> Any:
    """Import the ``datasets`` package, only when it is needed: it takes a second."""
    try:
        import datasets
    except ImportError:
        raise MidepochError(f"{why}: install the extra with `pip install midepoch[hf]`.") from None
    return datasets


@dataclass(frozen=True)
class Batch:
    """Columns of equal length. A column is an Arrow array as read, or any sequence that a map returned.

    - ``rows``: row numbers in the dataset before the shuffle
    - ``places``: index of each row among the requested positions, since rows may have been skipped
    - ``owned``: Arrow columns may be delivered as writable
    - ``nullable``: paths in the source columns at which any row of the data is null
    - ``ordinals``: numbers that distinguish rows made from the same row, None while there is one of each
    - ``leaves``: number of the source of each row, or of all of them
    - ``documents``: the documents of packed sequences, if they are traced
    """

    columns: dict[str, Any]
    rows: Int64Array
    places: Int64Array
    owned: bool
    nullable: Mapping[str, Paths] = field(default_factory=dict)
    ordinals: Int64Array | None = None
    leaves: int | Int16Array = 0
    documents: DocumentTable | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def traced(self) -> DocumentTable:
        """The provenance of the rows."""
        return DocumentTable.of_rows(self.rows, self.leaves) if self.documents is None else self.documents

    @property
    def nbytes(self) -> int:
        """Approximate memory of the columns. Lists are estimated from their first value."""
        return sum(map(_bytes_of, self.columns.values()))

    def slice(self, start: int, stop: int) -> Batch:
        if start == 0 and stop >= len(self.rows):
            return self
        columns = {name: cut(column, start, stop) for name, column in self.columns.items()}
        documents = None if self.documents is None else self.documents.slice(start, min(stop, len(self)))
        return self.part(slice(start, stop), columns, self.owned, documents)

    def keep(self, places: Int64Array) -> Batch:
        """Return the batch with only the rows at these places."""
        columns = {name: pick(column, places) for name, column in self.columns.items()}
        documents = None if self.documents is None else self.documents.keep(places)
        return self.part(places, columns, True, documents)

    def part(self, places: Any, columns: dict[str, Any], owned: bool, documents: DocumentTable | None) -> Batch:
        """Return the rows at some places, given what is not one array of all rows."""
        ordinals = None if self.ordinals is None else self.ordinals[places]
        leaves = self.leaves if isinstance(self.leaves, int) else self.leaves[places]
        rows, kept = self.rows[places], self.places[places]
        return Batch(columns, rows, kept, owned, self.nullable, ordinals, leaves, documents)

    def with_ordinals(self, number: int) -> Batch:
        """Return the rows with ordinals that distinguish them from rows of another source. 0 changes nothing."""
        if not number or not len(self):
            return self
        ordinals = np.zeros(len(self), np.int64) if self.ordinals is None else self.ordinals
        return replace(self, ordinals=with_ordinals(ordinals, number))

    def with_columns(self, columns: dict[str, Any], nullable: Mapping[str, Paths] | None = None) -> Batch:
        return replace(self, columns=columns, nullable=self.nullable if nullable is None else nullable)

    def made_of(self, columns: dict[str, Any], parents: Int64Array) -> Batch:
        """Return a batch of new rows, each made from the row at the place in ``parents`` (ascending)."""
        first = np.searchsorted(parents, parents)  # start of the rows of the same parent
        ordinals = np.arange(len(parents), dtype=np.int64) - first
        if self.ordinals is not None:
            ordinals = with_ordinals(self.ordinals[parents], ordinals + 1)  # 0 would leave some ordinals unchanged
        documents = None if self.documents is None else self.documents.keep(parents)
        return replace(self.part(parents, columns, False, documents), nullable={}, ordinals=ordinals)


def _bytes_of(column: Any) -> int:
    if isinstance(column, dict):
        return sum(map(_bytes_of, column.values()))
    if isinstance(column, Encoded):
        column = column.array
    if isinstance(column, (list, tuple)):
        return len(column) * _bytes_of(column[0]) if column else 0
    try:
        return int(column.nbytes) if hasattr(column, "nbytes") else sys.getsizeof(column)
    except pa.ArrowException:  # pyarrow 20 cannot count the bytes of views
        return int(column.get_total_buffer_size())


def with_ordinals(ordinals: Int64Array, numbers: Int64Array | int) -> Int64Array:
    """Return different ordinals for each number: a hash of both, or the ordinals themselves for 0."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    mixed = (ordinals.astype(np.uint64) + np.uint64(1)) * factor + np.asarray(numbers).astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * factor
    return np.where(np.asarray(numbers) == 0, ordinals, (mixed >> np.uint64(2)).astype(np.int64))


def join(parts: Sequence[Batch]) -> Batch:
    """Concatenate the rows of several batches. The columns of empty batches are ignored."""
    found = [part for part in parts if len(part)] or list(parts[:1])
    if len(found) == 1:
        return found[0]
    first = found[0]
    for part in found[1:]:
        if part.columns.keys() != first.columns.keys():
            raise ColumnError(
                f"rows with the columns {', '.join(first.columns) or 'none'} and rows with the columns "
                f"{', '.join(part.columns) or 'none'} cannot be in one batch. Give them the same columns first "
                "(select_columns, rename_columns, map). A map that returns None for a row leaves it without the "
                "function's columns; filter() drops rows."
            )
    columns = {name: join_columns(name, [part.columns[name] for part in found]) for name in first.columns}
    nullable = {
        name: frozenset().union(*(part.nullable.get(name, frozenset()) for part in found)) for name in first.columns
    }
    ordinals = None
    if any(part.ordinals is not None for part in found):
        ordinals = np.concatenate(
            [np.zeros(len(part), np.int64) if part.ordinals is None else part.ordinals for part in found]
        )
    leaves = first.leaves
    if any(not isinstance(part.leaves, int) or part.leaves != leaves for part in found):
        leaves = np.concatenate([np.broadcast_to(np.asarray(part.leaves, np.int16), len(part)) for part in found])
    documents = None
    if any(part.documents is not None for part in found):
        documents = DocumentTable.join([part.traced for part in found])
    rows, places = (np.concatenate(arrays) for arrays in zip(*((p.rows, p.places) for p in found), strict=True))
    return Batch(columns, rows, places, True, nullable, ordinals, leaves, documents)


def alike(batches: Sequence[Batch]) -> bool:
    """Return True if the columns of several batches have the same kinds, so that joining them changes no value."""
    found: dict[str, Any] = {}
    kinds = ((name, _kind(column)) for batch in batches if len(batch) for name, column in batch.columns.items())
    return all(found.setdefault(name, kind) == kind for name, kind in kinds)


def _kind(column: Any) -> Any:
    if isinstance(column, dict):
        return {name: _kind(inner) for name, inner in column.items()}
    if isinstance(column, pa.Array):
        return pa.Array, column.type
    return type(column), getattr(column, "dtype", None), tuple(getattr(column, "shape", (0,))[1:])


def join_columns(name: str, parts: Sequence[Any]) -> Any:
    """Concatenate columns to one column of their kind, or to a list if their kinds differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(part, Mapping) and part.keys() == first.keys() for part in parts):
        return {key: join_columns(f"{name}.{key}", [part[key] for part in parts]) for key in first}
    if all(isinstance(part, Encoded) for part in parts):
        return Encoded(first.name, pa.concat_arrays([part.array for part in parts]), first.schema)
    if all(isinstance(part, (pa.Array, pa.ChunkedArray)) for part in parts):
        arrays = [chunk for part in parts for chunk in (part.chunks if hasattr(part, "chunks") else [part])]
        kinds = {array.type for array in arrays if not pa.types.is_null(array.type)}
        if len(kinds) > 1:
            several = " and as ".join(sorted(map(str, kinds)))
            raise ColumnError(f"column {name!r} comes as {several}. Map it to one type.")
        kind = next(iter(kinds), pa.null())
        return pa.concat_arrays([array if array.type == kind else array.cast(kind) for array in arrays])
    if all(isinstance(part, np.ndarray) and part.shape[1:] == first.shape[1:] for part in parts):
        return np.concatenate(parts)
    torch = loaded("torch")
    if torch is not None and all(isinstance(p, torch.Tensor) and p.shape[1:] == first.shape[1:] for p in parts):
        return torch.cat(list(parts))
    return [value for part in parts for value in (to_python(part) if isinstance(part, pa.Array) else part)]


def cut(column: Any, start: int, stop: int) -> Any:
    """Return ``column[start:stop]``, also for a struct column presented as a dict."""
    if isinstance(column, dict):
        return {name: cut(inner, start, stop) for name, inner in column.items()}
    if isinstance(column, pa.Array):  # not by indexing, which returns the storage of datasets' extension types
        return column.slice(start, stop - start)
    return column[start:stop]


def pick(column: Any, places: Int64Array) -> Any:
    if isinstance(column, dict):
        return {name: pick(inner, places) for name, inner in column.items()}
    if isinstance(column, np.ndarray):
        return column[places]
    if isinstance(column, Encoded):
        return column.take(places)
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return taken(column, places)
    torch = loaded("torch")
    if torch is not None and isinstance(column, torch.Tensor):
        return column[torch.from_numpy(places)]
    return [column[int(i)] for i in places]


def at(column: Any, i: int) -> Any:
    if isinstance(column, dict):
        return {name: at(inner, i) for name, inner in column.items()}
    return column[i]


def as_rows(columns: dict[str, Any], length: int) -> list[Row]:
    """Return one dict per row from presented columns (lists, arrays, tensors)."""
    if not columns:
        return [{} for _ in range(length)]
    if all(isinstance(value, list) for value in columns.values()):
        return _row_maker(len(columns))(*columns, zip(*columns.values(), strict=True))
    return [{name: at(column, i) for name, column in columns.items()} for i in range(length)]


@lru_cache(maxsize=64)
def _row_maker(count: int) -> Callable[..., list[Row]]:
    """Return a generated function of ``count`` names and an iterable of tuples of values. It makes dicts in half the
    time of ``dict(zip(names, values))``.
    """
    names, values = ([f"{letter}{i}" for i in range(count)] for letter in "nv")
    items = ", ".join(map("{}: {}".format, names, values))
    made: Callable[..., list[Row]] = eval(
        f"lambda {', '.join(names)}, rows: [{{{items}}} for {', '.join(values)}, in rows]"
    )
    return made


def check_columns(wanted: Sequence[str], present: Sequence[str], what: str, remedy: str = "") -> None:
    """Raise ColumnError with the missing and the existing columns. ``remedy``: a sentence for what is often meant."""
    missing = [name for name in wanted if name not in present]
    if missing:
        wrong: Any = missing[0]
        if not isinstance(wrong, str):
            kind = "the name of one column" if isinstance(wrong, (list, tuple)) else "names of columns"
            raise TypeError(f"{what} takes {kind}, got {wrong!r:.60}. There are: {', '.join(present)}.")
        hint = f"{nearest(missing[0], present, '{!r}')} There are: {', '.join(present)}.".lstrip()
        parts = [part for part in re.split(r"[,;\s]+", missing[0]) if part]
        if missing[0][:1] == "-" and missing[0][1:] in present:
            hint = f"For descending order: ds.sort({missing[0][1:]!r}, reverse=True)."
        if len(parts) > 1 and {*parts} <= {*present}:
            hint = f"Pass several as a list: {parts}."
        struct, _, inner = missing[0].partition(".")
        if inner and struct in present:
            hint = f"For a field of {struct!r}, use map(lambda row: {{{inner!r}: row[{struct!r}][{inner!r}]}}) first."
        elif not present:
            hint = "There are none that all sources have. Call rename_columns or map before the sources are combined."
        raise ColumnError(f"{what}: no column {', '.join(map(repr, missing))}. {hint}{' ' * bool(remedy)}{remedy}")
