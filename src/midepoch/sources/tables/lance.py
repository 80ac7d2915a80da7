"""Lance tables: the version to read, and its fragments. Their rows are read by the package ``lance``.

A block is a range of the rows of a fragment, without deleted ones. The address and the version of the table, and the
number of the fragment, are saved as the footer of a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from midepoch._internal.progress import Progress
from midepoch.errors import CorruptBlockError, DataNotFoundError, FetchError, FormatError, MidepochError
from midepoch.sources.fingerprints import fingerprint
from midepoch.sources.formats import Block, Format, Scanned, table_of
from midepoch.sources.index import for_all
from midepoch.sources.lake import Files
from midepoch.sources.schemas import nulls, plain_type
from midepoch.sources.tables.opening import package, reader_options
from midepoch.storage.damage import expired, refusals
from midepoch.storage.stores import Entry, Store

_GONE = re.compile(r"not found|NoSuchKey|does not exist", re.IGNORECASE)
_NETWORK = re.compile(r"request|connect|timed? ?out|HTTP|status|denied|credential", re.IGNORECASE)


def lance_package() -> Any:
    """Return the package. Raise MidepochError if it is not installed."""
    return package("lance", "Lance", "pylance", "lance")


def lance_table(store: Store, path: str, version: int, manifest: str) -> Any:
    """Return a Lance table at a version. ``manifest``: text that differs for a table that was created again."""
    _ = store.filesystem  # refused in a forked process, in which the threads of lance do not run
    return _table(store.scheme + path, version, manifest, tuple(sorted(reader_options(store).items())), os.getpid())


@lru_cache(maxsize=8)
def _table(uri: str, version: int, manifest: str, options: tuple[tuple[str, str], ...], process: int) -> Any:  # noqa: ARG001
    return lance_package().dataset(uri, version=version, storage_options=dict(options) or None)


def refusing(store: Store, name: str) -> AbstractContextManager[None]:
    """Return a context that converts errors of ``lance``."""

    def failure(_problem: BaseException, text: str) -> MidepochError:
        if _GONE.search(text):
            return expired(name)
        if not store.local and _NETWORK.search(text):
            return FetchError(f"{name} could not be read: {text}")
        return CorruptBlockError(f"{name} cannot be read: {text}")

    return refusals(store.secrets.clean, failure)


class LanceFormat(Format):
    """Format whose blocks are ranges of rows of a fragment. They are scanned with their table."""

    def decode(
        self,
        store: Store,
        block: Block,
        schema: pa.Schema,  # noqa: ARG002  # a format need not use all arguments of its interface
        columns: Sequence[str],
    ) -> pa.Table:
        about = json.loads(block.footer)
        assert block.end is not None
        name = f"fragment {about['fragment']} of {store.name(about['table'])}"
        with refusing(store, name):
            table = lance_table(store, about["table"], about["version"], about["manifest"])
            fragment = table.get_fragment(about["fragment"])
            if fragment is None:
                raise CorruptBlockError(f"{name} is missing in version {about['version']}.")
            if not columns:
                return table_of([], [], block.end - block.offset)
            count = block.end - block.offset  # without deleted rows
            scanner = fragment.scanner(
                columns=list(columns), offset=block.offset, limit=count, batch_size=count, blob_handling="all_binary"
            )
            rows = scanner.to_table()
        for i, column in enumerate(rows.columns):
            if (kind := _stored_type(column.type)) != column.type:
                stored = pa.chunked_array([chunk.storage for chunk in column.chunks], kind)
                rows = rows.set_column(i, rows.schema.names[i], stored)
        return rows


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the stored values, for a type that only ``lance`` knows."""
    return kind.storage_type if isinstance(kind, pa.ExtensionType) else kind


_MANIFEST = re.compile(r"(\d+)\.manifest")
_LARGEST = (1 << 64) - 1
_BLOCK_BYTES = 8 << 20
_MOST_ROWS = 1 << 16
_NULLS = re.compile(r"\bRepdef(\w+)|\b(NoNulls|SomeNulls|AllNulls)\b|has_validity: (\w+)")
_NONE = {"AllValidItem", "AllValidList", "EmptyableList", "NoNulls", "false"}
"""Descriptions of pages without nulls."""


@dataclass(frozen=True)
class LanceTableAt:
    """A Lance table at one version. ``manifest``: its file, which lists the fragments."""

    store: Store
    path: str
    version: int
    manifest: Entry

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the version. A table that was removed and created again has another manifest."""
        return ("lance", self.path, str(self.version), self.identity)

    @property
    def identity(self) -> str:
        return f"{self.manifest.size} {self.manifest.mtime_ns}"

    def scan(self, progress: Progress) -> Files:
        """Scan the fragments of this version."""
        with refusing(self.store, self.name):
            table = lance_table(self.store, self.path, self.version, self.identity)
            fragments = sorted(table.get_fragments(), key=lambda each: each.fragment_id)
            schema = table.scanner(limit=0, blob_handling="all_binary").projected_schema
            fields = {field.name(): field for field in table.lance_schema.fields()}
        if not sum(fragment.count_rows() for fragment in fragments):
            raise DataNotFoundError(f"there are no rows in {self.name} (version {self.version}).")
        shown = pa.schema([(field.name, plain_type(_stored_type(field.type))) for field in schema])
        scan_one = partial(_scanned, self, shown, fields)
        found = for_all(scan_one, fragments, lambda done: progress(done, len(fragments)))
        return Files.of_snapshot(self.store, "lance", found, shown, f"lance {self.version}")


def find_version(store: Store, path: str, version: int | str | None) -> LanceTableAt:
    """Return the table at a version: a number, a tag, or the latest one."""
    name = store.name(path)
    if isinstance(version, bool) or not isinstance(version, (int, str, type(None))):
        raise ValueError(f"version must be a number, a tag or None, got {version!r}")
    manifests: dict[int, Entry] = {}
    for entry in store.list(f"{path}/_versions"):
        if match := _MANIFEST.fullmatch(entry.path.rpartition("/")[2]):  # newer tables count their names down
            manifests[_LARGEST - int(match[1]) if len(match[1]) == 20 else int(match[1])] = entry
    if not manifests:
        raise DataNotFoundError(f"{name} is not a Lance table: there is no _versions/*.manifest in it. Check the path.")
    if isinstance(version, str):
        version = _tagged(store, path, version)
    number = max(manifests) if version is None else version
    if number not in manifests:
        raise DataNotFoundError(
            f"{name} has no version {number}: it has {min(manifests)} to {max(manifests)}, except those that a cleanup "
            "removed. Choose one of them."
        )
    return LanceTableAt(store, path, number, manifests[number])


def _tagged(store: Store, path: str, tag: str) -> int:
    with refusing(store, store.name(path)):
        tags = lance_package().dataset(store.scheme + path, storage_options=reader_options(store) or None).tags.list()
    if tag not in tags:
        raise DataNotFoundError(
            f"{store.name(path)} has no tag {tag!r}: it has {', '.join(map(repr, sorted(tags))) or 'none'}."
        )
    if tags[tag].get("branch"):
        raise FormatError(f"the tag {tag!r} of {store.name(path)} is on a branch, which is not supported.")
    return int(tags[tag]["version"])


def _scanned(table: LanceTableAt, schema: pa.Schema, fields: dict[str, Any], fragment: Any) -> tuple[Entry, Scanned]:
    store, about = table.store, fragment.metadata.to_json()
    name = f"fragment {fragment.fragment_id} of {table.name}"
    with refusing(store, name):
        rows = int(fragment.count_rows())
        entries = [_entry(store, f"{table.path}/data/{file['path']}") for file in about["files"] if not _is_apart(file)]
        size = sum(entry.size for entry in entries)
        step = max(1, min(_MOST_ROWS, _BLOCK_BYTES * max(1, rows) // max(1, size)))
        found = Scanned(schema, list(range(0, rows, step)), stop=rows)
        found.rows = [min(step, rows - start) for start in found.offsets]
        found.nullable = _nullable(table, schema, fields, fragment, about)
        found.decoded_bytes = 2.0 * size
        saved = {"table": table.path, "version": table.version, "manifest": table.identity}
        saved["fragment"] = fragment.fragment_id
        found.footer = json.dumps(saved).encode()
        digest = hashlib.blake2b(f"{schema.to_string(show_schema_metadata=False)} {step}".encode(), digest_size=16)
        others = [json.dumps(file, sort_keys=True) for file in about["files"] if _is_apart(file)]
        digest.update(json.dumps([others, about.get("overlays") or []], sort_keys=True).encode())
        has_deletions = about.get("deletion_file") is not None and not _is_apart(about["deletion_file"])
        deletions = [_entry(store, f"{table.path}/{fragment.deletion_file()}")] if has_deletions else []
        for entry in [*entries, *deletions]:
            digest.update(store.persist(entry.path, "indexed", partial(_sample, store, entry)))
        found.fingerprint = digest.hexdigest()
    return (entries[0] if entries else table.manifest), found


def _is_apart(file: dict[str, Any]) -> bool:
    """Return True if a file belongs to another table, of which this one is a clone."""
    return file.get("base_id") is not None


def _entry(store: Store, path: str) -> Entry:
    entry = store.stat(path)
    if entry is None:
        raise expired(store.name(path))
    return entry if store.local else entry._replace(mtime_ns=0)


def _sample(store: Store, entry: Entry) -> bytes:
    with store.open(entry) as file:
        return fingerprint(b"", file.read_at, file.size).encode()


def _nullable(
    table: LanceTableAt, schema: pa.Schema, fields: dict[str, Any], fragment: Any, about: dict[str, Any]
) -> set[tuple[str, ...]]:
    """Return the paths with a null. They are read from the descriptions of pages where these show it, else counted."""
    pages = _pages(table, about)
    found: set[tuple[str, ...]] = set()
    counted = []
    for column in schema:
        has_nulls = _has_nulls(fields[column.name], column.type, pages)
        if has_nulls:
            found.add((column.name,))
        elif has_nulls is None:
            counted.append(column.name)
    if counted:
        scanner = fragment.scanner(columns=counted, blob_handling="all_binary")
        for batch in scanner.to_batches():
            found |= nulls(pa.Table.from_batches([batch]))
    return found


def _has_nulls(field: Any, kind: pa.DataType, pages: dict[int, tuple[set[str], bool]] | None) -> bool | None:
    """Return True if the pages of a column show that it may have nulls. None if its nulls have to be counted."""
    if pages is None:
        return None
    leaves = list(_leaves(field))
    inner = kind.value_type if pt.is_fixed_size_list(kind) else kind
    is_old = any(pages[each][1] for each in leaves if each in pages)
    hides = is_old and not _has_fixed_width(inner)  # format 2.0 marks null lists, texts and bytes elsewhere
    # A column that was added has no pages, and no values in this fragment.
    if not hides and all(each in pages and pages[each][0] <= _NONE for each in leaves):
        return False
    return None if pt.is_nested(kind) else True


def _has_fixed_width(kind: pa.DataType) -> bool:
    try:
        return not pt.is_nested(kind) and kind.bit_width > 0
    except ValueError:
        return False


def _leaves(field: Any) -> Iterator[int]:
    children = field.children()
    if not children:
        yield field.id()
    for child in children:
        yield from _leaves(child)


def _pages(table: LanceTableAt, about: dict[str, Any]) -> dict[int, tuple[set[str], bool]] | None:
    """Return the marks of the pages of each field, and True for the format 2.0. None if there are none."""
    if about.get("overlays") or any(_is_apart(file) or file["file_major_version"] != 2 for file in about["files"]):
        return None
    reader = lance_package().file.LanceFileReader
    options = reader_options(table.store) or None
    found: dict[int, tuple[set[str], bool]] = {}
    for file in about["files"]:
        path = f"{table.store.scheme}{table.path}/data/{file['path']}"
        columns = reader(path, storage_options=options).metadata().columns
        for number, place in zip(file["fields"], file["column_indices"], strict=True):
            if not 0 <= place < len(columns):
                continue
            marks: set[str] = set()
            for page in columns[place].pages:
                shown = {next(filter(None, match)) for match in _NULLS.findall(str(page.encoding))}
                marks |= shown or {"unknown"}
            found[number] = marks, file["file_minor_version"] == 0
    return found
