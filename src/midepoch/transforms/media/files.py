"""Files in a column: their bytes, or their paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.transforms.features import Encoded

File = tuple[Any, str | None]
"""The bytes of a file, as a buffer or bytes, and its path if there is one."""


def reader_of(name: str, column: Any, root: str | None) -> Callable[[int], File]:
    """Return a function that reads the file of a row. It raises ValueError for a null, and OSError for a missing file.

    A column has bytes, paths, or structs of both as in Hugging Face's features. Arrow columns are not converted to
    Python: the bytes of a row are a view of the column.
    """
    array = column.array if isinstance(column, Encoded) else column
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not isinstance(array, pa.Array):
        return lambda i: _read(_parts(name, array[i]), root)
    kind = array.type
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if not {"bytes", "path"} & set(names):
            raise ColumnError(f"decode: column {name!r} has the fields {', '.join(names)}: there is no bytes or path.")
        files, paths = (array.field(part) if part in names else None for part in ("bytes", "path"))
        return lambda i: _read((_buffer(files, i), _text(paths, i)) if array[i].is_valid else (None, None), root)
    if _is_binary(kind):
        return lambda i: _read((_buffer(array, i), None), root)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return lambda i: _read((None, _text(array, i)), root)
    raise ColumnError(f"decode: column {name!r} is {kind}. It must have bytes, paths, or structs of both.")


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _buffer(array: pa.Array | None, i: int) -> Any:
    return None if array is None else array[i].as_buffer() if array[i].is_valid else None


def _text(array: pa.Array | None, i: int) -> str | None:
    return None if array is None else array[i].as_py()


def _parts(name: str, value: Any) -> tuple[Any, str | None]:
    """Return the bytes and the path of a value that a function returned."""
    if value is None or isinstance(value, (bytes, bytearray, memoryview)):
        return value, None
    if isinstance(value, (str, os.PathLike)):
        return None, os.fspath(value)
    if isinstance(value, dict) and {"bytes", "path"} & value.keys():
        return value.get("bytes"), value.get("path")
    raise TypeError(f"column {name!r} has a value of type {type(value).__name__}, expected bytes or a path")


def _read(parts: tuple[Any, str | None], root: str | None) -> File:
    data, path = parts
    if data is not None:
        return data, path
    if path is None:
        raise ValueError("the value is null. Leave such rows out with filter()")
    with open(path if root is None else os.path.join(root, path), "rb") as file:
        return file.read(), path
