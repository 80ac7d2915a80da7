"""Tar shards of WebDataset. A row is a sample: consecutive files with the same key, one column for each extension.

Samples are exactly those of the ``webdataset`` package. Its rules: the key is the path up to the first dot of the file
name, and the extension is the rest, in lower case. Files without an extension or with a name like ``__meta__``, links
and folders are ignored.
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.compressed import compression, decompressed
from midepoch.sources.formats.tar_headers import BLOCK, Archive, Damage
from midepoch.sources.formats.tar_reading import Stream, opened
from midepoch.sources.formats.tar_samples import KEY, LARGEST, TarShard
from midepoch.sources.formats.tar_tables import Int64Array, MemberTable, table_of
from midepoch.sources.stores import Entry, OpenFile, Store

_log = logging.getLogger("midepoch")

LOCAL_GAP, REMOTE_GAP = 32 << 10, 1 << 20
"""Bytes between two requested members that are worth a separate read."""

LARGE = 64 << 10
"""Average bytes of members that are read one by one."""


class TarFormat(NoStatistics):
    """Format whose blocks are about 8 MB of samples. Only the ranges of the requested columns are read."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with opened(store, entry) as (reader, etag):
            archive, shard = Archive(reader), TarShard(name, skip_damage)
            for item in archive:
                shard.add(item)
            if isinstance(reader, Stream) and reader.damage is not None:
                shard.add(Damage(reader.damage))
            elif not archive.end and not reader.at(0, 1):
                shard.add(Damage("it is empty"))
            elif not shard.is_damaged and not archive.is_marked:
                _log.warning("%s has no end mark: if it was cut, its last sample is incomplete", name)
        found = shard.finished()
        found.etag = etag
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002
        names, table = table_of(block.footer, block.offset)
        numbers = {name: number for number, name in enumerate(names)}
        present = [name for name in columns if name in numbers or name == KEY]
        wanted = [numbers[name] for name in present if name != KEY]
        table = table.only(np.isin(table.columns, wanted))
        large = _large_columns(table) if store.local and compression(block.entry.path) is None else []
        rest = table.only(~np.isin(table.columns, large))
        data, positions = _read(store, block, rest)
        arrays = {number: _values(data, positions, rest, number) for number in wanted if number not in large}
        if large:
            with store.open(block.entry) as file:
                arrays |= {number: _read_in_place(file, table, number) for number in large}
        return pa.table([table.keys if name == KEY else arrays[numbers[name]] for name in present], names=present)


def _large_columns(table: MemberTable) -> list[int]:
    """Return the columns whose members are read one by one, which saves a copy. Small ones are cheaper together."""
    counts = np.bincount(table.columns)
    sizes = np.bincount(table.columns, weights=table.sizes)
    sparse = np.bincount(table.columns, weights=table.is_sparse)
    found: list[int] = np.flatnonzero((counts > 0) & (sizes >= LARGE * counts) & (sparse == 0)).tolist()
    return found


def _read_in_place(file: OpenFile, table: MemberTable, column: int) -> pa.Array:
    """Return one column, whose members are read into the memory of the array."""
    chosen = np.flatnonzero(table.columns == column)
    rows, sizes = len(table.keys), table.sizes[chosen]
    ends = np.zeros(rows + 1, np.int64)
    ends[table.samples[chosen] + 1] = sizes
    np.cumsum(ends, out=ends)
    contents = pa.allocate_buffer(int(ends[-1]))
    view, start = memoryview(contents), 0
    for offset, size in zip(table.offsets[chosen].tolist(), sizes.tolist(), strict=True):
        file.read_into(view[start : start + size], offset)
        start += size
    small = start <= LARGEST
    offsets = pa.py_buffer(ends.astype(np.int32) if small else ends)
    return pa.Array.from_buffers(
        pa.binary() if small else pa.large_binary(), rows, [_validity(table, chosen), offsets, contents]
    )


def _read(store: Store, block: Block, table: MemberTable) -> tuple[pa.Buffer, Int64Array]:
    """Return bytes that contain all members, and the position of each in them. Large gaps are not read."""
    if not len(table.offsets):
        return pa.py_buffer(b""), table.offsets
    stops = table.offsets + table.sizes
    first, stop = int(table.offsets[0]), int(stops[-1])
    if compression(block.entry.path) is not None:
        data = decompressed(store, replace(block, offset=first, end=stop))
        return _checked(data, stop - first), table.offsets - first
    far = LOCAL_GAP if store.local else REMOTE_GAP
    cuts = np.flatnonzero(table.offsets[1:] - stops[:-1] > far) + 1
    starts, ends = table.offsets[[0, *cuts]].tolist(), stops[[*(cuts - 1), -1]].tolist()
    with store.open(block.entry) as file:
        pieces = [
            _checked(file.read_at(end - start, start), end - start) for start, end in zip(starts, ends, strict=True)
        ]
    if len(pieces) == 1:
        return pieces[0], table.offsets - first
    run = np.zeros(len(table.offsets), np.int64)
    run[cuts] = 1
    skipped = np.array(starts) - np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])[:-1]])
    return pa.py_buffer(b"".join(pieces)), table.offsets - skipped[np.cumsum(run)]


def _checked(data: bytes, size: int) -> pa.Buffer:
    if len(data) != size:
        raise OSError(f"{len(data)} bytes were received where {size} were requested")
    return pa.py_buffer(data)


def _values(data: pa.Buffer, positions: Int64Array, table: MemberTable, column: int) -> pa.Array:
    """Return one column: the bytes between two members are values too, which are not taken."""
    chosen = np.flatnonzero(table.columns == column)
    count, rows = len(chosen), len(table.keys)
    small = len(data) <= LARGEST
    kind = pa.binary() if small else pa.large_binary()
    if not count:
        return pa.nulls(rows, kind)
    if table.is_sparse[chosen].any():
        return _restored(data, positions, table, chosen)
    bounds = np.stack([positions[chosen], positions[chosen] + table.sizes[chosen]], axis=1)
    offsets = pa.py_buffer(bounds.astype(np.int32) if small else bounds)
    spans = pa.Array.from_buffers(kind, 2 * count - 1, [None, offsets, data])
    places = np.zeros(rows, np.int64)
    places[table.samples[chosen]] = np.arange(0, 2 * count, 2)
    # Not pa.array: it would import pandas in each process, which takes 0.3 s.
    return spans.take(pa.Array.from_buffers(pa.int64(), rows, [_validity(table, chosen), pa.py_buffer(places)]))


def _validity(table: MemberTable, chosen: Int64Array) -> pa.Buffer | None:
    """Return the bitmap of the samples that have one of these members, or None if all of them have."""
    rows = len(table.keys)
    if len(chosen) == rows:
        return None
    is_there = np.zeros(rows, bool)
    is_there[table.samples[chosen]] = True
    return pa.py_buffer(np.packbits(is_there, bitorder="little"))


def _restored(data: pa.Buffer, positions: Int64Array, table: MemberTable, chosen: Int64Array) -> pa.Array:
    """Return a column with sparse members: ``tarfile`` restores the holes from the headers."""
    values: list[bytes | None] = [None] * len(table.keys)
    for number in chosen.tolist():
        start, size = int(positions[number]), int(table.sizes[number])
        value = data[start : start + size].to_pybytes()
        if table.is_sparse[number]:
            with tarfile.open(fileobj=io.BytesIO(value + bytes(2 * BLOCK))) as archive:
                file = archive.extractfile(archive.getmembers()[0])
                assert file is not None
                value = file.read()
        values[int(table.samples[number])] = value
    return pa.array(values, pa.large_binary())
