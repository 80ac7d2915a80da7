"""The frozen Source: the blocks of an index, and access to them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as fs

from midepoch.errors import CorruptBlockError, DataNotFoundError
from midepoch.order import SourceLayout
from midepoch.order.shuffle import DEFAULT_WINDOW
from midepoch.sources.filters import Filter
from midepoch.sources.fingerprints import SKIPPED
from midepoch.sources.formats import Block, CacheSpec, InPlace, Room, decoded, format_named
from midepoch.sources.index import MAPPED, Index, IndexedFile, IndexedFiles
from midepoch.sources.names import KINDS
from midepoch.storage.damage import DamageError, expired, is_damage, refusal
from midepoch.storage.stores import Entry, Store

_PLAIN_FEATURES = {
    "Value",
    "ClassLabel",
    "Sequence",
    "List",
    "LargeList",
    "Translation",
    "TranslationVariableLanguages",
}
_ARRAY_FEATURES = {"Array2D", "Array3D", "Array4D", "Array5D"}
"""Features stored as nested lists, which need no decoding. Inside other features they do."""


_WINDOW_BYTES = 256 << 20
_WINDOW_SHARE = 0.35  # of the cache
_MOST_BLOCKS = 4096
"""Number of small blocks up to which all rows are shuffled together."""


@dataclass(frozen=True, eq=False)
class Access:
    """Access to blocks that are fetched or decoded. Not part of the identity of the data."""

    store: Store
    filter: Filter | None
    cache: CacheSpec


@dataclass(frozen=True, eq=False)
class Source:
    """An ordered, fingerprinted set of blocks in files, in place. Pickles to the path of its index.

    ``access`` is set if blocks are fetched or decoded, and None if files are mapped.
    """

    index: Index
    access: Access | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.index, self.access)  # without the cached properties

    @property
    def fetched(self) -> bool:
        """True if blocks have to be fetched or decoded, False if files are mapped in place."""
        return self.access is not None

    @property
    def window(self) -> int:
        """Default number of blocks to shuffle together, if blocks are fetched or decoded.

        All of them if they take up to 256 MB, otherwise up to 64 that do.
        """
        return self._window(_WINDOW_BYTES)

    @property
    def window_in_cache(self) -> int:
        """Like ``window``, but limited so that the cache holds one window while the next one is read."""
        if self.access is None:
            return self.window
        return self._window(min(_WINDOW_BYTES, int(self.access.cache.limit * _WINDOW_SHARE)))

    def _window(self, room: int) -> int:
        if not self.fetched:
            return DEFAULT_WINDOW
        blocks = max(1, len(self.layout.block_starts) - 1)
        most = int(max(2, room // max(1.0, self.rows * self.bytes_per_row / blocks)))
        return blocks if blocks <= min(most, _MOST_BLOCKS) else min(DEFAULT_WINDOW, most)

    @property
    def files(self) -> IndexedFiles:
        return self.index.files

    @property
    def is_folder(self) -> bool:
        """True if its one file is a folder of media, each of which is a row."""
        return self.index.format in KINDS

    @property
    def rows(self) -> int:
        return int(self.index.starts[-1])

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte offset of each block in its file."""
        return self.index.offsets

    @cached_property
    def layout(self) -> SourceLayout:
        return SourceLayout(self.index.starts, np.concatenate([[0], np.cumsum(self.files.rows)]))

    @cached_property
    def file_blocks(self) -> npt.NDArray[np.int64]:
        """First block of each file, and the number of blocks."""
        return np.concatenate([[0], np.cumsum(self.files.blocks)])

    @property
    def schema(self) -> pa.Schema:
        return self.index.schema

    @cached_property
    def nullable(self) -> dict[str, frozenset[tuple[str, ...]]]:
        """Paths with at least one null, by column: () for the column itself, (child,) for a child."""
        nullable: dict[str, set[tuple[str, ...]]] = {name: set() for name in self.schema.names}
        for name, *inner in self.index.nullable:
            if name in nullable:
                nullable[name].add(tuple(inner))
        return {name: frozenset(paths) for name, paths in nullable.items()}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the contents, in order. It does not depend on the location or the names of the files."""
        return self.index.fingerprint

    @cached_property
    def bytes_per_row(self) -> float:
        """Approximate bytes of a row in memory."""
        if self.index.row_bytes:
            return self.index.row_bytes
        return int(self.files.size.sum()) / max(1, self.rows)

    @cached_property
    def decoded(self) -> frozenset[str]:
        """Columns whose Hugging Face feature is more than its Arrow value: images, audio, video."""
        features = self.features.items()
        return frozenset(name for name, feature in features if not _is_array(feature) and _needs_decoding(feature))

    @cached_property
    def features(self) -> dict[str, Any]:
        """The Hugging Face features of the columns, as in the metadata of the schema. Empty without metadata."""
        metadata = self.schema.metadata or {}
        try:
            return dict(json.loads(metadata[b"huggingface"])["info"]["features"])
        except (KeyError, ValueError, TypeError):
            return {}

    def place(self, row: int) -> str:
        """Describe the location of a source row."""
        number = self._file_number(row)
        place = f"row {row - int(self.layout.file_starts[number])} of {self.name(self.files[number])}"
        if not self.is_folder or self.index.filter:  # with it, rows of a block are not those of its footer
            return place
        from midepoch.sources.formats.media import name_of

        starts = self.layout.block_starts
        block = int(starts.searchsorted(row, side="right")) - 1
        name = name_of(self.index.footer(block), row - int(starts[block]))
        return place if name is None else f"{place} ({name})"

    def file_of(self, row: int) -> IndexedFile:
        """Return the file of a source row."""
        return self.files[self._file_number(row)]

    def _file_number(self, row: int) -> int:
        return int(np.searchsorted(self.layout.file_starts, row, side="right")) - 1

    def name(self, file: IndexedFile) -> str:
        return file.path if self.access is None else self.access.store.name(file.path)

    def fetch(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Fetch and decode a block: these columns of the rows that pass the filter. Raise DataError."""
        assert self.access is not None
        store, chosen, index = self.access.store, self.access.filter, self.index
        of_file = int(self.file_blocks.searchsorted(number, side="right")) - 1
        file = index.files[of_file]
        entry = Entry(file.path, file.size, file.mtime_ns, file.etag)
        grouped = index.format in KINDS
        end = int(index.ends[number])
        block = Block(
            entry,
            int(index.offsets[number]),
            None if end < 0 else end,
            index.footer(number if grouped else of_file),
            file.dictionaries,
            self.access.cache,
        )
        rows = int(index.starts[number + 1] - index.starts[number])
        read = [*columns, *(name for name in self._filter_columns if name not in columns)]
        form, expected = format_named(index.format), rows if chosen is None else None

        def checked() -> pa.Table:
            try:
                return decoded(store, form, block, file.partition, self.schema, read, expected)
            except MemoryError as problem:
                if not is_damage(problem, entry.size):
                    raise
                raise CorruptBlockError(f"{store.name(file.path)}: {problem}.") from None
            finally:
                if not grouped:  # their files are checked when they are read
                    store.check(entry)  # the data, or the error, may come from a mix of old and new contents

        try:
            table = store.persist(file.path, "read", checked)
            table = table if chosen is None else chosen.apply(table, self._filter_columns).select(list(columns))
            if table.num_rows != rows:
                raise pa.ArrowInvalid(f"{table.num_rows} rows where the index says {rows}")
        except DataNotFoundError:
            if index.snapshot:
                raise expired(store.name(file.path)) from None
            raise
        except CorruptBlockError as problem:
            raise CorruptBlockError(f"{str(problem).rstrip('.')}. {self._remedy(number)}") from None
        except (pa.ArrowException, ValueError, LookupError, EOFError, OverflowError, struct.error) as problem:
            if not is_damage(problem):
                raise refusal(problem, f"{store.name(file.path)}: {problem}") from None
            raise CorruptBlockError(f"{store.name(file.path)}: {problem}. {self._remedy(number)}") from None
        return table

    @cached_property
    def _filter_columns(self) -> list[str]:
        chosen = self.access.filter if self.access is not None else None
        return chosen.columns(self.schema) if chosen is not None else []

    def unreadable(self, block: int, problem: Exception) -> CorruptBlockError:
        """Return the error for a block of a mapped file."""
        path = self.files.paths[int(self.file_blocks.searchsorted(block, side="right")) - 1]
        what = f"the record batch at byte {self.offsets[block]}" if self.index.format == MAPPED else "a block"
        first, stop = self.layout.block_starts[block : block + 2].tolist()
        return CorruptBlockError(
            f"{what} of {path} (rows {first} to {stop - 1} of the data) cannot be read: {problem}. Restore the file, "
            'or pass on_error="skip" to leave it out.'
        )

    def _remedy(self, number: int) -> str:
        first, stop = self.layout.block_starts[number : number + 2].tolist()
        return (
            f'These are rows {first} to {stop - 1} of the data. Restore the file, or pass on_error="skip" to leave '
            "them out."
        )


def _is_array(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") in _ARRAY_FEATURES


def _needs_decoding(feature: Any) -> bool:
    if isinstance(feature, list):
        return any(map(_needs_decoding, feature))
    if not isinstance(feature, dict):
        return False
    kind = feature.get("_type")
    if isinstance(kind, str) and kind not in _PLAIN_FEATURES:
        return True
    return any(_needs_decoding(value) for name, value in feature.items() if name != "_type")


def in_place(source: Source) -> InPlace | None:
    """Return the format of a source if its blocks are views of mapped files other than Arrow files, else None."""
    name = source.index.format
    if source.access is not None or name == MAPPED:
        return None
    found = format_named(name)
    assert isinstance(found, InPlace)
    return found


def view(source: Source, form: InPlace, block: int, files: Callable[[int], pa.Buffer], room: Room) -> pa.RecordBatch:
    """Return a block as a view. ``files`` maps a file by its number, and ``room`` returns memory for offsets."""
    index = source.index
    number = int(source.file_blocks.searchsorted(block, side="right")) - 1
    file = index.files[number]
    entry = Entry(file.path, file.size, file.mtime_ns)
    where = Block(entry, int(index.offsets[block]), int(index.ends[block]))
    batch = form.view(files(number), lambda: files(number - 1), where, room)
    if batch.schema.equals(index.schema):
        return batch
    own = set(batch.schema.names)  # several files may have other columns and types in common
    columns = [
        batch.column(field.name).cast(field.type) if field.name in own else pa.nulls(len(batch), field.type)
        for field in index.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=index.schema)


def fingerprint_of(source: Source, file: IndexedFile) -> str:
    """Return the fingerprint of the present contents of a mapped file."""
    store, name = Store(fs.LocalFileSystem()), source.index.format
    entry = store.stat(file.path)
    assert entry is not None
    try:
        return format_named("arrow" if name == MAPPED else name).scan(store, entry, skip_damage=True).fingerprint
    except DamageError:
        return SKIPPED
