"""Samples of LitData as columns: a tree of dicts, lists and tuples, whose leaves have one encoding each.

The keys of the outermost dict are columns; an outermost list or tuple has the columns "0", "1", …, and a sample that is
one value has the column "item". Inner dicts are structs, inner lists of equal types are lists, others structs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError

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

    def array(self, decode: Callable[[int], pa.Array], rows: int) -> pa.Array:
        """Return the array of a column. ``decode`` returns that of a leaf."""
        if self.leaf >= 0:
            return decode(self.leaf)
        if not self.children:
            empty: Any = [] if self.is_list else {}
            return pa.array([empty] * rows, pa.list_(pa.null()) if self.is_list else pa.struct([]))
        parts = [child.array(decode, rows) for child in self.children]
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
