"""Text with a row a line (CSV, JSON lines): blocks are ranges of bytes that end where a row ends.

Such files say nothing about themselves, so the index reads them through once, and learns the number of rows, the types
and where nulls are. Compressed files are cut at bytes of their contents; to get to a block they are read from their
beginning, which is why such a file is better kept small.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.files import COMPRESSIONS
from midepoch.sources.formats.base import Block, Scanned
from midepoch.sources.stores import Entry, Store

BLOCK_BYTES = 8 << 20
_READ = 8 << 20

Parse = Callable[[bytes], pa.Table]


def compression(path: str) -> str | None:
    """The codec that a file's name says it is compressed with."""
    return COMPRESSIONS.get(os.path.splitext(path.lower())[1])


@contextmanager
def contents(store: Store, entry: Entry) -> Iterator[Any]:
    """The file as a stream of its contents, decompressed."""
    with store.open(entry) as file:
        codec = compression(entry.path)
        if codec is None:
            yield file.arrow
        else:
            with pa.CompressedInputStream(file.arrow, codec) as stream:
                yield stream


def scan_lines(
    store: Store, entry: Entry, *, start: int, quoted: bytes | None, parse: Parse, skip_damage: bool
) -> Scanned:
    """Cut a file from byte ``start`` on and parse every block once. ``quoted``: the delimiter of a format in
    which a line end in quotes ends no row.
    """
    name = store.name(entry.path)
    digest = hashlib.blake2b(digest_size=16)
    found = Scanned(pa.schema([]), inferred=True)
    schemas: list[pa.Schema] = []
    at = start
    try:
        for data in _blocks(store, entry, start, quoted, digest):
            table = _parsed(name, at, data, parse)
            if table.num_rows:
                found.offsets.append(at)
                found.rows.append(table.num_rows)
                found.nullable |= _nulls(table)
                schemas.append(table.schema)
            at += len(data)
    except (FormatError, pa.ArrowInvalid, UnicodeDecodeError) as problem:
        if not skip_damage or not schemas:
            raise problem if isinstance(problem, FormatError) else FormatError(f"{name}: {problem}") from None
        found.complete = False
    if entry.size and not schemas and at > start:
        raise FormatError(f"{name}: no rows were found in {entry.size} bytes.")
    found.schema, found.decoded_bytes = widest(name, schemas, text=quoted is not None), float(at - start)
    for schema in schemas:
        if schema.names != found.schema.names or any(map(pa.types.is_struct, schema.types)):
            found.nullable |= _lacking(found.schema, schema)
    found.fingerprint = digest.hexdigest()
    with store.open(entry) as file:
        found.etag = file.etag
    return found


def _parsed(name: str, at: int, data: bytes, parse: Parse) -> pa.Table:
    try:
        return parse(data)
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        raise FormatError(
            f"{name}: the rows from byte {at} on cannot be read: {problem}. "
            'Mend the file, or pass on_error="skip" to use the rows before them.'
        ) from None


def _blocks(store: Store, entry: Entry, start: int, quoted: bytes | None, digest: Any) -> Iterator[bytes]:
    """The contents in pieces that end with a row."""
    rest = b""
    with contents(store, entry) as file:
        skipped = bytes(file.read(start)) if start else b""
        digest.update(skipped)
        while data := bytes(file.read(_READ)):
            digest.update(data)
            rest += data
            if len(rest) >= BLOCK_BYTES and (cut := _last_row_end(rest, quoted)):
                yield rest[:cut]
                rest = rest[cut:]
    if rest.strip(b"\r\n \t") or (quoted is not None and _holds_blanks(rest, quoted, skipped)):
        yield rest


def _holds_blanks(rest: bytes, quoted: bytes, head: bytes) -> bool:
    """Whether white space is rows of CSV: tabs that separate, or, where there is one column, lines of spaces."""
    return quoted in rest or (quoted not in head and re.search(rb"[ \t]\r?\n", rest) is not None)


def _last_row_end(data: bytes, quoted: bytes | None) -> int:
    """Behind the last line end that ends a row, of data that begins with one; 0 if there is none."""
    if quoted is None or b'"' not in data:
        return data.rfind(b"\n") + 1
    spans = _quoted(data, quoted)
    opened = [start for start, _ in spans]
    at = len(data)
    while (at := data.rfind(b"\n", 0, at)) >= 0:
        i = bisect.bisect(opened, at) - 1
        if i < 0 or spans[i][1] <= at:
            return at + 1
        at = spans[i][0]  # in quotes: go on before them
    return 0


def first_row_end(data: bytes, delimiter: bytes) -> int:
    """Behind the line end that ends the first row; 0 if there is none."""
    at = -1
    for start, stop in [*_quoted(data, delimiter), (len(data), len(data))]:
        found = data.find(b"\n", at + 1, start)
        if found >= 0:
            return found + 1
        at = stop - 1
    return 0


def _quoted(data: bytes, delimiter: bytes) -> list[tuple[int, int]]:
    """From the opening to behind the closing quote of each quoted value. A quote in the middle of a value is none."""
    found = []
    before = (delimiter[0], ord("\n"), ord("\r"))
    at = data.find(b'"')
    while at >= 0:
        if at and data[at - 1] not in before:
            at = data.find(b'"', at + 1)
            continue
        stop = data.find(b'"', at + 1)
        while stop >= 0 and data[stop + 1 : stop + 2] == b'"':  # two of them stand for one
            stop = data.find(b'"', stop + 2)
        if stop < 0:
            found.append((at, len(data) + 1))
            break
        found.append((at, stop + 1))
        at = data.find(b'"', stop + 1)
    return found


def read_range(store: Store, block: Block) -> bytes:
    """The bytes of a block."""
    if compression(block.entry.path) is None:
        with store.open(block.entry) as file:
            end = file.size if block.end is None else block.end
            data = file.read_at(end - block.offset, block.offset)
            if len(data) != end - block.offset:
                raise OSError(f"{len(data)} bytes came where {end - block.offset} were asked for")
            return data
    with contents(store, block.entry) as stream:
        left = block.offset
        while left and (passed := len(stream.read(min(left, _READ)))):
            left -= passed
        return bytes(stream.read() if block.end is None else stream.read(block.end - block.offset))


def _nulls(table: pa.Table) -> set[tuple[str, ...]]:
    """Paths of columns, and of what is inside them, with a null."""
    found: set[tuple[str, ...]] = set()

    def look(path: tuple[str, ...], column: pa.Array) -> None:
        if column.null_count:
            found.add(path)
        if pa.types.is_struct(column.type):
            for i in range(column.type.num_fields):
                look((*path, column.type.field(i).name), column.field(i))
        elif pa.types.is_list(column.type):
            look((*path, column.type.field(0).name), column.flatten())

    for name, column in zip(table.schema.names, table.columns, strict=True):
        for chunk in column.chunks:
            look((name,), chunk)
    return found


def _lacking(whole: Iterable[pa.Field], part: Iterable[pa.Field], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of what one block lacks, and so has nulls for, of what there is in all."""
    mine, found = {field.name: field.type for field in part}, set()
    for field in whole:
        here = (*path, field.name)
        if field.name not in mine:
            found.add(here)
        elif pa.types.is_struct(field.type) and pa.types.is_struct(mine[field.name]):
            found |= _lacking(_fields(field.type), _fields(mine[field.name]), here)
    return found


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)]


def widest(name: str, schemas: list[pa.Schema], *, text: bool = False) -> pa.Schema:
    """One schema for all blocks: whole numbers become floats, dates that are not dates everywhere text.

    ``text``: whatever does not fit together is text (CSV, where all of it is).
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
            f"{file}: column {column!r} holds {a} in some rows and {b} in others. Write values of one type."
        ) from None
