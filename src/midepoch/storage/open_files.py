"""Open files of a store: the detection of short reads, and an adapter of fsspec file systems for pyarrow, with
independent read positions and modification times.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as fs

from midepoch.storage.address import Address, redacted


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
        wanted = stop - start
        for _ in range(4):  # one in 256 last bytes equals its mark by chance
            buffer, mark = bytearray(wanted), os.urandom(_MARK)
            buffer[-_MARK:] = mark[-min(wanted, _MARK) :]
            native.seek(start)
            if native.readinto(buffer) == wanted and buffer[-1] != mark[-1]:
                return bytes(buffer)
        raise ShortError(f"fewer than the {wanted} bytes requested from byte {start} on were received")

    return RangeFile(native.size(), fetch, native.close)


_PLACES = ("host", "port", "share", "org", "repo", "sha", "fo")
"""Options that locate the files."""


class FsspecHandler(fs.FSSpecHandler):  # type: ignore[misc]
    """Handler that gives pyarrow access to an fsspec file system."""

    @staticmethod
    def _create_file_info(path: str, info: dict[str, Any]) -> fs.FileInfo:
        """Add the modification time, which every file system names differently."""
        times = (
            info.get(name)
            for name in ("uploaded_at", "mtime", "LastModified", "last_modified", "modified", "updated", "created")
        )
        mtime = next((time for time in times if isinstance(time, (datetime, int, float))), None)
        return fs.FSSpecHandler._create_file_info(path, {**info, "mtime": mtime})

    @property
    def survives_fork(self) -> bool:
        """True if a forked process can continue to read: files in memory are copied, files on disk are opened again.
        With other file systems it would share connections or positions.
        """
        inner = _inner(self.fs)
        return _is_of_kind(inner, "file", "memory") or isinstance(getattr(inner, "fo", None), io.BytesIO)

    @property
    def place(self) -> str:
        """Server, repository or archive of the files, without credentials."""
        options = options_of(self)
        return " ".join(
            Address(str(options[name])).identity for name in _PLACES if isinstance(options.get(name), (str, int))
        )

    def refresh(self) -> None:
        self.fs.invalidate_cache()

    def version(self, path: str) -> str:
        """Return an identifier that changes with the contents of a file. Empty if the file system has none."""
        if path.startswith("buckets/") and _is_of_kind(self.fs, "hf"):
            # Of the contents now: the file system would return that of its listing.
            from huggingface_hub import HfApi

            _, owner, name, inner = path.split("/", 3)
            api = HfApi(endpoint=self.fs.endpoint, token=self.fs.token)
            for file in api.get_bucket_paths_info(f"{owner}/{name}", [inner]):
                return str(file.xet_hash)
            raise FileNotFoundError(path)
        try:
            info = self.fs.info(path)
        except Exception:
            return ""
        return str(info.get("ETag") or info.get("etag") or info.get("created") or "")

    def open_input_file(self, path: str) -> Any:
        inner = _inner(self.fs)
        # Files are independent where every read is a request, on disk, and on the Hub.
        if getattr(inner, "async_impl", False) or _is_of_kind(inner, "file", "hf"):
            return pa.PythonFile(self._open_existing(path), mode="r")
        # Not by getattr: file systems that cache others override attribute access.
        own = object.__getattribute__(inner, "__dict__")
        lock = own.setdefault("_midepoch_lock", threading.RLock())
        with lock:
            file = self._open_existing(path)
        # Opening a file of fsspec's memory returns one shared object with one position: two concurrent readers would
        # get each other's bytes. The files of an archive share one file in the same way.
        if isinstance(file, io.BytesIO):
            return pa.BufferReader(file.getvalue())

        def in_turn(start: int, stop: int) -> bytes:
            with lock:
                file.seek(start)
                return bytes(file.read(stop - start))

        with lock:
            size = file.seek(0, os.SEEK_END)
        return pa.PythonFile(RangeFile(size, in_turn, file.close), mode="r")

    open_input_stream = open_input_file

    def _open_existing(self, path: str) -> Any:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return self.fs.open(path, mode="rb")


def options_of(filesystem: Any) -> dict[str, Any]:
    """Return the options of a pyarrow or fsspec file system, including those of file systems that it wraps."""
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


_LOGGERS = (
    "fsspec fsspec.http fsspec.cached huggingface_hub.utils._http httpx httpcore.connection httpcore.http11 "
    "httpcore.proxy httpx2 httpcore2.connection httpcore2.http11 httpcore2.proxy"
)


def redact_logs() -> None:
    """Remove the credentials from addresses that fsspec and the Hub's client log at DEBUG and INFO."""
    for name in _LOGGERS.split():
        logging.getLogger(name).addFilter(_without_credentials)  # added only once


def _without_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    if record.exc_info:
        record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip())
        record.exc_info = None
    return True


def is_foreign(problem: BaseException) -> bool:
    """Return True for an error of the package that fetches the bytes, not of Python or pyarrow."""
    package = type(problem).__module__.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("pyarrow", "midepoch")


def _inner(filesystem: Any) -> Any:
    """Return the file system in which this one is a folder, else itself."""
    while _is_of_kind(filesystem, "dir") and hasattr(filesystem, "fs"):
        filesystem = filesystem.fs
    return filesystem


def _is_of_kind(filesystem: Any, *kinds: str) -> bool:
    protocol = getattr(filesystem, "protocol", ())
    return any(kind in ((protocol,) if isinstance(protocol, str) else protocol) for kind in kinds)
