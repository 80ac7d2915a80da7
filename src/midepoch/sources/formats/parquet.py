"""Parquet: a block is a row group. The footer is read once, for the index. A block costs the bytes of its columns.

``ColumnChunkMetaData.statistics`` of pyarrow crashes the process for damaged or encrypted statistics. Therefore they
are parsed here, and pyarrow reads only those that are valid. Layout:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

Footers are encoded in Thrift's compact protocol, which is read here, too. Layout:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats import Block, Format, Scanned, table_of, varint
from midepoch.sources.names import not_the_data
from midepoch.sources.schemas import children, has_large_text, large_text, plain_type, storage_of, with_children
from midepoch.storage.damage import DamageError, unreadable
from midepoch.storage.stores import Entry, OpenFile, Store

_NOT_UNDERSTOOD = (ValueError, IndexError, KeyError, TypeError, AttributeError)
"""Errors of the functions that read Thrift, for damaged bytes."""

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


def null_paths(footer: bytes, groups: Sequence[Sequence[tuple[NullLeaf, ColumnChunk]]]) -> set[Path]:
    """Return the paths with a null. An undecided path counts as one with a null, except inside lists.

    The level histograms of newer writers are exact. The null count of a leaf includes nulls above it and empty lists,
    so that a struct has none if any of its leaves has none. Values inside lists are assumed to have none: nearly every
    file has empty lists, and few have null values in them.
    """
    nulls: set[Path] = set()
    for group in groups:
        without: set[Path] = set()
        open_leaves = []
        for leaf, chunk in group:
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


_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = frozenset((4, 5, 6))
_DEEPEST = 32

Fields = dict[int, Any]
"""Values of a struct, by field number."""


def fields_at(data: bytes, at: int, depth: int = 0, *, last: int | None = None) -> tuple[Fields, int]:
    """Return the fields of the struct at an offset, up to field ``last`` if it is given, and its end."""
    found: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = integer(data, at)
        found[number], at = _value(data, at, head & 15, depth)
        if number == last:
            break
    return found, at + 1


def integer(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at an offset, and its end."""
    value = data[at]
    value, at = (value, at + 1) if value < 128 else varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return the value of a type at an offset, and its end."""
    if depth > _DEEPEST:
        raise ValueError("structs are nested too deeply")
    if kind in _INTEGERS:
        return integer(data, at)
    if kind == _BINARY:
        size, at = varint(data, at)
        return data[at : at + size], at + size
    if kind == _STRUCT:
        return fields_at(data, at, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in (_BYTE, _DOUBLE):
        size = 1 if kind == _BYTE else 8
        return data[at : at + size], at + size
    raise ValueError(f"a value of kind {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head = data[at]
    count, at = (head >> 4, at + 1) if head < 0xF0 else varint(data, at + 1)
    if count > len(data):
        raise ValueError("a list is longer than its message")
    kind, values = head & 15, []
    kind = _BYTE if kind in (_TRUE, _FALSE) else kind  # booleans in lists take a byte
    usual = _usual().match if kind == _STRUCT else None
    for _ in range(count):
        match = usual(data, at) if usual is not None else None
        if match is not None:
            value, at = match, match.end()
        else:
            value, at = _value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TYPES = (*_WIDTHS, "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
"""Physical types, by their numbers in a footer, and the bytes of a value of those that have a width."""
MOST_BYTES = (1 << 31) - 1
"""Maximum bytes of an array of text with 32-bit offsets. Larger arrays have to be large_string."""


class ColumnChunk(NamedTuple):
    """The values of one column in one row group."""

    metadata: int | Fields | None
    """Its metadata, or their offset in the footer. None if the column is encrypted."""
    nulls: int | None
    """Number of values that are null at any level of nesting, including empty lists. None if unknown."""
    large: int
    """Bytes of the values if they exceed ``MOST_BYTES``, else 0."""


def column_chunks(footer: bytes) -> list[list[ColumnChunk]]:
    """Return the chunks of each row group."""
    file, _ = fields_at(footer, 0, last=4)
    return [[_chunk(footer, chunk) for chunk in group[1]] for group in file.get(4, [])]


def _chunk(footer: bytes, found: re.Match[bytes] | Fields) -> ColumnChunk:
    if isinstance(found, dict):
        column = None if 3 not in found or 8 in found or 9 in found else _struct(found, 3)
        return ColumnChunk(column, _struct(column or {}, 12).get(3), _large_size(column or {}))
    at, nulls = found.start(1), found[3]
    is_long = max(len(found[2]), len(found[4] or b"")) >= -(-(2 * MOST_BYTES).bit_length() // 7)
    large = _large_size(fields_at(footer, at)[0]) if is_long else 0
    return ColumnChunk(at, None if nulls is None else integer(nulls, 0)[0], large)


def _large_size(column: Fields) -> int:
    """Return the bytes of values that are too large, as their writer reports them, else encoded. 0 if they are not."""
    size = int(_struct(column, 16).get(1) or column.get(6) or 0)
    return size if size > MOST_BYTES else 0


def sound(footer: bytes, chunk: ColumnChunk, column: pq.ColumnSchema) -> bool:
    """Return True if pyarrow can read the statistics of a chunk."""
    fields, kind = _metadata(footer, chunk), column.physical_type
    if not fields or fields[1] != _TYPES.index(kind) or 17 in fields:
        return False
    bounds = [bound for number, bound in _struct(fields, 12).items() if number in (1, 2, 5, 6)]
    if kind != "BYTE_ARRAY" and any(len(bound) != _WIDTHS.get(kind, column.length) for bound in bounds):
        return False
    sizes = _struct(fields, 16)
    levels = {2: column.max_repetition_level, 3: column.max_definition_level}
    return all(len(sizes.get(number, ())) in (0, highest + 1) for number, highest in levels.items()) and (
        1 not in sizes or kind == "BYTE_ARRAY"
    )


def definition_levels(footer: bytes, chunk: ColumnChunk) -> list[int] | None:
    """Return the number of values of a chunk at each definition level, or None if the writer did not record it."""
    levels = _struct(_metadata(footer, chunk), 16).get(3)
    return levels if isinstance(levels, list) else None


def _struct(fields: Fields, number: int) -> Fields:
    """Return a struct in a struct, {} if it is missing or damaged."""
    value = fields.get(number)
    return value if isinstance(value, dict) else {}


def _metadata(footer: bytes, chunk: ColumnChunk) -> Fields:
    if isinstance(chunk.metadata, int):
        return fields_at(footer, chunk.metadata)[0]
    return chunk.metadata or {}


@lru_cache(maxsize=1)
def _usual() -> re.Pattern[bytes]:
    """Return the pattern of a chunk as nearly all writers write it: 10 times faster than reading its fields.

    Its groups: the metadata, its uncompressed size, the number of nulls, and the bytes of its values. The byte before a
    value is ``(skipped fields + 1) * 16 + type``. A chunk that does not match is read field by field.
    """
    number = rb"[\x80-\xff]*[\x00-\x7f]"
    text = _any(b"\\x%02x.{%d}" % (size, size) for size in range(64))
    numbers = _any(b"\\x%02x(?:%s){%d}" % (n << 4 | kind, number, n) for n in range(8) for kind in (5, 6))
    texts = _any(b"\\x%02x(?:%s){%d}" % (n << 4 | 8, text, n) for n in range(1, 5))
    encodings = _any(b"\\x%02x(?:(?:\\x15%s){3}\\x00){%d}" % (n << 4 | 12, number, n) for n in range(1, 6))
    parts = {
        b"NUMBERS": numbers,
        b"NUMBER": number,
        b"TEXTS": texts,
        b"TEXT": text,
        b"ENCODINGS": encodings,
    }
    statistics = rb"(?:\x18TEXT\x18TEXT\x16|\x36)(NUMBER)(?:\x16NUMBER)?(?:[\x18\x28]TEXT\x18TEXT)?[\x11\x12]{0,2}\x00"
    sizes = rb"(?:\x16(NUMBER))?(?:[\x19\x29\x39]NUMBERS){0,2}\x00"
    pages = rb"\x26NUMBER(?:\x16NUMBER)?(?:[\x16\x26]NUMBER)?"
    column = rb"\x15NUMBER\x19NUMBERS\x19TEXTS\x15NUMBER\x16NUMBER\x16(NUMBER)\x16NUMBER" + pages
    column += rb"(?:[\x1c\x2c\x3c]%s)?(?:[\x19\x29]ENCODINGS)?(?:[\x3c\x4c]%s)?\x00" % (statistics, sizes)
    chunk = rb"(?:\x26NUMBER\x1c|\x3c)(%s)(?:[\x15\x16]NUMBER){0,4}\x00" % column
    for name, part in parts.items():
        chunk = chunk.replace(name, part)
    return re.compile(chunk, re.DOTALL)


def _any(patterns: Iterable[bytes]) -> bytes:
    return b"(?:" + b"|".join(patterns) + b")"


_MAGIC = b"PAR1"
_TAIL = 64 << 10
"""Bytes at the end of a file that the first request reads: most footers are shorter."""


class Footer:
    """The footer of a file. ``name``: that of the file, for errors."""

    def __init__(self, name: str, data: bytes) -> None:
        self._name, self.data = name, data

    @property
    def alone(self) -> bytes:
        """A file that consists of only this footer, from which pyarrow reads the metadata."""
        return _MAGIC + self.data + struct.pack("<I", len(self.data)) + _MAGIC

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        try:
            return pq.read_metadata(pa.BufferReader(self.alone))
        except (pa.ArrowException, OSError, ValueError) as problem:
            raise unreadable(problem, f"{self._name}: its Parquet footer cannot be read: {problem}") from None

    @cached_property
    def rows(self) -> list[int]:
        """Number of rows of each row group."""
        return [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the file."""
        described = self.metadata.schema
        try:
            schema = described.to_arrow_schema()
            if any(described.column(i).logical_type.type == "UUID" for i in range(len(described))):
                with pq.ParquetFile(pa.BufferReader(self.alone), arrow_extensions_enabled=True) as file:
                    for i, (field, extended) in enumerate(zip(schema, file.schema_arrow, strict=True)):
                        schema = schema.set(i, field.with_type(_with_uuids(field.type, extended.type)))
            _ = schema.metadata, schema.to_string(), leaves(schema)  # invalid UTF-8 is detected only on access
            return schema
        except (pa.ArrowException, OSError, ValueError) as problem:
            raise unreadable(problem, f"{self._name}: its Parquet schema cannot be read: {problem}") from None

    @cached_property
    def columns(self) -> list[pq.ColumnSchema]:
        return [self.metadata.schema.column(i) for i in range(len(self.metadata.schema))]

    @property
    def chunks(self) -> list[list[tuple[NullLeaf, ColumnChunk]]]:
        """The chunks of each row group, and the leaves of the schema that they belong to. Empty if the footer has an
        unknown form.
        """
        return _chunks(self)

    @property
    def large_columns(self) -> set[str]:
        """The columns whose bytes in a row group exceed 32-bit offsets."""
        found = {(i, leaf) for group in self.chunks for i, (leaf, chunk) in enumerate(group) if chunk.large}
        columns = self.columns if found else []
        return {leaf.column for i, leaf in found if columns[i].physical_type == "BYTE_ARRAY"}


footer_of = lru_cache(maxsize=256)(Footer)


@lru_cache(maxsize=32)
def _chunks(footer: Footer) -> list[list[tuple[NullLeaf, ColumnChunk]]]:
    found = leaves(footer.schema)
    if [leaf.level for leaf in found] != [column.max_definition_level for column in footer.columns]:
        return []
    try:
        return [list(zip(found, chunks, strict=True)) for chunks in column_chunks(footer.data)]
    except _NOT_UNDERSTOOD:
        return []


_VERIFIED = {"page_checksum_verification": True}
"""With checksums of the writer, a flipped bit is an error instead of a wrong value."""


_BATCH_BYTES = 256 << 20


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
            footer = footer_of(name, _read_footer(name, file, size))
            identity = fingerprint(footer.data, file.read_at, size)
        metadata, schema, chunks, large = footer.metadata, footer.schema, footer.chunks, footer.large_columns
        for i, field in enumerate(schema):
            if field.name in large:
                schema = schema.set(i, field.with_type(large_text(plain_type(field.type))))
        found = Scanned(schema, footer=footer.data, etag=etag, fingerprint=identity)
        found.offsets = [group for group, rows in enumerate(footer.rows) if rows]
        found.rows = [rows for rows in footer.rows if rows]
        if sum(found.rows) != metadata.num_rows or any(rows < 0 for rows in found.rows):
            raise DamageError(
                f"{name}: its row groups have {sum(found.rows)} rows, its footer says {metadata.num_rows}."
            )
        if len(chunks) == metadata.num_row_groups:
            found.nullable = null_paths(footer.data, chunks)
        else:  # without null counts, every path may have a null
            found.nullable = {node.path for leaf in leaves(footer.schema) for node in leaf.nodes if not node.in_list}
        found.decoded_bytes = float(sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)))
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        name = store.name(block.entry.path)
        footer = footer_of(name, block.footer)
        available = set(footer.schema.names)
        wanted = [name for name in columns if name in available]
        if not wanted:  # only the number of rows is needed
            return table_of([], [], footer.metadata.row_group(block.offset).num_rows)
        with (
            store.open(block.entry) as file,
            pq.ParquetFile(file.arrow, metadata=footer.metadata, pre_buffer=not store.local, **self._reading) as whole,
        ):
            try:
                if any(map(has_large_text, (schema.field(each).type for each in wanted))):
                    return _in_batches(whole, footer, block.offset, schema, wanted)
                return whole.read_row_group(block.offset, columns=wanted, use_threads=len(wanted) > 1)
            except (pa.ArrowException, OSError):
                for group in footer.chunks[block.offset : block.offset + 1]:
                    for leaf, chunk in group:
                        if chunk.metadata is None and leaf.column in wanted:
                            raise FormatError(
                                f"{name}: column {leaf.column!r} is encrypted, which is not supported. Leave it out "
                                "with columns=…."
                            ) from None
                raise

    def excluded(
        self, block: Block, expression: Any, schema: pa.Schema, partition: Any, columns: Sequence[str]
    ) -> bool:
        import pyarrow.dataset as ds

        footer = footer_of(block.entry.path, block.footer)
        if not _has_sound_statistics(footer, block.offset, columns):
            return False
        fragment = ds.ParquetFileFormat().make_fragment(
            pa.BufferReader(footer.alone), partition_expression=partition, row_groups=[block.offset]
        )
        return not fragment.split_by_row_group(expression, schema=schema)


def _in_batches(
    whole: pq.ParquetFile, footer: Footer, group: int, schema: pa.Schema, wanted: Sequence[str]
) -> pa.Table:
    """Read a row group with large text in batches: pyarrow reads it with 32-bit offsets."""
    rows = whole.metadata.row_group(group).num_rows
    largest = max((chunk.large for _, chunk in footer.chunks[group]), default=0) if footer.chunks else 0
    if not largest:
        return whole.read_row_group(group, columns=wanted, use_threads=len(wanted) > 1)
    size = max(1, rows * _BATCH_BYTES // largest)
    target = pa.schema([schema.field(name) for name in wanted])
    batches = whole.iter_batches(size, row_groups=[group], columns=wanted)
    return pa.concat_tables([pa.Table.from_batches([batch]).select(wanted).cast(target) for batch in batches])


def _has_sound_statistics(footer: Footer, group: int, names: Sequence[str]) -> bool:
    """Return True if pyarrow can read the statistics of these columns. Invalid ones crash the process."""
    if group >= len(footer.chunks):
        return False
    pairs = zip(footer.columns, footer.chunks[group], strict=True)
    try:
        return all(sound(footer.data, chunk, column) for column, (leaf, chunk) in pairs if leaf.column in names)
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


def _with_uuids(kind: pa.DataType, extended: pa.DataType) -> pa.DataType:
    """Return a type with the UUIDs of ``extended``, which has other extension types, too."""
    if isinstance(extended, pa.UuidType) or not kind.num_fields:
        return extended if isinstance(extended, pa.UuidType) else kind
    pairs = zip(children(kind), children(extended), strict=True)
    return with_children(kind, [field.with_type(_with_uuids(field.type, inner.type)) for field, inner in pairs])
