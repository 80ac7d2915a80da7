"""Open files of a store, and the detection of short reads."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa


class Entry(NamedTuple):
    """One file of a listing. ``etag`` is empty if the store has none or does not list it."""

    path: str
    size: int
    mtime_ns: int
    etag: str = ""


class OpenFile:
    """A file open for reading. ``arrow`` is for pyarrow's own readers."""

    def __init__(self, arrow: pa.NativeFile, etag: str = "") -> None:
        self.arrow, self.etag, self.size = arrow, etag, int(arrow.size())

    def read_at(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from an offset on, fewer only at the end of the file."""
        return bytes(self.arrow.read_at(size, offset))

    def read_into(self, place: memoryview, offset: int) -> None:
        """Fill ``place`` with the bytes from an offset on. Raise OSError if the file is too short. Not thread-safe."""
        self.arrow.seek(offset)
        came = self.arrow.readinto(place)
        if came != len(place):
            raise OSError(f"{came} bytes were received where {len(place)} were requested")

    def close(self) -> None:
        self.arrow.close()

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RangeFile(io.RawIOBase):
    """Python file for ``pa.PythonFile``. Every read calls ``fetch(start, stop)`` for its bytes."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], close: Callable[[], None] | None = None) -> None:
        self._size, self._fetch, self._close, self._at = size, fetch, close, 0

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        data = self._fetch(self._at, self._at + wanted) if wanted else b""
        self._at += wanted
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def close(self) -> None:
        if self._close is not None and not self.closed:
            self._close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


_MARK = 16


class ShortError(OSError):
    """A store delivered fewer bytes than requested."""


def checked_file(native: pa.NativeFile) -> RangeFile:
    """Return a remote file that detects short reads.

    pyarrow does not: if a server delivers fewer bytes than requested, the rest of the buffer is uninitialised memory.
    Therefore the end of the buffer is marked before a read. If the mark is still there, the bytes are requested again.
    """

    def fetch(start: int, stop: int) -> bytes:
        for _ in range(2):
            if (data := _read_marked(native, start, stop - start)) is not None:
                return data
        raise ShortError(f"fewer than the {stop - start} bytes requested from byte {start} on were received")

    return RangeFile(native.size(), fetch, native.close)


def _read_marked(native: pa.NativeFile, start: int, wanted: int) -> bytes | None:
    """Return the bytes, or None if the last of them may be part of the mark."""
    buffer, mark = bytearray(wanted), os.urandom(_MARK)
    buffer[-_MARK:] = mark[-min(wanted, _MARK) :]
    native.seek(start)
    came = native.readinto(buffer)
    return bytes(buffer) if came == wanted and buffer[-1] != mark[-1] else None
