"""File formats: the division of a file into blocks, and the decoding of a block to the columns of a table.

A format is imported when its first file is opened: most datasets use one format, and mapped Arrow files none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataError, FormatError
from midepoch.storage.damage import is_damage, refusal
from midepoch.storage.stores import Entry, Store

Values = tuple[tuple[str, Any], ...]
"""Values of columns that are the same for all rows of a file: those of its partitions."""
Chains = tuple[tuple[tuple[int, ...], ...], ...]
"""Dictionaries of an Arrow file: for each, its versions in order; for each version, the offsets of its messages."""


@dataclass
class Scanned:
    """Result of the scan of one file."""

    schema: pa.Schema
    offsets: list[int] = field(default_factory=list)
    """Start of each block: a byte offset, or the number of a row group or stripe."""
    rows: list[int] = field(default_factory=list)
    nullable: set[tuple[str, ...]] = field(default_factory=set)
    """Paths of columns, and of fields inside them, that contain a null."""
    fingerprint: str = ""
    footer: bytes = b""
    """Data of the file that is needed to decode its blocks."""
    etag: str = ""
    dictionaries: Chains = ()
    decoded_bytes: float = 0.0
    """Approximate bytes of all rows in memory, if the file reports them."""
    inferred: bool = False
    """True if the types were inferred from text, so that other files may widen them."""
    complete: bool = True
    """False if blocks of a damaged file were left out."""
    compressed: bool = False
    """True if some record batches of an Arrow file have to be decompressed."""
    stop: int | None = None
    """The end of the last block, if that is not the end of the file."""
    broken_lines: list[int] = field(default_factory=list)
    """Numbers of unreadable lines, which are not part of the data."""
    damage: DataError | None = None
    """The reason why the file is left out, with all of its rows."""
    footers: list[bytes] = field(default_factory=list)
    """One for each block, instead of ``footer``, for formats of ``KINDS``."""

    def end(self, i: int) -> int | None:
        """Return the start of the block after block i, or ``stop`` for the last one."""
        return self.offsets[i + 1] if i + 1 < len(self.offsets) else self.stop

    def footer_of(self, i: int) -> bytes:
        """Return the footer to decode block i with."""
        return self.footers[i] if self.footers else self.footer


@dataclass(frozen=True)
class CacheSpec:
    """Folder of decoded blocks and decompressed files (by default, the cache folder), and its limit in bytes.

    ``chosen``: the user named the folder.
    """

    folder: str = ""
    limit: int = 4 << 30
    chosen: bool = False


@dataclass(frozen=True)
class Block:
    """A block to decode. ``end`` is the start of the next block, None for the last one of a file."""

    entry: Entry
    offset: int
    end: int | None
    footer: bytes = b""
    dictionaries: Chains = ()
    scratch: CacheSpec = CacheSpec()


@dataclass(frozen=True)
class Member:
    """A file that a manifest names, and what the manifest says about it."""

    entry: Entry
    about: dict[str, Any]


class Format:
    """One file format: it divides a file into blocks, and decodes a block.

    Files that a manifest names have ``members`` and ``scan_member``. Files of tables and media are scanned together,
    not by their format.
    """

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        """Find all blocks. May be called again after a failure of the store."""
        raise FormatError(f"{store.name(entry.path)}: pass the folder of this file, which has its index.json.")

    def members(self, store: Store, manifests: Sequence[Entry]) -> list[Member]:
        """Return the data files of all manifests, in order. Raise DataNotFoundError if one is missing."""
        raise NotImplementedError

    def scan_member(self, store: Store, member: Member) -> Scanned:
        """Find all blocks of a file that a manifest names. May be called again after a failure of the store."""
        raise NotImplementedError

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        """Return those columns that the file has, in types as close to ``schema`` as the file allows."""
        raise NotImplementedError

    def excluded(
        self, block: Block, expression: Any, schema: pa.Schema, partition: Any, columns: Sequence[str]
    ) -> bool:
        """Return True if statistics prove that no row of the block passes the filter, which uses these columns."""
        return False


def table_of(names: list[str], arrays: list[Any], rows: int) -> pa.Table:
    """Return arrays as a table, which knows its number of rows even without columns."""
    return pa.table(arrays, names=names) if names else pa.table({"": pa.nulls(rows)}).select([])


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned integer at an offset, and its end: 7 bits in each byte, the lowest first."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")


class FileContents(NamedTuple):
    """Contents of a file. ``read`` takes a size and an offset, and returns bytes, or a view of a mapped file."""

    read: Callable[[int, int], Any]
    size: int

    @staticmethod
    def mapped(file: pa.Buffer) -> FileContents:
        return FileContents(lambda size, at: file.slice(at, min(size, file.size - at)), file.size)


Room = Callable[[int], Any]
"""Function that returns memory for a number of bytes, as an array."""


@runtime_checkable
class InPlace(Protocol):
    """A format whose blocks can be views of mapped files."""

    def view(self, file: pa.Buffer, beside: Callable[[], pa.Buffer], block: Block, room: Room) -> pa.RecordBatch:
        """Return a block of a mapped file. Raise ValueError or ``pa.ArrowException`` if it is damaged.

        ``beside`` maps the entry before the file. ``room`` is for what the file does not contain.
        """
        ...


def partition_expression(values: Values) -> Any:
    """Return an expression that is true for all rows of a file, from its partition values. None if there are none."""
    import pyarrow.compute as pc

    known = None
    for name, value in values:
        condition = pc.field(name).is_null() if value is None else pc.field(name) == value
        known = condition if known is None else known & condition
    return known


def decoded(
    store: Store,
    form: Format,
    block: Block,
    values: Values,
    schema: pa.Schema,
    columns: Sequence[str],
    rows: int | None,
) -> pa.Table:
    """Decode a block to exactly these columns, in the types of the schema.

    Columns that the file lacks are null. ``rows``: the expected number of rows, None with a filter.
    """
    constants = dict(values)
    own = [name for name in columns if name not in constants]
    table = form.decode(store, block, schema, own) if own or rows is None else table_of([], [], rows)
    length = table.num_rows if rows is None else rows
    if table.num_columns and table.num_rows != length:
        raise pa.ArrowInvalid(f"{table.num_rows} rows where the index says {rows}")
    present = dict(zip(table.schema.names, table.columns, strict=True))
    wanted = pa.schema([schema.field(name) for name in columns])
    arrays = []
    for name, kind in zip(columns, wanted.types, strict=True):
        if name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[name], kind), length))
        elif name not in present:
            arrays.append(pa.nulls(length, kind))
        else:
            arrays.append(_cast(store, block, name, present[name], kind))
    return pa.table(arrays, schema=wanted)


def _cast(store: Store, block: Block, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type.equals(kind, check_metadata=True):
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as problem:
        text = f"{store.name(block.entry.path)}: column {name!r} is not {kind}: {problem}"
        raise CorruptBlockError(text) if is_damage(problem) else refusal(problem, text) from None


_MODULES = {
    "arrow": ("formats.arrow_ipc", "ArrowFormat"),
    "parquet": ("formats.parquet", "ParquetFormat"),
    "orc": ("formats.orc", "OrcFormat"),
    "csv": ("formats.text", "CsvFormat"),
    "jsonl": ("formats.text", "JsonFormat"),
    "mds": ("formats.mds", "MdsFormat"),
    "litdata": ("formats.litdata", "LitDataFormat"),
    "text": ("formats.text", "TextFormat"),
    "image": ("formats.media", "MediaFormat"),
    "audio": ("formats.media", "MediaFormat"),
    "video": ("formats.media", "MediaFormat"),
    "megatron": ("formats.tokens", "MegatronFormat"),
    "tokens": ("formats.tokens", "TokensFormat"),
    "tar": ("formats.tar_shards", "TarFormat"),
    "table": ("formats.table_parquet", "TableFormat"),
    "lance": ("tables.lance", "LanceFormat"),
}


@lru_cache(maxsize=64)
def format_named(name: str) -> Format:
    """Return the format with a name of ``files.FORMATS``. Arguments follow after colons: ``tokens:uint16:1024``."""
    stem, *arguments = name.split(":")
    module, class_name = _MODULES[stem]
    format_: Format = getattr(import_module(f"midepoch.sources.{module}"), class_name)(*arguments)
    return format_
