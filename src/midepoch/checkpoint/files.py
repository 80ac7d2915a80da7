"""Files of a checkpoint: written as a stream with checksums, read in parallel and verified against them.

The checksums of a file are the CRC-32 of each 32 MiB: pieces are verified in parallel, 4 GB/s per core.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from midepoch.errors import CheckpointDamagedError

Bytes = npt.NDArray[np.uint8]
PIECE = 32 << 20
_LARGE = 1 << 20
"""Bytes from which a checksum is computed in a thread of its own."""
_READERS, _CHUNK = 4, 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Checksums:
    """Size of a file and the CRC-32 of each piece."""

    size: int
    crc32: tuple[int, ...]


class Sink(Protocol):
    """Target of a write: takes all bytes, in order, or raises OSError."""

    def write(self, data: memoryview, /) -> Any: ...


class FileSource(Protocol):
    """File that several threads can read at any offset; returns fewer bytes than requested only at its end."""

    size: int
    chunk: int  # bytes per read: enough for full throughput, little memory

    def read_into(self, data: memoryview, offset: int, /) -> int: ...


class ChecksumSink:
    """Computes checksums of data that it passes on, if to another sink; of large pieces while they are written."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink, self._size, self._crc = sink, 0, 0
        self._pieces: list[int] = []

    def write(self, data: memoryview, /) -> None:
        while len(data):
            room = PIECE - self._size % PIECE
            part, data = data[:room], data[room:]
            crc = _beside(self._sink is not None and len(part) > _LARGE, zlib.crc32, part, self._crc)
            if self._sink is not None:
                self._sink.write(part)
            self._crc = crc()
            self._size += len(part)
            if not self._size % PIECE:
                self._pieces.append(self._crc)
                self._crc = 0

    @property
    def checksums(self) -> Checksums:
        rest = (self._crc,) if self._size % PIECE else ()
        return Checksums(self._size, (*self._pieces, *rest))


def read_verified(source: FileSource, sums: Checksums, name: str) -> Bytes:
    """Return all bytes of a file. Raises CheckpointDamagedError unless they are those that were written."""
    data = np.empty(sums.size if source.size == sums.size else 0, np.uint8)

    def keep(part: memoryview, offset: int) -> None:
        data[offset : offset + len(part)] = part

    verify_file(source, sums, name, keep)
    return data


def verify_file(
    source: FileSource, sums: Checksums, name: str, keep: Callable[[memoryview, int], None] | None = None
) -> None:
    """Raise CheckpointDamagedError unless a file is what was written; holds only a few chunks in memory.

    ``keep`` receives each chunk and its offset, in several threads.
    """
    if source.size != sums.size:
        raise CheckpointDamagedError(f"{name} has {source.size} bytes, {sums.size} were written")

    def verify_piece(number: int) -> None:
        start = number * PIECE
        stop = min(start + PIECE, sums.size)
        crc = 0
        chunk = np.empty(min(source.chunk, stop - start), np.uint8).data
        for offset in range(start, stop, len(chunk)):
            part = chunk[: stop - offset]
            if source.read_into(part, offset) != len(part):
                raise CheckpointDamagedError(f"{name} ends before byte {offset + len(part)} of {sums.size}")
            crc = zlib.crc32(part, crc)
            if keep is not None:
                keep(part, offset)
        if crc != sums.crc32[number]:
            raise CheckpointDamagedError(f"{name} is damaged between byte {start} and {stop}")

    run_in_threads(min(_READERS, len(sums.crc32)), verify_piece, range(len(sums.crc32)))


def file_checksums(path: Path) -> Checksums:
    """Return the checksums of a local file."""
    summing = ChecksumSink()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            summing.write(memoryview(chunk))
    return summing.checksums


class BytesSource:
    """Source over bytes in memory."""

    chunk = _CHUNK

    def __init__(self, data: Bytes) -> None:
        self._data, self.size = data.data, len(data)

    def read_into(self, data: memoryview, offset: int, /) -> int:
        part = self._data[offset : offset + len(data)]
        data[: len(part)] = part
        return len(part)


def _beside(in_thread: bool, action: Callable[..., T], *arguments: Any) -> Callable[[], T]:
    """Start an action in a thread; return a function that waits for its result.

    At interpreter exit, where Python starts no threads, that function runs the action.
    """
    if in_thread:
        with suppress(RuntimeError):
            pool = ThreadPoolExecutor(1, thread_name_prefix="midepoch-sum")
            future = pool.submit(action, *arguments)
            pool.shutdown(wait=False)
            return future.result
    return partial(action, *arguments)


def run_in_threads(count: int, action: Callable[[Any], Any], values: Iterable[Any]) -> None:
    """Call an action with each value, ``count`` at a time; raises the first error.

    With one thread, or at interpreter exit, everything runs in the caller's thread.
    """
    values, futures = list(values), None
    if count > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(count, thread_name_prefix="midepoch-many") as pool:
            futures = [pool.submit(action, value) for value in values]
    if futures is None:
        for value in values:
            action(value)
        return
    for future in futures:
        future.result()
