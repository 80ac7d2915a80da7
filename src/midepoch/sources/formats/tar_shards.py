"""Tar shards of WebDataset. A row is a sample: consecutive files with the same key, one column for each extension.

Samples are exactly those of the ``webdataset`` package. Its rules: the key is the path up to the first dot of the file
name, and the extension is the rest, in lower case. Files without an extension or with a name like ``__meta__``, links
and folders are ignored.

The footer of a file in the index is an Arrow file with a record batch for each block. To read a block, only its own
batch is decompressed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats import Block, Format, Scanned, table_of
from midepoch.sources.formats.compressed import compression, decompressed
from midepoch.sources.formats.tar_headers import BLOCK, Damage, TarMember, members, opened
from midepoch.storage.stores import Entry, OpenFile, Store

BLOCK_BYTES = 8 << 20
KEY = "__key__"
LARGEST = (1 << 31) - 1
"""Bytes that 32-bit offsets can address."""
_SPLIT = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)").fullmatch
_META = re.compile(rb"__[^/]*__(?:$|/)").match
_RESERVED = (KEY, "__url__")
_BAD = "__bad__"
_TABLES = ("parquet", "arrow", "feather", "orc")
_MOST_COLUMNS = 1_000
_NAMED_SAMPLES = 10
_NAMES = b"names"


class TarShard:
    """Samples of one archive, in blocks."""

    def __init__(self, name: str, skip_damage: bool) -> None:
        self._name, self._skip_damage = name, skip_damage
        self._extensions: dict[bytes, int] = {}
        self._numbers: dict[str, int] = {}
        """Numbers of the columns, by their names."""
        self._sample: Sample | None = None
        self._is_suspect = False
        """True after damage of a header: the missing file may belong to the sample before or to the one after it."""
        self._block: list[Sample] = []
        self._blocks: list[_Packed] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._links = 0
        self._skipped: list[str] = []
        self._is_damaged = False

    def add(self, item: TarMember | Damage) -> None:
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
        if column < 0 or any(column == each[0] for each in sample.members):
            self._refuse_duplicate(key, extension)
            return
        sample.members.append((column, item.offset, item.size, item.is_sparse))
        sample.contents.append(b"%d %b %d " % (len(extension), extension, item.size))
        sample.contents.append(item.ends)

    def _new_extension(self, name: bytes, extension: bytes) -> int:
        text = extension.decode(errors="backslashreplace").lower()
        if not self._extensions and text in _TABLES:
            remedy = f"Unpack the archive, and open its files: from_files('FOLDER/*.{text}')."
            raise FormatError(f"{self._name}: {_shown(name)} is a file of rows, not a part of a sample. {remedy}")
        number = -1 if text in _RESERVED else self._numbers.setdefault(text, len(self._numbers))
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
                f'{self._name}: {problem}. Write the shard again, or pass on_error="skip" to use the first of them.'
            )
        _log.warning("%s: %s, only the first is used", self._name, problem)

    def _pass_damage(self, damage: Damage) -> None:
        split = _SPLIT(damage.name) if damage.name else None
        before = self._sample.key if self._sample is not None else None
        if not self._skip_damage:
            after = f"after sample {_shown(before)}" if before else "at its beginning"
            place = f"in sample {_shown(split[1])}" if split else after
            raise FormatError(
                f'{self._name}: damaged {place}: {damage.text}. Copy or download it again, or pass on_error="skip" '
                "to use the samples that can be read."
            )
        self._is_damaged = True
        _log.warning("%s: %s", self._name, damage.text)
        if split is None:
            self._is_suspect = True
        if self._sample is not None and (split is None or split[1] == before):
            self._sample.is_whole = False

    def _finish(self) -> None:
        """Add the current sample to the block, or start the next block with it."""
        sample, self._sample = self._sample, None
        if sample is None or not sample.members or self._is_bad(sample):
            return
        if not sample.is_whole:
            self._skipped.append(_shown(sample.key))
            return
        _, offset, size, _ = sample.members[-1]
        if self._block and offset + size - self._block[0].members[0][1] > BLOCK_BYTES:
            self._close_block()
        self._block.append(sample)
        self._digest.update(b"%d %b %d " % (len(sample.key), sample.key, len(sample.members)))
        self._digest.update(b"".join(sample.contents))

    def _close_block(self) -> None:
        samples, self._block = self._block, []
        keys = [sample.key.decode(errors="backslashreplace") for sample in samples]
        bounds = np.cumsum([0, *(len(sample.members) for sample in samples)], dtype=np.int32)
        numbers = np.array([member for sample in samples for member in sample.members], np.int64)
        self._blocks.append((keys, bounds, numbers.T.copy()))

    def _is_bad(self, sample: Sample) -> bool:
        """Return True for a sample with a file ``key.__bad__`` that is not empty: webdataset omits it."""
        number = self._numbers.get(_BAD)
        return any(column == number and size > 0 for column, _, size, _ in sample.members)

    def finished(self) -> Scanned:
        """Return the result of the scan."""
        self._finish()
        if self._block:
            self._close_block()
        if self._skipped:
            more = ", …" if len(self._skipped) > _NAMED_SAMPLES else ""
            listed = ", ".join(self._skipped[:_NAMED_SAMPLES])
            _log.warning("%s: skipped %d damaged samples: %s%s", self._name, len(self._skipped), listed, more)
        if self._links:
            _log.warning("%s: ignored %d links, which are not files", self._name, self._links)
        rows, names = [len(keys) for keys, _, _ in self._blocks], list(self._numbers)
        columns, _, sizes, _ = np.concatenate([np.empty((4, 0), np.int64), *(block[2] for block in self._blocks)], 1)
        counts, largest = np.bincount(columns, minlength=len(names)), np.zeros(len(names), np.int64)
        np.maximum.at(largest, columns, sizes)
        used = np.flatnonzero(counts).tolist()
        kinds = [pa.large_binary() if largest[number] > LARGEST else pa.binary() for number in used]
        fields = [pa.field(names[number], kind) for number, kind in zip(used, kinds, strict=True)]
        return Scanned(
            pa.schema([pa.field(KEY, pa.string()), *fields]),
            list(range(len(rows))),
            rows,
            {(names[number],) for number in used if counts[number] < sum(rows)},
            self._digest.hexdigest(),
            packed(names, self._blocks),
            decoded_bytes=float(sizes.sum()),
            complete=not self._is_damaged,
        )


def _is_meta(name: bytes) -> bool:
    return _META(name) is not None or (b"/" not in name and name.endswith(b"__"))


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))


Int64Array = npt.NDArray[np.int64]


@dataclass
class Sample:
    """A sample: its key, and its members in the order of the archive."""

    key: bytes
    members: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """The number of the column, the offset, the size, and True for a sparse member."""
    contents: list[bytes] = field(default_factory=list)
    """Descriptions of the members for the fingerprint."""
    is_whole: bool = True


_Packed = tuple[list[str], npt.NDArray[np.int32], Int64Array]
"""A block: the keys of its samples, the bounds of their members, and the numbers of ``Sample.members`` in rows."""


@dataclass(frozen=True, eq=False)
class MemberTable:
    """Samples of one block. Arrays have one entry for each member, in the order of the archive."""

    keys: pa.Array
    samples: Int64Array
    """Number of the sample in the block."""
    columns: Int64Array
    offsets: Int64Array
    sizes: Int64Array
    is_sparse: npt.NDArray[np.bool_]

    def only(self, chosen: npt.NDArray[np.bool_]) -> MemberTable:
        """Return the table of some members, and of all samples."""
        names = ("samples", "columns", "offsets", "sizes", "is_sparse")
        return self if chosen.all() else replace(self, **{name: getattr(self, name)[chosen] for name in names})


def packed(names: Sequence[str], blocks: Sequence[_Packed]) -> bytes:
    """Return the footer of a file: the names of its columns, and the members of its blocks.

    Offsets are stored as their difference to the place where the next member usually is, which is mostly the same.
    """
    lists = [pa.field(name, pa.list_(pa.int64())) for name in ("columns", "drift", "sizes", "sparse")]
    schema = pa.schema([pa.field("keys", pa.string()), *lists], metadata={_NAMES: json.dumps(list(names))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for keys, bounds, numbers in blocks:
            numbers[1] -= _usual(numbers[2])
            columns = [pa.ListArray.from_arrays(pa.array(bounds), pa.array(column)) for column in numbers]
            writer.write_batch(pa.record_batch([pa.array(keys), *columns], schema=schema))
    return bytes(sink.getvalue())


def _usual(sizes: Int64Array) -> Int64Array:
    """Return the offsets of members with one header each and nothing between them, from the first on."""
    steps = -(-sizes // BLOCK) * BLOCK + BLOCK
    return np.cumsum(steps) - steps


def unpacked(footer: bytes, number: int) -> tuple[list[str], MemberTable]:
    """Return the names of the columns of a file, and the members of one of its blocks."""
    with pa.ipc.open_file(footer) as file:
        batch = file.get_batch(number)
    keys, *lists = batch.columns
    bounds = np.frombuffer(lists[0].buffers()[1], np.int32, len(batch) + 1)
    # Not Array.to_numpy, which would import pandas.
    numbers = [np.frombuffer(each.values.buffers()[1], np.int64, int(bounds[-1])) for each in lists]
    columns, drift, sizes, sparse = numbers
    samples = np.repeat(np.arange(len(batch)), np.diff(bounds))
    table = MemberTable(keys, samples, columns, _usual(sizes) + drift, sizes, sparse != 0)
    return json.loads(batch.schema.metadata[_NAMES]), table


_log = logging.getLogger("midepoch")

LOCAL_GAP, REMOTE_GAP = 32 << 10, 1 << 20
"""Bytes between two requested members that are worth a separate read."""

LARGE = 64 << 10
"""Average bytes of members that are read one by one."""


class TarFormat(Format):
    """Format whose blocks are about 8 MB of samples. Only the ranges of the requested columns are read."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        name = store.name(entry.path)
        with opened(store, entry) as (reader, etag):
            shard = TarShard(name, skip_damage)
            for item in members(reader, name):
                shard.add(item)
        found = shard.finished()
        found.etag = etag
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        names, table = unpacked(block.footer, block.offset)
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
        values = [table.keys if name == KEY else arrays[numbers[name]] for name in present]
        return table_of(present, values, len(table.keys))


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
