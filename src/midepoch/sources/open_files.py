"""Open files of a store, and the detection of short reads."""

from __future__ import annotations

import os

import pyarrow as pa


class OpenFile:
    """A file open for reading. ``arrow`` is for pyarrow's own readers."""

    def __init__(self, arrow: pa.NativeFile, etag: str = "") -> None:
        self.arrow, self.etag, self.size = arrow, etag, int(arrow.size())

    def read_at(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from an offset on, fewer only at the end of the file."""
        return bytes(self.arrow.read_at(size, offset))

    def read_into(self, place: memoryview, offset: int) -> None:
        """Fill ``place`` from an offset on. Raise OSError if the file ends before. Not for concurrent use."""
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


_MARK = 16


class ShortError(OSError):
    """A store delivered fewer bytes than requested."""


class CheckedFile:
    """Python file over a remote file, for ``pa.PythonFile``, that detects short reads.

    pyarrow does not: if a server delivers fewer bytes than requested, the rest of the buffer is uninitialised memory.
    Therefore the end of the buffer is marked before a read. If the mark is still there, the bytes are requested again.
    """

    def __init__(self, native: pa.NativeFile) -> None:
        self._native, self._size, self._at = native, native.size(), 0

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data = self._once(wanted, os.urandom(_MARK))
        if data is None:
            data = self._once(wanted, os.urandom(_MARK))
        if data is None:
            raise ShortError(f"fewer than the {wanted} bytes requested from byte {self._at} on were received")
        self._at += wanted
        return data

    def _once(self, wanted: int, mark: bytes) -> bytes | None:
        """Return the bytes, or None if the last of them may be part of the mark."""
        buffer = bytearray(wanted)
        buffer[-_MARK:] = mark[-min(wanted, _MARK) :]
        self._native.seek(self._at)
        came = self._native.readinto(buffer)
        return bytes(buffer) if came == wanted and buffer[-1] != mark[-1] else None

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._native.close()

    @property
    def closed(self) -> bool:
        return bool(self._native.closed)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False
