"""Images, sounds and videos: each row is a file. Blocks are groups of files.

The footer of a block is a table of its rows, in which a file is a struct of its location. Its bytes are read only if
its column is requested.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataNotFoundError
from midepoch.sources.formats.base import Block, Format, table_of
from midepoch.storage.damage import changed, removed
from midepoch.storage.stores import Entry, Store

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""The type of a file in a row, as in Hugging Face's features."""
LOCATED = pa.struct([("path", pa.string()), ("name", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64())])
"""The type of a file in a footer. ``name`` is its path relative to the folder that was given."""
SKIP = b"skip"
_CONCURRENT = 16
"""Files of a store that are requested concurrently: a request for a small object is mostly waiting."""
_log = logging.getLogger("midepoch")


class MediaFormat(Format):
    """Format with blocks of files. Its scan is ``media_rows.scan_media``, which takes the listing."""

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        rows = pa.ipc.open_stream(block.footer).read_all().combine_chunks()
        skips = SKIP in (rows.schema.metadata or {})
        names = [name for name in columns if name in rows.schema.names]
        arrays = [_with_contents(store, rows.column(name).combine_chunks(), skips) for name in names]
        return table_of(names, arrays, len(rows))


def name_of(footer: bytes, row: int) -> str | None:
    """Return the name of the first file of a row of a block, relative to its folder. None if it has no file."""
    rows = pa.ipc.open_stream(footer).read_all()
    for column in rows.columns:
        if column.type == LOCATED and (located := column[row].as_py()) is not None:
            return str(located["name"])
    return None


def _with_contents(store: Store, column: pa.Array, skips: bool) -> pa.Array:
    """Return a column with the files in it read, or as it is."""
    if column.type == LOCATED:
        return _files(store, column, skips)
    if pa.types.is_list(column.type) and column.type.value_type == LOCATED:
        files = _files(store, column.flatten(), skips)
        lengths = [length or 0 for length in column.value_lengths().to_pylist()]
        offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(offsets, files, mask=mask)
    return column


def _files(store: Store, located: pa.StructArray, skips: bool) -> pa.Array:
    """Return the files as structs of bytes and path. With ``skips``, bytes of a file that cannot be read are null."""
    columns = located.flatten()
    paths, sizes, times = (columns[i].to_pylist() for i in (0, 2, 3))
    contents = np.empty(sum(size or 0 for size in sizes), np.uint8)
    view, jobs, start = memoryview(contents.data), [], 0
    offsets = np.zeros(len(paths) + 1, np.int32)
    for i, (path, size, mtime) in enumerate(zip(paths, sizes, times, strict=True)):
        if path is not None:
            jobs.append((i, Entry(path, size, mtime), view[start : start + size]))
            start += size
        offsets[i + 1] = start
    names, bits, mask = columns[1], None, None
    missing = _missing(store, jobs, _read_local if store.local else _read_remote, skips)
    if missing or located.null_count:  # not otherwise: pa.array of a list imports pandas, which takes 0.3 s
        given, absent = names.to_pylist(), {*missing, *(i for i, path in enumerate(paths) if path is None)}
        names = pa.array([store.name(paths[i]) if i in missing else name for i, name in enumerate(given)], pa.string())
        bits = pa.array([i not in absent for i in range(len(paths))], pa.bool_()).buffers()[1]
        mask = pa.array([path is None for path in paths], pa.bool_())
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(contents)]
    binary = pa.Array.from_buffers(pa.binary(), len(paths), buffers)
    return pa.StructArray.from_arrays([binary, names], fields=list(FILE), mask=mask)


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
        raise changed(entry.path, f"it has {stat.st_size} bytes and had {entry.size}")
    if stat.st_mtime_ns != entry.mtime_ns:
        raise changed(entry.path, "its modification time differs")


def _read_remote(store: Store, entry: Entry, place: memoryview) -> None:
    with store.open(entry) as file:
        file.read_into(place, 0)
