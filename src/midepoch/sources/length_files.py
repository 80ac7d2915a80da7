"""Sidecars of an index with the row lengths of one column: a header, then one unsigned number for each row.

The numbers have the smallest width that holds the longest, so that 10⁸ lengths of tokens take 200 MB. A sidecar is
opened by its header and a sample of its numbers, then mapped: the cost does not depend on the rows.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from midepoch.sources.length_blocks import Compact, Measured, smallest_dtype
from midepoch.sources.storage import sweep, temporary_path

SUFFIX = ".midepoch-lengths"
VERSION = 1
KEY_BYTES = 16
_MAGIC = b"MIDLENGT"
_FIELDS = struct.Struct(f"<8sII4Q{KEY_BYTES}sII")
"""Magic, version, bytes of a number, rows, total, longest, unreadable rows, key, checksums of the sample and of all
fields before."""
_START = 4096  # of the numbers: one page
_SAMPLES, _SAMPLE = 64, 512
_COPY = 1 << 20
_KEPT_SECONDS = 7 * 24 * 3600
_log = logging.getLogger("midepoch")


@dataclass(frozen=True, eq=False)
class LengthsFile:
    """Contents of a sidecar. ``lengths`` is mapped."""

    lengths: npt.NDArray[Any]
    total: int
    longest: int
    unreadable: int


def read_lengths(path: Path, key: bytes, rows: int | None = None) -> LengthsFile | None:
    """Return the contents of a sidecar, or None if it is missing, damaged, of another key or of other rows."""
    try:
        with path.open("rb") as file:
            head = file.read(_FIELDS.size)
            magic, version, width, count, total, longest, unreadable, found, sample, checksum = _FIELDS.unpack(head)
            if magic != _MAGIC or version != VERSION or zlib.crc32(head[:-4]) != checksum:
                raise ValueError("its header is damaged, or of another version")
            if found != key or (rows is not None and count != rows):
                raise ValueError("it belongs to other data")
            dtype = smallest_dtype(longest)
            if dtype.itemsize != width or os.fstat(file.fileno()).st_size != _START + count * width:
                raise ValueError("it has another size")
            lengths = np.asarray(np.memmap(file, dtype, "r", _START, (count,)) if count else np.empty(0, dtype))
        if _sample(lengths) != sample:
            raise ValueError("its numbers are damaged")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error, OverflowError) as problem:
        _log.info("the row lengths %s cannot be used and are made again: %s", path, problem)
        return None
    return LengthsFile(lengths, total, longest, unreadable)


def write_lengths(path: Path, key: bytes, parts: Iterable[Measured]) -> None:
    """Write a sidecar atomically, part by part. Raise OSError, and leave nothing, if it cannot be written."""
    sweep(path.parent, f".{path.name}.*.tmp")
    temporary = temporary_path(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "w+b", buffering=0) as file:
            _write(file, key, parts)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_old(path: Path, pattern: str) -> None:
    """Remove sidecars of the same column for earlier contents. A week later no process uses them."""
    for old in path.parent.glob(pattern):
        with suppress(OSError):
            if old != path and old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                old.unlink()


def _write(file: BinaryIO, key: bytes, parts: Iterable[Measured]) -> None:
    dtype = smallest_dtype(0)
    rows = total = longest = unreadable = 0
    file.seek(_START)
    for part in parts:
        if (needed := smallest_dtype(part.longest)).itemsize > dtype.itemsize:
            _widen(file, rows, dtype, needed)
            dtype = needed
        for piece in part.pieces:
            _put(file, piece.astype(dtype, copy=False))
        rows, total, unreadable = rows + part.rows, total + part.total, unreadable + part.unreadable
        longest = max(longest, part.longest)
    file.truncate(_START + rows * dtype.itemsize)
    sample = _sample(np.asarray(np.memmap(file, dtype, "r", _START, (rows,)))) if rows else 0
    head = _FIELDS.pack(_MAGIC, VERSION, dtype.itemsize, rows, total, longest, unreadable, key, sample, 0)[:-4]
    file.seek(0)
    file.write(head + struct.pack("<I", zlib.crc32(head)))


def _put(file: BinaryIO, numbers: Compact) -> None:
    data = np.ascontiguousarray(numbers).view(np.uint8).data
    while len(data):  # a raw file may write less than it is given
        data = data[file.write(data) :]


def _widen(file: BinaryIO, rows: int, dtype: np.dtype[Any], wider: np.dtype[Any]) -> None:
    """Write the numbers so far in a wider dtype, from the last to the first, so that none is overwritten unread."""
    for stop in range(rows, 0, -_COPY):
        start = max(0, stop - _COPY)
        file.seek(_START + start * dtype.itemsize)
        data = bytearray()
        while missing := (stop - start) * dtype.itemsize - len(data):
            data += file.read(missing)
        file.seek(_START + start * wider.itemsize)
        _put(file, np.frombuffer(data, dtype).astype(wider))
    file.seek(_START + rows * wider.itemsize)


def _sample(lengths: npt.NDArray[Any]) -> int:
    """Return a checksum of up to 64 ranges of numbers, spread evenly, the first and the last among them."""
    last = max(0, len(lengths) - _SAMPLE)
    starts = np.unique(np.linspace(0, last, _SAMPLES).astype(np.int64)) if last else np.zeros(1, np.int64)
    checksum = 0
    for start in starts.tolist():
        checksum = zlib.crc32(np.ascontiguousarray(lengths[start : start + _SAMPLE]).data, checksum)
    return checksum
