"""Images, sounds and videos: each row is a file, with a label or metadata. Blocks are groups of files.

The footer of a block is a table of its rows, in which a file is a struct of its location. Its bytes are read only if
its column is requested. Few files are opened to make an index.

Metadata are tables named ``metadata`` that name the files beside them. A column ``file_name`` names the file of each
row, ``NAME_file_name`` further ones, and ``file_names`` lists of files, as in the folders that ``datasets`` reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import posixpath
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError
from midepoch.sources.fingerprints import fingerprint, spaced
from midepoch.sources.formats import Block, Format, Scanned, decoded, format_named, table_of
from midepoch.sources.index import for_all
from midepoch.sources.names import Listing, is_metadata
from midepoch.sources.schemas import nulls, unified
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
    """Format with blocks of files. Its scan is ``scan_media``, which takes the listing."""

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
    missing = _missing(store, jobs, skips)
    if missing or located.null_count:  # not otherwise: pa.array of a list imports pandas, which takes 0.3 s
        given, absent = names.to_pylist(), {*missing, *(i for i, path in enumerate(paths) if path is None)}
        names = pa.array([store.name(paths[i]) if i in missing else name for i, name in enumerate(given)], pa.string())
        bits = pa.array([i not in absent for i in range(len(paths))], pa.bool_()).buffers()[1]
        mask = pa.array([path is None for path in paths], pa.bool_())
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(contents)]
    binary = pa.Array.from_buffers(pa.binary(), len(paths), buffers)
    return pa.StructArray.from_arrays([binary, names], fields=list(FILE), mask=mask)


Job = tuple[int, Entry, memoryview]


def _missing(store: Store, jobs: Sequence[Job], skips: bool) -> list[int]:
    """Read files into their places, and return the numbers of those that cannot be read."""

    def run(job: Job) -> int | None:
        i, entry, place = job
        try:
            store.persist(entry.path, "read", lambda: _read(store, entry, place, skips))
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


def _read(store: Store, entry: Entry, place: memoryview, skips: bool) -> None:
    try:
        if store.local:
            _read_local(entry, place)
        else:
            with store.open(entry) as file:
                file.read_into(place, 0)
    except FileNotFoundError:
        raise removed(store.name(entry.path)) from None
    except PermissionError as problem:
        if not skips:
            raise
        raise CorruptBlockError(f"{store.name(entry.path)} cannot be read: {problem}") from None


def _read_local(entry: Entry, place: memoryview) -> None:
    with open(entry.path, "rb", buffering=0) as file:
        done = 0
        while done < len(place) and (came := file.readinto(place[done:])):
            done += came
        stat = os.fstat(file.fileno())  # after the read: contents from before a change would be detected, too
    if stat.st_size != entry.size or done < len(place):
        raise changed(entry.path, f"it has {stat.st_size} bytes and had {entry.size}")
    if stat.st_mtime_ns != entry.mtime_ns:
        raise changed(entry.path, "its modification time differs")


_NAMED = 10
"""Maximum number of missing files that are named in the log."""
_SAMPLED = 256
"""Maximum number of files of which contents are part of the fingerprint."""
_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}


def described_rows(
    store: Store, listing: Listing, described: Sequence[Entry], kind: str, *, skip_damage: bool
) -> MediaTable:
    """Return the rows of metadata files, in the order of their paths."""
    described = sorted(described)
    digest = hashlib.blake2b(digest_size=16)
    tables = _tables(store, described, digest, skip_damage)
    schema = tables[0].schema
    columns = {name: _column(name, kind) for name in schema.names if _holds_files(schema.field(name))}
    if not columns:
        found = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise FormatError(
            f"{store.name(described[0].path)} describes the files beside it, but has no column file_name with names "
            f"of files as text. Its columns are {found}. Add it, or pass format='csv' (or 'jsonl', 'parquet') to read "
            "the table alone."
        )
    delivered = [columns.get(name, name) for name in schema.names]
    for name in columns.values():
        if delivered.count(name) > 1:
            raise FormatError(
                f"{store.name(described[0].path)}: several of its columns ({', '.join(schema.names)}) become the "
                f"column {name!r}. Rename all but one of them."
            )
    files = _Files(store, listing, skip_damage)
    parts = [files.resolved(entry, table, list(columns)) for entry, table in zip(described, tables, strict=True)]
    table = pa.concat_tables(part for part, _ in parts).rename_columns(delivered)
    hash_files(digest, store, files.used, skip_damage)
    files.report()
    features: dict[str, Any] = {}
    for name, column in columns.items():
        is_list = pa.types.is_list(schema.field(name).type)
        features[column] = [feature_of(kind)] if is_list else feature_of(kind)
    return MediaTable(
        table, np.array([size for _, sizes in parts for size in sizes], np.int64), digest.hexdigest(), features
    )


def _tables(store: Store, described: Sequence[Entry], digest: Any, skip_damage: bool) -> list[pa.Table]:
    suffixes = sorted({os.path.splitext(entry.path)[1] for entry in described})
    if len(suffixes) > 1:
        raise FormatError(
            f"{store.name(described[0].path)}: there are metadata files in several formats: {', '.join(suffixes)}. "
            "Keep one of them."
        )
    form = format_named(_FORMATS[suffixes[0]])
    scans = [
        store.persist(entry.path, "indexed", partial(form.scan, store, entry, skip_damage=skip_damage))
        for entry in described
    ]
    names = [store.name(entry.path) for entry in described]
    schema = unified(names, scans, None, text=suffixes == [".csv"]).remove_metadata()
    tables = []
    for entry, scan in zip(described, scans, strict=True):
        digest.update(scan.fingerprint.encode())
        blocks = [Block(entry, scan.offsets[i], scan.end(i), scan.footer_of(i)) for i in range(len(scan.rows))]
        read = [
            store.persist(entry.path, "read", partial(decoded, store, form, block, (), schema, schema.names, rows))
            for block, rows in zip(blocks, scan.rows, strict=True)
        ]
        tables.append(pa.concat_tables(read) if read else schema.empty_table())
    return tables


def _holds_files(field: pa.Field) -> bool:
    texts = (pa.string(), pa.large_string())
    if field.name == "file_name" or field.name.endswith("_file_name"):
        return field.type in texts
    if field.name == "file_names" or field.name.endswith("_file_names"):
        return bool(pa.types.is_list(field.type)) and field.type.value_type in texts
    return False


def _column(name: str, kind: str) -> str:
    """Return the name of the column of files that a column of names becomes."""
    if name.endswith("file_names"):
        return name[: -len("_file_names")] or f"{kind}s"
    return name[: -len("_file_name")] or kind


class _MissingError(Exception):
    """A row names a file that does not exist, and is left out."""


class _Files:
    """Files of a listing by their paths. ``used``: those that were found, in order, with their names."""

    def __init__(self, store: Store, listing: Listing, skip_damage: bool) -> None:
        self._store, self._skips = store, skip_damage
        pairs = zip(listing.files, listing.names, strict=True)
        self._known = {entry.path: (entry, name) for entry, name in pairs}
        self._missing: list[str] = []
        self.used: list[tuple[Entry, str]] = []

    def resolved(self, metadata: Entry, table: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, list[int]]:
        """Return the table with files in place of their names, and the bytes of the files of each row."""
        kept, rows, sizes = [], [], []
        for number, names in enumerate(zip(*(table.column(name).to_pylist() for name in columns), strict=True)):
            start = len(self.used)
            try:
                rows.append([self._value(metadata, number, each) for each in names])
            except _MissingError:
                del self.used[start:]
                continue
            kept.append(number)
            sizes.append(sum(entry.size for entry, _ in self.used[start:]))
        table = table.take(pa.array(kept, pa.int64()))
        for i, name in enumerate(columns):
            place = table.schema.get_field_index(name)
            kind = pa.list_(LOCATED) if pa.types.is_list(table.schema.field(place).type) else LOCATED
            table = table.set_column(place, name, pa.array([row[i] for row in rows], kind))
        return table, sizes

    def _value(self, metadata: Entry, row: int, value: Any) -> Any:
        """Return the value of a file, or of a list of files, that a row names. None for a null."""
        if isinstance(value, list):
            return [self._value(metadata, row, each) for each in value]
        if value is None:
            return None
        place = f"{self._store.name(metadata.path)}: row {row} (the first is 0)"
        name, folder = posixpath.normpath(value).replace("\\", "/"), posixpath.dirname(metadata.path)
        if "://" in value or name == ".." or name.startswith(("/", "../")):
            raise FormatError(f"{place} names the file {value!r}. Names must be relative, and below this folder.")
        found = self._known.get(posixpath.join(folder, name))
        if found is None and self._skips:
            self._missing.append(value)
            raise _MissingError
        if found is None:
            raise FormatError(
                f"{place} names the file {value!r}, which does not exist in {self._store.name(folder)}. Restore it, or "
                'pass on_error="skip" to leave out such rows.'
            )
        self.used.append(found)
        entry, name = found
        return {"path": entry.path, "name": name, "size": entry.size, "mtime_ns": entry.mtime_ns}

    def report(self) -> None:
        if self._missing:
            named = ", ".join(self._missing[:_NAMED]) + ", …" * (len(self._missing) > _NAMED)
            _log.warning("skipped %d rows whose files do not exist: %s", len(self._missing), named)


BLOCK_BYTES = 4 << 20
BLOCK_FILES = 128
"""Limits of a block. A window of 64 blocks, the most that is shuffled together, is then at most 256 MB."""
_LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class MediaTable:
    """All rows. Files are structs of type ``LOCATED``. ``sizes``: the bytes of the files of each row.

    ``digest`` identifies the rows by their files (``hash_files``), their labels and their metadata.
    """

    table: pa.Table
    sizes: npt.NDArray[np.int64]
    digest: str
    features: dict[str, Any]


def feature_of(kind: str) -> dict[str, str]:
    """Return the Hugging Face feature of a file, as JSON."""
    return {"_type": kind.capitalize()}


def scan_media(store: Store, listing: Listing, kind: str, *, skip_damage: bool) -> Scanned:
    """Return the blocks of a listing: a row for each row of its metadata, otherwise for each file."""
    described = [entry for entry in listing.files if is_metadata(entry.path)]
    if described:
        rows = described_rows(store, listing, described, kind, skip_damage=skip_damage)
    else:
        rows = _labelled(store, listing, kind, skip_damage)
    if len(rows.sizes) and rows.sizes.max() > _LARGEST:
        row = int(rows.sizes.argmax())
        raise FormatError(
            f"{store.name(listing.root)}: the files of row {row} have {rows.sizes[row]} bytes, and a row may have "
            "2 GiB. Remove it."
        )
    return _grouped(rows, skip_damage)


def _labelled(store: Store, listing: Listing, kind: str, skip_damage: bool) -> MediaTable:
    """Return a row for each file, labelled by its folder if there are several folders, all of the same depth."""
    folders = [entry.path.rpartition("/")[0].rpartition("/")[2] for entry in listing.files]
    names = sorted(set(folders)) if len({name.count("/") for name in listing.names}) == 1 else []
    columns = {kind: located(listing.files, listing.names)}
    features: dict[str, Any] = {kind: feature_of(kind)}
    if len(names) > 1:
        numbers = {name: i for i, name in enumerate(names)}
        columns["label"] = pa.array([numbers[folder] for folder in folders], pa.int64())
        features["label"] = {"names": names, "_type": "ClassLabel"}
    sizes = np.array([entry.size for entry in listing.files], np.int64)
    digest = hashlib.blake2b(json.dumps(features).encode(), digest_size=16)
    hash_files(digest, store, list(zip(listing.files, listing.names, strict=True)), skip_damage)
    return MediaTable(pa.table(columns), sizes, digest.hexdigest(), features)


def located(files: Sequence[Entry], names: Sequence[str]) -> pa.StructArray:
    """Return files with their names as an array."""
    fields = [[entry.path for entry in files], names, [entry.size for entry in files]]
    fields.append([entry.mtime_ns for entry in files])
    arrays = [pa.array(values, LOCATED.field(i).type) for i, values in enumerate(fields)]
    return pa.StructArray.from_arrays(arrays, fields=list(LOCATED))


def hash_files(digest: Any, store: Store, files: Sequence[tuple[Entry, str]], skip_damage: bool) -> None:
    """Add the names and sizes of files to a hash, and the fingerprints of some of them."""
    digest.update("".join(f"{name}\0{entry.size}\0" for entry, name in files).encode())
    some = [files[number][0] for number in spaced(len(files) - 1, _SAMPLED)] if files else []
    for found in for_all(partial(_sampled, store, skip_damage), some, lambda _: None):
        digest.update(found.encode())


def _sampled(store: Store, skip_damage: bool, entry: Entry) -> str:
    def read() -> str:
        try:
            with store.open(entry) as file:
                return fingerprint(b"", file.read_at, file.size)
        except PermissionError:
            if not skip_damage:
                raise
            return ""

    return store.persist(entry.path, "indexed", read)


def _grouped(rows: MediaTable, skip_damage: bool) -> Scanned:
    """Divide rows into blocks. Each footer is a table of the rows of its block."""
    bounds = _bounds(rows.sizes)
    marked = rows.table.combine_chunks().replace_schema_metadata({SKIP: b""} if skip_damage else None)
    footers = []
    for start, stop in pairwise(bounds):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, marked.schema) as writer:
            writer.write_table(marked.slice(start, stop - start))
        footers.append(bytes(sink.getvalue()))
    metadata = {"huggingface": json.dumps({"info": {"features": rows.features}})}
    schema = pa.schema([field.with_type(_delivered(field.type)) for field in rows.table.schema], metadata=metadata)
    return Scanned(
        schema,
        offsets=bounds[:-1],
        rows=np.diff(bounds).tolist(),
        nullable=_nullable(rows.table, skip_damage),
        fingerprint=rows.digest,
        footers=footers,
        decoded_bytes=float(rows.sizes.sum()),
        stop=bounds[-1],
    )


def _bounds(sizes: npt.NDArray[np.int64]) -> list[int]:
    """Return the first row of each block, and the number of rows."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while (start := bounds[-1]) < len(sizes):
        full = int(np.searchsorted(ends, ends[start] - sizes[start] + BLOCK_BYTES, side="right"))
        bounds.append(min(max(full, start + 1), start + BLOCK_FILES, len(sizes)))
    return bounds


def _delivered(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_delivered(kind.value_type))
    return FILE if kind == LOCATED else kind


def _nullable(table: pa.Table, skip_damage: bool) -> set[tuple[str, ...]]:
    """Return the paths with a null. With ``skip_damage``, the bytes of a file that cannot be read are null."""
    found = {path for path in nulls(table) if not _is_located(table.schema.field(path[0]).type) or len(path) == 1}
    if skip_damage:
        found |= {(field.name, "bytes") for field in table.schema if field.type == LOCATED}
    return found


def _is_located(kind: pa.DataType) -> bool:
    return bool(kind == LOCATED or (pa.types.is_list(kind) and kind.value_type == LOCATED))
