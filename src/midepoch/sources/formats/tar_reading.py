"""Reading of the headers of tar archives: by ranges, so that large contents are not fetched, or from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.damage import is_damage
from midepoch.sources.formats.compressed import can_be_fetched, compression, contents
from midepoch.sources.formats.tar_headers import BLOCK
from midepoch.sources.stores import Entry, OpenFile, Store

_LOCAL = (4 << 10, 32 << 10, 1 << 20)
_REMOTE = (64 << 10, 1 << 20, 8 << 20)
"""The smallest read, the gap that is worth a separate read, and the largest read. A request takes as long as 1 MB."""
_STREAM = 64 << 10  # a read that meets damage loses its bytes
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"\x04\x22\x4d\x18": ".lz4"}
_XZ = b"\xfd7zXZ"


class Ranges:
    """Reader that fetches more and more ahead, as long as no large gap is skipped."""

    seekable = True

    def __init__(self, file: OpenFile, *, local: bool) -> None:
        self._file = file
        self._least, self._far, self._most = _LOCAL if local else _REMOTE
        self._start, self._window, self._ahead = 0, b"", self._least

    def at(self, offset: int, size: int) -> bytes:
        first = offset - self._start
        if first < 0 or first + size > len(self._window):
            self._fetch(offset, size)
            first = 0
        return self._window[first : first + size]

    def _fetch(self, offset: int, size: int) -> None:
        gap = offset - self._start - len(self._window)
        self._ahead = min(2 * self._ahead, self._most) if abs(gap) < self._far else self._least
        self._window = self._file.read_at(max(size, self._ahead), offset)
        self._start = offset


class Stream:
    """Reader of decompressed contents, which can only be read from the beginning. ``damage`` stops it."""

    seekable = False

    def __init__(self, store: Store, entry: Entry, stream: Any) -> None:
        self._store, self._entry, self._stream = store, entry, stream
        self._start, self._window = 0, b""
        self.damage: str | None = None

    def at(self, offset: int, size: int) -> bytes:
        first = offset - self._start
        while first + size > len(self._window) and (data := self._more()):
            kept = self._window[max(0, first - BLOCK) :]
            self._start += len(self._window) - len(kept)
            self._window, first = kept + data, offset - self._start
        return self._window[first : first + size]

    def _more(self) -> bytes:
        if self.damage is not None:
            return b""
        try:
            return bytes(self._stream.read(_STREAM))
        except (OSError, pa.ArrowException) as problem:
            if not is_damage(problem) or not can_be_fetched(self._store, self._entry):
                raise
            self.damage = f"its compressed data is truncated or damaged: {problem}"
            return b""


@contextmanager
def opened(store: Store, entry: Entry) -> Iterator[tuple[Ranges | Stream, str]]:
    """Yield a reader of an archive, and the ETag of its file."""
    with store.open(entry) as file:
        if compression(entry.path) is None:
            reader = Ranges(file, local=store.local)
            _refuse_packed(store.name(entry.path), reader.at(0, BLOCK))
            yield reader, file.etag
            return
        with contents(store, entry) as stream:
            yield Stream(store, entry, stream), file.etag


def _refuse_packed(name: str, head: bytes) -> None:
    if head.startswith(_XZ):
        raise FormatError(f"{name}: its contents are compressed by xz, which is not supported. Write it as .tar.zst.")
    for magic, suffix in _PACKED.items():
        if head.startswith(magic):
            raise FormatError(
                f"{name}: its contents are compressed, but its name does not say so. Rename it to .tar{suffix}."
            )
