"""Serializers of LitData: the Arrow type of each leaf of a sample, and the decoding of all values of a block.

Media are delivered as the files that were stored, nested values as JSON text, and pickles as bytes: unpickling runs
code, so that it is the user's step. A serializer of the user's own is unknown here: its values are bytes, too.

A sample is a tree of dicts, lists and tuples, whose leaves have one encoding each. The keys of the outermost dict are
columns; an outermost list or tuple has the columns "0", "1", …, and a sample that is one value has the column "item".
Inner dicts are structs, inner lists of equal types are lists, others structs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.mds import Decode, image_lists, images, scalars
from midepoch.sources.formats.records import BadSampleError, Values, arrays, bytes_array, first_true, integers

SINGLE = "item"


@dataclass(frozen=True)
class Tree:
    """A node, and the names of its children. A leaf has neither, and the number of its encoding."""

    names: tuple[str, ...] = ()
    children: tuple[Tree, ...] = ()
    leaf: int = -1
    is_list: bool = False

    def columns(self) -> dict[str, Tree]:
        """Return the outermost children by name."""
        return {SINGLE: self} if self.leaf >= 0 else dict(zip(self.names, self.children, strict=True))

    def array(self, leaves: Sequence[Callable[[], pa.Array]], rows: int) -> pa.Array:
        """Return the array of a column. ``leaves`` return the arrays of all leaves."""
        if self.leaf >= 0:
            return leaves[self.leaf]()
        if not self.children:
            empty: Any = [] if self.is_list else {}
            return pa.array([empty] * rows, pa.list_(pa.null()) if self.is_list else pa.struct([]))
        parts = [child.array(leaves, rows) for child in self.children]
        if self.is_list and len({part.type for part in parts}) == 1:
            order = np.arange(rows * len(parts), dtype=np.int64).reshape(len(parts), rows).T.reshape(-1)
            places = pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)])
            values = pa.concat_arrays(parts).take(places)
            return pa.FixedSizeListArray.from_arrays(values, len(parts))
        return pa.StructArray.from_arrays(parts, names=list(self.names))


def parsed_tree(text: str, leaves: int, name: str) -> Tree:
    """Return the tree of a ``data_spec``. Raise FormatError if it does not have this number of leaves."""
    try:
        _protocol, node = json.loads(text)
        tree, count = _node(node, 0)
        if not tree.columns() or count != leaves:
            raise ValueError(f"it has {count} leaves, data_format has {leaves}")
    except (ValueError, TypeError, KeyError) as problem:
        raise FormatError(f"{name}: its data_spec cannot be read: {problem}. Write the index again.") from None
    return tree


def _node(node: dict[str, Any], leaf: int) -> tuple[Tree, int]:
    if node["type"] is None:
        return Tree(leaf=leaf), leaf + 1
    children = []
    for child in node["children_spec"]:
        tree, leaf = _node(child, leaf)
        children.append(tree)
    names = _names(node, len(children))
    is_list = node["type"] in ("builtins.list", "builtins.tuple", "collections.deque")
    return Tree(names, tuple(children), is_list=is_list), leaf


def _names(node: dict[str, Any], count: int) -> tuple[str, ...]:
    """Return the keys of a dict, and numbers for other nodes."""
    context: Any = node["context"]
    if isinstance(context, str) and node["type"].lower().endswith("dict"):
        context = json.loads(context)
    if isinstance(context, dict):  # of a defaultdict
        context = context.get("dict_context")
    keys: Sequence[Any] = context if isinstance(context, list) and len(context) == count else range(count)
    return tuple(map(str, keys))


_NUMPY = (
    "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?",
)  # fmt: skip
_TORCH = (
    "f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "", "u1", "i1", "i2", "i2", "i4", "i4", "i8", "i8",
    "?", "u2",
)  # fmt: skip
"""Dtypes by their numbers in LitData. Number 10 of torch is bfloat16, which it cannot write."""


@lru_cache(maxsize=256)
def leaf_encoding(text: str) -> Decode:
    """Return the encoding of a leaf, by its entry in ``data_format``."""
    name, _, argument = text.partition(":")
    if name in ("no_header_numpy", "no_header_tensor"):
        return partial(_flat, dtype=dtype_of(name, int(argument)))
    return _LEAVES.get(name, _BINARY)


def dtype_of(name: str, number: int) -> np.dtype[Any]:
    """Return a dtype by its number. Raise BadSampleError for an unknown one."""
    known = _TORCH if name.endswith("tensor") else _NUMPY
    if not 0 <= number < len(known) or not known[number]:
        raise BadSampleError(0, f"its array has the unknown dtype {number}")
    return np.dtype(known[number])


def _flat(values: Values, dtype: np.dtype[Any]) -> pa.Array:
    """Return arrays of one dimension, which are stored without a header."""
    first_true(
        values.sizes % dtype.itemsize != 0, lambda i: f"an array of {dtype} does not have {values.sizes[i]} bytes"
    )
    return arrays(values, dtype, (values.sizes // dtype.itemsize)[:, None])


def _with_header(values: Values, name: str, order: str) -> pa.Array:
    """Return arrays after a header of uint32: their dtype, the number of their dimensions, and the dimensions."""
    if not len(values):
        return pa.nulls(0)
    first_true(values.sizes < 8, lambda _: "its array has no header")
    heads = integers(values.data, values.starts, 2, f"{order}u4")
    first_true((heads != heads[0]).any(axis=1), lambda _: "its array has another dtype or number of dimensions")
    number, axes = heads[0].tolist()
    first_true(values.sizes < 8 + 4 * axes, lambda _: f"its array has no room for {axes} dimensions")
    shapes = integers(values.data, values.starts + 8, axes, f"{order}u4")
    return arrays(values.without(8 + 4 * axes), dtype_of(name, number), shapes)


def _nested(values: Values) -> pa.Array:
    texts = []
    for number in range(len(values)):
        value = values.value(number)
        try:
            texts.append(json.dumps(nested_value(value), ensure_ascii=False))
        except (ValueError, IndexError, struct.error, RecursionError) as problem:
            raise BadSampleError(number, f"its nested value cannot be read: {problem}") from None
    return pa.array(texts, pa.string())


def nested_value(raw: bytes) -> Any:
    """Return a nested value: JSON, or the compact form that begins with a tag."""
    if not raw or raw[0] > 32:
        return json.loads(raw)
    return _tagged(raw, 0)[0]


_FIELDS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}
"""Tags of scalars in lists of dicts, as tags of values."""


def _scalar(raw: bytes, at: int, tag: int) -> tuple[Any, int]:
    if tag == 7:
        return _text(raw, at)
    if tag in (8, 9):
        return struct.unpack_from("<q" if tag == 8 else "<d", raw, at)[0], at + 8
    if tag == 10:
        return bool(raw[at]), at + 1
    if tag == 11:
        return None, at
    raise ValueError(f"the tag {tag} is unknown")


def _tagged(raw: bytes, at: int) -> tuple[Any, int]:
    tag, at = raw[at], at + 1
    if tag >= 7:
        return _scalar(raw, at, tag)
    (count,) = struct.unpack_from("<I", raw, at)
    at += 4
    if tag in (0, 4) and at + count > len(raw):
        raise ValueError("it is truncated")
    if tag == 0:
        return json.loads(raw[at : at + count]), at + count
    if tag == 4:
        return [bool(byte) for byte in raw[at : at + count]], at + count
    if tag in (2, 3):
        return np.frombuffer(raw, "<i8" if tag == 2 else "<f8", count, at).tolist(), at + 8 * count
    if tag == 1:
        return _repeated(raw, at, count, _text)
    return _mapping(raw, at, count) if tag == 5 else _records(raw, at, count)


def _repeated(raw: bytes, at: int, count: int, read: Any) -> tuple[list[Any], int]:
    found = []
    for _ in range(min(count, len(raw))):
        value, at = read(raw, at)
        found.append(value)
    return found, at


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<I", raw, at)
    if at + 4 + size > len(raw):
        raise ValueError("it is truncated")
    return raw[at + 4 : at + 4 + size].decode(), at + 4 + size


def _mapping(raw: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    found = {}
    for _ in range(min(count, len(raw))):
        key, at = _text(raw, at)
        found[key], at = _tagged(raw, at)
    return found, at


def _records(raw: bytes, at: int, count: int) -> tuple[list[dict[str, Any]], int]:
    """Return a list of dicts with the same keys. Their values are scalars."""
    (width,) = struct.unpack_from("<I", raw, at)
    keys, at = _repeated(raw, at + 4, width, _text)
    found = []
    for _ in range(min(count, len(raw))):
        row = {}
        for key in keys:
            row[key], at = _scalar(raw, at + 1, _FIELDS.get(raw[at], -1))
        found.append(row)
    return found, at


_BINARY = partial(bytes_array, kind=pa.binary())
_TEXT = partial(bytes_array, kind=pa.string())
_LEAVES: dict[str, Decode] = {
    "str": _TEXT,
    "text": _TEXT,
    "bool": partial(scalars, dtype=np.dtype("?")),
    "int": partial(scalars, dtype=np.dtype("i8")),
    "float": partial(scalars, dtype=np.dtype("f8")),
    "numpy": partial(_with_header, name="numpy", order="<"),
    "tensor": partial(_with_header, name="tensor", order=">"),
    "pil": images,
    "jpeg_array": partial(image_lists, skipped=0),
    "json": _nested,
}
