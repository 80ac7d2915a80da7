"""Nullable paths of a Parquet file, as far as its footer shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.types as pt

from midepoch.sources.formats.parquet_chunks import Chunks, definition_levels

Path = tuple[str, ...]


class NullNode(NamedTuple):
    """A column, or a field inside it, that may be null: its definition level is then ``level - 1``."""

    path: Path
    level: int
    in_list: bool


class NullLeaf(NamedTuple):
    """A leaf of the schema, which is one chunk of each row group."""

    column: str
    nodes: tuple[NullNode, ...]
    level: int


def leaves(schema: pa.Schema) -> list[NullLeaf]:
    """Return the leaves of a schema, in the order of a row group's chunks."""
    return [leaf for field in schema for leaf in _leaves(field, NullLeaf(field.name, (), 0), (), in_list=False)]


def _leaves(field: pa.Field, above: NullLeaf, path: Path, *, in_list: bool) -> Iterator[NullLeaf]:
    path, nodes, level = (*path, field.name), above.nodes, above.level
    if field.nullable:
        level += 1
        nodes = (*nodes, NullNode(path, level, in_list))
    kind = field.type
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not kind.num_fields or pt.is_dictionary(kind):
        yield NullLeaf(above.column, nodes, level)
        return
    repeated = not pt.is_struct(kind)
    here = NullLeaf(above.column, nodes, level + repeated)
    for i in range(kind.num_fields):
        yield from _leaves(kind.field(i), here, path, in_list=in_list or repeated)


def null_paths(footer: bytes, found: Sequence[NullLeaf], groups: Sequence[Chunks]) -> set[Path]:
    """Return the paths with a null. An undecided path counts as one with a null, except inside lists.

    The level histograms of newer writers are exact. The null count of a leaf includes nulls above it and empty lists,
    so that a struct has none if any of its leaves has none. Values inside lists are assumed to have none: nearly every
    file has empty lists, and few have null values in them.
    """
    nulls: set[Path] = set()
    for group in groups:
        without: set[Path] = set()
        open_leaves = []
        for leaf, at, count in zip(found, group.at, group.nulls, strict=True):
            if count == 0:
                if len(leaf.nodes) > 1:
                    without.update(node.path for node in leaf.nodes)
            elif leaf.nodes and leaf.nodes[-1].path not in nulls:
                open_leaves.append((leaf, at))
        for leaf, at in open_leaves:
            levels = definition_levels(footer, at) if leaf.level > 1 else None
            if levels is not None and len(levels) == leaf.level + 1:
                nulls.update(node.path for node in leaf.nodes if levels[node.level - 1])
            else:
                nulls.update(node.path for node in leaf.nodes if not node.in_list and node.path not in without)
    return nulls


def all_paths(found: Sequence[NullLeaf]) -> set[Path]:
    """Return every path that may have a null, for a file without null counts."""
    return {node.path for leaf in found for node in leaf.nodes if not node.in_list}
