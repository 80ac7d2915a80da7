"""Shards of samples: their offsets, and their contents, which may be compressed as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.sources.damage import DamageError
from midepoch.sources.formats.records import Bytes, Int64Array
from midepoch.sources.stores import Entry, OpenFile

_MARGIN = 2 << 20
"""Compressed bytes that may be needed for the first bytes of the contents: bz2 has blocks of 900 kB."""
_STREAMS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}


@dataclass(frozen=True)
class ShardFile:
    """A file, its compression (None for a plain one), and the size of its contents."""

    entry: Entry
    codec: str | None
    size: int


def beginning(file: OpenFile, shard: ShardFile, size: int, name: str) -> bytes:
    """Return the first bytes of the contents: all of them if there are fewer than ``size``."""
    if shard.codec is None:
        return file.read_at(min(size, shard.size), 0)
    return _decompressed(file, shard, size, name)


def contents_of(file: OpenFile, shard: ShardFile, begin: int, end: int, name: str) -> Bytes:
    """Return a range of the contents. A compressed file is decompressed up to its end."""
    plain = shard.codec is None
    data = file.read_at(end - begin, begin) if plain else _decompressed(file, shard, end, name)[begin:]
    if len(data) != end - begin:
        raise CorruptBlockError(f"{name}: its contents end {end - begin - len(data)} bytes too early.")
    return np.frombuffer(data, np.uint8)


def _decompressed(file: OpenFile, shard: ShardFile, size: int, name: str) -> bytes:
    assert shard.codec is not None
    if shard.codec not in (*_STREAMS, "snappy"):
        known = ", ".join((*_STREAMS, "snappy"))
        raise FormatError(f"{name}: the compression {shard.codec!r} is unknown, expected one of {known}.")
    partial = size < shard.size and shard.codec != "snappy"  # which is not a stream: there is no way to stop early
    packed = file.read_at(min(file.size, size + size // 64 + _MARGIN) if partial else file.size, 0)
    try:
        if shard.codec == "snappy":
            return bytes(pa.decompress(packed, shard.size, "snappy", asbytes=True)[:size])
        return _unpacked(packed, _STREAMS[shard.codec], size if partial else None)
    except (OSError, pa.ArrowException) as problem:
        raise CorruptBlockError(f"{name} cannot be decompressed: {problem}.") from None


def _unpacked(packed: bytes, codec: str, size: int | None) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
        return bytes(stream.read() if size is None else stream.read(size))


def offsets_in(head: bytes, samples: int, name: str, least: int | None = None) -> Int64Array:
    """Return the offsets of all samples, and the end of the last one, from the beginning of a shard.

    ``least``: the smallest possible offset; default: that of the end of the offsets.
    """
    table = 4 * (samples + 2)
    if len(head) < table:
        raise DamageError(f"{name}: it is too short for the offsets of {samples} samples. Copy or download it again.")
    count = int.from_bytes(head[:4], "little")
    if count != samples:
        raise DamageError(f"{name}: it has {count} samples, its index.json says {samples}. Copy or download it again.")
    offsets = np.frombuffer(head, "<u4", samples + 1, 4).astype(np.int64)
    wrong = np.flatnonzero(np.diff(offsets) < 0)
    if len(wrong) or offsets[0] < (table if least is None else least):
        raise damaged_offset(name, int(wrong[0]) if len(wrong) else 0)
    return offsets


def damaged_offset(name: str, sample: int) -> FormatError:
    """Return the error for an offset that cannot be right."""
    return DamageError(f"{name}: the offset of sample {sample} is damaged. Copy or download it again.")


def packed_footer(about: dict[str, Any], offsets: Int64Array) -> bytes:
    """Return all that the decoding of a block needs. The offsets of samples of one size are two numbers."""
    steps = np.diff(offsets)
    uniform = len(steps) > 0 and bool((steps == steps[0]).all())
    text = json.dumps({**about, "uniform": [int(offsets[0]), int(steps[0])] if uniform else None}).encode()
    return len(text).to_bytes(4, "little") + text + (b"" if uniform else offsets.astype("<u4").tobytes())


def footer_parts(footer: bytes) -> tuple[dict[str, Any], Int64Array]:
    """Return the two arguments of ``packed_footer``."""
    length = int.from_bytes(footer[:4], "little")
    about = json.loads(footer[4 : 4 + length])
    if about["uniform"] is not None:
        start, step = about["uniform"]
        return about, start + step * np.arange(about["samples"] + 1, dtype=np.int64)
    return about, np.frombuffer(footer, "<u4", about["samples"] + 1, 4 + length).astype(np.int64)
