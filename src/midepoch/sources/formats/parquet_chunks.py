"""Column chunks of a Parquet footer: their number of nulls, and the validity of their statistics.

``ColumnChunkMetaData.statistics`` of pyarrow crashes the process for damaged or encrypted statistics. Therefore they
are parsed here, and pyarrow reads only those that are valid. Layout:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

Footers are encoded in Thrift's compact protocol, which is read here, too. Layout:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
Its functions raise ``ValueError``, ``IndexError``, ``KeyError`` or ``TypeError`` for invalid bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow.parquet as pq

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


class Chunk(NamedTuple):
    """The values of one column in one row group."""

    metadata: int | Fields | None
    """Its metadata, or their offset in the footer. None if the column is encrypted."""
    nulls: int | None
    """Number of values that are null at any level of nesting, including empty lists. None if unknown."""
    large: int
    """Bytes of the values if they exceed ``MOST_BYTES``, else 0."""


def column_chunks(footer: bytes) -> list[list[Chunk]]:
    """Return the chunks of each row group."""
    file, _ = fields_at(footer, 0, last=4)
    return [[_chunk(footer, chunk) for chunk in group[1]] for group in file.get(4, [])]


def _chunk(footer: bytes, found: re.Match[bytes] | Fields) -> Chunk:
    if isinstance(found, dict):
        column = None if 3 not in found or 8 in found or 9 in found else _struct(found, 3)
        return Chunk(column, _struct(column or {}, 12).get(3), _large_size(column or {}))
    at, nulls = found.start(1), found[3]
    is_long = max(len(found[2]), len(found[4] or b"")) >= -(-(2 * MOST_BYTES).bit_length() // 7)
    large = _large_size(fields_at(footer, at)[0]) if is_long else 0
    return Chunk(at, 0 if nulls == b"\0" else nulls if nulls is None else integer(nulls, 0)[0], large)


def _large_size(column: Fields) -> int:
    """Return the bytes of values that are too large, as their writer reports them, else encoded. 0 if they are not."""
    size = int(_struct(column, 16).get(1, column.get(6, 0)))
    return size if size > MOST_BYTES else 0


def sound(footer: bytes, chunk: Chunk, column: pq.ColumnSchema) -> bool:
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


def definition_levels(footer: bytes, chunk: Chunk) -> list[int] | None:
    """Return the number of values of a chunk at each definition level, or None if the writer did not record it."""
    levels = _struct(_metadata(footer, chunk), 16).get(3)
    return levels if isinstance(levels, list) else None


def _struct(fields: Fields, number: int) -> Fields:
    """Return a struct in a struct, {} if it is missing or damaged."""
    value = fields.get(number)
    return value if isinstance(value, dict) else {}


def _metadata(footer: bytes, chunk: Chunk) -> Fields:
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
