"""Contents of compressed files, decompressed once per process, whatever the order of requested blocks.

A compressed file can only be read from its beginning. Therefore the decompressed contents are kept in an unnamed file
in the cache folder, which disappears with the process.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from midepoch.sources.formats import Block, CacheSpec
from midepoch.sources.names import COMPRESSIONS
from midepoch.storage.cache_files import default_index_dir, make_private
from midepoch.storage.damage import is_damage
from midepoch.storage.stores import Entry, OpenFile, Store

_log = logging.getLogger("midepoch")
_READ = 1 << 20
_FETCH = 8 << 20
_MOST_FILES = 128
"""Maximum number of open files: a process may have 1,024 descriptors, and each file takes one or two."""


def compression(path: str) -> str | None:
    """Return the compression codec that a file name indicates, or None."""
    return COMPRESSIONS.get(os.path.splitext(path.lower())[1])


@contextmanager
def contents(store: Store, entry: Entry) -> Iterator[Any]:
    """Yield the file as a stream of its decompressed contents."""
    with store.open(entry) as file:
        codec = compression(entry.path)
        if codec is None:
            yield file.arrow
        else:
            with pa.CompressedInputStream(file.arrow, codec) as stream:
                yield stream


def skip(stream: Any, size: int) -> None:
    """Skip ``size`` bytes by reading them."""
    while size and (passed := len(stream.read(min(size, _READ)))):
        size -= passed


def damage_of(store: Store, entry: Entry, problem: Exception) -> str:
    """Return the description of a problem in compressed contents. Raise it if all bytes cannot be read at all."""
    if not is_damage(problem) or compression(entry.path) is None:
        raise problem
    with store.open(entry) as file:
        if not all(file.arrow.read(min(_FETCH, left)) for left in range(file.size, 0, -_FETCH)):
            raise problem
    return f"its compressed data is truncated or damaged: {problem}"


def read_ranges(store: Store, block: Block, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
    """Return ranges of the contents of the file of a block. None stands for the end of the file."""
    if compression(block.entry.path) is None:
        with store.open(block.entry) as file:
            sizes = [(file.size if end is None else end) - start for start, end in ranges]
            parts = [file.read_at(size, start) for size, (start, _) in zip(sizes, ranges, strict=True)]
    else:
        parts = [_decompressed(store, block, start, end) for start, end in ranges]
        sizes = [len(part) if end is None else end - start for part, (start, end) in zip(parts, ranges, strict=True)]
    for part, size in zip(parts, sizes, strict=True):
        if len(part) != size:
            raise OSError(f"{len(part)} bytes were received where {size} were requested")
    return parts


def _decompressed(store: Store, block: Block, start: int, end: int | None) -> bytes:
    if end is None and start < _READ:  # the only block: there is no later read
        with contents(store, block.entry) as stream:
            skip(stream, start)
            return bytes(stream.read())
    file = _files.get(store, block)
    try:
        return file.read(start, end)
    except BaseException:
        _files.forget(file)  # the position of the stream is undefined
        raise


class _Decompressed:
    """Requested contents of one file. As much of its beginning as fits is kept in a file."""

    def __init__(self, store: Store, entry: Entry, scratch: CacheSpec) -> None:
        self._store, self._entry, self.limit = store, entry, scratch.limit
        self._lock = threading.Lock()
        self._raw: OpenFile | None = None
        self._stream: Any = None
        self._position = 0  # of the stream
        self._file = _unnamed_file(scratch.folder)
        if self._file is not None:
            weakref.finalize(self, self._file.close)
        self._is_growing, self._is_whole = self._file is not None, False
        self.size = 0  # of the file

    def read(self, offset: int, end: int | None) -> bytes:
        """Return the bytes from ``offset`` to ``end``, or to the end of the contents."""
        with self._lock:
            kept = self._kept(offset, self.size if end is None else min(end, self.size))
            start, parts = offset + len(kept), [kept]
            if self._is_whole or start == end:
                return kept
            if self._stream is None or self._position > start:
                self._rewind()
            while end is None or self._position < end:
                data = self._stream.read(_READ if end is None else min(_READ, end - self._position))
                if not data:  # the end of the contents
                    self._is_whole, self._raw, self._stream = self._is_growing, None, None
                    break
                self._keep(data)
                parts.append(data[max(0, start - self._position) :])
                self._position += len(data)
            return b"".join(parts)

    def _kept(self, offset: int, stop: int) -> bytes:
        if self._file is None or offset >= stop:
            return b""
        return os.pread(self._file.fileno(), stop - offset, offset)

    def _keep(self, data: bytes) -> None:
        """Append data at the position of the stream to the file, if it comes next and fits."""
        if not self._is_growing or self._position != self.size:
            return
        assert self._file is not None
        with suppress(OSError):
            self._file.seek(self.size)
            if self.size + len(data) <= self.limit and self._file.write(data) == len(data):  # fewer on a full disk
                self.size += len(data)
                return
        self._is_growing = False
        _log.warning(
            "%s: only the first %d bytes of its contents are kept: blocks after them are decompressed "
            "repeatedly if they are not read in order. Increase cache_bytes, or write smaller files.",
            self._store.name(self._entry.path), self.size,
        )  # fmt: skip

    def _rewind(self) -> None:
        self._raw = self._store.open(self._entry)
        self._stream = pa.CompressedInputStream(self._raw.arrow, compression(self._entry.path))
        self._position = 0


def _unnamed_file(folder: str) -> IO[bytes] | None:
    for place in (Path(folder) if folder else default_index_dir() / "blocks", Path(tempfile.gettempdir())):
        try:
            make_private(place)
            return tempfile.TemporaryFile(dir=place, buffering=0)
        except OSError:
            continue
    return None


class _Files:
    """The most recently read files, as many as fit. A forked process starts without any: it cannot share streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Any, ...], _Decompressed] = OrderedDict()

    def get(self, store: Store, block: Block) -> _Decompressed:
        key = (store.identity, block.entry, block.scratch)
        with self._lock:
            file = self._open.get(key)
            if file is None:
                file = self._open[key] = _Decompressed(store, block.entry, block.scratch)
            self._open.move_to_end(key)
            while len(self._open) > 1 and (
                len(self._open) > _MOST_FILES or sum(each.size for each in self._open.values()) > file.limit
            ):
                self._open.popitem(last=False)  # closed when the last thread has read from it
            return file

    def forget(self, file: _Decompressed) -> None:
        with self._lock:
            self._open = OrderedDict((key, each) for key, each in self._open.items() if each is not file)


_files = _Files()
_inherited: list[_Files] = []


def _reset() -> None:
    global _files
    _inherited.append(_files)  # not freed: a stream of a store would wait for threads that a fork does not have
    _files = _Files()


os.register_at_fork(after_in_child=_reset)
