"""Blocks of local files that are not Arrow, as views of the mapped files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs

from midepoch.sources.arrow_ipc import scan
from midepoch.sources.damage import DamageError
from midepoch.sources.fingerprints import SKIPPED
from midepoch.sources.formats import Block, InPlace, format_named
from midepoch.sources.index import MAPPED, IndexedFile
from midepoch.sources.source import Source
from midepoch.sources.stores import Entry, Store


def in_place(source: Source) -> InPlace | None:
    """Return the format of a source if its blocks are views of mapped files other than Arrow files, else None."""
    name = source.indexes[0].format
    if source.access is not None or name == MAPPED:
        return None
    found = format_named(name)
    assert isinstance(found, InPlace)
    return found


def view(
    source: Source, form: InPlace, block: int, files: Callable[[int], pa.Buffer], room: Callable[[int], Any]
) -> pa.RecordBatch:
    """Return a block as a view. ``files`` maps a file by its number, and ``room`` returns memory for offsets."""
    index = source.indexes[0]
    assert index.ends is not None
    number = int(source.file_blocks.searchsorted(block, side="right")) - 1
    file = index.files[number]
    entry = Entry(file.path, file.size, file.mtime_ns)
    where = Block(entry, int(index.offsets[block]), int(index.ends[block]))
    return form.view(files(number), lambda: files(number - 1), where, index.schema, room)


def fingerprint_of(source: Source, file: IndexedFile) -> str:
    """Return the fingerprint of the present contents of a mapped file."""
    if in_place(source) is None:
        try:
            return scan(Path(file.path), skip_damage=True).fingerprint
        except DamageError:
            return SKIPPED
    store = Store(fs.LocalFileSystem())
    entry = store.stat(file.path)
    assert entry is not None
    return format_named(source.indexes[0].format).scan(store, entry, skip_damage=True).fingerprint
