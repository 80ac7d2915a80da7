"""Tar shards of WebDataset. A row is a sample: consecutive files with the same key, one column for each extension.

Samples are exactly those of the ``webdataset`` package. Its rules: the key is the path up to the first dot of the file
name, and the extension is the rest, in lower case. Files without an extension or with a name like ``__meta__``, links
and folders are ignored.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import tarfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.compressed import compression, decompressed
from midepoch.sources.formats.tar_headers import BLOCK, Archive, Damage, Member
from midepoch.sources.formats.tar_reading import Stream, opened
from midepoch.sources.formats.tar_tables import Int64Array, MemberTable, Sample, joined, packed, table_of
from midepoch.sources.stores import Entry, Store

_log = logging.getLogger("midepoch")

BLOCK_BYTES = 8 << 20
LOCAL_GAP, REMOTE_GAP = 32 << 10, 1 << 20
"""Bytes between two requested members that are worth a separate read."""
KEY = "__key__"
_SPLIT = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)").fullmatch
_META = re.compile(rb"__[^/]*__(?:$|/)").match
_RESERVED = (KEY, "__url__")
_BAD = "__bad__"
_MOST_COLUMNS = 1_000
_LARGE = (1 << 31) - 1
_NAMED_SAMPLES = 10


class TarFormat(NoStatistics):
    """Format whose blocks are about 8 MB of samples. Only the ranges of the requested columns are read."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with opened(store, entry) as (reader, etag):
            archive, shard = Archive(reader), _Shard(name, skip_damage)
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
        chosen = np.isin(table.columns, [numbers[name] for name in present if name != KEY])
        table = table.only(chosen)
        data, positions = _read(store, block, table)
        arrays = [
            table.keys if name == KEY else _values(data, positions, table, numbers[name])
            for name in present
        ]
        return pa.table(arrays, names=present)


class _Shard:
    """Samples of one archive, in blocks."""

    def __init__(self, name: str, skip_damage: bool) -> None:
        self._name, self._skip_damage = name, skip_damage
        self._extensions: dict[bytes, int] = {}
        self._columns: list[str] = []
        self._counts: list[int] = []
        self._largest: list[int] = []
        self._numbers: dict[str, int] = {}
        self._sample: Sample | None = None
        self._is_suspect = False
        """True after damage of a header: the missing file may belong to the sample before or to the one after it."""
        self._block: list[Sample] = []
        self._rows: list[int] = []
        self._tables: list[bytes] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._bytes = self._links = 0
        self._skipped: list[str] = []
        self.is_damaged = False

    def add(self, item: Member | Damage) -> None:
        """Add the next member of the archive."""
        if isinstance(item, Damage):
            self._pass_damage(item)
            return
        name = item.name
        if item.is_link:
            self._links += 1
            return
        split = _SPLIT(name)
        if split is None or (name.startswith(b"__") and _is_meta(name)):
            return
        key, extension = split.groups()
        column = self._extensions.get(extension)
        if column is None:
            column = self._new_extension(name, extension)
        sample = self._sample
        if sample is None or key != sample.key:
            self._finish()
            sample = self._sample = Sample(key, is_whole=not self._is_suspect)
        self._is_suspect = False
        if column in sample.columns or column < 0:
            self._refuse_duplicate(key, extension)
            return
        sample.columns.append(column)
        sample.offsets.append(item.offset)
        sample.sizes.append(item.size)
        sample.sparse.append(item.is_sparse)
        sample.contents.append(b"%d %b %d " % (len(extension), extension, item.size))
        sample.contents.append(item.ends)

    def _new_extension(self, name: bytes, extension: bytes) -> int:
        text = extension.decode(errors="backslashreplace").lower()
        number = -1 if text in _RESERVED else self._numbers.setdefault(text, len(self._columns))
        if number == len(self._columns):
            self._columns.append(text)
            self._counts.append(0)
            self._largest.append(0)
        if number > _MOST_COLUMNS:
            raise FormatError(
                f"{self._name}: its files have more than {_MOST_COLUMNS:,} different extensions, the last is {text!r} "
                f"of {_shown(name)}. An extension begins at the first dot: write names without dots before it."
            )
        self._extensions[extension] = number
        return number

    def _refuse_duplicate(self, key: bytes, extension: bytes) -> None:
        problem = f"sample {_shown(key)} has several files with the extension {_shown(extension)}"
        if not self._skip_damage:
            raise FormatError(
                f"{self._name}: {problem}. Write the shard again, or pass on_error=\"skip\" to use the first of them."
            )
        _log.warning("%s: %s, only the first is used", self._name, problem)

    def _pass_damage(self, damage: Damage) -> None:
        split = _SPLIT(damage.name) if damage.name else None
        before = self._sample.key if self._sample is not None else None
        if not self._skip_damage:
            place = f"in sample {_shown(split[1])}" if split else f"after sample {_shown(before)}" if before else "at its beginning"
            raise FormatError(
                f"{self._name}: damaged {place}: {damage.text}. Copy or download it again, or pass on_error=\"skip\" "
                "to use the samples that can be read."
            )
        self.is_damaged = True
        _log.warning("%s: %s", self._name, damage.text)
        if split is None:
            self._is_suspect = True
        if self._sample is not None and (split is None or split[1] == before):
            self._sample.is_whole = False

    def _finish(self) -> None:
        """Add the current sample to the block, or start the next block with it."""
        sample, self._sample = self._sample, None
        if sample is None or not sample.columns or self._is_bad(sample):
            return
        if not sample.is_whole:
            self._skipped.append(_shown(sample.key))
            return
        if self._block and sample.stop - self._block[0].offsets[0] > BLOCK_BYTES:
            self._close_block()
        for column, size in zip(sample.columns, sample.sizes, strict=True):
            self._counts[column] += 1
            if size > self._largest[column]:
                self._largest[column] = size
        self._digest.update(b"%d %b %d " % (len(sample.key), sample.key, len(sample.columns)))
        self._digest.update(b"".join(sample.contents))
        self._bytes += sum(sample.sizes)
        self._block.append(sample)

    def _is_bad(self, sample: Sample) -> bool:
        """Return True for a sample with a file ``key.__bad__`` that is not empty: webdataset omits it."""
        number = self._numbers.get(_BAD)
        return number in sample.columns and sample.sizes[sample.columns.index(number)] > 0

    def _close_block(self) -> None:
        self._rows.append(len(self._block))
        self._tables.append(packed(self._block))
        self._block = []

    def finished(self) -> Scanned:
        """Return the result of the scan."""
        self._finish()
        if self._block:
            self._close_block()
        rows = sum(self._rows)
        if self._skipped:
            more = ", …" if len(self._skipped) > _NAMED_SAMPLES else ""
            listed = ", ".join(self._skipped[:_NAMED_SAMPLES])
            _log.warning("%s: skipped %d damaged samples: %s%s", self._name, len(self._skipped), listed, more)
        if self._links:
            _log.warning("%s: ignored %d links, which are not files", self._name, self._links)
        used = [number for number, count in enumerate(self._counts) if count]
        kinds = [pa.large_binary() if self._largest[number] > _LARGE else pa.binary() for number in used]
        fields = [pa.field(self._columns[number], kind) for number, kind in zip(used, kinds, strict=True)]
        return Scanned(
            pa.schema([pa.field(KEY, pa.string()), *fields]),
            list(range(len(self._rows))),
            self._rows,
            {(self._columns[number],) for number in used if self._counts[number] < rows},
            self._digest.hexdigest(),
            joined(self._columns, self._tables),
            decoded_bytes=float(self._bytes),
            complete=not self.is_damaged,
        )


def _is_meta(name: bytes) -> bool:
    return _META(name) is not None or (b"/" not in name and name.endswith(b"__"))


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))


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
        pieces = [_checked(file.read_at(end - start, start), end - start) for start, end in zip(starts, ends, strict=True)]
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
    small = len(data) <= _LARGE
    kind = pa.binary() if small else pa.large_binary()
    if not count:
        return pa.nulls(rows, kind)
    if table.is_sparse[chosen].any():
        return _restored(data, positions, table, chosen)
    bounds = np.empty(2 * count, np.int32 if small else np.int64)
    bounds[0::2] = positions[chosen]
    bounds[1::2] = bounds[0::2] + table.sizes[chosen]
    spans = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(bounds), data])
    indices = np.arange(0, 2 * count, 2)
    if count == rows:
        return spans.take(pa.array(indices))
    places, is_null = np.zeros(rows, np.int64), np.ones(rows, bool)
    places[table.samples[chosen]], is_null[table.samples[chosen]] = indices, False
    return spans.take(pa.array(places, mask=is_null))


def _restored(data: pa.Buffer, positions: Int64Array, table: MemberTable, chosen: Int64Array) -> pa.Array:
    """Return a column with sparse members: ``tarfile`` restores the holes from the headers."""
    values: list[bytes | None] = [None] * len(table.keys)
    for number in chosen.tolist():
        start, size = int(positions[number]), int(table.sizes[number])
        value = data[start : start + size].to_pybytes()
        if table.is_sparse[number]:
            with tarfile.open(fileobj=io.BytesIO(value + bytes(BLOCK * 20))) as archive:
                file = archive.extractfile(archive.next())
                value = file.read()
        values[int(table.samples[number])] = value
    return pa.array(values, pa.large_binary())
