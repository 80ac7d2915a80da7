"""Columns with Hugging Face features that ``datasets`` has to decode (Image, Array2D, …)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from midepoch.errors import MidepochError
from midepoch.sources.dictionaries import Int64Array, taken
from midepoch.storage.damage import is_damage


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

    @property
    def null_count(self) -> int:
        return int(self.array.null_count)

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
