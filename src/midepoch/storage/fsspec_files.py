"""Adapter of fsspec file systems for pyarrow: independent read positions and modification times."""

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

from midepoch.storage.address import Address, redacted
from midepoch.storage.open_files import RangeFile

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

    def version(self, path: str) -> str:
        """Return an identifier that changes with the contents of a file. Empty if the file system has none."""
        if path.startswith("buckets/") and _is_of_kind(self.fs, "hf"):
            return self._hash_in_bucket(path)
        try:
            info = self.fs.info(path)
        except Exception:
            return ""
        return str(info.get("ETag") or info.get("etag") or info.get("created") or "")

    def _hash_in_bucket(self, path: str) -> str:
        """Return the hash of a file of the Hub that may change. The file system would return the one of its listing."""
        from huggingface_hub import HfApi

        _, owner, name, inner = path.split("/", 3)
        api = HfApi(endpoint=self.fs.endpoint, token=self.fs.token)
        for file in api.get_bucket_paths_info(f"{owner}/{name}", [inner]):
            return str(file.xet_hash)
        raise FileNotFoundError(path)

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
