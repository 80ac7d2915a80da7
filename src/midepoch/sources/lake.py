"""Opening of an index: read if the files are those that it was built of, else built.

It is built once: headers and footers of files (for text, all rows) are scanned in parallel, types are unified, and the
rows that pass the filter are counted, so that a position means the same row on every machine. Hive partitions, folders
named ``key=value``, add columns to all rows below them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs as fs

from midepoch._internal.progress import Progress
from midepoch.errors import CorruptBlockError, DataNotFoundError, DifferentSchemasError, FormatError
from midepoch.sources.files import DataFiles
from midepoch.sources.filters import Filter, comparable
from midepoch.sources.fingerprints import SKIPPED
from midepoch.sources.formats import Block, Member, Scanned, Values, decoded, format_named, partition_expression
from midepoch.sources.index import (
    MAPPED,
    Index,
    IndexedFile,
    IndexedFiles,
    for_all,
    packed,
    read_index,
    read_or_build,
)
from midepoch.sources.listing import files_at
from midepoch.sources.names import GLOB, KINDS
from midepoch.sources.schemas import difference, holds, holds_dictionary, nullable_paths, row_bytes, unified, usable
from midepoch.storage.cache_files import default_index_dir
from midepoch.storage.damage import DamageError
from midepoch.storage.stores import Entry, Store

_log = logging.getLogger("midepoch")

_NAMED_LINES = 10
"""Maximum number of unreadable lines of a file that are named in the log."""


@dataclass(frozen=True, eq=False)
class Request:
    """Everything that determines the contents of an index. ``find`` chooses the files when needed.

    ``mapped``: blocks must be mapped, even if they have to be decoded for each row. Otherwise those of plain local
    Arrow files are mapped if nothing has to be decoded.
    """

    store: Store
    paths: tuple[str, ...]
    format: str | None
    filter: Filter | None
    partitioning: str | None
    skip_damage: bool
    find: Callable[[], DataFiles]
    mapped: bool = False

    @cached_property
    def found(self) -> DataFiles:
        """The files, chosen once."""
        return self.find()


def index_path(folder: Path | None, chosen: Filter | None, *parts: str) -> Path:
    """Return the path of the index for a filter and other texts. Its name contains no secrets, not even as a hash."""
    texts = [*parts, chosen.text, chosen.digest] if chosen else parts
    name = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
    return (folder or default_index_dir()) / f"{name}.midepoch-index"


def _quiet(done: int, total: int) -> None:
    """Show no progress."""


def open_index(
    files: Sequence[str | os.PathLike[str]],
    *,
    index_dir: Path | None = None,
    force: bool = False,
    skip_damage: bool = False,
    progress: Progress = _quiet,
) -> Index:
    """Return the index of local Arrow files to map. Raise DifferentSchemasError unless they have one schema."""
    paths, store = tuple(os.path.abspath(path) for path in files), Store(fs.LocalFileSystem())

    def find() -> DataFiles:
        found = files_at(store, paths)
        for path in paths:
            if path not in found:
                raise DataNotFoundError(f"{path} cannot be opened: there is no such file.")
        return DataFiles("arrow", tuple(found[path] for path in paths))

    request = Request(store, paths, "arrow", None, None, skip_damage, find, mapped=True)
    return open_lake(request, index_dir=index_dir, force=force, progress=progress)


def open_lake(
    request: Request,
    *,
    index_dir: Path | None = None,
    force: bool = False,
    validate: bool = True,
    progress: Progress = _quiet,
) -> Index:
    """Return the index: read if it is fresh (by one listing; ``validate=False`` skips the check), else built."""
    store = request.store
    choices = (request.format or "", request.partitioning or "", str(request.skip_damage), str(request.mapped))
    path = index_path(index_dir, request.filter, store.identity, *request.paths, *choices)
    index = None if force else read_index(path)
    if index is None or (validate and not _fresh(index, request.found)):
        if index is not None and (earlier := store.earlier):
            _log.warning(
                "%s has changed since it was indexed. A state saved before will be refused. The version that was "
                "opened last is at %s", store.name(request.paths[0]), earlier,
            )  # fmt: skip
        index = read_or_build(
            path,
            lambda: _build(request, progress),
            force=force,
            is_fresh=lambda index: _fresh(index, request.found),
        )
    for number in np.flatnonzero(index.files.blocks == 0).tolist():
        if (file := index.files[number]).fingerprint == SKIPPED:
            _log.warning("%s is damaged: all of its rows are left out", store.name(file.path))
    for file in index.files.incomplete:
        _log.warning("%s is damaged: only %d of its rows are used", store.name(file.path), file.rows)
    for file in index.files.with_broken_lines:
        more = ", …" if file.broken > len(file.broken_lines) else ""
        _log.warning(
            "%s: skipped %d line%s%s that cannot be read: %s%s", store.name(file.path), file.broken,
            "s" * (file.broken > 1), " or elements" * (index.format == "jsonl"),
            ", ".join(map(str, file.broken_lines)), more,
        )  # fmt: skip
    return index


def _fresh(index: Index, found: DataFiles) -> bool:
    """Return True if an index is of these files."""
    files = index.files.part(0, len(found.entries)) if found.listed else index.files  # a manifest stands for its files
    return files.are(found.entries)


def _build(request: Request, report: Progress) -> Index:
    store, found = request.store, request.found
    items: Sequence[Any] = found.entries
    if found.listed:
        items = format_named(found.format).members(store, found.entries)
    entries = [item.entry if found.listed else item for item in items]
    total = len(entries) * (1 if request.filter is None else 2)
    if found.listing is None:
        scan_one = partial(_scanned, store, found.format, request.skip_damage)
        scans = for_all(scan_one, items, lambda done: report(done, total))
    else:
        from midepoch.sources.formats.media import scan_media

        if request.partitioning is not None:
            raise ValueError(f"partitioning={request.partitioning!r} is for tables, and these are {found.format} files")
        scans = [scan_media(store, found.listing, found.format, skip_damage=request.skip_damage)]
    values, added = (
        hive_values(below(request.paths, [entry.path for entry in entries]))
        if request.partitioning == "hive"
        else ([()] * len(entries), None)
    )
    used = [scan for scan in scans if scan.damage is None]
    names = [store.name(entry.path) for entry, scan in zip(entries, scans, strict=True) if scan.damage is None]
    for damage in (scan.damage for scan in scans if scan.damage is not None):
        if not used:
            raise damage
        _log.warning("a damaged file is left out: %s", damage)
    mapped = _is_mapped(request, found, names, used)
    text = found.format.partition(":")[0] == "csv"
    schema = used[0].schema if mapped else unified(names, used, added, text=text)
    nullable = nullable_paths(used, schema, values, added)
    manifests = found.entries if found.listed else ()
    form = MAPPED if mapped else found.format
    files = Files(store, form, entries, scans, values, schema, nullable, manifests=manifests)
    return indexed(files, request.filter, skip_damage=request.skip_damage, report=report)


def _is_mapped(request: Request, found: DataFiles, names: Sequence[str], scans: Sequence[Scanned]) -> bool:
    """Return True if blocks are mapped: files with different columns, and encoded blocks, are decoded once instead."""
    plain = request.store.local and request.filter is None and request.partitioning is None
    if not plain or found.format != "arrow":
        return False
    differs = difference(names, [scan.schema for scan in scans])
    if request.mapped and differs is not None:
        raise DifferentSchemasError(differs)
    encoded = any(scan.compressed or any(holds_dictionary(each.type) for each in scan.schema) for scan in scans)
    return request.mapped or not (differs or encoded)


@dataclass(frozen=True, eq=False)
class Files:
    """Files that were scanned, with their common schema and the values of their partitions."""

    store: Store
    format: str
    entries: Sequence[Entry]
    scans: Sequence[Scanned]
    values: Sequence[Values]
    schema: pa.Schema
    nullable: frozenset[tuple[str, ...]]
    snapshot: str = ""
    manifests: Sequence[Entry] = ()
    """Files that name the others, and come before them in an index."""

    @staticmethod
    def of_snapshot(
        store: Store, form: str, found: Sequence[tuple[Entry, Scanned]], schema: pa.Schema, snapshot: str
    ) -> Files:
        """Return the files of a snapshot of a table, which have a schema in common."""
        entries, scans = zip(*found, strict=True)
        nullable = frozenset[tuple[str, ...]]().union(*(scan.nullable for scan in scans))
        return Files(store, form, entries, scans, [()] * len(entries), schema, nullable, snapshot)


def indexed(of: Files, chosen: Filter | None, *, skip_damage: bool, report: Progress) -> Index:
    """Return the index of scanned files. With a filter, count the rows of each block that pass it."""
    store = of.store
    usable(store.name(of.entries[0].path), of.schema)
    work = list(zip(of.entries, of.scans, of.values, strict=True))
    counts = [scan.rows for scan in of.scans]
    if chosen is not None:
        counter = _Counter(store, of.format, chosen, of.schema, skip_damage)
        counts = for_all(counter.count, work, lambda done: report(len(work) + done, 2 * len(work)))
    offsets, ends, rows = list[int](), list[int](), list[int]()
    footers = [b"" for _ in of.manifests]
    files = [IndexedFile(*each[:3], 0, 0, of.format) for each in of.manifests]
    for (entry, scan, values), passing in zip(work, counts, strict=True):
        blocks = [i for i, count in enumerate(passing) if count or chosen is None]
        offsets += [scan.offsets[i] for i in blocks]
        ends += [-1 if (end := scan.end(i)) is None else end for i in blocks]
        rows += [passing[i] for i in blocks]
        footers += [scan.footers[i] for i in blocks] if of.format in KINDS else [scan.footer]
        files.append(
            IndexedFile(
                entry.path, entry.size, entry.mtime_ns, sum(passing), len(blocks), scan.fingerprint,
                scan.dictionaries, scan.etag, values, len(scan.broken_lines), tuple(scan.broken_lines[:_NAMED_LINES]),
                not scan.complete,
            )
        )  # fmt: skip
    return Index(
        IndexedFiles.of(files),
        np.array([*offsets, 0], dtype=np.int64),
        np.cumsum([0, *rows], dtype=np.int64),
        np.array([*ends, 0], dtype=np.int64),
        of.schema.serialize().to_pybytes(),
        of.nullable,
        of.format,
        chosen.text if chosen else "",
        packed(footers),
        0.0 if of.format == MAPPED else row_bytes(of.scans, of.schema),
        of.snapshot,
    )


def _scanned(store: Store, form: str, skip_damage: bool, item: Entry | Member) -> Scanned:
    format_ = format_named(form)
    try:
        if isinstance(item, Member):
            return store.persist(item.entry.path, "indexed", lambda: format_.scan_member(store, item))
        return store.persist(item.path, "indexed", lambda: format_.scan(store, item, skip_damage=skip_damage))
    except (CorruptBlockError, DamageError) as problem:
        if not skip_damage:
            raise
        return Scanned(pa.schema([]), fingerprint=SKIPPED, damage=problem)


class _Counter:
    """Counter of the rows of each block that pass a filter. It reads only the columns of the filter."""

    def __init__(self, store: Store, form: str, chosen: Filter, schema: pa.Schema, skip_damage: bool) -> None:
        self._store, self._form, self._filter, self._schema = store, format_named(form), chosen, schema
        self._columns, self._skip_damage = chosen.columns(schema), skip_damage
        types = [schema.field(name).type for name in self._columns]
        uuids = any(isinstance(kind, pa.UuidType) for kind in types)  # whose statistics pyarrow does not compare
        self._prunes = not uuids and (chosen.never_nan or not any(holds(kind, pa.types.is_floating) for kind in types))

    def count(self, file: tuple[Entry, Scanned, Values]) -> list[int]:
        """Return the number of rows that pass, for each block of a file."""
        known = partition_expression(file[2])
        return [self._passing(*file, known, i) for i in range(len(file[1].rows))]

    def _passing(self, entry: Entry, scan: Scanned, values: Values, known: Any, i: int) -> int:
        block = Block(entry, scan.offsets[i], scan.end(i), scan.footer_of(i), scan.dictionaries)
        if self._prunes and self._form.excluded(block, self._filter.expression, self._schema, known, self._columns):
            return 0
        decode = partial(decoded, self._store, self._form, block, values, self._schema, self._columns, scan.rows[i])
        try:
            table = self._store.persist(entry.path, "read", decode)
        except CorruptBlockError as problem:
            if not self._skip_damage:
                raise
            _log.warning("skipped %d rows that cannot be filtered: %s", scan.rows[i], problem)
            return 0
        return int(comparable(table).filter(self._filter.expression).num_rows)


_NULL = "__HIVE_DEFAULT_PARTITION__"


def hive_values(paths: Sequence[str]) -> tuple[list[Values], pa.Schema]:
    """Return the values of each path and their types: integers if all values are, else text."""
    texts: list[dict[str, str | None]] = []
    for path in paths:
        parts = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part and not part.startswith("=")]
        texts.append({unquote(key): None if value == _NULL else unquote(value) for key, value in parts})
        if list(texts[-1]) != list(texts[0]):
            raise FormatError(
                f"the files are not partitioned alike: {paths[0]} has {list(texts[0]) or 'no keys'}, {path} has "
                f"{list(texts[-1])}."
            )
    columns: dict[str, list[Any]] = {key: [text[key] for text in texts] for key in texts[0]}
    types = {}
    for key, column in columns.items():
        given = [text for text in column if text is not None]
        are_ints = all(re.fullmatch(r"-?[0-9]{1,19}", text) and abs(int(text)) < 1 << 63 for text in given)
        types[key] = pa.int64() if are_ints else pa.string()
        if are_ints:
            columns[key] = [text if text is None else int(text) for text in column]
    typed = [tuple(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return typed or [()] * len(paths), pa.schema(list(types.items()))


def below(given: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the paths of files relative to the roots of their partitions.

    For a given folder the root is the folder, or the first parent that is not itself a partition. For a file or a glob
    the partitions are the nearest consecutive folders named ``key=value``.
    """
    files = set(given).intersection(paths)
    others = [text for text in given if text not in files]
    relative = []
    for path in paths:
        roots = [_root(text, path) for text in ((path,) if path in files else others)]
        root = max((each for each in roots if path.startswith(each)), key=len, default="")
        relative.append(path[len(root) :].lstrip("/"))
    return relative


def _root(text: str, path: str) -> str:
    plain, *glob = GLOB.split(text, maxsplit=1)
    if text != path and not glob:
        above = text.rstrip("/").split("/")
        while above and "=" in above[-1]:  # a folder that is itself a partition
            above.pop()
        return "/".join([*above, ""])
    folders = path.split("/")[:-1]
    fixed = plain.split("/")[:-1] if text != path else folders
    if any("=" in folder for folder in folders[len(fixed) :]):
        folders = fixed  # the glob matches some of the partitions
    else:
        while any("=" in folder for folder in folders) and "=" not in folders[-1]:
            folders.pop()
    while folders and "=" in folders[-1]:
        folders.pop()
    return "".join(f"{folder}/" for folder in folders)
