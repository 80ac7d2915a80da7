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
        return _parsed(text, leaves)
    except (ValueError, TypeError, KeyError) as problem:
        raise FormatError(f"{name}: its data_spec cannot be read: {problem}. Write the index again.") from None


@lru_cache(maxsize=64)
def _parsed(text: str, leaves: int) -> Tree:
    _protocol, node = json.loads(text)
    tree, count = _node(node, 0)
    if not tree.columns() or count != leaves:
        raise ValueError(f"it has {count} leaves, data_format has {leaves}")
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
            texts.append(json.dumps(_nested_value(value), ensure_ascii=False))
        except (ValueError, RecursionError) as problem:
            raise BadSampleError(number, f"its nested value cannot be read: {problem}") from None
    return pa.array(texts, pa.string())


def _nested_value(raw: bytes) -> Any:
    """Return a nested value: JSON, or the compact form that begins with a tag."""
    return json.loads(raw) if not raw or raw[0] > 32 else _Tagged(raw).value()


class _Tagged:
    """Reader of values in the compact form: each has a tag, and most a count."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def value(self) -> Any:
        tag = self._number("<B")
        if tag > 6:
            return self._scalar(tag)
        count = self._number("<I")
        if tag == 0:
            return json.loads(self._bytes(count))
        if tag == 1:
            return [self._text() for _ in self._times(count)]
        if tag in (2, 3):
            return np.frombuffer(self._bytes(8 * count), "<i8" if tag == 2 else "<f8").tolist()
        if tag == 4:
            return [bool(byte) for byte in self._bytes(count)]
        if tag == 5:
            return {self._text(): self.value() for _ in self._times(count)}
        keys = [self._text() for _ in self._times(self._number("<I"))]  # dicts with the same keys
        return [{key: self._scalar(_OF_DICTS.get(self._number("<B"), -1)) for key in keys} for _ in self._times(count)]

    def _scalar(self, tag: int) -> Any:
        if tag == 7:
            return self._text()
        if tag in (8, 9):
            return self._number("<q" if tag == 8 else "<d")
        if tag == 10:
            return bool(self._number("<B"))
        if tag == 11:
            return None
        raise ValueError(f"the tag {tag} is unknown")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _text(self) -> str:
        return self._bytes(self._number("<I")).decode()

    def _bytes(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._raw):
            raise ValueError("it is truncated")
        return self._raw[start : self._at]

    def _times(self, count: int) -> range:
        """Return a range for a count that may be damaged: no value takes less than a byte."""
        if count > len(self._raw):
            raise ValueError("it is truncated")
        return range(count)


_OF_DICTS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}
"""Tags of scalars in lists of dicts, as tags of values."""


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
