"""Reader of Thrift's compact protocol, the encoding of Parquet footers.

Layout: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
Every function raises ``ValueError`` or ``IndexError`` for invalid bytes.
"""

from __future__ import annotations

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


def binary(data: bytes, at: int) -> bytes:
    """Return the bytes at an offset."""
    size, at = _unsigned(data, at)
    if at + size > len(data):
        raise ValueError("a value reaches past the end")
    return data[at : at + size]


def binary_size(data: bytes, at: int) -> int:
    """Return the length of the bytes at an offset."""
    return _unsigned(data, at)[0]


def integers(data: bytes, at: int) -> list[int]:
    """Return the list of integers at an offset."""
    count, _, at = list_head(data, at)
    values = []
    for _ in range(count):
        value, at = integer(data, at)
        values.append(value)
    return values


def structs(data: bytes, at: int) -> list[Fields]:
    """Return the list of structs at an offset."""
    count, kind, at = list_head(data, at)
    if count and kind != _STRUCT:
        raise ValueError(f"a list of kind {kind} where structs should be")
    values = []
    for _ in range(count):
        fields, at = struct_fields(data, at)
        values.append(fields)
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
