"""Arrow IPC files (stream or file format): the search for their record batches without reading the bodies.

The blocks of files that cannot be mapped in place are decoded here, too: of files in a store, or with columns that
other files of the set lack.

pyarrow reads such files but does not report the offset or the rows of a batch before it reads it. The header of each
message contains both, so that the search costs one small read per record batch. A file has a footer that lists its
messages. A stream has none: its messages follow each other up to the end-of-stream marker, or the end of the file.

Messages are parsed as far as this needs it. Every function of the parser raises one of ``DAMAGE`` for bytes that are
not a valid message. Layout:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import hashlib
import logging
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import sample, sample_bodies, sample_buffers
from midepoch.sources.formats import Block, Chains, FileContents, Format, Scanned, table_of
from midepoch.sources.schemas import nodes, plain_array
from midepoch.storage.damage import DamageError, unreadable
from midepoch.storage.stores import Entry, Store

_log = logging.getLogger("midepoch")

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

    def scalar(self, number: int, code: str) -> int:
        where = self._where(number)
        return int(struct.unpack_from(code, self._data, where)[0]) if where else 0

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


_FEATHER_V1 = b"FEA1"
_ZEROS_READ = 1 << 20


class _Scanning:
    """Builder of a Scanned."""

    def __init__(self, schema: pa.Schema) -> None:
        self.scan = Scanned(schema)
        self._nodes = nodes(schema)
        self._columns = [i for i, (path, _) in enumerate(self._nodes) if len(path) == 1]
        self._messages: list[Message] = []
        self._dictionaries: list[Message] = []
        self._versions: dict[int, list[list[int]]] = {}

    def check(self, message: Message) -> None:
        """Raise ``struct.error`` for a header that contradicts itself or the schema."""
        if message.kind == SCHEMA:
            raise struct.error("a second schema, as if files had been concatenated")
        if message.kind == RECORD_BATCH:
            check_rows(message, self._columns, len(self._nodes))

    def add(self, at: int, message: Message) -> None:
        """Add a message. The messages of a dictionary are added in the order in which they apply."""
        if message.kind == DICTIONARY:
            versions = self._versions.setdefault(message.dictionary, [])
            if message.delta and versions:
                versions[-1].append(at)
            else:
                versions.append([at])
            self._dictionaries.append(message)
        elif message.kind == RECORD_BATCH and message.rows:
            self.scan.offsets.append(at)
            self.scan.rows.append(message.rows)
            self.scan.compressed |= message.compressed
            nulls = [count for _, count in message.nodes]
            for i, ((path, items), count) in enumerate(zip(self._nodes, nulls, strict=False)):
                # A null fixed-size list has null items in the file, which are not values of any row.
                if count and not (items and count == nulls[i - 1] * items):
                    self.scan.nullable.add(path)
            self._messages.append(message)

    def finish(self, read: Read, digest: hashlib.blake2b, start: int, length: int) -> Scanned:
        """Return the scan. ``digest`` covers the headers, and thereby the length of every buffer."""
        digest.update(f"{length}".encode())
        sample(digest, read, start, length)
        sample_bodies(digest, read, self._dictionaries)
        sample_buffers(digest, read, self._messages)
        self.scan.fingerprint = digest.hexdigest()
        self.scan.dictionaries = tuple(tuple(map(tuple, versions)) for versions in self._versions.values())
        return self.scan


def walk(path: str, read: Read, size: int, *, skip_damage: bool = False) -> Scanned:
    """Find the record batches of one Arrow IPC file.

    Raise FormatError for a file that is not Arrow, or damaged. With ``skip_damage``, keep the readable batches instead:
    in the file format all complete batches that the footer lists, in a stream or without a footer those before the
    damage.
    """
    start = _first_message(path, bytes(read(16, 0)), size)
    if start:
        try:
            footer = read_footer(read, size)
        except DAMAGE as problem:
            if not skip_damage:
                raise DamageError(_damage(path, size, size, problem)) from None
            _log.warning("%s: %s", path, problem)
        else:
            return _listed(path, read, size, footer, skip_damage)
    return _followed(path, read, size, start, skip_damage)


def _listed(path: str, read: Read, size: int, footer: FileFooter, skip_damage: bool) -> Scanned:
    """Scan the messages that a footer lists, in the order of their offsets."""
    scanning = _begin(path, footer.schema_message)
    digest = hashlib.blake2b(read(HEADER_READ, _FILE_START), digest_size=16)
    messages: dict[int, Message] = {}
    kinds = {**dict.fromkeys(footer.dictionaries, DICTIONARY), **dict.fromkeys(footer.batches, RECORD_BATCH)}
    end = _schema_end(read, footer)
    for at in sorted((*kinds, footer.start)):
        try:
            _check_unlisted(read, end, at)
            if at == footer.start:
                break
            head = read(HEADER_READ, at)
            message = message_at(read, head, at, footer.start)
            if message.kind != kinds[at]:
                raise struct.error("its type differs from that in the footer")
            scanning.check(message)
        except DAMAGE as problem:
            if not skip_damage:
                raise DamageError(_damage(path, at, size, problem)) from None
            _log.warning("%s: the message at byte %d cannot be read: %s", path, at, problem)
            scanning.scan.complete, end = False, footer.start
            continue
        digest.update(head)
        messages[at], end = message, message.end
    for at in kinds:  # in the order of the footer, which is the order of the rows
        if at in messages:
            scanning.add(at, messages[at])
    if list(footer.batches) != sorted(footer.batches):
        digest.update(repr(footer.batches).encode())
    return scanning.finish(read, digest, _FILE_START, end - _FILE_START)


def _schema_end(read: Read, footer: FileFooter) -> int:
    """Return the end of the schema message at the beginning of a file. Polars writes one without a length."""
    try:
        message = message_at(read, read(HEADER_READ, _FILE_START), _FILE_START, footer.start)
    except DAMAGE:
        return footer.start
    return message.end if message.kind == SCHEMA else footer.start


def _check_unlisted(read: Read, end: int, start: int) -> None:
    """Raise ``struct.error`` for an unlisted message between two others: the footer is damaged."""
    if start - end <= len(END_OF_STREAM):
        return
    head = read(HEADER_READ, end)
    try:
        unlisted = struct.unpack_from("<I", head)[0] == CONTINUATION and message_at(read, head, end, start)
    except DAMAGE:
        return  # padding
    if unlisted:
        raise struct.error(f"the footer does not list the message at byte {end}")


def _followed(path: str, read: Read, size: int, start: int, skip_damage: bool) -> Scanned:
    """Scan the messages of a stream, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    scanning: _Scanning | None = None
    at = start
    while at < size:
        try:
            head = read(HEADER_READ, at)
            if _ends_stream(head, at, size):
                if not start:
                    _check_after(read, at + len(END_OF_STREAM), size)
                break
            message = message_at(read, head, at, size)
            if scanning is not None:
                scanning.check(message)
        except DAMAGE as problem:
            if scanning is None or not skip_damage:
                raise DamageError(_damage(path, at, size, problem)) from None
            _log.warning("%s: the message at byte %d cannot be read: %s", path, at, problem)
            scanning.scan.complete = False
            break
        digest.update(head)
        if scanning is None:
            if message.kind != SCHEMA:
                raise DamageError(f"{path}: not an Arrow IPC stream: it does not begin with a schema.")
            scanning = _begin(path, whole_message(read, at, size, message.end))
        scanning.add(at, message)
        at = message.end
    else:
        _log.warning("%s has no end-of-stream marker: it may have been truncated between two record batches", path)
    if scanning is None:
        raise DamageError(f"{path}: no Arrow schema found in {size} bytes: the file is empty or not Arrow IPC.")
    return scanning.finish(read, digest, start, at - start)


def _ends_stream(head: Bytes, at: int, size: int) -> bool:
    """Return True at the end-of-stream marker. Before Arrow 0.15 it was four zero bytes at the end of the file."""
    return head[: len(END_OF_STREAM)] == END_OF_STREAM or (at + 4 == size and head == b"\0\0\0\0")


def _check_after(read: Read, at: int, size: int) -> None:
    """Raise ``struct.error`` unless only zero bytes follow the end of the stream."""
    for start in range(at, size, _ZEROS_READ):
        if any(read(min(_ZEROS_READ, size - start), start)):
            raise struct.error("there is data after the end of the stream, as if files had been concatenated")


def _first_message(path: str, head: bytes, size: int) -> int:
    if size == 0:
        raise DamageError(f"{path}: the file is empty (0 bytes). Remove it, or write it again.")
    if head.startswith(MAGIC):
        return _FILE_START
    if head.startswith(_FEATHER_V1):
        raise FormatError(f"{path}: Feather V1 files have no record batches. Write it again with pyarrow (Feather V2).")
    if head[:4] == b"PAR1":
        raise FormatError(
            f"{path}: this is a Parquet file. Pass format='parquet', or give it a name that ends with .parquet."
        )
    if len(head) >= 8 and struct.unpack_from("<I", head)[0] != CONTINUATION:
        # Before Arrow 0.15 there was no marker: the length came first. A larger value means another format.
        (length,) = struct.unpack_from("<i", head)
        if not 0 < length < min(size, 1 << 24):
            raise DamageError(
                f"{path}: not an Arrow IPC file (it begins with {head[:8]!r}). Pass format=… if it has another format, "
                "else write it again."
            )
    return 0


def _begin(path: str, schema_message: Bytes) -> _Scanning:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(schema_message))
        _ = schema.metadata, schema.to_string()  # invalid UTF-8 is detected only on access
        return _Scanning(schema)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise unreadable(problem, f"{path}: its Arrow schema cannot be read: {problem}") from None


def _damage(path: str, at: int, size: int, problem: Exception) -> str:
    return (
        f"{path}: not a complete Arrow IPC file: the message at byte {at} of {size} cannot be read ({problem}). "
        "The file is probably truncated or damaged: copy or download it again, "
        'or pass on_error="skip" to use the record batches that can be read.'
    )


class BatchReader:
    """Record batches of one file, by offset, in any order.

    pyarrow reads a batch with dictionaries only as part of a stream. Therefore it gets a synthetic stream: the schema,
    then for each batch the dictionaries that differ from those of the last batch, and the batch. Even a file with new
    dictionaries for every batch is read in linear time. Not thread-safe.
    """

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self._feed = _Feed()
        self._stream: pa.RecordBatchStreamReader | None = None
        self._loaded: list[tuple[int, ...]] = []

    def read(self, offset: int, end: int | None, dictionaries: Chains) -> pa.RecordBatch:
        """Return the record batch at an offset. ``end``: upper bound of its end. Raise ``pa.ArrowException``."""
        needed = [_version_at(versions, offset) for versions in dictionaries]
        try:
            if self._stream is None:
                self._feed.give(self._schema_message())
                self._stream = pa.ipc.open_stream(pa.PythonFile(self._feed, mode="r"))
                self._loaded = [()] * len(needed)
            changed = [new for new, old in zip(needed, self._loaded, strict=True) if new != old]
            # Before the first batch pyarrow expects one message of each dictionary, then the deltas.
            bases, deltas = [version[0] for version in changed], [at for version in changed for at in version[1:]]
            for at in (*bases, *deltas):
                self._feed.give(whole_message(self._read, at, self._size))
            self._feed.give(whole_message(self._read, offset, self._size, end))
            batch = self._stream.read_next_batch()
            batch.validate(full=True)  # later casts and takes trust its offsets
        except BaseException as problem:
            self._stream = None  # its dictionaries may be half loaded
            if isinstance(problem, (EOFError, StopIteration, *DAMAGE)):
                raise pa.ArrowInvalid(f"there is no complete record batch at byte {offset}: {problem}") from None
            raise
        finally:
            self._feed.clear()
        self._loaded = needed
        return batch

    def _schema_message(self) -> Bytes:
        if self._read(len(MAGIC), 0) == MAGIC:
            return read_footer(self._read, self._size).schema_message
        return whole_message(self._read, 0, self._size)


def _version_at(versions: tuple[tuple[int, ...], ...], offset: int) -> tuple[int, ...]:
    """Return the messages of a dictionary for the batch at an offset: all of its version. Those after the batch only
    add values that it does not use.
    """
    number = bisect_right(versions, offset, key=lambda version: version[0]) - 1
    return versions[max(0, number)]  # a file may keep its dictionaries after its batches


class _Feed:
    """Python file that returns the bytes it is given."""

    closed = False

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()

    def give(self, data: Bytes) -> None:
        self._parts.append(memoryview(data))

    def clear(self) -> None:
        self._parts.clear()

    def read(self, size: int = -1) -> Any:
        """Return the next bytes of one message. pyarrow never reads across messages."""
        if not self._parts:
            return b""
        part = self._parts.popleft()
        if 0 <= size < len(part):
            self._parts.appendleft(part[size:])
            part = part[:size]
        return part

    def close(self) -> None:
        """Do nothing: no file is open."""


class ArrowFormat(Format):
    """Format whose blocks are record batches. All columns of a block are fetched."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        with store.open(entry) as file:
            found = walk(store.name(entry.path), file.read_at, file.size, skip_damage=skip_damage)
            return replace(found, etag=file.etag)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        with store.open(block.entry) as file:
            return decoded_batch(FileContents(file.read_at, file.size), block, columns)


def decoded_batch(file: FileContents, block: Block, columns: Sequence[str]) -> pa.Table:
    """Return those of the columns that a record batch of a file has, with plain values."""
    return plain_table(BatchReader(*file).read(block.offset, block.end, block.dictionaries), columns)


def plain_table(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Table:
    """Return those of the columns that a record batch has, with plain values."""
    available = set(batch.schema.names)
    present = [name for name in columns if name in available]
    return table_of(present, [plain_array(batch.column(name)) for name in present], batch.num_rows)
