"""File of a decoded block: a header of 64 bytes, then an Arrow stream of one record batch.

The header contains the identity of the block and its data, the number of rows, and the checksum of the rest. All of it
is checked when a block is opened.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from midepoch.sources.resources import retried

_MAGIC = b"MEBLOCK2"
_HEADER = struct.Struct("<8s16sqqI")  # magic, identity, rows, bytes of the rest, their CRC-32
_HEADER_BYTES = 64  # keeps the alignment that Arrow needs


@dataclass(frozen=True)
class BlockFile:
    """File of one block. ``identity`` (16 bytes) identifies the block and its data. For ``mapped`` see ``read``."""

    path: Path
    identity: bytes
    mapped: bool

    def read(self, *, trusted: bool = False) -> pa.RecordBatch:
        """Return the rows. Raise OSError, or ValueError if the file is not valid.

        Mapped files share their memory between processes. Files on a network file system are read instead: a mapped
        page of a file that another machine has removed would crash the process. ``trusted``: just written by this
        process.
        """
        content = retried(self._content, str(self.path))
        if content.size < _HEADER_BYTES:
            raise ValueError(f"it has {content.size} bytes")
        magic, identity, rows, size, checksum = _HEADER.unpack_from(content)
        body = content.slice(_HEADER_BYTES)
        if magic != _MAGIC or identity != self.identity:
            raise ValueError("it is not this block")
        if size != body.size or (not trusted and zlib.crc32(body) != checksum):
            raise ValueError("its checksum differs")
        try:
            batch = pa.ipc.open_stream(body).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as problem:
            raise ValueError(str(problem)) from None
        if batch.num_rows != rows:
            raise ValueError(f"it has {batch.num_rows} rows instead of {rows}")
        return batch

    def _content(self) -> pa.Buffer:
        if self.mapped:
            return pa.memory_map(str(self.path)).read_buffer()
        with pa.OSFile(str(self.path)) as file:
            return file.read_buffer()

    def write(self, batch: pa.RecordBatch) -> int:
        """Write the rows to this path, under which no reader looks for a block yet. Return the number of bytes."""
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with pa.OSFile(str(self.path), "wb") as sink:
            sink.write(bytes(_HEADER_BYTES))
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
        body = self._content().slice(_HEADER_BYTES)
        header = _HEADER.pack(_MAGIC, self.identity, batch.num_rows, body.size, zlib.crc32(body))
        with self.path.open("r+b") as file:
            file.write(header)
        return int(body.size) + _HEADER_BYTES
