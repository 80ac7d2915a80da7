"""Parser of Arrow IPC messages, limited to what is needed to find record batches without reading them.

Layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
Every function here raises one of ``DAMAGE`` for bytes that are not a valid message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
END_OF_STREAM = struct.pack("<II", CONTINUATION, 0)
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
HEADER_READ = 4096  # a header and the first bytes of its body: one page, one read
_FILE_START = 8
DAMAGE = (struct.error, IndexError, OverflowError)

Bytes = bytes | memoryview
Read = Callable[[int, int], Bytes]
"""Function ``read(size, offset)`` that returns ``size`` bytes, or fewer at the end of the file."""


@dataclass(frozen=True)
class Message:
    """The header of one message."""

    kind: int
    body: int  # offset of its body
    end: int  # offset of the next message
    rows: int = 0
    nodes: tuple[tuple[int, int], ...] = ()  # length and null count of each array, depth first
    buffers: tuple[tuple[int, int], ...] = ()  # offset in the body and length of each
    dictionary: int = 0  # id of the dictionary that a message defines
    delta: bool = False  # True if it adds values to that dictionary
    compressed: bool = False


@dataclass(frozen=True)
class FileFooter:
    """Footer of an IPC file, the only list of its messages."""

    start: int
    schema_message: bytes
    dictionaries: tuple[int, ...]  # offsets, in the order in which they apply
    batches: tuple[int, ...]


class _Table:
    """One table of a flatbuffer, with just enough of the format to look up a field."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data, self.at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        if self._vtable < 0:
            raise struct.error("a table begins before its message")
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    def _where(self, number: int) -> int:
        slot = 4 + 2 * number
        offset: int = struct.unpack_from("<H", self._data, self._vtable + slot)[0] if slot < self._size else 0
        return self.at + offset if offset else 0

    def scalar(self, number: int, code: str, default: int = 0) -> int:
        where = self._where(number)
        return int(struct.unpack_from(code, self._data, where)[0]) if where else default

    def has(self, number: int) -> bool:
        return bool(self._where(number))

    def table(self, number: int) -> _Table:
        where = self._where(number)
        if not where:
            raise struct.error(f"field {number} is missing")
        return _Table(self._data, where + struct.unpack_from("<I", self._data, where)[0])

    def structs(self, number: int, code: str) -> list[tuple[int, ...]]:
        """Return a vector of structs."""
        where = self._where(number)
        if not where:
            return []
        start = where + struct.unpack_from("<I", self._data, where)[0]
        (count,) = struct.unpack_from("<I", self._data, start)
        size = struct.calcsize(code)
        if start + 4 + count * size > len(self._data):
            raise struct.error("a vector reaches outside its message")
        return list(struct.iter_unpack(code, self._data[start + 4 : start + 4 + count * size]))


def message_at(read: Read, head: Bytes, at: int, size: int) -> Message:
    """Return the message at an offset. ``head`` is its beginning."""
    prefix = 8 if struct.unpack_from("<I", head)[0] == CONTINUATION else 4
    (length,) = struct.unpack_from("<i", head, prefix - 4)
    if length == 0:
        raise struct.error("zero bytes where a message should begin")
    if length < 0 or at + prefix + length > size:
        raise struct.error("its header reaches past the end of the file")
    metadata = head[prefix : prefix + length]
    if len(metadata) < length:
        metadata = read(length, at + prefix)
    message = _parsed(metadata, at + prefix + length)
    if message.end > size:
        raise struct.error("its body reaches past the end of the file")
    return message


def _parsed(metadata: Bytes, body: int) -> Message:
    message = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind, length = message.scalar(1, "<B"), message.scalar(3, "<q")
    if kind not in (SCHEMA, DICTIONARY, RECORD_BATCH) or length < 0:
        raise struct.error(f"message of kind {kind} with a body of {length} bytes")
    end = body + length
    if kind == SCHEMA:
        return Message(kind, body, end)
    header = message.table(2)
    if kind == DICTIONARY:
        return Message(kind, body, end, dictionary=header.scalar(0, "<q"), delta=bool(header.scalar(2, "<B")))
    nodes, buffers = header.structs(1, "<qq"), header.structs(2, "<qq")
    if any(at < 0 or size < 0 or at + size > length for at, size in buffers):
        raise struct.error("a buffer reaches outside its body")
    arrays: dict[str, Any] = {"nodes": tuple(nodes), "buffers": tuple(buffers)}
    return Message(kind, body, end, header.scalar(0, "<q"), **arrays, compressed=header.has(3))


def check_rows(message: Message, columns: Sequence[int], nodes: int) -> None:
    """Check that the row count of a record batch matches the lengths of its columns.

    ``columns``: the nodes of the columns, among ``nodes`` in total. If the message has another number of nodes, only
    the first column is checked: some types are counted differently.
    """
    lengths = [length for length, _ in message.nodes]
    checked = columns if len(lengths) == nodes else columns[:1]
    if message.rows < 0 or any(i >= len(lengths) or lengths[i] != message.rows for i in checked):
        raise struct.error(f"a record batch of {message.rows} rows has columns of other lengths")
    if any(not -1 <= nulls <= length for length, nulls in message.nodes):
        raise struct.error("a column with more nulls than rows")


def read_footer(read: Read, size: int) -> FileFooter:
    """Read the footer of an IPC file."""
    tail = read(min(10, size), max(0, size - 10))
    if len(tail) < 10 or tail[4:] != MAGIC:
        raise struct.error("its footer is missing")
    (length,) = struct.unpack_from("<i", tail)
    start = size - 10 - length
    if length <= 0 or start < _FILE_START:
        raise struct.error(f"its footer has {length} bytes")
    data = read(length, start)
    footer = _Table(data, struct.unpack_from("<I", data)[0])
    dictionaries, batches = ([at for at, _, _ in footer.structs(i, "<qi4xq")] for i in (2, 3))
    offsets = [*dictionaries, *batches]
    if len(set(offsets)) != len(offsets) or any(not _FILE_START <= at < start for at in offsets):
        raise struct.error("its footer lists messages outside the file, or twice")
    schema = _schema_message(data, footer.table(1).at, footer.scalar(0, "<h"))
    return FileFooter(start, schema, tuple(dictionaries), tuple(batches))


def _schema_message(data: Bytes, schema: int, version: int) -> bytes:
    """Return a message whose header is the schema at an offset of a flatbuffer, which it contains completely.

    pyarrow reads a schema only from a message. A schema rewritten by pyarrow would have other dictionary ids.
    """
    vtable = struct.pack("<HHHHH2x", 10, 12, 4, 6, 8)  # places of the fields: version, kind of header, header
    start = 32  # of the flatbuffer
    table = struct.pack("<ihBxI", len(vtable), version, SCHEMA, start + schema - 24)
    metadata = (struct.pack("<I", 4 + len(vtable)) + vtable + table).ljust(start, b"\0") + bytes(data)
    metadata += bytes(-len(metadata) % 8)
    return struct.pack("<II", CONTINUATION, len(metadata)) + metadata


def whole_message(read: Read, at: int, size: int, end: int | None = None) -> Bytes:
    """Return the bytes of a message, or all up to ``end`` if it is given. Raise ``pa.ArrowInvalid``."""
    if end is None or end <= at:
        try:
            end = message_at(read, read(HEADER_READ, at), at, size).end
        except DAMAGE as problem:
            raise pa.ArrowInvalid(f"the message at byte {at} cannot be read: {problem}") from None
    return read(end - at, at)
