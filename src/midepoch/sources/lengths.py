"""Lengths of the rows of a source: of one column of lists, text or bytes, computed once and kept beside the index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.progress import shown
from midepoch.errors import ColumnError, FormatError
from midepoch.sources.damage import changed, removed
from midepoch.sources.index import IndexedFile, default_index_dir
from midepoch.sources.length_blocks import (
    Measured,
    constant_length,
    has_length,
    measured_blocks,
    smallest_dtype,
)
from midepoch.sources.length_files import KEY_BYTES, SUFFIX, LengthsFile, read_lengths, remove_old, write_lengths
from midepoch.sources.source import Source
from midepoch.sources.storage import locked
from midepoch.sources.views import fingerprint_of

Int64Array = npt.NDArray[np.int64]
Stamps = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, eq=False)
class RowLengths:
    """One length for each row of a source, mapped from a file. Pickles to the path of the file.

    Lists count their items, text and bytes the bytes as stored (UTF-8, not characters). A null has length 0.
    """

    rows: int
    total: int
    """The sum of all lengths."""
    longest: int
    unreadable: int = 0
    """Rows of damaged blocks, whose length is 0."""
    _lengths: npt.NDArray[Any] | None = field(default=None, repr=False)
    """None if all rows have the length ``longest``."""
    _path: str | None = None
    _key: bytes = field(default=b"", repr=False)

    def __len__(self) -> int:
        return self.rows

    def of(self, rows: Int64Array) -> Int64Array:
        """Return the lengths of these source rows."""
        if self._lengths is None:
            return np.full(len(rows), self.longest, np.int64)
        return self._lengths[rows].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None:
            return _reopened, (self._path, self._key)
        return RowLengths, (self.rows, self.total, self.longest, self.unreadable, self._lengths)


def lengths_of(source: Source, column: str, *, skip_corrupt: bool = False) -> RowLengths:
    """Return the lengths of the rows of a column of the source, read from their file if there is one, else computed.

    Offsets of mapped Arrow files are read in place. Otherwise the column is read once. With ``skip_corrupt``, rows of
    blocks that cannot be read have length 0. Otherwise, such a block raises CorruptBlockError.
    """
    if column not in source.schema.names:
        raise ColumnError(f"lengths: no column {column!r}. There are: {', '.join(source.schema.names)}.")
    kind = source.schema.field(column).type
    if not has_length(kind):
        raise ColumnError(
            f"lengths: column {column!r} contains {kind}, whose values have no length. Name a column of lists, text or "
            "bytes."
        )
    constant = constant_length(kind)
    if constant is not None and () not in source.nullable[column]:
        return RowLengths(source.rows, source.rows * constant, constant)
    stamps = _stamps(source)
    folder, stem, key = _sidecar(source, column, stamps)
    path = folder / f"{stem}.{key.hex()}{SUFFIX}"
    if (found := _usable(path, key, source.rows, skip_corrupt)) is not None:
        return found
    parts = partial(_parts, source, column, skip_corrupt, stamps)
    with locked(folder / f"{stem}{SUFFIX}", "the row lengths") as slot:
        if (found := _usable(path, key, source.rows, skip_corrupt)) is not None:  # another process has made it
            return found
        try:
            with closing(_marked(parts())) as marked:
                kept = slot.keep(lambda: write_lengths(path, key, marked))
        except _ReadingError as problem:
            raise problem.cause from None
        if kept:
            remove_old(path, f"{stem}.*{SUFFIX}")
            found = _usable(path, key, source.rows, skip_corrupt)
    return found if found is not None else _in_memory(parts())


def _parts(source: Source, column: str, skip_corrupt: bool, stamps: Stamps) -> Iterator[Measured]:
    """Yield the lengths of all blocks, and show the progress. The files must not change meanwhile."""
    done = 0
    with shown(f"lengths of {column}", "rows") as report:
        for part in measured_blocks(source, column, skip_corrupt=skip_corrupt):
            yield part
            done += part.rows
            report(done, source.rows)
    for file, before, after in zip(source.files, stamps, _stamps(source), strict=True):
        if before != after:
            raise changed(file.path, "while the lengths of its rows were read")


class _ReadingError(Exception):
    """An error of the data. Errors of the folder in which lengths are saved are of the same types."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


def _marked(parts: Iterator[Measured]) -> Generator[Measured, None, None]:
    try:
        yield from parts
    except Exception as problem:
        raise _ReadingError(problem) from None


def _in_memory(parts: Iterator[Measured]) -> RowLengths:
    found = Measured.join(list(parts))
    lengths = np.concatenate([np.empty(0, smallest_dtype(found.longest)), *found.pieces])
    return RowLengths(found.rows, found.total, found.longest, found.unreadable, lengths)


def _usable(path: Path, key: bytes, rows: int, skip_corrupt: bool) -> RowLengths | None:
    found = read_lengths(path, key, rows)
    if found is None or (found.unreadable and not skip_corrupt):
        return None
    return _opened(found, path, key)


def _opened(found: LengthsFile, path: Path, key: bytes) -> RowLengths:
    return RowLengths(len(found.lengths), found.total, found.longest, found.unreadable, found.lengths, str(path), key)


def _reopened(path: str, key: bytes) -> RowLengths:
    found = read_lengths(Path(path), key)
    if found is None:
        raise FormatError(
            f"the row lengths {path} were changed or removed since they were opened. Create the dataset again."
        )
    return _opened(found, Path(path), key)


def _sidecar(source: Source, column: str, stamps: Stamps) -> tuple[Path, str, bytes]:
    """Return the folder and stem of the files for this column, and the key of the one for the present contents."""
    access, first = source.access, source.indexes[0].path
    key = _digest(
        source.fingerprint,
        column,
        source.schema.field(column).type,
        access.store.identity if access is not None else "",
        access.filter.digest if access is not None and access.filter is not None else "",
        *stamps,
    )
    indexes = _digest(*((index.path and Path(index.path).stem) or index.fingerprint for index in source.indexes))
    folder = Path(first).parent if first is not None else default_index_dir()
    return folder, f"{indexes.hex()}.{_digest(column).hex()[:8]}", key


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=KEY_BYTES).digest()


def _stamps(source: Source) -> Stamps:
    """Return what changes whenever the contents of a file change, for each file.

    A fingerprint does not suffice: it samples the values, and offsets between the samples may have changed. Nor does
    the modification time, which tools set back. Nobody can set the time of the last change (ctime) of a local file.
    """
    if source.access is not None and not source.access.store.local:
        return tuple((file.path, file.size, file.mtime_ns, file.etag) for file in source.files)
    return tuple(_local_stamp(source, file) for file in source.files)


def _local_stamp(source: Source, file: IndexedFile) -> tuple[object, ...]:
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise removed(file.path) from None
    if stat.st_size != file.size:
        raise changed(file.path, f"it has {stat.st_size} bytes and had {file.size}")
    if stat.st_mtime_ns != file.mtime_ns:
        if source.access is not None:
            raise changed(file.path, "its modification time differs")
        if fingerprint_of(source, file) != file.fingerprint:
            raise changed(file.path, "its contents differ")
    return file.path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
