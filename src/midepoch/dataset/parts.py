"""Rows that are written once, as Arrow files in parts. Types become wider as later rows require it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.ipc import get_record_batch_size

from midepoch._internal.progress import Progress
from midepoch.errors import ColumnError, MidepochError
from midepoch.sources import Source
from midepoch.sources.lake import open_index
from midepoch.storage.cache_files import atomic_file, atomic_write
from midepoch.transforms.columns import common_type, converted

ROWS = 1000
"""Rows of a record batch."""
PART_BYTES = 64 << 20
COMPLETE = "complete.json"


def part_name(number: int) -> str:
    return f"part-{number:05}.arrow"


def open_parts(folder: Path) -> Source | None:
    """Return the rows of a folder that is complete, or None if it has no rows."""
    try:
        parts = json.loads((folder / COMPLETE).read_bytes())["parts"]
    except (OSError, ValueError, KeyError) as problem:
        raise MidepochError(f"the cache {folder} cannot be read ({problem}). Delete this folder.") from None
    if not parts:
        return None
    return Source(open_index([folder / part_name(number) for number in range(parts)], index_dir=folder))


@dataclass
class PartWriter:
    """Writes tables as parts. ``what`` names the function of the user in messages, ``room`` says what to do if the
    folder cannot be written.
    """

    folder: Path
    what: str
    room: str
    schema: pa.Schema | None = None
    schemas: list[pa.Schema] = field(default_factory=list)
    """Schemas of the parts that are finished."""

    def fitted(self, table: pa.Table) -> pa.Table:
        """Return a table with the types so far, which become wider if necessary."""
        if self.schema is None:
            self.schema = table.schema
        uneven = sorted(set(self.schema.names) ^ set(table.column_names))
        if uneven:
            raise ColumnError(
                f"{self.what}: some rows have a column {uneven[0]!r}, others do not. Return the same for every row, "
                "None for a missing value."
            )
        kinds = {}
        for column in self.schema:
            found = table.schema.field(column.name).type
            both = common_type(column.type, found)
            if both is None:
                raise ColumnError(
                    f"{self.what}: column {column.name!r} is {column.type} in some rows and {found} in others. Convert "
                    f"it first: cast({{{column.name!r}: …}})."
                )
            kinds[column.name] = both
        wide = pa.schema(list(kinds.items()), metadata=self.schema.metadata)
        self.schema = self.schema if wide.equals(self.schema) else wide
        return _as(table, self.schema)

    def finish(self, tables: Sequence[pa.Table], *, rows: int | None = None) -> str:
        """Write a part in batches of ``rows`` rows, and return the name of its file."""
        name = part_name(len(self.schemas))
        self._write(name, tables, rows)
        self.schemas.append(self.schema)
        return name

    def write_all(
        self,
        tables: Iterable[pa.Table],
        report: Progress,
        total: int = 0,
        done: int = 0,
        finished: Callable[[str, int], None] | None = None,
    ) -> int:
        """Write tables in parts of ``PART_BYTES``, and return the number of rows with those that were ``done``.

        ``total``: all rows, if known. ``finished``: called with the name and the rows of each part. Where a part ends
        depends only on the values of its rows.
        """
        part: list[pa.Table] = []
        rows = size = 0
        report(done, total)
        for table in chain(tables, [None]):
            if table is not None:
                part.append(table)
                rows, size = rows + table.num_rows, size + sum(map(get_record_batch_size, table.to_batches()))
                report(done + rows, total)
            if part and (table is None or size >= PART_BYTES):
                name = self.finish(part)
                if finished is not None:
                    finished(name, rows)
                done, part, rows, size = done + rows, [], 0, 0
        return done

    def complete(self, about: dict[str, Any]) -> None:
        """Write parts again whose types are narrower than those of later ones, then the note that all are written."""
        for number, schema in enumerate(self.schemas):
            if self.schema is not None and not schema.equals(self.schema):
                with pa.memory_map(str(self.folder / part_name(number))) as file:
                    self._write(part_name(number), [pa.ipc.open_file(file).read_all()])
        self.note(COMPLETE, {"parts": len(self.schemas), **about})

    def note(self, name: str, content: dict[str, Any]) -> None:
        with self.writing():
            atomic_write(self.folder / name, json.dumps(content).encode())

    def _write(self, name: str, tables: Sequence[pa.Table], rows: int | None = None) -> None:
        schema = self.schema
        assert schema is not None
        # The file is on disk when this returns: the note after it must not outlive the part.
        with self.writing(), atomic_file(self.folder / name) as file, pa.ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(copied(_as(table, schema)), max_chunksize=rows or ROWS)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what to do if the folder cannot be written."""
        try:
            yield
        except OSError as problem:
            raise MidepochError(f"the cache {self.folder} cannot be written: {problem}. {self.room}") from problem


def copied(table: pa.Table) -> pa.Table:
    """Return a table in new memory: the bytes of a file must not depend on how or where its rows were made."""
    columns = [pa.concat_arrays(column.chunks) if column.num_chunks else column for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        pa.chunked_array(
            [converted(each.name, chunk, each.type) for chunk in table.column(each.name).chunks], each.type
        )
        for each in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
