"""Contents of shards that may be compressed as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.sources.formats.records import Bytes
from midepoch.sources.stores import Entry, OpenFile

_STREAMS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}


@dataclass(frozen=True)
class Shard:
    """A file, its compression (None for a plain one), and the size of its contents."""

    entry: Entry
    codec: str | None
    size: int


def beginning(file: OpenFile, shard: Shard, size: int, name: str) -> bytes:
    """Return the first bytes of the contents."""
    size = min(size, shard.size)
    if shard.codec is None:
        return file.read_at(size, 0)
    return _decompressed(file, shard, size, name)


def contents_of(file: OpenFile, shard: Shard, begin: int, end: int, name: str) -> Bytes:
    """Return a range of the contents. A compressed file is decompressed up to its end."""
    if shard.codec is None:
        data = file.read_at(end - begin, begin)
    else:
        data = _decompressed(file, shard, end, name)[begin:]
    if len(data) != end - begin:
        raise CorruptBlockError(f"{name}: {len(data)} of {end - begin} bytes could be read. Copy it again.")
    return np.frombuffer(data, np.uint8)


def _decompressed(file: OpenFile, shard: Shard, size: int, name: str) -> bytes:
    assert shard.codec is not None
    try:
        if shard.codec == "snappy":  # not a stream: there is no way to stop early
            packed = file.read_at(file.size, 0)
            return bytes(pa.Codec("snappy").decompress(packed, shard.size, asbytes=True)[:size])
        if shard.codec not in _STREAMS:
            known = ", ".join((*_STREAMS, "snappy"))
            raise FormatError(f"{name}: the compression {shard.codec!r} is unknown. Use one of {known}.")
        with pa.CompressedInputStream(file.arrow, _STREAMS[shard.codec]) as stream:
            data = bytes(stream.read(size))
    except OSError as problem:
        if type(problem) is not OSError or "compress" not in str(problem).lower():
            raise
        raise CorruptBlockError(f"{name} cannot be decompressed: {problem}. Copy or download it again.") from None
    if len(data) < size:
        raise CorruptBlockError(f"{name}: its contents end after {len(data)} of {size} bytes. Copy it again.")
    return data
