"""fsspec's file systems, as pyarrow wants them: each file read from a position of its own, and dated."""

from __future__ import annotations

import io
import os
import threading
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs


class Handler(fs.FSSpecHandler):  # type: ignore[misc]
    """Hands pyarrow the files of a file system of fsspec's."""

    def open_input_stream(self, path: str) -> Any:
        return self._opened(path)

    def open_input_file(self, path: str) -> Any:
        return self._opened(path)

    @staticmethod
    def _create_file_info(path: str, info: dict[str, Any]) -> fs.FileInfo:
        """With the time of the last change, for which every file system has a name of its own."""
        times = (
            info.get(name) for name in ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
        )
        found = next((time for time in times if isinstance(time, (datetime, int, float))), None)
        return fs.FSSpecHandler._create_file_info(path, {**info, "mtime": found})

    @property
    def survives_fork(self) -> bool:
        """Whether a fork can read on: it has a copy of what is in memory, and opens files of a disk anew. Of others it
        would share the connections or positions.
        """
        inner = _inner(self.fs)
        return _is_of_kind(inner, "file", "memory") or isinstance(getattr(inner, "fo", None), io.BytesIO)

    def version(self, path: str) -> str:
        """What changes with the contents of a file, as far as the file system tells; empty if it does not."""
        try:
            found = self.fs.info(path)
        except Exception:
            return ""
        return str(found.get("ETag") or found.get("etag") or found.get("created") or "")

    def _opened(self, path: str) -> Any:
        inner = _inner(self.fs)
        # Each is one of its own where every read is a request, on a disk, and of the Hub.
        if getattr(inner, "async_impl", False) or _is_of_kind(inner, "file", "hf"):
            return pa.PythonFile(self._found(path), mode="r")
        # Not by getattr: those that keep copies of other file systems have a way of their own with attributes.
        own = object.__getattribute__(inner, "__dict__")
        lock = own.setdefault("_midepoch_lock", threading.RLock())
        with lock:
            file = self._found(path)
        # Whoever opens a file of fsspec's memory gets one and the same object, with one position for all: two that read
        # at the same time would get each other's bytes. Files of an archive are such parts of one file.
        if isinstance(file, io.BytesIO):
            return pa.BufferReader(file.getvalue())
        return pa.PythonFile(_InTurn(file, lock), mode="r")

    def _found(self, path: str) -> Any:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return self.fs.open(path, mode="rb")


class _InTurn:
    """A file that is read while no other of its file system is, from a position that is its own."""

    def __init__(self, file: Any, lock: threading.RLock) -> None:
        self._file, self._lock, self._at = file, lock, 0
        self.closed = False

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            self._at = offset
        elif whence == os.SEEK_CUR:
            self._at += offset
        else:
            with self._lock:
                self._at = self._file.seek(offset, whence)
        return self._at

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            self._file.seek(self._at)
            found: bytes = self._file.read(size)
        self._at += len(found)
        return found

    def close(self) -> None:
        self.closed = True
        with self._lock:
            self._file.close()


def _inner(filesystem: Any) -> Any:
    """The file system in which this one is a folder; itself, if it is none."""
    while _is_of_kind(filesystem, "dir") and hasattr(filesystem, "fs"):
        filesystem = filesystem.fs
    return filesystem


def _is_of_kind(filesystem: Any, *kinds: str) -> bool:
    found = getattr(filesystem, "protocol", ())
    return any(kind in ((found,) if isinstance(found, str) else found) for kind in kinds)
