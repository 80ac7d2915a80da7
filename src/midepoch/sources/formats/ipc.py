"""Arrow IPC files that cannot be mapped in place: in a store, or with columns that other files of the set lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from midepoch.sources.arrow_ipc import BatchReader, walk
from midepoch.sources.dictionaries import plain_array
from midepoch.sources.formats.base import Block, Format, Scanned, table_of
from midepoch.storage.stores import Entry, Store


class ArrowFormat(Format):
    """Format whose blocks are record batches. All columns of a block are fetched."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        with store.open(entry) as file:
            found = walk(store.name(entry.path), file.read_at, file.size, skip_damage=skip_damage)
            return replace(found, etag=file.etag)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        with store.open(block.entry) as file:
            batch = BatchReader(file.read_at, file.size).read(block.offset, block.end, block.dictionaries)
        available = set(batch.schema.names)
        present = [name for name in columns if name in available]
        return table_of(present, [plain_array(batch.column(name)) for name in present], batch.num_rows)
