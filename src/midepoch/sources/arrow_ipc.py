"""Finding the record batches of an Arrow IPC file (stream or file format) without reading their bodies.

pyarrow reads such files but does not say where in them a batch lies or how many rows it has before it is read. Both
stand in the flatbuffer header of each message, at fixed places, so the walk costs one small read a record batch.
Layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from midepoch.errors import FormatError

MAGIC = b"ARROW1"
_log = logging.getLogger("midepoch")
FEATHER_V1 = b"FEA1"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_KINDS = {_SCHEMA: "schema", _DICTIONARY: "dictionary", _RECORD_BATCH: "record batch"}
_READ = 4096  # a header and the first bytes of its body: one page, one read
_SAMPLED_BLOCKS = 64
_SAMPLE = 256


@dataclass
class FileScan:
    """What a walk over one file found."""

    schema: pa.Schema
    offsets: list[int] = field(default_factory=list)  # of record batches
    rows: list[int] = field(default_factory=list)
    dictionaries: list[int] = field(default_factory=list)  # offsets of dictionary messages
    nullable: set[tuple[str, ...]] = field(default_factory=set)  # paths of columns and children with a null
    fingerprint: str = ""
    complete: bool = True  # False when the rest of a damaged file was left out


@dataclass(frozen=True)
class _Message:
    kind: int
    rows: int
    body: int  # offset of its body
    end: int  # offset of the next message
    null_counts: tuple[int, ...] = ()
    buffers: tuple[tuple[int, int], ...] = ()  # offset in the body and length of each


class _Table:
    """One table of a flatbuffer: just enough of the format to look up a field."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    def _where(self, number: int) -> int:
        slot = 4 + 2 * number
        offset: int = struct.unpack_from("<H", self._data, self._vtable + slot)[0] if slot < self._size else 0
        return self._at + offset if offset else 0

    def scalar(self, number: int, code: str, default: int = 0) -> int:
        where = self._where(number)
        return int(struct.unpack_from(code, self._data, where)[0]) if where else default

    def table(self, number: int) -> _Table:
        where = self._where(number)
        if not where:
            raise struct.error(f"field {number} is missing")
        return _Table(self._data, where + struct.unpack_from("<I", self._data, where)[0])

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64."""
        where = self._where(number)
        if not where:
            return []
        start = where + struct.unpack_from("<I", self._data, where)[0]
        (count,) = struct.unpack_from("<I", self._data, start)
        flat = struct.unpack_from(f"<{2 * count}q", self._data, start + 4)
        return list(zip(flat[::2], flat[1::2], strict=True))


def _parse(metadata: bytes, body: int, nodes: bool) -> _Message:
    message = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind = message.scalar(1, "<B")
    length = message.scalar(3, "<q")
    if kind not in _KINDS or length < 0:
        raise struct.error(f"message of kind {kind} with a body of {length} bytes")
    if kind != _RECORD_BATCH:
        return _Message(kind, 0, body, body + length)
    header = message.table(2)
    if not nodes:
        return _Message(kind, header.scalar(0, "<q"), body, body + length)
    nulls = tuple(count for _, count in header.pairs(1))
    buffers = tuple(header.pairs(2))
    if any(at < 0 or size < 0 or at + size > length for at, size in buffers):
        raise struct.error("a buffer reaches outside its body")
    return _Message(kind, header.scalar(0, "<q"), body, body + length, nulls, buffers)


def _node_paths(schema: pa.Schema) -> list[tuple[str, ...]]:
    """The path of each field node of a record batch: the column's name, then those of its children, depth first."""

    return [path for column in schema for path in node_paths(column.name, column.type)]


def node_paths(name: str, kind: pa.DataType, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of a column and of everything inside it."""
    if isinstance(kind, pa.BaseExtensionType):
        return node_paths(name, kind.storage_type, above)
    here = (*above, name)
    if pa.types.is_dictionary(kind):
        return [here]
    children = [kind.field(i) for i in range(kind.num_fields)]
    return [here, *(path for child in children for path in node_paths(child.name, child.type, here))]


Read = Callable[[int, int], bytes]
"""So many bytes from an offset on, fewer at the end of the file."""


def scan(path: Path, *, skip_damage: bool = False) -> FileScan:
    """``walk`` over a local file."""
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        return walk(str(path), lambda size, at: os.pread(fd, size, at), os.fstat(fd).st_size, skip_damage=skip_damage)


def walk(path: str, read: Read, size: int, *, skip_damage: bool = False) -> FileScan:
    """Walk the messages of one Arrow IPC file.

    Raises FormatError for a file that is not Arrow, or cut short (with ``skip_damage`` the whole batches before the
    damage are kept instead).
    """
    start = _first_message(path, read(16, 0), size)
    digest = hashlib.blake2b(digest_size=16)
    found: FileScan | None = None
    paths: list[tuple[str, ...]] = []
    messages: list[_Message] = []
    at = start
    while True:
        try:
            head = read(_READ, at)
            message = _message_at(read, head, at, size, bool(paths))
        except (struct.error, IndexError, OverflowError) as problem:
            if found is None or not skip_damage:
                raise FormatError(_damage(path, at, size, problem)) from None
            found.complete = False
            break
        if message is None:
            _check_end(path, read, at, size, start, skip_damage)
            break
        digest.update(head)
        if message.kind == _SCHEMA:
            schema, paths = _schema_of(path, read, at, message.end)
            found = FileScan(schema)
        elif found is None:
            raise FormatError(f"{path}: an Arrow IPC stream must begin with its schema; this is not one.")
        elif message.kind == _DICTIONARY:
            found.dictionaries.append(at)
        elif message.rows:
            found.offsets.append(at)
            found.rows.append(message.rows)
            found.nullable.update(p for p, count in zip(paths, message.null_counts, strict=False) if count)
            messages.append(message)
        at = message.end
    if found is None:
        raise FormatError(f"{path}: no Arrow schema found in {size} bytes: the file is empty or not Arrow IPC.")
    digest.update(f"{at - start}".encode())
    _sample(read, messages, digest)
    found.fingerprint = digest.hexdigest()
    return found


def _sample(read: Read, messages: list[_Message], digest: hashlib.blake2b) -> None:
    """Bytes from the start, middle and end of every buffer of up to 64 blocks spread over the file.

    All headers are in the digest already, and with them the length of every buffer; this is for values that change
    without changing a length. More blocks would cost a large file minutes of random reads.
    """
    step = max(1, -(-len(messages) // _SAMPLED_BLOCKS))
    for message in [*messages[::step], *messages[-1:]]:
        for offset, length in message.buffers:
            first, last = message.body + offset, message.body + offset + length
            if length <= 3 * _SAMPLE:
                digest.update(read(length, first))
                continue
            for at in (first, first + length // 2, last - _SAMPLE):
                digest.update(read(_SAMPLE, at))


def _check_end(path: str, read: Read, at: int, size: int, start: int, skip_damage: bool) -> None:
    """Whether the file ends where its messages do: nothing cut off, nothing behind."""
    if start and read(len(MAGIC), size - len(MAGIC)) != MAGIC:
        problem = "its footer is missing"
    elif not start and at + 4 < size and any(read(min(size - at, 1 << 16), at)[8:]):
        problem = "there is data behind the end of the stream, as if files had been joined"
    elif at == size and not start:
        _log.warning("%s has no end-of-stream marker: it may have been cut off between two record batches", path)
        return
    else:
        return
    if not skip_damage:
        raise FormatError(_damage(path, at, size, problem))
    _log.warning("%s: %s", path, problem)


def _first_message(path: str, head: bytes, size: int) -> int:
    if size == 0:
        raise FormatError(f"{path}: the file is empty (0 bytes). Remove it, or write it again.")
    if head.startswith(MAGIC):
        return 8
    if head.startswith(FEATHER_V1):
        raise FormatError(f"{path}: Feather V1 files hold no record batches; write it again with pyarrow (Feather V2).")
    if head[:4] == b"PAR1":
        raise FormatError(
            f"{path}: this is a Parquet file: pass format='parquet', or give it a name that ends with .parquet."
        )
    if len(head) >= 8 and struct.unpack_from("<I", head)[0] != _CONTINUATION:
        # Before Arrow 0.15 there was no marker: the length came first. Anything larger is another format.
        (length,) = struct.unpack_from("<i", head)
        if not 0 < length < min(size, 1 << 24):
            raise FormatError(
                f"{path}: not an Arrow IPC file (it begins with {head[:8]!r}). If it is of another format, say so with "
                "format=…; else write it again."
            )
    return 0


def _message_at(read: Read, head: bytes, at: int, size: int, nodes: bool) -> _Message | None:
    """The message at an offset, or None at the end of the stream."""
    if at == size:
        return None  # a stream may end without its end-of-stream marker
    marker = struct.unpack_from("<I", head)[0]
    prefix = 8 if marker == _CONTINUATION else 4
    (length,) = struct.unpack_from("<i", head, prefix - 4)
    if length == 0:
        return None
    if length < 0 or at + prefix + length > size:
        raise struct.error("its header reaches past the end of the file")
    metadata = head[prefix : prefix + length]
    if len(metadata) < length:
        metadata = read(length, at + prefix)
    message = _parse(metadata, at + prefix + length, nodes)
    if message.end > size:
        raise struct.error("its body reaches past the end of the file")
    return message


def _schema_of(path: str, read: Read, at: int, end: int) -> tuple[pa.Schema, list[tuple[str, ...]]]:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(read(end - at, at)))
        _ = schema.metadata, schema.to_string()  # bytes that are no text show only when asked for
        return schema, _node_paths(schema)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise FormatError(f"{path}: its Arrow schema cannot be read: {problem}") from None


def _damage(path: str, at: int, size: int, problem: Exception | str) -> str:
    return (
        f"{path}: not a whole Arrow IPC file: the message at byte {at} of {size} cannot be read ({problem}). "
        "The file is probably truncated: copy or download it again, "
        'or pass on_error="skip" to use the record batches before the damage.'
    )


def message_block(read: Read, size: int, offset: int, end: int | None, dictionaries: Sequence[int]) -> pa.RecordBatch:
    """The record batch at an offset, with the schema and dictionaries that stand before it: pyarrow reads those only as
    part of a stream, so it is handed one of just the messages that this block needs.
    """
    start = 8 if read(6, 0) == MAGIC else 0
    parts = [start, *(at for at in dictionaries if at < offset)]
    stream = b"".join(_whole_message(read, at, size, None) for at in parts)
    with pa.ipc.open_stream(stream + _whole_message(read, offset, size, end)) as reader:
        return reader.read_next_batch()


def _whole_message(read: Read, at: int, size: int, end: int | None) -> bytes:
    if end is None:
        try:
            message = _message_at(read, read(_READ, at), at, size, nodes=False)
        except struct.error as problem:
            raise pa.ArrowInvalid(str(problem)) from None
        if message is None:
            raise pa.ArrowInvalid(f"there is no message at byte {at}")
        end = message.end
    return read(end - at, at)
