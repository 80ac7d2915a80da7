"""Text with one row per line (CSV, JSON lines, plain text). Blocks are byte ranges that end at the end of a row.

Such files have no metadata. The index reads them completely once, to find the number of rows, the types, the nullable
columns, and the unreadable rows. Under ``on_error="skip"`` the index contains the byte ranges of unreadable rows, which
are not part of the data. Byte offsets of compressed files refer to their decompressed contents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.formats.base import Block, Scanned
from midepoch.sources.formats.compressed import can_be_fetched, compression, contents, decompressed, skip
from midepoch.sources.formats.cutting import SPACE, Int64Array, broken_rows, row_ends, without
from midepoch.storage.damage import DamageError, is_damage
from midepoch.storage.stores import Entry, Store

MIXED_REMEDY = (
    'Write values of one type, or open it with midepoch.load_dataset("json", data_files=…), which reads mixed types.'
)


def nulls(table: pa.Table) -> set[tuple[str, ...]]:
    """Return the paths of columns, and of fields inside them, with a null."""
    found: set[tuple[str, ...]] = set()

    def look(path: tuple[str, ...], column: pa.Array) -> None:
        if column.null_count:
            found.add(path)
        if pa.types.is_struct(column.type):
            for i in range(column.type.num_fields):
                look((*path, column.type.field(i).name), column.field(i))
        elif pt.is_list(column.type) or pt.is_large_list(column.type) or pt.is_fixed_size_list(column.type):
            look((*path, column.type.field(0).name), column.flatten())

    for name, column in zip(table.schema.names, table.columns, strict=True):
        for chunk in column.chunks:
            look((name,), chunk)
    return found


def lacking(union: Iterable[pa.Field], part: Iterable[pa.Field], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the paths of the union's fields that one block lacks, and for which it has nulls."""
    mine, found = {field.name: field.type for field in part}, set()
    for field in union:
        here = (*path, field.name)
        if field.name not in mine:
            found.add(here)
        elif pa.types.is_struct(field.type) and pa.types.is_struct(mine[field.name]):
            found |= lacking(_fields(field.type), _fields(mine[field.name]), here)
    return found


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)]


def widest(name: str, schemas: list[pa.Schema], *, text: bool = False) -> pa.Schema:
    """Return one schema for all blocks: integers mixed with floats become floats, dates mixed with text become text.

    ``text``: all other mixed types become text (as in CSV, where every value is text).
    """
    types: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            before = types.get(field.name)
            types[field.name] = field.type if before is None else _wider(name, field.name, before, field.type, text)
    return pa.schema(list(types.items()))


def _wider(file: str, column: str, a: pa.DataType, b: pa.DataType, text: bool) -> pa.DataType:
    if a.equals(b):
        return a
    if pa.types.is_temporal(a) != pa.types.is_temporal(b) and pa.string() in (a, b):
        return pa.string()
    if pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(_wider(file, column, a.value_type, b.value_type, text))
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = {a.field(i).name: a.field(i).type for i in range(a.num_fields)}
        for other in (b.field(i) for i in range(b.num_fields)):
            mine = fields.get(other.name)
            fields[other.name] = other.type if mine is None else _wider(file, column, mine, other.type, text)
        return pa.struct(list(fields.items()))
    try:
        merged = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
        return merged.field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if text:
            return pa.string()
        raise FormatError(
            f"{file}: column {column!r} contains {a} in some rows and {b} in others. {MIXED_REMEDY}"
        ) from None


BLOCK_BYTES = 8 << 20
_READ = 8 << 20
_MIXED = re.compile(r"Column\(/(?:/\[\]/)?(.+)\) changed from (\w+) to (\w+)")
_PARSER_WORDS = re.compile(r"^(?:JSON|CSV) parse error: (?:Row #\d+: )?|\.? in row \d+$|\.$")
_LONGEST_ROW = 32
"""Number of blocks after which the closing quote of an open quoted value is assumed to be missing."""


def check_text(data: bytes) -> None:
    """Raise UnicodeDecodeError for bytes that are not UTF-8."""
    if not data.isascii():
        data.decode()


class Piece(NamedTuple):
    """Some rows of a file: their byte offset, the number of the first line or element, and their bytes.

    ``is_cut``: it is known that they end with a row.
    """

    offset: int
    number: int
    data: bytes
    is_cut: bool = False


class Dialect:
    """Syntax of rows in text. ``name`` tells it from others: the same bytes are other rows in another syntax.

    ``unit`` names a row by its number. ``about``: what else is needed to decode a block. ``mixed_is_text``: values of
    different types become text.
    """

    name = ""
    unit = "line {}"
    mixed_is_text = False

    @property
    def about(self) -> dict[str, Any]:
        return {}

    def ends(self, data: bytes) -> Int64Array:
        """Return the position after each row, for data that begins with a row. The last row may be missing."""
        return row_ends(data, None)

    def count(self, data: bytes) -> int:
        """Return the number of units in rows: of line feeds, carriage returns, or both together."""
        return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")

    def has_rows(self, data: bytes) -> bool:
        """Return True if the end of a file contains a row."""
        return bool(data.strip(SPACE))

    def is_closed(self, data: bytes) -> bool:
        """Return True if data ends with a row, not inside of one."""
        return True

    def parse(self, data: bytes) -> pa.Table:
        """Return all rows. Raise ``pa.ArrowException`` or ``UnicodeDecodeError``."""
        raise NotImplementedError

    def is_readable(self, data: bytes) -> bool:
        """Return True if each row can be read, though not all of them together, because their types differ."""
        return False

    def problem(self, data: bytes) -> str | None:
        """Return the reason why rows cannot be read. None if each can be read alone."""
        try:
            self.parse(data)
        except UnicodeDecodeError as problem:
            return f"it is not UTF-8 text: {problem}"
        except pa.ArrowException as problem:
            if not is_damage(problem):
                raise
            if _MIXED.search(str(problem)) and self.is_readable(data):
                return None
            text = _PARSER_WORDS.sub("", str(problem)).rstrip()
            return "it is not a JSON object" if text.startswith("Column() changed from object") else text
        return None

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        """Return the byte ranges of rows that cannot be read even alone."""
        return broken_rows(data, self.ends(data), self.problem)

    def pieces(self, file: FilePieces) -> Iterator[Piece]:
        """Yield the contents of a file in pieces that end with a row, of about 8 MB."""
        rest, offset, number, enough = b"", file.start, 0, BLOCK_BYTES
        for data in file:
            number = number or 1 + self.count(file.head)
            rest += data
            if len(rest) < enough:
                continue
            cut = last = self._last_end(rest)
            if not cut and len(rest) >= _LONGEST_ROW * BLOCK_BYTES:
                cut = rest.rfind(b"\n") + 1
            enough = BLOCK_BYTES if cut else 2 * len(rest)
            if cut:
                yield Piece(offset, number, rest[:cut], is_cut=last > 0)
                offset, number, rest = offset + cut, number + self.count(rest[:cut]), rest[cut:]
        if file.is_damaged:
            rest = rest[: self._last_end(rest)]
        if self.has_rows(rest):
            yield Piece(offset, number, rest)

    def _last_end(self, data: bytes) -> int:
        ends = self.ends(data)
        return int(ends[-1]) if len(ends) else 0


def scan_text(store: Store, entry: Entry, dialect: Dialect, *, start: int, skip_damage: bool) -> Scanned:
    """Divide a file from byte ``start`` on into blocks, and parse every block once."""
    name = store.name(entry.path)
    file = FilePieces(store, entry, start, salvage=skip_damage)
    found = Scanned(pa.schema([]), inferred=True)
    schemas: list[pa.Schema] = []
    broken: list[tuple[int, int]] = []
    end = start
    for piece in dialect.pieces(file):
        table, ranges = _read(name, piece, dialect, skip_damage)
        if table.num_rows:
            found.offsets.append(piece.offset)
            found.rows.append(table.num_rows)
            found.nullable |= nulls(table)
            schemas.append(table.schema)
        number, position = piece.number, 0
        for first, stop in ranges:
            number, position = number + dialect.count(piece.data[position:first]), first
            found.broken_lines.append(number)
            broken.append((piece.offset + first, piece.offset + stop))
        end = piece.offset + len(piece.data)
    if broken and not schemas:
        raise DamageError(f"{name}: none of its {entry.size} bytes can be read as a row. Check the format.")
    found.complete, found.stop = not file.is_damaged, end if file.is_damaged else None
    found.schema = widest(name, schemas, text=dialect.mixed_is_text)
    found.decoded_bytes = float(end - start)
    for schema in schemas:
        found.nullable |= lacking(found.schema, schema)
    found.fingerprint = f"{file.digest.hexdigest()}-{dialect.name}"
    found.footer = json.dumps({**dialect.about, "broken": broken}).encode()
    with store.open(entry) as opened:
        found.etag = opened.etag
    return found


def _read(name: str, piece: Piece, dialect: Dialect, skip_damage: bool) -> tuple[pa.Table, list[tuple[int, int]]]:
    """Return the rows of a piece, and the byte ranges of those that were left out."""
    data = piece.data
    try:
        if piece.is_cut or dialect.is_closed(data):
            return dialect.parse(data), []
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        if not is_damage(problem):
            raise
    ranges = dialect.broken(data)
    if ranges and not skip_damage:
        first, stop = ranges[0]
        place = dialect.unit.format(piece.number + dialect.count(data[:first]))
        raise FormatError(
            f'{name}: {place} cannot be read: {dialect.problem(data[first:stop])}. Fix it, or pass on_error="skip" to '
            "leave out rows that cannot be read."
        )
    rest = without(data, ranges)
    if ranges and not rest.strip():
        return pa.table({}), ranges
    try:
        return dialect.parse(rest), ranges
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        mixed = _MIXED.search(str(problem))
        if mixed is None:
            raise FormatError(f"{name}: {problem}.") from None
        column, one, other = mixed.groups()
        text = f"{name}: column {column!r} contains {one} in some rows and {other} in others. {MIXED_REMEDY}"
        raise FormatError(text) from None


class FilePieces:
    """Iterable over the contents of a file from byte ``start`` on, in pieces of ``_READ`` bytes.

    ``salvage``: use the readable part of a damaged file, and set ``is_damaged``.
    """

    def __init__(self, store: Store, entry: Entry, start: int, *, salvage: bool) -> None:
        self._store, self._entry, self.start, self.salvage = store, entry, start, salvage
        self.name = store.name(entry.path)
        self.digest = hashlib.blake2b(digest_size=16)
        self.head, self.is_damaged = b"", False

    def __iter__(self) -> Iterator[bytes]:
        with contents(self._store, self._entry) as file:
            self.head = bytes(file.read(self.start)) if self.start else b""
            self.digest.update(self.head)
            for data in self._read(file):
                self.digest.update(data)
                yield data

    def _read(self, file: Any) -> Iterator[bytes]:
        position = self.start
        try:
            while data := bytes(file.read(_READ)):
                position += len(data)
                yield data
        except (OSError, pa.ArrowException) as problem:
            if (
                not is_damage(problem)
                or compression(self._entry.path) is None
                or not can_be_fetched(self._store, self._entry)
            ):
                raise
            if not self.salvage:
                raise FormatError(
                    f"{self.name}: its compressed data is truncated or damaged: {problem}. "
                    'Copy the file again, or pass on_error="skip" to use the lines before the damage.'
                ) from None
            self.is_damaged = True
            yield self._before_damage(position)

    def _before_damage(self, position: int) -> bytes:
        """Return the contents from a position on. A failed read loses its bytes, so that reads become smaller."""
        found = bytearray()
        for size in (1 << 16, 1 << 8, 1):
            try:
                with contents(self._store, self._entry) as file:
                    skip(file, position + len(found))
                    while data := file.read(size):
                        found += data
            except (OSError, pa.ArrowException) as problem:
                if not is_damage(problem):
                    raise
        return bytes(found)


def read_rows(store: Store, block: Block) -> bytes:
    """Return the bytes of a block without the rows that the index marks as broken."""
    data = _read_range(store, block)
    stop = block.offset + len(data)
    ranges = [
        (a - block.offset, b - block.offset) for a, b in about_rows(block.footer)["broken"] if block.offset <= a < stop
    ]
    return without(data, ranges)


@lru_cache(maxsize=64)
def about_rows(footer: bytes) -> dict[str, Any]:
    """Return what a dialect needs to decode blocks, and the byte ranges of broken rows."""
    about: dict[str, Any] = json.loads(footer)
    return about


def _read_range(store: Store, block: Block) -> bytes:
    if compression(block.entry.path) is None:
        with store.open(block.entry) as file:
            end = file.size if block.end is None else block.end
            data = file.read_at(end - block.offset, block.offset)
            if len(data) != end - block.offset:
                raise OSError(f"{len(data)} bytes were received where {end - block.offset} were requested")
            return data
    return decompressed(store, block)
