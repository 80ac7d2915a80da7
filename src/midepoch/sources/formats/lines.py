"""Text with a row a line (CSV, JSON lines): blocks are ranges of bytes that end where a row ends.

Such files say nothing about themselves, so the index reads them through once, and learns the number of rows, the types
and where nulls are. Compressed files are cut at bytes of their contents; to get to a block they are read from their
beginning, which is why such a file is better kept small.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.arrow_ipc import node_paths
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


def scan_lines(store: Store, entry: Entry, *, start: int, quoted: bool, parse: Parse, skip_damage: bool) -> Scanned:
    """Cut a file from byte ``start`` on and parse every block once. ``quoted``: a line end in quotes ends no row."""
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
    found.schema = widest(name, schemas)
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


def _blocks(store: Store, entry: Entry, start: int, quoted: bool, digest: Any) -> Iterator[bytes]:
    """The contents in pieces that end with a row."""
    rest, inside = b"", False
    with contents(store, entry) as file:
        skipped = bytes(file.read(start)) if start else b""
        digest.update(skipped)
        while data := bytes(file.read(_READ)):
            digest.update(data)
            cut, inside = _last_row_end(data, quoted, inside)
            if cut and len(rest) + cut >= BLOCK_BYTES:
                yield rest + data[:cut]
                rest = data[cut:]
            else:
                rest += data
    if rest.strip(b"\r\n \t"):
        yield rest


def _last_row_end(data: bytes, quoted: bool, inside: bool) -> tuple[int, bool]:
    """Behind the last line end that ends a row (0: there is none), and whether the piece ends inside of quotes."""
    if not quoted or b'"' not in data:
        return (0 if inside else data.rfind(b"\n") + 1), inside
    values = np.frombuffer(data, np.uint8)
    quotes = np.cumsum(values == ord('"')) + inside
    ends = np.flatnonzero((values == ord("\n")) & (quotes % 2 == 0))
    return (int(ends[-1]) + 1 if len(ends) else 0), bool(quotes[-1] % 2)


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
    pair = {str(a), str(b)}
    if pa.types.is_temporal(a) != pa.types.is_temporal(b) and "string" in pair:
        return pa.string()
    try:
        merged = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
        return merged.field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if text:
            return pa.string()
        raise FormatError(
            f"{file}: column {column!r} holds {a} in some rows and {b} in others. Write values of one type."
        ) from None


__all__ = ["Parse", "compression", "contents", "node_paths", "read_range", "scan_lines", "widest"]
