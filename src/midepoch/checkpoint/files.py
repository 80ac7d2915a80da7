"""One file of a checkpoint: written in a stream and summed on the way, read in parallel and checked against its sums.

A sum is the CRC-32 of each 32 MiB of the file: several can be checked at once, and 4 GB/s by one core.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from midepoch.checkpoint.arrays import Bytes
from midepoch.checkpoint.helpers import Helper, in_threads
from midepoch.errors import CheckpointDamagedError

PIECE = 32 << 20
_READERS = 4
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

    def read_into(self, data: memoryview, at: int, /) -> int: ...


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
    _each_piece(source, sums, name, lambda at, size: data[at : at + size])
    return data


def check(source: Source, sums: Sums, name: str) -> None:
    """Raise CheckpointDamagedError unless a file is what was written; holds no more than a few pieces in memory."""
    _each_piece(source, sums, name, lambda _, size: np.empty(size, np.uint8))


def _each_piece(source: Source, sums: Sums, name: str, room: Callable[[int, int], Any]) -> None:
    if source.size != sums.size:
        raise CheckpointDamagedError(f"{name} has {source.size} bytes, {sums.size} were written")

    def one(number: int) -> None:
        at = number * PIECE
        view = memoryview(room(at, min(PIECE, sums.size - at)))
        if source.read_into(view, at) != len(view):
            raise CheckpointDamagedError(f"{name} ends before byte {at + len(view)} of {sums.size}")
        if zlib.crc32(view) != sums.crc32[number]:
            raise CheckpointDamagedError(f"{name} is damaged between byte {at} and {at + len(view)}")

    if len(sums.crc32) == 1:
        one(0)
    elif sums.crc32:
        in_threads(min(_READERS, len(sums.crc32)), one, range(len(sums.crc32)))


def sums_of(path: Path) -> Sums:
    """The sums of a file of this machine."""
    summing = Summing(_Nowhere())
    piece = bytearray(min(PIECE, max(1, path.stat().st_size)))
    with path.open("rb", buffering=0) as file:
        while came := file.readinto(piece):
            summing.write(memoryview(piece)[:came])
    return summing.sums


class _Nowhere:
    def write(self, data: memoryview, /) -> None:
        pass
