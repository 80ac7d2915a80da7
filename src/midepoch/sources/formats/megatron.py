"""Megatron's indexed datasets: tokens in ``PREFIX.bin``, their lengths and positions in ``PREFIX.idx``.

A row is a document. Blocks are documents in equal numbers, so that opening reads two headers and no lengths. Each
prefix is two entries: first the ``.idx``, which has no rows, then the ``.bin``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats.base import Block, FileContents, Format, Scanned
from midepoch.storage.stores import Entry, OpenFile, Store

COLUMN, LENGTHS, MODES = "input_ids", "sequence_lengths", "modes"
BLOCK_BYTES = 8 << 20
_MOST_ROWS = 1 << 20
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
Room = Callable[[int], Any]
"""Function that returns memory for a number of bytes, as an array."""


@dataclass(frozen=True)
class IndexHeader:
    """Header of an index: the type of the tokens, and the numbers of sequences and documents."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int
    has_modes: bool

    @staticmethod
    def of(name: str, index: FileContents) -> IndexHeader:
        """Parse the header of an index."""
        head, size = bytes(index.read(_HEADER.size, 0)), index.size
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise FormatError(f"{name} is not an index of Megatron: it begins with {head[:9]!r}. Check the path.")
        _, version, code, sequences, offsets = _HEADER.unpack(head[: _HEADER.size])
        if version != 1 or code not in _DTYPES:
            raise FormatError(f"{name}: version {version} with type {code} is unknown. Version 1 can be read.")
        least = _HEADER.size + 12 * sequences + 8 * offsets
        if size not in (least, least + sequences) or not offsets:
            raise FormatError(f"{name} has {size} bytes, its header promises {least}. Copy or download it again.")
        return IndexHeader(np.dtype(_DTYPES[code]), sequences, offsets - 1, size > least)

    @property
    def joined(self) -> bool:
        """True if a document may consist of several sequences."""
        return self.documents != self.sequences

    @property
    def schema(self) -> pa.Schema:
        fields = [pa.field(COLUMN, pa.list_(pa.from_numpy_dtype(self.dtype)))]
        if self.joined:
            fields.append(pa.field(LENGTHS, pa.list_(pa.int32())))
        if self.has_modes:
            fields.append(pa.field(MODES, pa.list_(pa.int8())))
        return pa.schema(fields)

    def documents_at(self, index: FileContents, start: int, stop: int) -> _Documents:
        """Return the lengths and positions of some documents. Raise ValueError if they are damaged."""
        bounds = _array(index, "<i8", _HEADER.size + 12 * self.sequences + 8 * start, stop - start + 1)
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > self.sequences:
            raise ValueError(f"the document indices of documents {start} to {stop - 1} are not in order")
        if not self.joined and (bounds != np.arange(start, stop + 1)).any():
            raise ValueError(f"documents {start} to {stop - 1} are not one sequence each")
        first, last = int(bounds[0]), int(bounds[-1])
        lengths = _array(index, "<i4", _HEADER.size + 4 * first, last - first)
        pointers = _array(index, "<i8", _HEADER.size + 4 * self.sequences + 8 * first, last - first)
        if len(lengths) and (lengths.min() < 0 or pointers.min() < 0 or (pointers % self.dtype.itemsize).any()):
            number = int(np.flatnonzero((lengths < 0) | (pointers < 0) | (pointers % self.dtype.itemsize != 0))[0])
            raise ValueError(f"sequence {first + number} has length {lengths[number]} at byte {pointers[number]}")
        modes = None
        if self.has_modes:
            start_of_modes = _HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)
            modes = _array(index, "i1", start_of_modes + first, len(lengths))
        return _Documents(bounds - first, lengths, pointers, modes)


@dataclass(frozen=True)
class _Documents:
    """Sequences of some documents: document d has those from ``bounds[d]`` to ``bounds[d + 1]``."""

    bounds: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None

    def ends(self, width: int) -> npt.NDArray[np.int64]:
        """Return the byte after each sequence."""
        return self.pointers + self.lengths.astype(np.int64) * width


class MegatronFormat(Format):
    """Format whose rows are documents: their tokens, and the lengths of their sequences if they have several."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        if entry.path.endswith(".idx"):
            with store.open(entry) as file:
                header = _header(store.name(entry.path), file)
                return Scanned(header.schema, etag=file.etag, fingerprint=fingerprint(b"idx", file.read_at, file.size))
        index = index_of(store, entry)
        with store.open(index) as file:
            header, etag = _header(store.name(index.path), file), file.etag
        with store.open(entry) as file:
            found = Scanned(header.schema, etag=file.etag, fingerprint=fingerprint(b"bin", file.read_at, file.size))
        mean = max(1, entry.size // max(1, header.documents))
        step = max(1, min(_MOST_ROWS, BLOCK_BYTES // mean))
        found.offsets = list(range(0, header.documents, step))
        found.rows = [min(step, header.documents - first) for first in found.offsets]
        found.stop = header.documents
        found.decoded_bytes = float(entry.size)
        found.footer = json.dumps([index.size, index.mtime_ns, etag]).encode()
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        index = Entry(_index_path(block.entry.path), *json.loads(block.footer))
        with store.open(index) as beside, store.open(block.entry) as file:
            pair = FileContents(beside.read_at, beside.size), FileContents(file.read_at, file.size)
            batch = _batch(store.name(index.path), *pair, block, lambda size: np.empty(size, np.uint8))
        return pa.Table.from_batches([batch]).select([name for name in columns if name in batch.schema.names])

    def view(
        self,
        file: pa.Buffer,
        beside: Callable[[], pa.Buffer],
        block: Block,
        schema: pa.Schema,
        room: Room,
    ) -> pa.RecordBatch:
        """Return a block of a mapped file. Its tokens are not copied, its offsets are written to ``room``."""
        index, tokens = FileContents.mapped(beside()), FileContents.mapped(file)
        batch = _batch(_index_path(block.entry.path), index, tokens, block, room)
        return batch if batch.schema.equals(schema) else _fitted(batch, schema)


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns and types that several files have in common."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def index_of(store: Store, entry: Entry) -> Entry:
    """Return the index of a ``.bin`` file."""
    path = _index_path(entry.path)
    found = store.stat(path)
    if found is None:
        raise DataNotFoundError(
            f"{store.name(path)} does not exist. {store.name(entry.path)} cannot be read without it."
        )
    return found


def _index_path(path: str) -> str:
    return path.removesuffix(".bin") + ".idx"


def _header(name: str, file: OpenFile) -> IndexHeader:
    return IndexHeader.of(name, FileContents(file.read_at, file.size))


def _array(index: FileContents, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    kind = np.dtype(dtype)
    data = index.read(count * kind.itemsize, offset)
    if len(data) != count * kind.itemsize:
        raise ValueError(f"its index ends at byte {offset + len(data)} instead of {offset + count * kind.itemsize}")
    return np.frombuffer(data, kind)


def _batch(name: str, index: FileContents, tokens: FileContents, block: Block, room: Room) -> pa.RecordBatch:
    """Return the documents of a block. ``name``: that of the index."""
    assert block.end is not None
    header = IndexHeader.of(name, index)
    documents = header.documents_at(index, block.offset, block.end)
    width, bounds, lengths, pointers = header.dtype.itemsize, documents.bounds, documents.lengths, documents.pointers
    stops = documents.ends(width)
    start, stop = (int(pointers.min()), int(stops.max())) if len(pointers) else (0, 0)
    if stop > tokens.size:
        sequence = int(np.flatnonzero(stops > tokens.size)[0])
        document = block.offset + int(np.searchsorted(bounds, sequence, side="right")) - 1
        raise ValueError(f"document {document} ends at byte {stops[sequence]} of a file of {tokens.size} bytes")
    data = pa.py_buffer(tokens.read(stop - start, start))
    if (stops[:-1] != pointers[1:]).any():  # sequences are not one after the other
        flat, firsts = np.frombuffer(data, header.dtype), (pointers - start) // width
        parts = [flat[first : first + length] for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)]
        data = pa.py_buffer(np.concatenate(parts))
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = pa.Array.from_buffers(pa.from_numpy_dtype(header.dtype), int(ends[-1]), [None, data])
    columns = [_lists(values, ends[bounds], room)]
    if header.joined:
        columns.append(_lists(_copied(lengths, pa.int32(), room), bounds, room))
    if documents.modes is not None:
        columns.append(_lists(_copied(documents.modes, pa.int8(), room), bounds, room))
    return pa.RecordBatch.from_arrays(columns, schema=header.schema)


def _lists(values: pa.Array, ends: npt.NDArray[np.int64], room: Room) -> pa.Array:
    if ends[-1] > np.iinfo(np.int32).max:
        raise FormatError(f"a block of {len(ends) - 1} documents has {ends[-1]} tokens, more than 2³¹. Split the file.")
    offsets = _copied(ends, pa.int32(), room).buffers()[1]
    return pa.Array.from_buffers(pa.list_(values.type), len(ends) - 1, [None, offsets], children=[values])


def _copied(values: npt.NDArray[Any], kind: pa.DataType, room: Room) -> pa.Array:
    dtype = np.dtype(kind.to_pandas_dtype())
    part = room(len(values) * dtype.itemsize)
    part.view(dtype)[:] = values
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(part)])
