"""Parquet: a block is a row group. The footer is read once, for the index. A block costs the bytes of its columns."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats import Block, Format, Scanned, table_of
from midepoch.sources.formats.parquet_chunks import Chunk, column_chunks, definition_levels, sound
from midepoch.sources.names import not_the_data
from midepoch.sources.schemas import children, has_large_text, large_text, plain_type, storage_of, with_children
from midepoch.storage.damage import DamageError, unreadable
from midepoch.storage.stores import Entry, OpenFile, Store

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
    return [leaf for field in schema for leaf in _leaf_columns(field, NullLeaf(field.name, (), 0), (), in_list=False)]


def _leaf_columns(field: pa.Field, above: NullLeaf, path: Path, *, in_list: bool) -> Iterator[NullLeaf]:
    path, nodes, level = (*path, field.name), above.nodes, above.level
    if field.nullable:
        level += 1
        nodes = (*nodes, NullNode(path, level, in_list))
    kind = storage_of(field.type)
    if not kind.num_fields or pt.is_dictionary(kind):
        yield NullLeaf(above.column, nodes, level)
        return
    repeated = not pt.is_struct(kind)
    here = NullLeaf(above.column, nodes, level + repeated)
    for child in children(kind):
        yield from _leaf_columns(child, here, path, in_list=in_list or repeated)


def null_paths(footer: bytes, found: Sequence[NullLeaf], groups: Sequence[Sequence[Chunk]]) -> set[Path]:
    """Return the paths with a null. An undecided path counts as one with a null, except inside lists.

    The level histograms of newer writers are exact. The null count of a leaf includes nulls above it and empty lists,
    so that a struct has none if any of its leaves has none. Values inside lists are assumed to have none: nearly every
    file has empty lists, and few have null values in them.
    """
    nulls: set[Path] = set()
    for group in groups:
        without: set[Path] = set()
        open_leaves = []
        for leaf, chunk in zip(found, group, strict=True):
            if chunk.nulls == 0:
                if len(leaf.nodes) > 1:
                    without.update(node.path for node in leaf.nodes)
            elif leaf.nodes and leaf.nodes[-1].path not in nulls:
                open_leaves.append((leaf, chunk))
        for leaf, chunk in open_leaves:
            levels = definition_levels(footer, chunk) if leaf.level > 1 else None
            if levels is not None and len(levels) == leaf.level + 1:
                nulls.update(node.path for node in leaf.nodes if levels[node.level - 1])
            else:
                nulls.update(node.path for node in leaf.nodes if not node.in_list and node.path not in without)
    return nulls


_MAGIC = b"PAR1"
_TAIL = 64 << 10
"""Bytes at the end of a file that the first request reads: most footers are shorter."""


_VERIFIED = {"page_checksum_verification": True}
"""With checksums of the writer, a flipped bit is an error instead of a wrong value."""


_BATCH_BYTES = 256 << 20
_NOT_UNDERSTOOD = (ValueError, IndexError, KeyError, TypeError, AttributeError)


class ParquetFormat(Format):
    """Format whose blocks are row groups, with statistics that can exclude them from a filter.

    ``reading``: additional options of ``pyarrow.parquet.ParquetFile``.
    """

    def __init__(self, **reading: Any) -> None:
        self._reading = {**_VERIFIED, **reading}

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with store.open(entry) as file:
            etag, size = file.etag, file.size
            footer = _read_footer(name, file, size)
            identity = fingerprint(footer, file.read_at, size)
        metadata = _parsed(name, footer)
        about = _described(name, footer)
        found = Scanned(
            _with_large_text(file_schema(name, footer), large_columns(name, footer)), footer=footer, etag=etag
        )
        for group in range(metadata.num_row_groups):
            if rows := metadata.row_group(group).num_rows:
                found.offsets.append(group)
                found.rows.append(rows)
        if sum(found.rows) != metadata.num_rows or any(rows < 0 for rows in found.rows):
            raise DamageError(
                f"{name}: its row groups have {sum(found.rows)} rows, its footer says {metadata.num_rows}."
            )
        if len(about.chunks) == metadata.num_row_groups:
            found.nullable = null_paths(footer, about.leaves, about.chunks)
        else:  # without null counts, every path may have a null
            found.nullable = {node.path for leaf in about.leaves for node in leaf.nodes if not node.in_list}
        found.decoded_bytes = float(sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)))
        found.fingerprint = identity
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        name = store.name(block.entry.path)
        metadata, own = _parsed(name, block.footer), file_schema(name, block.footer)
        available = set(own.names)
        wanted = [name for name in columns if name in available]
        if not wanted:  # only the number of rows is needed
            return table_of([], [], metadata.row_group(block.offset).num_rows)
        with (
            store.open(block.entry) as file,
            pq.ParquetFile(file.arrow, metadata=metadata, pre_buffer=not store.local, **self._reading) as whole,
        ):
            try:
                if any(map(has_large_text, (schema.field(each).type for each in wanted))):
                    return _in_batches(whole, _described(name, block.footer), block.offset, schema, wanted)
                return whole.read_row_group(block.offset, columns=wanted, use_threads=len(wanted) > 1)
            except (pa.ArrowException, OSError):
                _check_encryption(name, block, wanted)
                raise

    def excluded(
        self, block: Block, expression: Any, schema: pa.Schema, partition: Any, columns: Sequence[str]
    ) -> bool:
        import pyarrow.dataset as ds

        if not _sound(block, columns):
            return False
        source = pa.BufferReader(_standing_alone(block.footer))
        fragment = ds.ParquetFileFormat().make_fragment(
            source, partition_expression=partition, row_groups=[block.offset]
        )
        return not fragment.split_by_row_group(expression, schema=schema)


def rows_of_groups(name: str, footer: bytes) -> list[int]:
    """Return the number of rows of each row group."""
    metadata = _parsed(name, footer)
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def large_columns(name: str, footer: bytes) -> set[str]:
    """Return the columns whose bytes in a row group exceed 32-bit offsets."""
    about = _described(name, footer)
    numbers = {i for chunks in about.chunks for i, chunk in enumerate(chunks) if chunk.large}
    return {about.leaves[i].column for i in numbers if about.columns[i].physical_type == "BYTE_ARRAY"}


def _with_large_text(schema: pa.Schema, names: set[str]) -> pa.Schema:
    """Return the schema with 64-bit offsets for these columns."""
    for i, field in enumerate(schema):
        if field.name in names:
            schema = schema.set(i, field.with_type(large_text(plain_type(field.type))))
    return schema


def _in_batches(
    whole: pq.ParquetFile, about: _Described, group: int, schema: pa.Schema, wanted: Sequence[str]
) -> pa.Table:
    """Read a row group with large text in batches: pyarrow reads it with 32-bit offsets."""
    rows = whole.metadata.row_group(group).num_rows
    largest = max((chunk.large for chunk in about.chunks[group]), default=0) if about.chunks else 0
    if not largest:
        return whole.read_row_group(group, columns=wanted, use_threads=len(wanted) > 1)
    size = max(1, rows * _BATCH_BYTES // largest)
    target = pa.schema([schema.field(name) for name in wanted])
    batches = whole.iter_batches(size, row_groups=[group], columns=wanted)
    return pa.concat_tables([pa.Table.from_batches([batch]).select(wanted).cast(target) for batch in batches])


def _check_encryption(name: str, block: Block, wanted: Sequence[str]) -> None:
    about = _described(name, block.footer)
    for group in about.chunks[block.offset : block.offset + 1]:
        for leaf, chunk in zip(about.leaves, group, strict=True):
            if chunk.metadata is None and leaf.column in wanted:
                raise FormatError(
                    f"{name}: column {leaf.column!r} is encrypted, which is not supported. Leave it out with columns=…."
                ) from None


def _sound(block: Block, names: Sequence[str]) -> bool:
    """Return True if pyarrow can read the statistics of these columns. Invalid ones crash the process."""
    about = _described(block.entry.path, block.footer)
    if block.offset >= len(about.chunks):
        return False
    looked_at = zip(about.leaves, about.columns, about.chunks[block.offset], strict=True)
    try:
        return all(sound(block.footer, chunk, column) for leaf, column, chunk in looked_at if leaf.column in names)
    except _NOT_UNDERSTOOD:
        return False


def _read_footer(name: str, file: OpenFile, size: int) -> bytes:
    if size < 12:
        raise DamageError(f"{name}: not a Parquet file ({size} bytes): it is empty or truncated. Write it again.")
    tail = file.read_at(min(_TAIL, size), max(0, size - _TAIL))
    if tail[-4:] != _MAGIC:
        if tail[-4:] == b"PARE":
            raise FormatError(f"{name}: encrypted Parquet files are not supported.")
        if (other := not_the_data(file.read_at(min(64, size), 0), "parquet")) is not None:
            raise DamageError(f"{name}: {other}.")
        raise DamageError(
            f"{name}: not a complete Parquet file: it does not end with {_MAGIC!r}. "
            "Pass format=… if it has another format. If it is truncated, copy or download it again."
        )
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length + 12 > size:
        raise DamageError(f"{name}: its footer of {length} bytes does not fit into {size} bytes: it is damaged.")
    if length + 8 <= len(tail):
        return tail[-8 - length : -8]
    return file.read_at(length, size - 8 - length)


def _standing_alone(footer: bytes) -> bytes:
    """Return a file that consists of only this footer, from which pyarrow reads the metadata."""
    return _MAGIC + footer + struct.pack("<I", len(footer)) + _MAGIC


@lru_cache(maxsize=256)
def _parsed(name: str, footer: bytes) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(_standing_alone(footer)))
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise unreadable(problem, f"{name}: its Parquet footer cannot be read: {problem}") from None


@lru_cache(maxsize=256)
def file_schema(name: str, footer: bytes) -> pa.Schema:
    """Return the Arrow schema of a file."""
    try:
        described = _parsed(name, footer).schema
        schema = described.to_arrow_schema()
        if any(described.column(i).logical_type.type == "UUID" for i in range(len(described))):
            with pq.ParquetFile(pa.BufferReader(_standing_alone(footer)), arrow_extensions_enabled=True) as file:
                for i, (field, extended) in enumerate(zip(schema, file.schema_arrow, strict=True)):
                    schema = schema.set(i, field.with_type(_with_uuids(field.type, extended.type)))
        _ = schema.metadata, schema.to_string(), _leaves(schema)  # invalid UTF-8 is detected only on access
        return schema
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise unreadable(problem, f"{name}: its Parquet schema cannot be read: {problem}") from None


def _with_uuids(kind: pa.DataType, extended: pa.DataType) -> pa.DataType:
    """Return a type with the UUIDs of ``extended``, which has other extension types, too."""
    if isinstance(extended, pa.UuidType) or not kind.num_fields:
        return extended if isinstance(extended, pa.UuidType) else kind
    pairs = zip(children(kind), children(extended), strict=True)
    return with_children(kind, [field.with_type(_with_uuids(field.type, inner.type)) for field, inner in pairs])


_leaves = lru_cache(maxsize=32)(leaves)


class _Described(NamedTuple):
    leaves: list[NullLeaf]
    columns: list[pq.ColumnSchema]
    chunks: list[list[Chunk]]  # of each row group; empty if the footer has an unknown form


@lru_cache(maxsize=32)
def _described(name: str, footer: bytes) -> _Described:
    found, schema = _leaves(file_schema(name, footer)), _parsed(name, footer).schema
    columns = [schema.column(i) for i in range(len(schema))]
    try:
        chunks = column_chunks(footer)
    except _NOT_UNDERSTOOD:
        chunks = []
    understood = [leaf.level for leaf in found] == [column.max_definition_level for column in columns]
    understood = understood and all(len(group) == len(found) for group in chunks)
    return _Described(found, columns, chunks if understood else [])
