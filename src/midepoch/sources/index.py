"""Index of a set of files: the location of every block. Written once, checked by ``stat``, opened memory-mapped.

Footers of files, which are needed to decode their blocks, follow in the same file. They are read on demand.
The files themselves are columns of JSON: ten thousand of them are opened and compared without an object for each.

Thousands of files are read by threads of this process, or by a cluster. An action is a module-level function with bound
arguments (``functools.partial``), so that it can be sent to another process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats import Chains, Values
from midepoch.sources.schemas import as_arrow
from midepoch.storage.cache_files import CacheSlot, atomic_write, read_or_make
from midepoch.storage.stores import Entry

T = TypeVar("T")
_THREADS = 16


Spread = Callable[[Callable[[Any], Any], Sequence[Any], Callable[[int], None]], list[Any]]
"""Executor that returns the results of an action for all items in order, raises its errors and reports progress."""


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

VERSION = 14
"""Increase it when the layout of an index or of the footers of a format changes, or the rule of fingerprints: older
indexes are built again.
"""
MAPPED = "mapped"
_log = logging.getLogger("midepoch")


def packed(footers: Iterable[bytes]) -> pa.Array:
    """Return footers as an array of compressed bytes. Empty if no file has one."""
    kept = list(footers)
    kept = kept if any(kept) else []
    stored = [len(one).to_bytes(8, "little") + pa.compress(one, codec="zstd", asbytes=True) for one in kept]
    ends = np.cumsum([0, *map(len, stored)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(stored))]
    return pa.Array.from_buffers(pa.large_binary(), len(stored), buffers)  # pa.array would import pandas


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
    footers: pa.Array = field(default_factory=partial(packed, ()))
    """Packed data that is needed to decode the blocks of each file, or each block of ``KINDS`` formats."""
    row_bytes: float = 0.0
    snapshot: str = ""
    """The snapshot of a table to which the files belong: ``"delta 3"``."""
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
        footers = self.footers[first:stop]
        return replace(
            self, files=self.files.part(first, stop), offsets=self.offsets[low : high + 1], starts=starts, path=None,
            ends=self.ends[low : high + 1], footers=footers, row_bytes=0.0,
        )  # fmt: skip

    def footer(self, number: int) -> bytes:
        """Return a footer. Empty if blocks of the format need none."""
        if not len(self.footers):
            return b""
        stored = self.footers[number].as_py()
        return bytes(pa.decompress(stored[8:], int.from_bytes(stored[:8], "little"), codec="zstd", asbytes=True))

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


def read_or_build(
    path: Path, build: Callable[[], Index], *, force: bool, is_fresh: Callable[[Index], bool] = lambda _: True
) -> Index:
    """Return the index in a file if it is fresh, else build and save it, one process at a time. ``force``: build it.

    An index that cannot be saved is returned as it was built.
    """

    def read() -> Index | None:
        index = read_index(path)
        return index if index is not None and is_fresh(index) else None

    def make(slot: CacheSlot) -> Index:
        built = build()
        return (read() if slot.keep(lambda: save(built, path)) else None) or built

    return read_or_make(path, "the index", (lambda: None) if force else read, make)


_PLAIN = ("format", "filter", "row_bytes", "snapshot")
"""Fields of an index that are saved as they are."""
_CHECKSUM = 4


def save(index: Index, path: Path) -> None:
    """Write an index: blocks, files and footers, and the CRC-32 of all of it at the end."""
    columns = index.files.columns
    header = {
        "version": VERSION,
        "schema": base64.b64encode(index.schema_bytes).decode(),
        "nullable": sorted(index.nullable),
        "files": {name: column for name, column in columns.items() if name not in _NUMBERS},
        **{name: getattr(index, name) for name in _PLAIN},
    }
    blocks = _batch({"offset": index.offsets, "start": index.starts, "end": index.ends})
    blocks = blocks.replace_schema_metadata({"header": json.dumps(header)})
    files = _batch({name: columns[name] for name in _NUMBERS})
    sink = pa.BufferOutputStream()
    for batch in (blocks, files, pa.RecordBatch.from_arrays([index.footers], names=["footer"])):
        with pa.ipc.new_stream(sink, batch.schema) as writer:  # a file would contain the metadata twice
            writer.write_batch(batch)
    data = sink.getvalue()
    atomic_write(path, data.to_pybytes() + zlib.crc32(data).to_bytes(_CHECKSUM, "little"))


def _batch(columns: Mapping[str, Int64Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(map(as_arrow, columns.values())), names=list(columns))


def read_index(path: Path) -> Index | None:
    """Return the index in a file, or None if it is missing, damaged or of another version.

    All of it is checked, 0.3 ms for 1 MB, although footers are decompressed later: then it could not be built again.
    """
    try:
        with pa.memory_map(str(path)) as mapped:
            data = mapped.read_buffer()
        if zlib.crc32(data[:-_CHECKSUM]) != int.from_bytes(data[-_CHECKSUM:], "little"):
            raise ValueError("its checksum is wrong")
        stream = pa.BufferReader(data)
        blocks, files, footers = (batch for _ in range(3) for batch in pa.ipc.open_stream(stream))
        header = json.loads(blocks.schema.metadata[b"header"])
        if header["version"] != VERSION:
            return None
        offsets, starts, ends = _arrays(blocks).values()
        return Index(
            IndexedFiles({name: _frozen(column) for name, column in header["files"].items()} | _arrays(files)),
            offsets,
            starts,
            ends,
            schema_bytes=base64.b64decode(header["schema"]),
            nullable=frozenset(map(tuple, header["nullable"])),
            footers=footers.column(0),
            **{name: header[name] for name in _PLAIN},
            path=str(path),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as problem:
        _log.info("the index %s cannot be used and is built again: %s", path, problem)
        return None


def _arrays(batch: pa.RecordBatch) -> dict[str, Int64Array]:
    # Not Array.to_numpy: it would import pandas, which takes longer than the rest of opening a dataset.
    return {name: np.frombuffer(batch[name].buffers()[1], np.int64) for name in batch.schema.names}


def _frozen(column: list[Any]) -> list[Any]:
    """Return a column from JSON with tuples in place of the lists in it."""
    if list not in set(map(type, column)):  # 1 ms for the paths, sizes and times of 10,000 files, which have none
        return column
    return [tuple(_frozen(each)) if isinstance(each, list) else each for each in column]


class IndexedFile(NamedTuple):
    """State of one file when it was indexed."""

    path: str
    size: int
    mtime_ns: int
    rows: int
    blocks: int
    fingerprint: str
    dictionaries: Chains = ()
    etag: str = ""
    partition: Values = ()
    broken: int = 0
    """Number of unreadable lines, which are not part of the data."""
    broken_lines: tuple[int, ...] = ()
    """Line numbers of the first of them."""
    incomplete: bool = False
    """True if the blocks after its damage are not part of the data."""


_NUMBERS = ("size", "mtime_ns", "rows", "blocks")
"""Fields of a file that are arrays."""


class IndexedFiles(Sequence[IndexedFile]):
    """Files in order, as ``columns`` of their fields. A column that is missing has the default value in all files."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns
        self.paths: Sequence[str] = columns["path"]
        self.size, self.mtime_ns, self.rows, self.blocks = (columns[name] for name in _NUMBERS)

    @staticmethod
    def of(files: Iterable[IndexedFile]) -> IndexedFiles:
        """Return files as columns."""
        listed, defaults = list(files), IndexedFile._field_defaults
        columns: dict[str, Any] = {name: [getattr(file, name) for file in listed] for name in IndexedFile._fields}
        columns |= {name: np.array(columns[name], np.int64) for name in _NUMBERS}
        return IndexedFiles({name: each for name, each in columns.items() if name not in defaults or any(each)})

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> IndexedFile: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[IndexedFile, ...]: ...
    def __getitem__(self, number: int | slice) -> IndexedFile | tuple[IndexedFile, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        values = {name: column[number] for name, column in self.columns.items()}
        return IndexedFile(**values | {name: int(values[name]) for name in _NUMBERS})

    def __iter__(self) -> Iterator[IndexedFile]:
        defaults = IndexedFile._field_defaults
        columns = (self.columns.get(name, repeat(defaults.get(name))) for name in IndexedFile._fields)
        lists = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
        return map(IndexedFile._make, zip(*lists, strict=False))

    @property
    def with_broken_lines(self) -> list[IndexedFile]:
        """The files that have unreadable lines."""
        return self._having("broken")

    @property
    def incomplete(self) -> list[IndexedFile]:
        """The files that are used up to their damage."""
        return self._having("incomplete")

    def _having(self, name: str) -> list[IndexedFile]:
        return [self[i] for i, value in enumerate(self.columns.get(name, ())) if value]

    def part(self, first: int, stop: int) -> IndexedFiles:
        """Return the files ``first`` to ``stop``, excluded."""
        return IndexedFiles({name: column[first:stop] for name, column in self.columns.items()})

    def are(self, entries: Sequence[Entry]) -> bool:
        """Return True if these are the entries of a listing, unchanged. ETags are compared where a listing has them."""
        paths, sizes, times, etags = ([entry[i] for entry in entries] for i in range(4))
        return (
            paths == self.paths
            and np.array_equal(sizes, self.size)
            and np.array_equal(times, self.mtime_ns)
            and (not any(etags) or etags == self.columns.get("etag"))
        )

    def described(self) -> Iterator[str]:
        """Yield the fingerprint, the rows and the partition of each file."""
        partitions = self.columns.get("partition") or [()] * len(self)
        for fingerprint, rows, values in zip(self.columns["fingerprint"], self.rows.tolist(), partitions, strict=True):
            yield f"{fingerprint} {rows}{f' {values}' if values else ''}\n"
