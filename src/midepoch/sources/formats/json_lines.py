"""JSON lines: one object per line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.json as pj

from midepoch.errors import FormatError
from midepoch.sources.damage import is_damage
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.compressed import contents
from midepoch.sources.formats.cutting import broken_rows, row_ends
from midepoch.sources.formats.inferred import MIXED_REMEDY
from midepoch.sources.formats.lines import read_rows, scan_lines
from midepoch.sources.stores import Entry, Store

_BOM = b"\xef\xbb\xbf"
_MIXED = re.compile(r"Column\(/(.+)\) changed from (\w+) to (\w+)")


class JsonFormat(NoStatistics):
    """Format with blocks of about 8 MB. Missing fields are null. Types are those of the complete set of files."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        with contents(store, entry) as file:
            head = bytes(file.read(64)).removeprefix(_BOM).lstrip(b" \t\r\n")
        if head.startswith(b"["):
            raise FormatError(
                f"{store.name(entry.path)}: this is one JSON array. Write one object per line (JSON lines) instead."
            )
        return scan_lines(store, entry, _JsonLines(), start=0, skip_damage=skip_damage)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        available = set(schema.names)
        wanted = pa.schema([schema.field(name) for name in columns if name in available])
        return _parse(read_rows(store, block), wanted)


class _JsonLines:
    """Implementation of ``lines.Dialect`` for JSON lines. Checks that text is UTF-8, which pyarrow does not."""

    delimiter = None

    def parse(self, data: bytes) -> pa.Table:
        if not data.isascii():
            data.decode()
        return _parse(data)

    def problem(self, data: bytes) -> str | None:
        try:
            self.parse(data)
        except UnicodeDecodeError as problem:
            return f"it is not UTF-8 text: {problem}"
        except pa.ArrowException as problem:
            if not is_damage(problem):
                raise
            if _MIXED.search(str(problem)) and _is_json(data):
                return None  # incompatible types are not damage of a row
            return re.sub(r"^JSON parse error: |\.? in row \d+$|\.$", "", str(problem))
        return None

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        return broken_rows(data, row_ends(data, None), self.problem)

    def refused(self, problem: Exception) -> str:
        mixed = _MIXED.search(str(problem))
        if mixed is None:
            return f"{problem}."
        column, first, second = mixed.groups()
        return f"column {column!r} contains {first} in some rows and {second} in others. {MIXED_REMEDY}"


def _is_json(data: bytes) -> bool:
    try:
        _read(data, pa.schema([]))
    except pa.ArrowException:
        return False
    return True


def _parse(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """Return all rows. Each line must be one object."""
    if schema is not None and not len(schema):  # pyarrow would lose the number of rows
        return pa.table({"": pa.nulls(_parse(data).num_rows)}).select([])
    return _read(data, schema)


def _read(data: bytes, schema: pa.Schema | None) -> pa.Table:
    data = data.removeprefix(_BOM)
    if re.match(rb"\s*null", data):  # crashes pyarrow unless an object comes before it
        return _read(b"{}\n" + data, schema).slice(1)
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    read = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pj.read_json(pa.BufferReader(data), read_options=read, parse_options=parse)
