"""ORC: a block is a stripe.

pyarrow does not report the number of rows of a stripe before it reads the stripe. The footer, a protobuf message,
contains it, and the columns with nulls: https://orc.apache.org/specification/ORCv1/
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.orc as po

from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats import Block, Format, Scanned, varint
from midepoch.storage.damage import DamageError, is_damage
from midepoch.storage.stores import Entry, OpenFile, Store

_TAIL = 64 << 10
_NONE, _ZLIB, _SNAPPY, _ZSTD = 0, 1, 2, 5


class OrcFormat(Format):
    """Format whose blocks are stripes. Only the streams of the requested columns are read."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with store.open(entry) as file:
            size = file.size
            tail = file.read_at(min(_TAIL, size), max(0, size - _TAIL))
            try:
                whole = po.ORCFile(file.arrow)
                schema, stripes, rows = whole.schema, whole.nstripes, whole.nrows
                footer = _footer(file, tail, size)
                counts = _counted(whole) if footer is None else [_number(stripe, 5) for stripe in _messages(footer, 3)]
            except (pa.ArrowException, OSError, IndexError, ValueError, zlib.error) as problem:
                if (isinstance(problem, OSError) and not store.local) or not is_damage(problem):
                    raise
                raise DamageError(f"{name}: not a complete ORC file: {problem}. Copy or download it again.") from None
            found = Scanned(schema, etag=file.etag, fingerprint=fingerprint(footer or tail, file.read_at, size))
        if len(counts) != stripes or sum(counts) != rows:
            raise DamageError(f"{name}: its stripes have {sum(counts)} rows, its footer says {rows}: it is damaged.")
        found.decoded_bytes = 3.0 * size
        found.offsets = [i for i, count in enumerate(counts) if count]
        found.rows = [count for count in counts if count]
        try:
            found.nullable = {(each,) for each in schema.names} if footer is None else _nullable(footer, schema, rows)
        except (IndexError, ValueError) as problem:
            raise DamageError(f"{name}: its ORC footer cannot be read: {problem}. Copy or download it again.") from None
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        with store.open(block.entry) as file:
            whole = po.ORCFile(file.arrow)
            names = whole.schema.names
            available = set(names)
            present = [name for name in columns if name in available]
            batch = whole.read_stripe(block.offset, columns=present or names[:1])
        table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
        return table.select(present)


def _counted(whole: po.ORCFile) -> list[int]:
    """Return the rows of each stripe, by reading the first column."""
    first = whole.schema.names[:1]
    return [whole.read_stripe(i, columns=first).num_rows for i in range(whole.nstripes)]


def _footer(file: OpenFile, tail: bytes, size: int) -> bytes | None:
    """Return the decompressed footer. None if it cannot be decompressed (LZ4 blocks have no length)."""
    length = tail[-1]
    script = tail[-1 - length : -1]
    footer_size, codec = _number(script, 1), _number(script, 2)
    end = len(tail) - 1 - length
    raw = tail[end - footer_size : end]
    if footer_size > end:
        raw = file.read_at(footer_size, size - 1 - length - footer_size)
    if len(raw) != footer_size:
        raise ValueError(f"its footer of {footer_size} bytes does not fit into {size} bytes")
    if codec == _NONE:
        return raw
    return b"".join(_chunks(raw, codec)) if codec in (_ZLIB, _SNAPPY, _ZSTD) else None


def _chunks(raw: bytes, codec: int) -> Iterator[bytes]:
    """Yield decompressed pieces. Each follows three bytes: its length, and a flag if it is stored uncompressed."""
    at = 0
    while at + 3 <= len(raw):
        head = int.from_bytes(raw[at : at + 3], "little")
        data = raw[at + 3 : at + 3 + (head >> 1)]
        at += 3 + (head >> 1)
        if head & 1:
            yield data
        elif codec == _ZLIB:
            yield zlib.decompress(data, -15)
        elif codec == _ZSTD:
            yield pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        elif codec == _SNAPPY:
            yield pa.Codec("snappy").decompress(data, varint(data, 0)[0], asbytes=True)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: integers, and bytes for all other types."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            size, at = varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            yield key >> 3, data[at : at + size]
            at += size


def _number(data: bytes, field: int) -> int:
    return next((value for name, value in _fields(data) if name == field and isinstance(value, int)), 0)


def _messages(data: bytes, field: int) -> list[bytes]:
    return [value for name, value in _fields(data) if name == field and isinstance(value, bytes)]


def _nullable(footer: bytes, schema: pa.Schema, rows: int) -> set[tuple[str, ...]]:
    """Return the paths of columns, and of fields inside them, with a null.

    If the writer does not record it, a field with fewer values than its struct has nulls. For lists it is unknown.
    """
    types, statistics = _messages(footer, 4), [dict(_fields(each)) for each in _messages(footer, 7)]
    found: set[tuple[str, ...]] = set()

    def look(path: tuple[str, ...], kind: pa.DataType, number: int, values: int | None) -> None:
        about = statistics[number] if number < len(statistics) else {}
        count = int(about.get(1, 0))
        if about.get(10, not about or (values is not None and count != values)):
            found.add(path)
        if pa.types.is_map(kind):
            path, kind, values = (*path, kind.field(0).name), kind.field(0).type, None
        else:
            values = count if pa.types.is_struct(kind) else None
        for i, child in enumerate(_subtypes(types[number])[: kind.num_fields]):
            look((*path, kind.field(i).name), kind.field(i).type, child, values)

    for field, number in zip(schema, _subtypes(types[0]), strict=False):
        look((field.name,), field.type, number, rows)
    return found


def _subtypes(message: bytes) -> list[int]:
    """Return the numbers of the columns inside a column, in packed or unpacked encoding."""
    packed = b"".join(value for name, value in _fields(message) if name == 2 and isinstance(value, bytes))
    found = [value for name, value in _fields(message) if name == 2 and isinstance(value, int)]
    at = 0
    while at < len(packed):
        value, at = varint(packed, at)
        found.append(value)
    return found
