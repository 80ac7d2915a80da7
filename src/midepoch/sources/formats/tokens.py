"""Flat files of tokens, cut into sequences of a length that is chosen when they are opened.

- ``.npy`` files of NumPy: the type is in the header
- raw files of unsigned integers, as written by nanoGPT, OLMo (whose ``.npy`` files are raw) and datatrove (nanotron)
- the ``.bin`` files of llm.c and modded-nanogpt: a header of 1,024 bytes, then raw tokens
"""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats.base import Block, FileContents, Format, Scanned
from midepoch.storage.stores import Entry, Store

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
            dtype, start, stop = _layout(name, FileContents(file.read_at, file.size), self._dtype)
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

    def view(
        self,
        file: pa.Buffer,
        beside: Callable[[], pa.Buffer],
        block: Block,
        schema: pa.Schema,
        room: Callable[[int], Any],
    ) -> pa.RecordBatch:
        """Return a block of a mapped file without a copy."""
        batch = self._batch(block.entry.path, FileContents.mapped(file), block)
        return batch if batch.schema.equals(schema) else batch.cast(schema)

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


def _layout(name: str, file: FileContents, given: str) -> tuple[np.dtype[Any], int, int]:
    """Return the type of the tokens, and the range of their bytes."""
    head, size = bytes(file.read(_LLMC_BYTES, 0)), file.size
    if head.startswith(_NPY):
        dtype, start, count = _npy(name, head, file)
        if given and np.dtype(given) != dtype:
            raise FormatError(f"{name} contains {dtype} by its header, not {given}. Omit dtype.")
        return dtype, start, _promised(name, start + count * dtype.itemsize, size)
    words = struct.unpack("<3i", head[:12]) if len(head) == _LLMC_BYTES else (0, 0, 0)
    if words[0] in _LLMC and words[2] >= 0:
        dtype = np.dtype(_LLMC[words[0]])
        return dtype, _LLMC_BYTES, _promised(name, _LLMC_BYTES + words[2] * dtype.itemsize, size)
    if not given:
        raise FormatError(f"{name} is a raw file of tokens, without their type. Pass dtype='uint16', or the type used.")
    dtype = np.dtype(given)
    if size % dtype.itemsize:
        raise FormatError(f"{name} has {size} bytes, not a multiple of the {dtype.itemsize} of {given}. Check dtype.")
    return dtype, 0, size


def _promised(name: str, stop: int, size: int) -> int:
    if stop > size:
        raise FormatError(f"{name} has {size} bytes, its header promises {stop}. Copy or download it again.")
    return stop


def _npy(name: str, head: bytes, file: FileContents) -> tuple[np.dtype[Any], int, int]:
    """Return the type, the first byte and the number of the values of a NumPy file."""
    wide = head[6:7] > b"\x01"
    size = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    start = (12 if wide else 10) + size
    try:
        header = ast.literal_eval(bytes(file.read(size, start - size)).decode("latin-1").strip())
        dtype, shape = np.dtype(header["descr"]), tuple(map(int, header["shape"]))
    except (ValueError, SyntaxError, KeyError, TypeError) as problem:
        raise FormatError(f"{name}: its NumPy header cannot be read ({problem}). Copy or download it again.") from None
    if any(count < 0 for count in shape):
        raise FormatError(f"{name} has the shape {shape} according to its NumPy header. Copy or download it again.")
    if dtype.str[1:] not in {np.dtype(each).str[1:] for each in DTYPES} or dtype.byteorder == ">":
        raise FormatError(f"{name} contains {header['descr']}, tokens are expected: integers, little-endian.")
    if len(shape) > 1 and header.get("fortran_order"):
        raise FormatError(f"{name} is stored by columns (Fortran order). Write it with np.ascontiguousarray.")
    return dtype, start, math.prod(shape)
