"""Encodings of MDS columns: the Arrow type of each, and the decoding of all values of a block.

Types follow the values of ``streaming``'s own reader. Some values are delivered as they are stored: images as files
that ``decode`` reads; JSON, and integers and decimals of any precision, as text, because Arrow has no type for all of
them; and pickles as bytes, because unpickling runs code, so that it is the user's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.pixels import image_file
from midepoch.sources.formats.records import (
    BadSampleError,
    Int64Array,
    Values,
    arrays,
    bytes_array,
    first_true,
    fixed_arrays,
    gathered,
    integers,
    numbers_array,
)

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""Numbers of dtypes in arrays that name their own."""


@dataclass(frozen=True)
class Encoding:
    """One encoding. ``kind`` is None if the values determine it: decode one to know it."""

    decode: Callable[[Values], pa.Array]
    kind: pa.DataType | None
    size: int | None = None


@lru_cache(maxsize=256)
def encoding_of(text: str) -> Encoding:
    """Return the encoding with a name, as in ``column_encodings``. Raise FormatError for an unknown one."""
    name, _, arguments = text.partition(":")
    if name == "ndarray":
        return _ndarray(arguments)
    if text in _SCALARS or text == "int":
        dtype = np.dtype("int64" if text == "int" else text)
        return Encoding(partial(scalars, dtype=dtype), pa.from_numpy_dtype(dtype), dtype.itemsize)
    if text in _PLAIN:
        return _PLAIN[text]
    raise FormatError(
        f"the encoding {text!r} is not one of MDS: {', '.join((*_PLAIN, 'int', *_SCALARS, 'ndarray'))}. Write the "
        "column in one of them."
    )


def scalars(values: Values, dtype: np.dtype[Any]) -> pa.Array:
    """Return values of a fixed size as numbers."""
    values.checked(dtype.itemsize, str(dtype))
    return numbers_array(gathered(values), dtype)


def _ndarray(arguments: str) -> Encoding:
    name, _, sizes = arguments.partition(":")
    if name and name not in _CODES.values():
        raise FormatError(f"the encoding 'ndarray:{arguments}' has an unknown dtype. Write the column in another one.")
    dtype = np.dtype(name) if name else None
    shape = tuple(map(int, sizes.split(","))) if sizes else None
    if dtype is None or shape is None:
        return Encoding(partial(_dynamic, dtype=dtype), None)
    kind = pa.from_numpy_dtype(dtype)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return Encoding(partial(fixed_arrays, dtype=dtype, shape=shape), kind, int(np.prod(shape)) * dtype.itemsize)


def _dynamic(values: Values, dtype: np.dtype[Any] | None) -> pa.Array:
    """Return arrays that store their dtype, unless it is given, and their shape."""
    if dtype is None:
        codes = _head(values, 1)[:, 0]
        first_true(codes != codes[0], lambda i: f"its array is {_dtype(codes[i])}, that of others {_dtype(codes[0])}")
        dtype, values = np.dtype(_dtype(codes[0])), values.without(1)
    marks = _head(values, 1)[:, 0]
    dimensions, widths = marks >> 2, 1 << (marks & 3)
    first_true(
        dimensions != dimensions[0],
        lambda i: f"its array has {dimensions[i]} dimensions, that of others {dimensions[0]}",
    )
    values = values.without(1)
    axes = int(dimensions[0])
    first_true(values.sizes < axes * widths, lambda _: "its array is shorter than its shape")
    shapes = np.zeros((len(values), axes), np.int64)
    for width in np.unique(widths).tolist():
        rows = widths == width
        shapes[rows] = integers(values.data, values.starts[rows], axes, f"<u{width}")
    first_true(shapes.min(axis=1, initial=0) < 0, lambda _: "its array has an impossible shape")
    return arrays(values.without(axes * widths), dtype, shapes)


def _head(values: Values, count: int) -> Int64Array:
    first_true(values.sizes < count, lambda _: "its array is empty")
    return integers(values.data, values.starts, count, "u1")


def _dtype(code: Any) -> str:
    if int(code) not in _CODES:
        raise BadSampleError(0, f"its array has the unknown dtype {int(code)}")
    return _CODES[int(code)]


def floats(values: Values) -> pa.Array:
    """Return floats that are stored as text."""
    texts, found = bytes_array(values, pa.string()), []
    for number, text in enumerate(texts.to_pylist()):
        try:
            found.append(float(text))
        except ValueError:
            raise BadSampleError(number, f"{text!r:.60} is not a float") from None
    return pa.array(found, pa.float64())


def image_lists(values: Values, skipped: int, convert: Callable[[bytes], bytes] = bytes) -> pa.Array:
    """Return lists of files: after ``skipped`` bytes their number, their sizes (all uint32), and their contents."""
    found = []
    for number in range(len(values)):
        value = values.value(number)
        count = int.from_bytes(value[skipped : skipped + 4], "little")
        at = skipped + 4 + 4 * count
        sizes = np.frombuffer(value[skipped + 4 : at], "<u4").tolist() if at <= len(value) else []
        if len(sizes) != count or at + sum(sizes) != len(value):
            raise BadSampleError(number, f"its list of images does not have {len(value)} bytes")
        files = []
        for size in sizes:
            files.append(_converted(convert, value[at : at + size], number))
            at += size
        found.append(files)
    return pa.array(found, pa.list_(pa.binary()))


def _converted(convert: Callable[[bytes], bytes], value: bytes, number: int) -> bytes:
    try:
        return convert(value)
    except ValueError as problem:
        raise BadSampleError(number, str(problem)) from None


def images(values: Values) -> pa.Array:
    """Return raw images as files."""
    return pa.array([_converted(image_file, values.value(i), i) for i in range(len(values))], pa.binary())


_BINARY = Encoding(partial(bytes_array, kind=pa.binary()), pa.binary())
_TEXT = Encoding(partial(bytes_array, kind=pa.string()), pa.string())
_FILES = pa.list_(pa.binary())
_PLAIN = {
    "bytes": _BINARY,
    "str": _TEXT,
    "str_int": _TEXT,
    "str_float": Encoding(floats, pa.float64()),
    "str_decimal": _TEXT,
    "json": _TEXT,
    "pil": Encoding(images, pa.binary()),
    "jpeg": _BINARY,
    "png": _BINARY,
    "jpeg_array": Encoding(partial(image_lists, skipped=0), _FILES),
    "jpegarray": Encoding(partial(image_lists, skipped=0), _FILES),
    "list[jpeg]": Encoding(partial(image_lists, skipped=4), _FILES),
    "list[png]": Encoding(partial(image_lists, skipped=4), _FILES),
    "list[pil]": Encoding(partial(image_lists, skipped=4, convert=image_file), _FILES),
    "pkl": _BINARY,
}
