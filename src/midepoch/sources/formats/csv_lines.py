"""CSV and TSV: a header with names, then a row a line; quoted values may hold line ends."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv as pc

from midepoch.errors import FormatError
from midepoch.sources.files import COMPRESSIONS
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.lines import contents, first_row_end, read_range, scan_lines
from midepoch.sources.stores import Entry, Store

_HEADER = 1 << 20


class CsvFormat(NoStatistics):
    """Blocks of about 8 MB. An empty field is null, in text columns an empty text."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        names, start = _header(store, entry)
        delimiter = _delimiter(entry.path)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FormatError(f"{store.name(entry.path)}: several columns are called {', '.join(map(repr, twice))}.")
        found = scan_lines(
            store,
            entry,
            start=start,
            quoted=delimiter.encode(),
            parse=lambda data: _parse(data, names, delimiter),
            skip_damage=skip_damage,
        )
        found.footer = json.dumps(names).encode()
        if not len(found.schema):
            found.schema = pa.schema([(name, pa.null()) for name in names])
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        names = json.loads(block.footer)
        there = [name for name in columns if name in names]
        data = read_range(store, block)
        if not there:
            return pa.table({"": pa.nulls(_parse(data, names, _delimiter(block.entry.path)).num_rows)}).select([])
        types = {name: schema.field(name).type for name in there}
        return _parse(data, names, _delimiter(block.entry.path), there, types)


def _delimiter(path: str) -> str:
    name = path.lower()
    stem, suffix = os.path.splitext(name)
    return "\t" if (stem if suffix in COMPRESSIONS else name).endswith(".tsv") else ","


def _header(store: Store, entry: Entry) -> tuple[list[str], int]:
    """The names in the first row, and the byte at which the second begins."""
    with contents(store, entry) as file:
        head = bytes(file.read(_HEADER))
    if not head.strip():
        raise FormatError(f"{store.name(entry.path)}: the file is empty: not even a header with names of columns.")
    blank = len(head) - len(head.lstrip(b"\xef\xbb\xbf\r\n"))
    end = blank + (first_row_end(head[blank:], _delimiter(entry.path).encode()) or len(head) - blank)
    try:
        text = head[blank:end].decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise FormatError(f"{store.name(entry.path)}: its header is not UTF-8 text: {problem}") from None
    if "\r" in text.rstrip("\r\n") and "\n" not in text:
        raise FormatError(f"{store.name(entry.path)}: its lines end with a carriage return only; write them with \\n.")
    names = next(csv.reader(io.StringIO(text.strip("\r\n"), newline=""), delimiter=_delimiter(entry.path)), [])
    return names, end


def _parse(
    data: bytes,
    names: list[str],
    delimiter: str,
    columns: Sequence[str] | None = None,
    types: dict[str, pa.DataType] | None = None,
) -> pa.Table:
    return pc.read_csv(
        pa.BufferReader(data),
        read_options=pc.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
        parse_options=pc.ParseOptions(delimiter=delimiter, newlines_in_values=b'"' in data),
        convert_options=pc.ConvertOptions(include_columns=list(columns or ()), column_types=types or {}),
    )
