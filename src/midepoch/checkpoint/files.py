"""One file of a checkpoint: written in a stream and summed on the way, read in parallel and checked against its sums.

A sum is the CRC-32 of each 32 MiB of the file: several can be checked at once, and 4 GB/s by one core.
"""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from midepoch.checkpoint.arrays import Bytes
from midepoch.checkpoint.disk import LocalSource
from midepoch.checkpoint.helpers import Helper, in_threads
from midepoch.errors import CheckpointDamagedError

PIECE = 32 << 20
_WORTHWHILE = 1 << 20


@dataclass(frozen=True)
class Sums:
    """What a manifest says of a file: its size, and the CRC-32 of each piece."""

    size: int
    crc32: tuple[int, ...]


class Sink(Protocol):
    """Where bytes go: all of them, in order, or an OSError."""

    def write(self, data: memoryview, /) -> None: ...


class Source(Protocol):
    """A file that can be read at any place, by several threads; fewer bytes than asked for only at its end."""

    size: int
    chunk: int  # bytes of a read that costs little more than its share, and not much memory
    readers: int  # threads that may read different places; 1 if it should be read in order

    def read_into(self, data: memoryview, at: int, /) -> int: ...

    def again(self) -> Source | None:
        """The same file, for as long as it is held; None if it should be read only once.

        CheckpointDamagedError if it changes meanwhile.
        """


class Summing:
    """A sink that passes on what it gets, and sums it. The sums of large pieces are made while those are written."""

    def __init__(self, sink: Sink, helper: Helper | None = None) -> None:
        self._sink, self._helper = sink, helper
        self._size, self._crc = 0, 0
        self._done: list[int] = []

    def write(self, data: Any) -> None:
        """Bytes, or anything that lends its own."""
        view = memoryview(data).cast("B")
        while len(view):
            room = PIECE - self._size % PIECE
            part, view = view[:room], view[room:]
            if self._helper is not None and len(part) > _WORTHWHILE:
                crc = self._helper.submit(zlib.crc32, part, self._crc)
                self._sink.write(part)
                self._crc = crc.result()
            else:
                self._sink.write(part)
                self._crc = zlib.crc32(part, self._crc)
            self._size += len(part)
            if not self._size % PIECE:
                self._done.append(self._crc)
                self._crc = 0

    @property
    def sums(self) -> Sums:
        left = (self._crc,) if self._size % PIECE else ()
        return Sums(self._size, (*self._done, *left))


def read_checked(source: Source, sums: Sums, name: str) -> Bytes:
    """All bytes of a file. Raises CheckpointDamagedError unless they are those that were written."""
    data = np.empty(sums.size if source.size == sums.size else 0, np.uint8)

    def keep(part: memoryview, at: int) -> None:
        data[at : at + len(part)] = part

    check(source, sums, name, keep)
    return data


def held(source: Source, sums: Sums, name: str) -> Source:
    """The same file, checked, to be read again after this one has been closed; of a store, from a copy on this machine.

    Raises CheckpointDamagedError.
    """
    again = source.again()
    if again is not None:
        check(source, sums, name)
        return again
    try:
        with tempfile.TemporaryFile(prefix="midepoch-checkpoint-") as file:
            check(source, sums, name, lambda part, at: _write_at(file.fileno(), part, at))
            return LocalSource(file.fileno()).again()
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
    return BytesSource(read_checked(source, sums, name))


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        came = os.pwrite(fd, data, at)
        data, at = data[came:], at + came


def check(
    source: Source, sums: Sums, name: str, keep: Callable[[memoryview, int], None] = lambda _data, _at: None
) -> None:
    """Raise CheckpointDamagedError unless a file is what was written; holds no more than a few chunks in memory.

    ``keep`` gets each chunk and its place, in several threads.
    """
    if source.size != sums.size:
        raise CheckpointDamagedError(f"{name} has {source.size} bytes, {sums.size} were written")

    def one(number: int) -> None:
        first = number * PIECE
        stop = min(first + PIECE, sums.size)
        crc = 0
        chunk = np.empty(min(source.chunk, stop - first), np.uint8).data
        for at in range(first, stop, len(chunk)):
            part = chunk[: stop - at]
            if source.read_into(part, at) != len(part):
                raise CheckpointDamagedError(f"{name} ends before byte {at + len(part)} of {sums.size}")
            crc = zlib.crc32(part, crc)
            keep(part, at)
        if crc != sums.crc32[number]:
            raise CheckpointDamagedError(f"{name} is damaged between byte {first} and {stop}")

    readers = min(source.readers, len(sums.crc32))
    if readers > 1:
        in_threads(readers, one, range(len(sums.crc32)))
    else:
        for number in range(len(sums.crc32)):
            one(number)


def sums_of(path: Path) -> Sums:
    """The sums of a file of this machine."""
    summing = Summing(_Nowhere())
    piece = bytearray(min(PIECE, max(1, path.stat().st_size)))
    with path.open("rb", buffering=0) as file:
        while came := file.readinto(piece):
            summing.write(memoryview(piece)[:came])
    return summing.sums


class BytesSource:
    """A file in memory. A Source, see there."""

    chunk = 1 << 20
    readers = 4

    def __init__(self, data: Bytes) -> None:
        self._data, self.size = data.data, len(data)

    def read_into(self, data: memoryview, at: int, /) -> int:
        part = self._data[at : at + len(data)]
        data[: len(part)] = part
        return len(part)

    def again(self) -> Source:
        return self


class _Nowhere:
    def write(self, data: memoryview, /) -> None:
        pass
