"""Images, sounds and videos: each row is a file. Blocks are groups of files.

The footer of a block is a table of its rows, in which a file is a struct of its location. Its bytes are read only if
its column is requested.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataChangedError, DataNotFoundError, FormatError
from midepoch.sources.damage import removed
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.stores import Entry, Store

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""The type of a file in a row, as in Hugging Face's features."""
LOCATED = pa.struct([("path", pa.string()), ("name", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64())])
"""The type of a file in a footer. ``name`` is its path relative to the folder that was given."""
SKIP = b"skip"
_CONCURRENT = 16
"""Files of a store that are requested concurrently: a request for a small object is mostly waiting."""
_log = logging.getLogger("midepoch")


class MediaFormat(NoStatistics):
    """Format with blocks of files. Its scan is ``media_scan.scan_media``, which has the listing."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:  # noqa: ARG002
        raise FormatError(f"{store.name(entry.path)}: files of media are indexed together, not one by one.")

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002
        rows = pa.ipc.open_stream(block.footer).read_all().combine_chunks()
        skips = SKIP in (rows.schema.metadata or {})
        names = [name for name in columns if name in rows.schema.names]
        arrays = []
        for name in names:
            column = rows.column(name).combine_chunks()
            arrays.append(_with_contents(store, column, skips))
        if not arrays:
            return pa.table({"": pa.nulls(len(rows))}).select([])
        return pa.table(arrays, names=names)


def _with_contents(store: Store, column: pa.Array, skips: bool) -> pa.Array:
    """Return a column with the files in it read, or as it is."""
    if column.type == LOCATED:
        return _files(store, column, skips)
    if pa.types.is_list(column.type) and column.type.value_type == LOCATED:
        files = _files(store, column.flatten(), skips)
        lengths = np.array([0 if value is None else value for value in column.value_lengths().to_pylist()])
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(offsets, files, mask=mask)
    return column


def _files(store: Store, located: pa.StructArray, skips: bool) -> pa.Array:
    """Return the files as structs of bytes and path. With ``skips``, bytes of a file that cannot be read are null."""
    paths, names, sizes, times = (each.to_pylist() for each in located.flatten())
    entries = [
        None if path is None else Entry(path, size, mtime)
        for path, size, mtime in zip(paths, sizes, times, strict=True)
    ]
    contents = np.empty(sum(size or 0 for size in sizes), np.uint8)
    view, jobs, start = memoryview(contents.data), [], 0
    offsets = np.zeros(len(entries) + 1, np.int32)
    read = _read_local if store.local else _read_remote
    for i, entry in enumerate(entries):
        if entry is not None:
            jobs.append((i, entry, view[start : start + entry.size]))
            start += entry.size
        offsets[i + 1] = start
    for i in _missing(store, jobs, read, skips):
        paths[i], names[i] = None, store.name(paths[i])
    missing = [path is None for path in paths]
    bits = None if not any(missing) else pa.array([not each for each in missing], pa.bool_()).buffers()[1]
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(contents)]
    binary = pa.Array.from_buffers(pa.binary(), len(entries), buffers)
    mask = pa.array([entry is None for entry in entries], pa.bool_()) if None in entries else None
    return pa.StructArray.from_arrays([binary, pa.array(names, pa.string())], fields=list(FILE), mask=mask)


Job = tuple[int, Entry, memoryview]
Read = Callable[[Store, Entry, memoryview], None]


def _missing(store: Store, jobs: Sequence[Job], read: Read, skips: bool) -> list[int]:
    """Read files into their places, and return the numbers of those that cannot be read."""

    def run(job: Job) -> int | None:
        i, entry, place = job
        try:
            store.persist(entry.path, "read", lambda: _attempt(store, entry, place, read, skips))
        except (CorruptBlockError, DataNotFoundError) as problem:
            if not skips:
                raise
            _log.warning("a file cannot be read, its row is skipped when it is decoded: %s", problem)
            place[:] = bytes(len(place))
            return i
        return None

    if store.local or len(jobs) < 2:
        done = [run(job) for job in jobs]
    else:
        with ThreadPoolExecutor(min(_CONCURRENT, len(jobs))) as pool:
            done = list(pool.map(run, jobs))
    return [i for i in done if i is not None]


def _attempt(store: Store, entry: Entry, place: memoryview, read: Read, skips: bool) -> None:
    try:
        read(store, entry, place)
    except FileNotFoundError:
        raise removed(store.name(entry.path)) from None
    except PermissionError as problem:
        if not skips:
            raise
        raise CorruptBlockError(f"{store.name(entry.path)} cannot be read: {problem}") from None


def _read_local(_store: Store, entry: Entry, place: memoryview) -> None:
    with open(entry.path, "rb", buffering=0) as file:
        done = 0
        while done < len(place) and (came := file.readinto(place[done:])):
            done += came
        stat = os.fstat(file.fileno())  # after the read: contents from before a change would be detected, too
    if stat.st_size != entry.size or done < len(place):
        raise _changed(entry.path, f"it has {stat.st_size} bytes and had {entry.size}")
    if stat.st_mtime_ns != entry.mtime_ns:
        raise _changed(entry.path, "its modification time differs")


def _changed(path: str, difference: str) -> DataChangedError:
    return DataChangedError(
        f"{path} has changed since it was indexed ({difference}). Open the dataset again to use the new contents."
    )


def _read_remote(store: Store, entry: Entry, place: memoryview) -> None:
    with store.open(entry) as file:
        data: Any = file.read_at(entry.size, 0)
    if len(data) != entry.size:
        raise OSError(f"{len(data)} bytes were received where {entry.size} were requested")
    place[:] = data
