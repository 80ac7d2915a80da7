"""Tokenized files. Flat files are cut into sequences of a length that is chosen when they are opened:

- ``.npy`` files of NumPy: the type is in the header
- raw files of unsigned integers, as written by nanoGPT, OLMo (whose ``.npy`` files are raw) and datatrove (nanotron)
- the ``.bin`` files of llm.c and modded-nanogpt: a header of 1,024 bytes, then raw tokens

Megatron's indexed datasets have tokens in ``PREFIX.bin``, and their lengths and positions in ``PREFIX.idx``. A row is a
document. Blocks are documents in equal numbers, so that opening reads two headers and no lengths. Each prefix is two
entries: first the ``.idx``, which has no rows, then the ``.bin``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats import Block, FileContents, Format, Room, Scanned
from midepoch.storage.stores import Entry, OpenFile, Store

COLUMN = "input_ids"
BLOCK_BYTES = 8 << 20
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
MOST_TOKENS = (1 << 31) - 1
"""Maximum length of a sequence, that of Arrow's lists of a fixed size."""
_NPY = b"\x93NUMPY"
_LLMC = {20240520: "uint16", 20240801: "uint32"}
_LLMC_BYTES = 1024


class TokensFormat(Format):
    """Format whose rows are sequences of ``length`` tokens. ``dtype`` is that of raw files, empty if it is unknown."""

    def __init__(self, dtype: str, length: str) -> None:
        self._dtype, self._length = dtype, int(length)

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with store.open(entry) as file:
            dtype, start, stop = _layout(name, FileContents(file.read_at, file.size), self._dtype, self._length)
            found = Scanned(_schema(dtype, self._length), etag=file.etag)
            found.fingerprint = fingerprint(f"{dtype} {self._length}".encode(), file.read_at, file.size)
        row = self._length * dtype.itemsize
        rows = (stop - start) // row
        step = max(1, BLOCK_BYTES // row)
        found.rows = [min(step, rows - first) for first in range(0, rows, step)]
        found.offsets = [start + first * row for first in range(0, rows, step)]
        found.stop = start + rows * row
        found.decoded_bytes = float(rows * row)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        with store.open(block.entry) as file:
            batch = self._batch(store.name(block.entry.path), FileContents(file.read_at, file.size), block)
        return pa.Table.from_batches([batch]).select(columns)

    def view(self, file: pa.Buffer, beside: Callable[[], pa.Buffer], block: Block, room: Room) -> pa.RecordBatch:
        """Return a block of a mapped file without a copy."""
        return self._batch(block.entry.path, FileContents.mapped(file), block)

    def _batch(self, name: str, file: FileContents, block: Block) -> pa.RecordBatch:
        assert block.end is not None
        dtype, _, _ = _layout(name, file, self._dtype)
        size, schema = block.end - block.offset, _schema(dtype, self._length)
        data, kind, tokens = pa.py_buffer(file.read(size, block.offset)), schema.field(0).type, size // dtype.itemsize
        values = pa.Array.from_buffers(kind.value_type, tokens, [None, data])
        rows = pa.Array.from_buffers(kind, tokens // self._length, [None], children=[values])
        return pa.RecordBatch.from_arrays([rows], schema=schema)


def _schema(dtype: np.dtype[Any], length: int) -> pa.Schema:
    return pa.schema([pa.field(COLUMN, pa.list_(pa.from_numpy_dtype(dtype), length))])


def _layout(name: str, file: FileContents, given: str, length: int = 1) -> tuple[np.dtype[Any], int, int]:
    """Return the type of the tokens, and the range of their bytes. Warn if sequences of a length cross rows."""
    head, size = bytes(file.read(_LLMC_BYTES, 0)), file.size
    if head.startswith((b"PK\x03\x04", b"PAR1")):
        what = "Parquet" if head.startswith(b"PAR1") else "an archive (.npz or .pt)"
        raise FormatError(
            f"{name} is {what}, not tokens. "
            + (
                "For lists of tokens, use from_files(path).pack(length, 'its column')."
                if what == "Parquet"
                else "Load it, and write the tokens with numpy.save('tokens.npy', …)."
            )
        )
    if head.startswith(_NPY):
        dtype, start, count = _npy(name, head, file, length)
        if given and np.dtype(given) != dtype:
            raise FormatError(f"{name} contains {dtype} by its header, not {given}. Omit dtype.")
        return dtype, start, _promised(name, start + count * dtype.itemsize, size)
    words = struct.unpack("<3i", head[:12]) if len(head) == _LLMC_BYTES else (0, 0, 0)
    if words[0] in _LLMC and words[2] >= 0:
        dtype = np.dtype(_LLMC[words[0]])
        return dtype, _LLMC_BYTES, _promised(name, _LLMC_BYTES + words[2] * dtype.itemsize, size)
    if not given:
        if head and head.isascii() and head.translate(None, b"\t\r\n").decode().isprintable():
            raise FormatError(f"{name} is text, not tokens. Use from_files({name!r}).tokenize(tokenizer).pack(2048).")
        raise FormatError(f"{name} is a raw file of tokens, without their type. Pass dtype='uint16', or the type used.")
    dtype = np.dtype(given)
    if size % dtype.itemsize:
        raise FormatError(f"{name} has {size} bytes, not a multiple of the {dtype.itemsize} of {given}. Check dtype.")
    return dtype, 0, size


def _promised(name: str, stop: int, size: int) -> int:
    if stop > size:
        raise FormatError(f"{name} has {size} bytes, its header promises {stop}. Copy or download it again.")
    return stop


_NPY_HEADER = re.compile(
    r"\{\s*'descr':\s*'(?P<descr>[^']*)',\s*'fortran_order':\s*(?P<fortran>True|False),\s*"
    r"'shape':\s*\((?P<shape>[-\d, ]*)\)\s*,?\s*\}"
)


def _npy(name: str, head: bytes, file: FileContents, length: int) -> tuple[np.dtype[Any], int, int]:
    """Return the type, the first byte and the number of the values of a NumPy file."""
    wide = head[6:7] > b"\x01"
    size = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    start = (12 if wide else 10) + size
    try:
        # Not by ast.literal_eval: threads index files, and in CPython 3.11 those that parse disturb each other.
        header = _NPY_HEADER.fullmatch(bytes(file.read(size, start - size)).decode("latin-1").strip())
        if header is None:
            raise ValueError("it is no dict of descr, fortran_order and shape")
        dtype, shape = np.dtype(header["descr"]), tuple(map(int, header["shape"].replace(",", " ").split()))
    except (ValueError, TypeError) as problem:
        raise FormatError(f"{name}: its NumPy header cannot be read ({problem}). Copy or download it again.") from None
    if any(count < 0 for count in shape):
        raise FormatError(f"{name} has the shape {shape} according to its NumPy header. Copy or download it again.")
    if dtype.str[1:] not in {np.dtype(each).str[1:] for each in DTYPES} or dtype.byteorder == ">":
        raise FormatError(f"{name} contains {header['descr']}, tokens are expected: integers, little-endian.")
    if len(shape) > 1 and shape[-1] % length:
        warn_once(
            "%s has the shape %s: sequences of %s tokens cross the ends of its rows. To keep the rows, pass %s.",
            *map(str, (name, shape, length, shape[-1])),
        )
    if len(shape) > 1 and header["fortran"] == "True":
        raise FormatError(f"{name} is stored by columns (Fortran order). Write it with np.ascontiguousarray.")
    return dtype, start, math.prod(shape)


LENGTHS, MODES = "sequence_lengths", "modes"
_MOST_ROWS = 1 << 20
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


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

    def documents_at(self, index: FileContents, start: int, stop: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the first sequence of each of some documents, and the lengths, positions and modes of all sequences.

        Raise ValueError if they are damaged.
        """
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
        end = _HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)
        modes = _array(index, "i1", end + first, len(lengths)) if self.has_modes else lengths[:0]
        return bounds - first, lengths, pointers, modes


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

    def view(self, file: pa.Buffer, beside: Callable[[], pa.Buffer], block: Block, room: Room) -> pa.RecordBatch:
        """Return a block of a mapped file. Its tokens are not copied, its offsets are written to ``room``."""
        index, tokens = FileContents.mapped(beside()), FileContents.mapped(file)
        return _batch(_index_path(block.entry.path), index, tokens, block, room)


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
    bounds, lengths, pointers, modes = header.documents_at(index, block.offset, block.end)
    width = header.dtype.itemsize
    stops = pointers + lengths.astype(np.int64) * width
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
    if header.has_modes:
        columns.append(_lists(_copied(modes, pa.int8(), room), bounds, room))
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
