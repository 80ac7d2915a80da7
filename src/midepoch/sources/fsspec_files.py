"""fsspec's file systems, as pyarrow wants them: each file read from a position of its own, and dated."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs

from midepoch.address import Address
from midepoch.redaction import redacted

_PLACES = ("host", "port", "share", "org", "repo", "sha", "fo")
"""Options that say where the files lie."""


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

    @property
    def place(self) -> str:
        """The server, repository or archive that the files are in, without credentials."""
        options = options_of(self)
        return " ".join(
            Address(str(options[name])).identity for name in _PLACES if isinstance(options.get(name), (str, int))
        )

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


def options_of(filesystem: Any) -> dict[str, Any]:
    """The options that a file system of pyarrow or fsspec was made with, and those of the ones it is made of."""
    if isinstance(filesystem, fs.PyFileSystem):
        return options_of(filesystem.handler)
    if isinstance(filesystem, fs.FSSpecHandler):
        return options_of(filesystem.fs)
    if isinstance(filesystem, fs.FileSystem):
        try:
            made_of = filesystem.__reduce__()[1]
        except Exception:
            return {}
        return {name: value for each in made_of if isinstance(each, dict) for name, value in each.items()}
    given = getattr(filesystem, "storage_options", None)
    if not isinstance(given, Mapping):
        return {}
    arguments = getattr(filesystem, "storage_args", ())
    nested = [options_of(value) for value in (*given.values(), *arguments, getattr(filesystem, "fs", None))]
    texts = tuple(value for value in arguments if isinstance(value, (str, bytes)))
    return {**dict(given), "arguments": texts, "nested": nested}


def redact_logs() -> None:
    """Let fsspec log addresses, which it does at DEBUG, without their credentials."""
    for name in ("fsspec", "fsspec.http", "fsspec.cached"):
        logging.getLogger(name).addFilter(_without_credentials)  # once, however often it is called


def _without_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    if record.exc_info:
        record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip())
        record.exc_info = None
    return True


def is_foreign(problem: BaseException) -> bool:
    """Whether an error is of the package that fetches the bytes, and not of Python or pyarrow, which read them."""
    package = type(problem).__module__.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("pyarrow", "midepoch")


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
