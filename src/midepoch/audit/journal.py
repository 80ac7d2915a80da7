"""Journals: files of records that one process appends to, and that survive its death at any moment.

A record has a head of 16 bytes (a kind of four letters, the length of its content, a checksum, and a number), its
content, and zeros up to a multiple of 8 bytes. The checksum is the CRC-32 of the head, the content, and the place of
the record in the file, so that records which are torn, moved or taken out are noticed. The file is mapped: a store into
memory takes a tenth of the time of a system call, and survives the death of the process as well. While it is written, a
file is longer than its records, filled with zeros. A closed one ends with a record of that. So one whose end was lost
later differs from that of a process that was killed.

A record of *counters* has integers of 8 bytes that change in place, which its checksum leaves out. So counting a step
is one store.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_HEAD = struct.Struct("<4sIII")
_SEALED = struct.Struct("<4sIIQ")
_GRANULE = mmap.ALLOCATIONGRANULARITY
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems that cannot allocate space in advance."""
COUNTERS, ENDED = b"live", b"done"


class Record(NamedTuple):
    """A record of a journal. ``place``: the byte at which it begins."""

    kind: bytes
    number: int
    content: memoryview
    checksum: int
    place: int

    @property
    def is_intact(self) -> bool:
        """True if it is what was written here. After a loss of power, parts of it may be zeros."""
        return _checksum(self.kind, self.number, self.content, self.place) == self.checksum

    @property
    def counters(self) -> list[int]:
        """The integers of a record of counters."""
        return self.content.cast("q").tolist()


def _checksum(kind: bytes, number: int, content: Any, place: int) -> int:
    head = _SEALED.pack(kind, len(content), number, place)
    return zlib.crc32(b"" if kind == COUNTERS else content, zlib.crc32(head))


def _size(length: int) -> int:
    """Return the bytes of a record with a content of some bytes."""
    return _HEAD.size + length + -length % 8


def head_of(kind: bytes, number: int, content: bytes, place: int) -> bytes:
    """Return the head of a record at a place."""
    return _HEAD.pack(kind, len(content), _checksum(kind, number, content, place), number)


def records_in(data: Any) -> Iterator[Record]:
    """Yield the records of a journal. One that is cut off ends them."""
    data, place = memoryview(data), 0
    while place + _HEAD.size <= len(data):
        kind, length, checksum, number = _HEAD.unpack_from(data, place)
        first = place + _HEAD.size
        if not kind.isalpha() or first + length > len(data):
            return
        yield Record(kind, number, data[first : first + length], checksum, place)
        place += _size(length)


def is_cut(data: bytes) -> bool:
    """Return True if the end of a journal is missing, as after a copy that was not complete, or on a full disk."""
    end, is_closed = 0, not data
    for record in records_in(data):
        end, is_closed = record.place + _size(len(record.content)), record.kind == ENDED
    # A process that was killed leaves zeros, or the content of a record without a head.
    return not is_closed and (len(data) < end + _HEAD.size or data[end : end + 4].isalpha())


class Journal:
    """A file to which this process appends. ``growth``: bytes by which it grows at least.

    All methods raise OSError if the disk is full, or the file cannot be written.
    """

    def __init__(self, path: Path, growth: int = 1) -> None:
        self.path, self._growth = path, growth
        self._file, self._owner = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), os.getpid()
        self._end = self._room = self._mapped = os.fstat(self._file).st_size
        self._pages: mmap.mmap | None = None  # the bytes from ``_mapped`` to ``_room``

    @property
    def is_open(self) -> bool:
        """True if it can be written to. In a fork it cannot: the file is that of the parent."""
        return self._file >= 0 and self._owner == os.getpid()

    def append_counters(self, count: int) -> Any:
        """Append a record of counters, all 0, and return them: a store into ``counters[i]`` changes the file."""
        place = self.append(COUNTERS, bytes(8 * count))
        if self._pages is None:
            return _WrittenCounters(self._file, place, count)
        return counters_in(self._pages, place - self._mapped, count)

    def append(self, kind: bytes, content: bytes, number: int = 0) -> int:
        """Append a record, and return the place of its content."""
        size = _size(len(content))
        while True:
            place = self._end
            if place + size + _HEAD.size > self._room:  # zeros follow the last record
                self._grow(place + size + _HEAD.size)
            if self._end == place:  # else a thread, or a handler of signals, has appended meanwhile
                self._end = place + size
                break
        try:
            self._store(place + _HEAD.size, content)
            self._store(place, head_of(kind, number, content, place))  # last: without it, there is no record
        except BaseException:
            self._end = place if self._end == place + size else self._end
            raise
        return place + _HEAD.size

    def _store(self, place: int, data: bytes) -> None:
        if self._pages is not None:
            self._pages[place - self._mapped : place - self._mapped + len(data)] = data
        elif os.pwrite(self._file, data, place) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def _grow(self, end: int) -> None:
        """Allocate space up to a byte or more, and map it from the end of the records on."""
        first, room = self._end // _GRANULE * _GRANULE, -(-(end + self._growth) // _GRANULE) * _GRANULE
        self._pages = _mapped(self._file, self._room, room, first)
        self._mapped, self._room = first, room

    def trim(self) -> None:
        """Cut the file to its records. It grows again with the next one."""
        if self.is_open:
            self._pages, self._room = None, self._end
            with suppress(OSError):
                os.ftruncate(self._file, self._end)

    def sync(self) -> None:
        """Write the records to disk."""
        if self.is_open:
            os.fsync(self._file)

    def end(self) -> None:
        """Record that nothing follows, and close the file. If that fails, it is left as by a process that died."""
        if self.is_open:
            with suppress(OSError):
                if self._end:  # not of a file whose first record failed
                    self.append(ENDED, b"")
                    self.sync()
                self.trim()
        self._close()

    def close(self) -> None:
        """Cut the file to its records, and close it."""
        self.trim()
        self._close()

    def _close(self) -> None:
        file, self._file, self._pages = self._file, -1, None
        if file >= 0 and self._owner == os.getpid():
            os.close(file)


def _mapped(file: int, end: int, room: int, first: int) -> mmap.mmap | None:
    """Allocate the bytes of a file from ``end`` to ``room``, and map it from byte ``first``.

    Return None if the file has to be written to. Raise OSError if the disk is full: without an allocation, that would
    be a fatal signal when a page is stored.
    """
    if not _allocated(file, end, room):
        os.ftruncate(file, room)
        return None
    try:
        return mmap.mmap(file, room - first, offset=first)
    except (OSError, ValueError):
        return None


def _allocated(file: int, end: int, room: int) -> bool:
    """Allocate the bytes of a file from ``end`` to ``room``. Return False if its file system cannot."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(file, end, room - end)
    except OSError as problem:
        if problem.errno not in _NO_ALLOCATION:
            raise
        return False
    return True


def counters_in(pages: mmap.mmap, place: int, count: int) -> Any:
    """Return integers in mapped memory. A store into one takes 40 ns."""
    return memoryview(pages)[place : place + 8 * count].cast("q")


class _WrittenCounters(list[int]):
    """Counters in a file that cannot be mapped. One that cannot be written keeps its last value there."""

    def __init__(self, file: int, place: int, count: int) -> None:
        super().__init__([0] * count)
        self._file, self._place = file, place

    def __setitem__(self, number: Any, value: Any) -> None:
        super().__setitem__(number, value)
        with suppress(OSError):
            os.pwrite(self._file, value.to_bytes(8, "little"), self._place + 8 * number)
