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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.sources.indexed_files import IndexedFile as IndexedFile
from midepoch.sources.indexed_files import IndexedFiles as IndexedFiles
from midepoch.storage.cache_files import atomic_write, locked
from midepoch.storage.damage import is_damage, refusal, retried

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
        if not any(kept):  # blocks of the format need none
            return Footers()
        digest = hashlib.blake2b(digest_size=8)
        for one in kept:
            digest.update(hashlib.blake2b(one, digest_size=16).digest())
        return Footers(kept, None, digest.hexdigest())

    def __getitem__(self, number: int) -> bytes:
        if self.path is None:
            return self.kept[number] if self.kept else b""
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
        if not self.kept:
            return self
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

VERSION = 11
"""Increase it when the layout of an index or of the footers of a format changes, or the rule of fingerprints: older
indexes are built again.
"""
MAPPED = "mapped"
_log = logging.getLogger("midepoch")


@dataclass(frozen=True, eq=False)
class Index:
    """Blocks of some files, in order. ``offsets[b]`` is the byte offset of block b in its file, ``ends[b]`` its end.

    ``starts[b]`` is its first row. These arrays have one entry more than there are blocks. ``format`` is the decoder of
    blocks, or ``MAPPED`` for Arrow files whose blocks are mapped in place.
    """

    files: IndexedFiles
    offsets: Int64Array
    starts: Int64Array
    ends: Int64Array
    """-1 if a block ends with its file."""
    schema_bytes: bytes
    nullable: frozenset[tuple[str, ...]]
    format: str
    filter: str = ""
    footers: Footers = field(default_factory=Footers)
    row_bytes: float = 0.0
    snapshot: str = ""
    """The snapshot of a table to which the files belong: ``"delta 3"``."""
    lookups: tuple[tuple[str, str], ...] = ()
    """The lookups by which local files were chosen. Empty if files have to be chosen every time."""
    looked_up: str = ""
    """Digest of what these lookups found."""
    path: str | None = None

    @property
    def in_place(self) -> bool:
        """True if blocks are views of the files. Local files are then mapped."""
        return self.format.partition(":")[0] in (MAPPED, "tokens", "megatron")

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
        footers = Footers.of(self.footers[number] for number in range(first, stop))
        return replace(
            self, files=self.files.part(first, stop), offsets=self.offsets[low : high + 1], starts=starts, path=None,
            ends=self.ends[low : high + 1], footers=footers, row_bytes=0.0,
        )  # fmt: skip

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.schema_bytes))

    def __reduce__(self) -> tuple[Any, ...]:
        # A dataset sent to a worker contains the path of the index, not its arrays.
        if self.path is not None:
            return _reopen, (self.path, self.fingerprint)
        return Index, tuple(getattr(self, each.name) for each in fields(self))


def _reopen(path: str, fingerprint: str) -> Index:
    index = read_index(Path(path))
    if index is None or index.fingerprint != fingerprint:
        raise FormatError(
            f"the index {path} was changed or removed since the dataset was created. Create the dataset again."
        )
    return index


def made_once(
    path: Path,
    what: str,
    *,
    force: bool,
    recall: Callable[[], T | None],
    make: Callable[[], T],
    save: Callable[[T], None],
) -> T:
    """Return what ``recall`` reads from a path, else make it, one process at a time, and save it.

    ``force``: make it in any case. What cannot be saved is returned as it was made.
    """
    if not force and (known := recall()) is not None:
        return known
    with locked(path, what) as place:
        if not force and (known := recall()) is not None:  # another process has made it
            return known
        made = make()
        if not place.keep(lambda: save(made)):
            return made
    return recall() or made


def save(index: Index, path: Path) -> None:
    """Write an index, and its footers beside it."""
    atomic_write(path, _serialised(replace(index, footers=index.footers.save(path))))


def _serialised(index: Index) -> bytes:
    arrays = [index.offsets, index.starts, index.ends]
    header = {
        "version": VERSION,
        "format": index.format,
        "filter": index.filter,
        "row_bytes": index.row_bytes,
        "snapshot": index.snapshot,
        "lookups": index.lookups,
        "looked_up": index.looked_up,
        "footers": [index.footers.path and os.path.basename(index.footers.path), index.footers.name],
        "schema": base64.b64encode(index.schema_bytes).decode(),
        "nullable": sorted(map(list, index.nullable)),
        "crc": _checksum(arrays),
    }
    text, files = json.dumps(header).encode(), index.files.serialised()
    metadata = {"midepoch": text, "midepoch_files": files, "midepoch_crc": str(zlib.crc32(files, zlib.crc32(text)))}
    columns = [pa.Array.from_buffers(pa.int64(), len(a), [None, pa.py_buffer(a.tobytes())]) for a in arrays]
    table = pa.Table.from_arrays(columns, names=["offset", "start", "end"]).replace_schema_metadata(metadata)
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
        header, stored = json.loads(metadata[b"midepoch"]), metadata[b"midepoch_files"]
        if header["version"] != VERSION:
            return None
        if zlib.crc32(stored, zlib.crc32(metadata[b"midepoch"])) != int(metadata[b"midepoch_crc"]):
            raise ValueError("its header is damaged")
        # Not Array.to_numpy: it would import pandas, which takes longer than the rest of opening a dataset.
        offsets, starts, ends = arrays = [
            np.frombuffer(column.chunk(0).buffers()[1], np.int64) for column in table.columns
        ]
        if any(len(array) != table.num_rows for array in arrays):
            raise ValueError("its arrays are truncated")
        if _checksum(arrays) != header["crc"]:
            raise ValueError("its arrays are damaged")
        files = IndexedFiles.deserialised(stored)
        footers, name = header["footers"]
        if footers and not path.with_name(footers).exists():
            raise ValueError("its footers are missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as problem:
        _log.info("the index %s cannot be used and is built again: %s", path, problem)
        return None
    return Index(
        files,
        offsets,
        starts,
        ends,
        schema_bytes=base64.b64decode(header["schema"]),
        nullable=frozenset(map(tuple, header["nullable"])),
        footers=Footers((), str(path.with_name(footers)) if footers else None, name),
        format=header["format"],
        filter=header["filter"],
        row_bytes=header["row_bytes"],
        snapshot=header["snapshot"],
        lookups=tuple((kind, place) for kind, place in header["lookups"]),
        looked_up=header["looked_up"],
        path=str(path),
    )


def _checksum(arrays: Sequence[Int64Array]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum
