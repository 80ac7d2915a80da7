"""Column chunks of a Parquet footer: their number of nulls, and the validity of their statistics.

``ColumnChunkMetaData.statistics`` of pyarrow crashes the process for damaged or encrypted statistics. Therefore they
are parsed here, and pyarrow reads only those that are valid. Layout:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

Footers are encoded in Thrift's compact protocol, which is read here, too. Layout:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
Its functions raise ``ValueError`` or ``IndexError`` for invalid bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import pyarrow.parquet as pq

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = frozenset((4, 5, 6))
_DEEPEST = 32

Fields = dict[int, int]
"""Offsets of the values of a struct, by field number."""


def struct_fields(
    data: bytes, at: int, depth: int = 0, *, only: int | None = None, after: int = 0
) -> tuple[Fields, int]:
    """Return the fields of the struct at an offset, and its end.

    ``only``: stop at the value of this field. ``after``: begin after this field.
    """
    found: Fields = {}
    number = after
    while head := data[at]:
        at += 1
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            number, at = integer(data, at)
        found[number] = at
        if number == only:
            return found, at
        if kind in _INTEGERS:  # inlined for speed: most fields are integers, and a footer has many
            while data[at] > 127:
                at += 1
            at += 1
        elif kind == _BINARY and data[at] < 128:
            at += 1 + data[at]
        elif kind > _FALSE:
            at = _end(data, at, kind, depth)
    return found, at + 1


def integer(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at an offset, and its end."""
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def integers(data: bytes, at: int) -> list[int]:
    """Return the list of integers at an offset."""
    count, _, at = list_head(data, at)
    values = []
    for _ in range(count):
        value, at = integer(data, at)
        values.append(value)
    return values


def list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the length of the list at an offset, the type of its values, and the offset of the first."""
    head = data[at]
    count, at = (head >> 4, at + 1) if head < 0xF0 else _unsigned(data, at + 1)
    if count > len(data):
        raise ValueError("a list is longer than its message")
    return count, head & 15, at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _end(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the end of the value of a type at an offset."""
    if depth > _DEEPEST:
        raise ValueError("structs are nested too deeply")
    if kind in _INTEGERS:
        return integer(data, at)[1]
    if kind == _STRUCT:
        return struct_fields(data, at, depth + 1)[1]
    if kind == _BINARY:
        size, at = _unsigned(data, at)
        return at + size
    if kind in (_LIST, _SET):
        count, inner, at = list_head(data, at)
        for _ in range(count):
            at = _end(data, at, inner, depth + 1)
        return at
    if kind in (_TRUE, _FALSE, _BYTE):  # inside lists booleans take a byte
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    raise ValueError(f"a value of kind {kind}")


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TYPES = (*_WIDTHS, "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
"""Physical types, by their numbers in a footer, and the bytes of a value of those that have a width."""
MOST_BYTES = (1 << 31) - 1
"""Maximum bytes of an array of text with 32-bit offsets. Larger arrays have to be large_string."""


class Chunks(NamedTuple):
    """The chunks of one row group, one for each column.

    ``at``: offset of their metadata in the footer, None if it is encrypted. ``nulls``: number of values that are null
    at any level of nesting, including empty lists, None if unknown. ``large``: bytes of the values of columns, by
    number, that exceed ``MOST_BYTES``.
    """

    at: list[int | None]
    nulls: list[int | None]
    large: dict[int, int]


def column_chunks(footer: bytes) -> list[Chunks]:
    """Return the chunks of each row group. Raise ``ValueError`` or ``IndexError`` for a damaged footer."""
    file, end = struct_fields(footer, 0, only=4)
    count, _, at = list_head(footer, file[4]) if 4 in file else (0, 0, end)
    groups = []
    for _ in range(count):
        group, _ = struct_fields(footer, at, only=1)
        columns, _, at = list_head(footer, group[1])
        chunks, at = _chunks(footer, at, columns)
        groups.append(chunks)
        _, at = struct_fields(footer, at, after=1)
    return groups


def _chunks(footer: bytes, at: int, count: int) -> tuple[Chunks, int]:
    places: list[int | None] = []
    nulls: list[int | None] = []
    large: dict[int, int] = {}
    usual, digits = _usual().match, -(-(2 * MOST_BYTES).bit_length() // 7)  # least length of a size that is too large
    for i in range(count):
        match = usual(footer, at)
        if match is not None:
            number, at = match[3], match.end()
            places.append(match.start(1))
            nulls.append(0 if number == b"\0" else number if number is None else integer(number, 0)[0])
            if len(match[2]) >= digits or len(match[4] or b"") >= digits:
                _note_size(footer, match.start(1), large, i)
            continue
        chunk, at = struct_fields(footer, at)
        encrypted = 3 not in chunk or 8 in chunk or 9 in chunk
        statistics = {} if encrypted else _statistics(footer, chunk[3])
        places.append(None if encrypted else chunk[3])
        nulls.append(integer(footer, statistics[3])[0] if 3 in statistics else None)
        if not encrypted:
            _note_size(footer, chunk[3], large, i)
    return Chunks(places, nulls, large), at


def _note_size(footer: bytes, at: int, large: dict[int, int], number: int) -> None:
    """Record a chunk whose values are too large, by the size that its writer reports, else by its encoded size."""
    column, _ = struct_fields(footer, at)
    sizes = struct_fields(footer, column[16])[0] if 16 in column else {}
    size = _number(footer, sizes, 1) if 1 in sizes else _number(footer, column, 6)
    if size > MOST_BYTES:
        large[number] = size


def _statistics(footer: bytes, at: int) -> Fields:
    column, _ = struct_fields(footer, at)
    return struct_fields(footer, column[12])[0] if 12 in column else {}


def sound(footer: bytes, at: int | None, column: pq.ColumnSchema) -> bool:
    """Return True if pyarrow can read the statistics of a chunk."""
    if at is None:
        return False
    fields, _ = struct_fields(footer, at)
    kind = column.physical_type
    if integer(footer, fields[1])[0] != _TYPES.index(kind) or 17 in fields:
        return False
    bounds = [bound for number, bound in _statistics(footer, at).items() if number in (1, 2, 5, 6)]
    width = _WIDTHS.get(kind, column.length)
    if kind != "BYTE_ARRAY" and any(_unsigned(footer, bound)[0] != width for bound in bounds):
        return False
    sizes = struct_fields(footer, fields[16])[0] if 16 in fields else {}
    levels = {2: column.max_repetition_level, 3: column.max_definition_level}
    lengths = {number: len(integers(footer, sizes[number])) for number in levels if number in sizes}
    return all(length in (0, levels[number] + 1) for number, length in lengths.items()) and (
        1 not in sizes or kind == "BYTE_ARRAY"
    )


def definition_levels(footer: bytes, at: int | None) -> list[int] | None:
    """Return the number of values of a chunk at each definition level, or None if the writer did not record it."""
    if at is None:
        return None
    column, _ = struct_fields(footer, at)
    sizes = struct_fields(footer, column[16])[0] if 16 in column else {}
    return integers(footer, sizes[3]) if 3 in sizes else None


def _number(footer: bytes, fields: Fields, field: int) -> int:
    return integer(footer, fields[field])[0] if field in fields else 0


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
