"""Tar shards of WebDataset. A row is a sample: consecutive files with the same key, one column for each extension.

Samples are exactly those of the ``webdataset`` package. Its rules: the key is the path up to the first dot of the file
name, and the extension is the rest, in lower case. Files without an extension or with a name like ``__meta__``, links
and folders are ignored.

The footer of a file in the index is an Arrow file with a record batch of one row for each block. To read a block, only
its own batch is decompressed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats import Block, Format, Scanned, table_of
from midepoch.sources.formats.compressed import compression, read_ranges
from midepoch.sources.formats.records import Bytes, Int64Array, Values, gathered
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
        self._blocks: list[tuple[list[str], Int64Array]] = []
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
        members = [(i, *member) for i, sample in enumerate(samples) for member in sample.members]
        self._blocks.append((keys, np.array(members, np.int64).T.copy()))

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
        rows, names = [len(keys) for keys, _ in self._blocks], list(self._numbers)
        members = np.concatenate([np.empty((5, 0), np.int64), *(block for _, block in self._blocks)], axis=1)
        columns, sizes = members[1], members[3]
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


@dataclass
class Sample:
    """A sample: its key, and its members in the order of the archive."""

    key: bytes
    members: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """The number of the column, the offset, the size, and True for a sparse member."""
    contents: list[bytes] = field(default_factory=list)
    """Descriptions of the members for the fingerprint."""
    is_whole: bool = True


def packed(names: Sequence[str], blocks: Sequence[tuple[list[str], Int64Array]]) -> bytes:
    """Return the footer of a file: the names of its columns, and the keys and the members of each block.

    The rows of the array of members: the number of the sample in the block, and the fields of ``Sample.members``.
    Offsets are stored as their difference to the place where the next member usually is, which is mostly the same.
    """
    for _, numbers in blocks:
        numbers[2] -= _usual(numbers[3])
    schema = pa.schema([("keys", pa.list_(pa.string())), ("members", pa.list_(pa.int64()))])
    schema = schema.with_metadata({_NAMES: json.dumps(list(names))})
    columns = [[keys for keys, _ in blocks], [numbers.reshape(-1) for _, numbers in blocks]]
    table = pa.table([pa.array(*pair) for pair in zip(columns, schema.types, strict=True)], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=1)
    return bytes(sink.getvalue())


def _usual(sizes: Int64Array) -> Int64Array:
    """Return the offsets of members with one header each and nothing between them, from the first on."""
    steps = -(-sizes // BLOCK) * BLOCK + BLOCK
    return np.cumsum(steps) - steps


def unpacked(footer: bytes, number: int) -> tuple[list[str], pa.Array, Int64Array]:
    """Return the names of the columns of a file, and the keys and the members of one of its blocks."""
    with pa.ipc.open_file(footer) as file:
        keys, numbers = (column.values for column in file.get_batch(number).columns)
        names = json.loads(file.schema.metadata[_NAMES])
    # Not Array.to_numpy, which would import pandas.
    members = np.frombuffer(numbers.buffers()[1], np.int64, len(numbers)).reshape(5, -1).copy()
    members[2] += _usual(members[3])
    return names, keys, members


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
        names, keys, found = unpacked(block.footer, block.offset)
        numbers = {name: number for number, name in enumerate(names)}
        present = [name for name in columns if name in numbers or name == KEY]
        wanted = [numbers[name] for name in present if name != KEY]
        is_plain = store.local and compression(block.entry.path) is None
        large = [number for number in wanted if is_plain and _is_large(found[:, found[1] == number])]
        small = [number for number in wanted if number not in large]
        rest = found[:, np.isin(found[1], small)]
        data, starts = _read(store, block, rest[2], rest[2] + rest[3])
        contents = {number: _gathered(data, starts, rest, number) for number in small}
        if large:
            with store.open(block.entry) as file:
                contents |= {number: _read_in_place(file, found[:, found[1] == number]) for number in large}
        arrays = [keys if name == KEY else _column(len(keys), *contents[numbers[name]]) for name in present]
        return table_of(present, arrays, len(keys))


Contents = tuple[Int64Array, Int64Array, pa.Buffer]
"""Values of a column: the samples that have one, their sizes, and their bytes, one after the other."""


def _is_large(members: Int64Array) -> bool:
    """Return True for members that are read one by one, which saves a copy. Small ones are cheaper together."""
    _, _, _, sizes, sparse = members
    return bool(len(sizes) and sizes.sum() >= LARGE * len(sizes) and not sparse.any())


def _read_in_place(file: OpenFile, members: Int64Array) -> Contents:
    """Return the contents of the members of a column, which are read into one buffer."""
    samples, _, offsets, sizes, _ = members
    contents = pa.allocate_buffer(int(sizes.sum()))
    view, start = memoryview(contents), 0
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        file.read_into(view[start : start + size], offset)
        start += size
    return samples, sizes, contents


def _read(store: Store, block: Block, offsets: Int64Array, stops: Int64Array) -> tuple[Bytes, Int64Array]:
    """Return bytes that contain all of these ranges, and the position of each in them. Large gaps are not read."""
    if not len(offsets):
        return np.empty(0, np.uint8), offsets
    far = LOCAL_GAP if store.local else REMOTE_GAP
    cuts = np.flatnonzero(offsets[1:] - stops[:-1] > far) + 1
    starts, ends = offsets[[0, *cuts]], stops[[*(cuts - 1), -1]]
    pieces = read_ranges(store, block, list(zip(starts.tolist(), ends.tolist(), strict=True)))
    skipped = starts - (np.cumsum(ends - starts) - (ends - starts))
    run = np.searchsorted(starts, offsets, side="right") - 1
    return np.frombuffer(b"".join(pieces), np.uint8), offsets - skipped[run]


def _gathered(data: Bytes, starts: Int64Array, members: Int64Array, column: int) -> Contents:
    """Return the contents of the members of a column. ``tarfile`` restores the holes of sparse ones."""
    chosen = members[1] == column
    samples, _, _, sizes, sparse = members[:, chosen]
    values = Values(data, starts[chosen], sizes)
    if not sparse.any():
        return samples, sizes, pa.py_buffer(gathered(values))
    contents = [values.value(i) for i in range(len(values))]
    for i in np.flatnonzero(sparse).tolist():
        with tarfile.open(fileobj=io.BytesIO(contents[i] + bytes(2 * BLOCK))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            assert file is not None
            contents[i] = file.read()
    return samples, np.array(list(map(len, contents)), np.int64), pa.py_buffer(b"".join(contents))


def _column(rows: int, samples: Int64Array, sizes: Int64Array, contents: pa.Buffer) -> pa.Array:
    """Return a column of so many rows, in which some samples have values."""
    ends, is_there = np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_)
    ends[samples + 1], is_there[samples] = sizes, True
    np.cumsum(ends, out=ends)
    validity = None if is_there.all() else pa.py_buffer(np.packbits(is_there, bitorder="little"))
    is_small = len(contents) <= LARGEST
    offsets = pa.py_buffer(ends.astype(np.int32) if is_small else ends)
    return pa.Array.from_buffers(pa.binary() if is_small else pa.large_binary(), rows, [validity, offsets, contents])
