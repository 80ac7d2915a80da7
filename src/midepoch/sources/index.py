"""Index of a set of files: the location of every block. Written once, checked by ``stat``, opened memory-mapped.

Footers of files, which are needed to decode their blocks, are stored beside it and read on demand.

Thousands of files are read by threads of this process, or by a cluster. An action is a module-level function with bound
arguments (``functools.partial``), so that it can be sent to another process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import Progress
from midepoch.errors import CorruptBlockError, DataError, DataNotFoundError, DifferentSchemasError, FormatError
from midepoch.sources.arrow_ipc import FileScan, node_paths, scan
from midepoch.sources.dictionaries import holds_dictionary, undecodable
from midepoch.sources.fingerprints import SKIPPED
from midepoch.sources.indexed_files import IndexedFile as IndexedFile
from midepoch.sources.indexed_files import IndexedFiles as IndexedFiles
from midepoch.storage.cache_files import atomic_write, default_index_dir, locked
from midepoch.storage.damage import DamageError, is_damage, refusal, retried

_SUFFIX = ".midepoch-footers"
_KEPT_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, eq=False)
class Footers:
    """One footer for each file: in memory, or in a file that is mapped on first use."""

    kept: tuple[bytes, ...] = ()
    path: str | None = None
    name: str = ""
    """Hash of the contents, so that an index is never used with the footers of another one."""

    @staticmethod
    def of(footers: Iterable[bytes]) -> Footers:
        kept = tuple(footers)
        digest = hashlib.blake2b(digest_size=8)
        for one in kept:
            digest.update(hashlib.blake2b(one, digest_size=16).digest())
        return Footers(kept, None, digest.hexdigest())

    def __getitem__(self, number: int) -> bytes:
        if self.path is None:
            return self.kept[number]
        return bytes(pa.decompress(*self._at(number), codec="zstd", asbytes=True))

    def _at(self, number: int) -> tuple[bytes, int]:
        stored = self._column[number].as_py()
        return stored[8:], int.from_bytes(stored[:8], "little")

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        assert self.path is not None
        try:
            table = retried(self._table, self.path)
        except (OSError, CorruptBlockError, pa.ArrowException) as problem:
            if not is_damage(problem):
                raise refusal(problem, f"{self.path} could not be read: {problem}") from None
            raise FormatError(
                f"{self.path} cannot be read ({problem}). Open the dataset with force_reindex=True."
            ) from None
        if (table.schema.metadata or {}).get(b"midepoch") != self.name.encode():
            raise FormatError(f"{self.path} belongs to another index. Create the dataset again.")
        return table.column(0)

    def _table(self) -> pa.Table:
        with pa.memory_map(self.path) as mapped:
            return pa.ipc.open_file(mapped).read_all()

    def save(self, index: Path) -> Footers:
        """Save the footers beside the index, under their own name: an index in use keeps its footers."""
        path = index.with_name(f"{index.stem}.{self.name}{_SUFFIX}")
        if not path.exists():
            atomic_write(path, self._serialised())
        for old in index.parent.glob(f"{index.stem}.*{_SUFFIX}"):
            if old != path and old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                old.unlink(missing_ok=True)
        return Footers((), str(path), self.name)

    def _serialised(self) -> bytes:
        stored = [len(one).to_bytes(8, "little") + pa.compress(one, codec="zstd", asbytes=True) for one in self.kept]
        table = pa.table({"footer": pa.array(stored, pa.binary())}).replace_schema_metadata({"midepoch": self.name})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())


T = TypeVar("T")
_THREADS = 16


class Spread(Protocol):
    """Executor that returns the results of an action for all items in order, raises its errors and reports progress."""

    def __call__(self, action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]: ...


def threads(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """Run an action in threads: footers are mostly waited for, and read without the interpreter lock."""
    results = []
    with ThreadPoolExecutor(max_workers=max(1, min(_THREADS, len(items)))) as pool:
        for number, result in enumerate(pool.map(action, items), 1):
            results.append(result)
            done(number)
    return results


_chosen: ContextVar[Spread] = ContextVar("spread", default=threads)


@contextmanager
def spread_over(spread: Spread) -> Iterator[None]:
    """Use an executor for the indexes that are created in this context."""
    token = _chosen.set(spread)
    try:
        yield
    finally:
        _chosen.reset(token)


def for_all(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """Run an action for all items with the current executor."""
    return _chosen.get()(action, items, done)


Int64Array = npt.NDArray[np.int64]
F = TypeVar("F")
S = TypeVar("S", bound="_HasDamage")

VERSION = 10
"""Increase it when the layout of an index or of the footers of a format changes, or the rule of fingerprints: older
indexes are built again.
"""
MAPPED = "mapped"
_log = logging.getLogger("midepoch")


class _HasDamage(Protocol):
    @property
    def damage(self) -> DataError | None: ...


class EncodedError(FormatError):
    """A file cannot be mapped in place, because its record batches have to be decoded."""


@dataclass(frozen=True, eq=False)
class Index:
    """Blocks of some files, in order. ``offsets[b]`` is the byte offset of block b in its file.

    ``starts[b]`` is its first row. Both arrays have one entry more than there are blocks. ``format`` is the decoder of
    blocks. Local Arrow files are mapped instead; the fields after ``format`` are then empty.
    """

    files: IndexedFiles
    offsets: Int64Array
    starts: Int64Array
    schema_bytes: bytes
    nullable: frozenset[tuple[str, ...]]
    path: str | None = None
    format: str = MAPPED
    filter: str = ""
    ends: Int64Array | None = None
    footers: Footers = field(default_factory=Footers)
    row_bytes: float = 0.0
    snapshot: str = ""
    """The snapshot of a table to which the files belong: ``"delta 3"``."""
    checksum: int = 0
    """Checksum of the file from which it was read."""

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the contents of all files, in order, and the snapshot of a table. It does not depend on the
        locations and names of the files.
        """
        digest = hashlib.blake2b(self.filter.encode(), digest_size=12)
        for text in self.files.described():
            digest.update(text.encode())
        return f"{digest.hexdigest()} {self.snapshot}" if self.snapshot else digest.hexdigest()

    def part(self, first: int, stop: int) -> Index:
        """Return the index of the files from ``first`` to ``stop``, excluded. Row sizes follow from file sizes."""
        blocks = np.concatenate([[0], np.cumsum(self.files.blocks)])
        low, high = int(blocks[first]), int(blocks[stop])
        starts = self.starts[low : high + 1] - self.starts[low]
        ends = None if self.ends is None else self.ends[low : high + 1]
        footers = (
            Footers.of(self.footers[number] for number in range(first, stop)) if self.ends is not None else Footers()
        )
        return replace(
            self, files=self.files.part(first, stop), offsets=self.offsets[low : high + 1], starts=starts, path=None,
            ends=ends, footers=footers, row_bytes=0.0,
        )  # fmt: skip

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.schema_bytes))

    def __reduce__(self) -> tuple[Any, ...]:
        # A dataset sent to a worker contains the path of the index, not its arrays.
        if self.path is not None:
            return _reopen, (self.path, self.fingerprint)
        return Index, (
            self.files, self.offsets, self.starts, self.schema_bytes, self.nullable, None,
            self.format, self.filter, self.ends, self.footers, self.row_bytes, self.snapshot,
        )  # fmt: skip


def _reopen(path: str, fingerprint: str) -> Index:
    index = read_index(Path(path))
    if index is None or index.fingerprint != fingerprint:
        raise FormatError(
            f"the index {path} was changed or removed since the dataset was created. Create the dataset again."
        )
    return index


def open_index(
    files: Sequence[str | os.PathLike[str]],
    *,
    index_dir: Path | None = None,
    force: bool = False,
    skip_damage: bool = False,
    as_mapped: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Return the index of these files: read if it is fresh, else built (by one process at a time) and saved.

    ``as_mapped``: raise EncodedError for files whose record batches would have to be decoded.
    """
    absolute = [os.path.abspath(path) for path in files]
    how = f"{skip_damage}{' as_mapped' * as_mapped}"
    key = hashlib.blake2b("\0".join([*absolute, how]).encode(), digest_size=16).hexdigest()
    path = (index_dir or default_index_dir()) / f"{key}.midepoch-index"
    if not force and (index := _fresh(path, absolute)) is not None:
        return index
    with locked(path, "the index") as place:
        if not force and (index := _fresh(path, absolute)) is not None:  # another process has built it
            return index
        index = _build([Path(path) for path in absolute], skip_damage, as_mapped, progress)
        if not place.keep(lambda: atomic_write(path, serialise(index))):
            return index
    return _fresh(path, absolute) or index


def _fresh(path: Path, files: Sequence[str]) -> Index | None:
    index = read_index(path)
    if index is None or index.files.paths != list(files):
        return None
    return index if all(file.unchanged() for file in index.files) else None


def _build(files: Sequence[Path], skip_damage: bool, as_mapped: bool, progress: Progress | None) -> Index:
    report = progress or (lambda _done, _total: None)
    scans = for_all(partial(_scanned, skip_damage), files, lambda done: report(done, len(files)))
    first, of_first = readable(files, [found for found, _ in scans])[0]
    schema = of_first.schema
    usable(first, schema)
    for path, (found, _) in zip(files, scans, strict=True):
        if as_mapped and (found.compressed or any(holds_dictionary(column.type) for column in found.schema)):
            raise EncodedError(f"{path} is compressed or dictionary-encoded: it cannot be mapped in place.")
    entries = []
    for path, (found, stat) in zip(files, scans, strict=True):
        if found.damage is None:
            _same_schema(first, schema, path, found.schema)
        if not found.complete:
            _log.warning("%s is damaged: only %d of its rows are used", path, sum(found.rows))
        entries.append(
            IndexedFile(
                str(path),
                stat.st_size,
                stat.st_mtime_ns,
                sum(found.rows),
                len(found.rows),
                found.fingerprint,
                found.dictionaries,
            )
        )
    rows = np.array([count for found, _ in scans for count in found.rows], dtype=np.int64)
    offsets = np.array([at for found, _ in scans for at in found.offsets] + [0], dtype=np.int64)
    nullable = frozenset().union(*(found.nullable for found, _ in scans))
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    return Index(IndexedFiles.of(entries), offsets, starts, schema.serialize().to_pybytes(), nullable)


def _scanned(skip_damage: bool, path: Path) -> tuple[FileScan, os.stat_result]:
    try:
        stat = os.stat(path)  # before the scan: a file that changes during it will look stale
    except OSError as problem:
        raise DataNotFoundError(f"{path} cannot be opened: {problem}") from None
    try:
        return retried(lambda: scan(path, skip_damage=skip_damage), str(path)), stat
    except DamageError as problem:
        if not skip_damage:
            raise
        return FileScan(pa.schema([]), fingerprint=SKIPPED, damage=problem), stat


def readable(files: Sequence[F], scans: Sequence[S]) -> list[tuple[F, S]]:
    """Return the files that are not left out, with their scans, and log the others. Raise their damage if all are."""
    damage = [scan.damage for scan in scans if scan.damage is not None]
    if len(damage) == len(scans):
        raise damage[0]
    for problem in damage:
        _log.warning("a damaged file is left out: %s", problem)
    return [(file, scan) for file, scan in zip(files, scans, strict=True) if scan.damage is None]


def warn_of_skipped(index: Index, name: Callable[[str], str] = str) -> None:
    """Log the files that are left out."""
    for number in np.flatnonzero(index.files.blocks == 0).tolist():
        if (file := index.files[number]).fingerprint == SKIPPED:
            _log.warning("%s is damaged: all of its rows are left out", name(file.path))


def usable(path: object, schema: pa.Schema) -> None:
    """Raise FormatError for columns that cannot be read, or told apart."""
    check_names(path, schema)
    for column in schema:
        if (inner := undecodable(column.type)) is not None:
            raise FormatError(
                f"{path}: column {column.name!r} contains dictionary-encoded values inside a {inner}, which cannot be "
                "read. Write them as plain values."
            )


def check_names(path: object, schema: pa.Schema) -> None:
    """Raise FormatError if two columns, or two fields of a struct, have the same name."""
    paths = Counter(path for column in schema for path in node_paths(column.name, column.type))
    if twice := sorted({repr(".".join(path)) for path, count in paths.items() if count > 1}):
        raise FormatError(f"{path}: several columns are named {', '.join(twice)}. Rename them in the file.")


def _same_schema(first: Path, expected: pa.Schema, path: Path, found: pa.Schema) -> None:
    if expected.equals(found):
        return
    types, others = (dict(zip(schema.names, schema.types, strict=True)) for schema in (expected, found))
    for name in {**types, **others}:
        a, b = types.get(name, "missing"), others.get(name, "missing")
        if a != b:
            raise DifferentSchemasError(
                f"the files do not have one schema: column {name!r} is {a} in {first} but {b} in {path}. "
                "Load them as separate datasets, or write one of them again."
            )
    if expected.names != found.names:
        raise DifferentSchemasError(f"the files list their columns in different orders: {first} and {path}.")


def serialise(index: Index) -> bytes:
    arrays = [index.offsets, index.starts] + ([index.ends] if index.ends is not None else [])
    header = {
        "version": VERSION,
        "format": index.format,
        "filter": index.filter,
        "row_bytes": index.row_bytes,
        "snapshot": index.snapshot,
        "footers": [index.footers.path and os.path.basename(index.footers.path), index.footers.name],
        "schema": base64.b64encode(index.schema_bytes).decode(),
        "nullable": sorted(map(list, index.nullable)),
        "crc": _checksum(arrays),
    }
    text, files = json.dumps(header).encode(), index.files.serialised()
    metadata = {"midepoch": text, "midepoch_files": files, "midepoch_crc": str(zlib.crc32(files, zlib.crc32(text)))}
    columns = [pa.Array.from_buffers(pa.int64(), len(a), [None, pa.py_buffer(a.tobytes())]) for a in arrays]
    names = ["offset", "start", "end"][: len(arrays)]
    table = pa.Table.from_arrays(columns, names=names).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:  # a file would contain the metadata twice
        writer.write_table(table, max_chunksize=max(1, table.num_rows))
    return bytes(sink.getvalue())


def read_index(path: Path) -> Index | None:
    """Return the index in a file, or None if it is missing, damaged or of another version."""
    try:
        with pa.memory_map(str(path)) as mapped:
            table = pa.ipc.open_stream(mapped).read_all()
        metadata = table.schema.metadata
        header, stored = json.loads(metadata[b"midepoch"]), metadata.get(b"midepoch_files", b"")
        if header["version"] != VERSION:
            return None
        checksum = zlib.crc32(stored, zlib.crc32(metadata[b"midepoch"]))
        if checksum != int(metadata[b"midepoch_crc"]):
            raise ValueError("its header is damaged")
        # Not Array.to_numpy: it would import pandas, which takes longer than the rest of opening a dataset.
        arrays = [np.frombuffer(column.chunk(0).buffers()[1], np.int64) for column in table.columns]
        if any(len(array) != table.num_rows for array in arrays):
            raise ValueError("its arrays are truncated")
        if _checksum(arrays) != header["crc"]:
            raise ValueError("its arrays are damaged")
        files = IndexedFiles.deserialised(stored)
        schema = base64.b64decode(header["schema"])
        footers, name = header["footers"]
        if footers and not path.with_name(footers).exists():
            raise ValueError("its footers are missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as problem:
        _log.info("the index %s cannot be used and is built again: %s", path, problem)
        return None
    nullable = frozenset(map(tuple, header["nullable"]))
    kept = Footers((), str(path.with_name(footers)) if footers else None, name)
    ends = arrays[2] if len(arrays) > 2 else None
    return Index(
        files,
        arrays[0],
        arrays[1],
        schema,
        nullable,
        str(path),
        header["format"],
        header["filter"],
        ends,
        kept,
        header["row_bytes"],
        header.get("snapshot", ""),
        checksum,
    )


def _checksum(arrays: Sequence[Int64Array]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum
