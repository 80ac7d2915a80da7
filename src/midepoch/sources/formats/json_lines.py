"""JSON lines: an object a line."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.json as pj

from midepoch.errors import FormatError
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.lines import contents, read_range, scan_lines
from midepoch.sources.stores import Entry, Store


class JsonFormat(NoStatistics):
    """Blocks of about 8 MB. Fields that a row lacks are null; types are those of the whole set of files."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        with contents(store, entry) as file:
            head = bytes(file.read(256)).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head.startswith(b"["):
            raise FormatError(
                f"{store.name(entry.path)}: this is one JSON array; write one object a line (JSON lines) instead."
            )
        return scan_lines(store, entry, start=0, quoted=None, parse=_parse, skip_damage=skip_damage)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        wanted = pa.schema([schema.field(name) for name in columns if name in schema.names])
        return _parse(read_range(store, block), wanted)


def _parse(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """All rows; a line must be one object, whatever its length."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    how = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    if schema is not None and not len(schema):  # pyarrow would forget the number of rows
        return pa.table({"": pa.nulls(_parse(data).num_rows)}).select([])
    whole = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pj.read_json(pa.BufferReader(data), read_options=whole, parse_options=how)
