"""JSON: one object per line, or one array of objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.json as pj

from midepoch.errors import FormatError
from midepoch.sources.damage import is_damage
from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.compressed import contents
from midepoch.sources.formats.cutting import Int64Array, broken_rows, row_ends
from midepoch.sources.formats.elements import SPACE, bracket_depths
from midepoch.sources.formats.inferred import MIXED_REMEDY
from midepoch.sources.formats.json_array import is_array, scan_array
from midepoch.sources.formats.lines import read_rows, scan_lines
from midepoch.sources.stores import Entry, Store

_BOM = b"\xef\xbb\xbf"
_BLANK = 1 << 20
"""Maximum number of blank bytes at the beginning of a file that are skipped to find its first character."""
DEEPEST = 100
"""Maximum number of brackets around a value. An Arrow schema that is nested more than about 120 deep cannot be saved,
and pyarrow crashes at about 10,000."""
_MIXED = re.compile(r"Column\(/(?:/\[\]/)?(.+)\) changed from (\w+) to (\w+)")


class JsonFormat(NoStatistics):
    """Format with blocks of about 8 MB. Missing fields are null. Types are those of the complete set of files."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        blank, first = _beginning(store, entry)
        if first.startswith(b"["):
            return scan_array(store, entry, JsonArray(), start=blank + 1, skip_damage=skip_damage)
        if re.match(rb'\{[ \t]*\r?\n\s*"', first):
            raise FormatError(
                f"{store.name(entry.path)}: this is one JSON object over several lines, expected one object per line "
                'or an array of objects. Open a field of it with midepoch.load_dataset("json", data_files=…, field=…).'
            )
        return scan_lines(store, entry, _JsonLines(), start=0, skip_damage=skip_damage)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        available = set(schema.names)
        wanted = pa.schema([schema.field(name) for name in columns if name in available])
        if is_array(block.footer):
            return JsonArray().parse(read_rows(store, block), wanted)
        return _parse(read_rows(store, block), wanted)


def _beginning(store: Store, entry: Entry) -> tuple[int, bytes]:
    """Return the number of blank bytes at the beginning of a file, and some bytes after them."""
    head, first = b"", b""
    with contents(store, entry) as file:
        # Read no more than necessary: the text after it may be damaged.
        while not first and len(head) < _BLANK and (data := bytes(file.read(max(64, len(head))))):
            head += data
            first = head.removeprefix(_BOM).lstrip(SPACE)
    return len(head) - len(first), first


class _JsonLines:
    """Implementation of ``lines.Dialect`` for JSON lines. Checks that text is UTF-8, which pyarrow does not."""

    delimiter = None

    def ends(self, data: bytes) -> Int64Array:
        return row_ends(data, None)

    def has_rows(self, data: bytes, head: bytes) -> bool:  # noqa: ARG002
        return False

    def parse(self, data: bytes) -> pa.Table:
        _check(data)
        return _parse(data)

    def problem(self, data: bytes) -> str | None:
        return _problem(data, self.parse, lambda each: _read(each, pa.schema([])))

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        return broken_rows(data, row_ends(data, None), self.problem)

    def refused(self, problem: Exception) -> str:
        return refused(problem)


class JsonArray:
    """Parser of consecutive elements of an array, with the commas between them. They become one value of one column."""

    def parse(self, data: bytes, schema: pa.Schema | None = None) -> pa.Table:
        if schema is None:
            _check(data)
        wrapped = b'{"":[' + data.rstrip(SPACE).removesuffix(b",") + b"]}"
        column = None if schema is None else pa.schema([("", pa.list_(pa.struct(list(schema))))])
        rows = _read(wrapped, column).column(0).combine_chunks().flatten()
        if not rows.type.num_fields:
            return pa.table({"": pa.nulls(len(rows))}).select([])
        fields = [rows.type.field(i) for i in range(rows.type.num_fields)]
        return pa.table(rows.flatten(), schema=pa.schema(fields))

    def problem(self, data: bytes) -> str | None:
        """Return the reason why elements cannot be read. None if each can be read alone."""
        return _problem(data, self.parse, lambda each: self.parse(each, pa.schema([])))

    def refused(self, problem: Exception) -> str:
        return refused(problem)


def refused(problem: Exception) -> str:
    """Return the message for rows that can be read alone, but not together."""
    mixed = _MIXED.search(str(problem))
    if mixed is None:
        return f"{problem}."
    column, first, second = mixed.groups()
    return f"column {column!r} contains {first} in some rows and {second} in others. {MIXED_REMEDY}"


def _problem(data: bytes, parse: Callable[[bytes], pa.Table], check: Callable[[bytes], pa.Table]) -> str | None:
    try:
        parse(data)
    except UnicodeDecodeError as problem:
        return f"it is not UTF-8 text: {problem}"
    except pa.ArrowException as problem:
        if not is_damage(problem):
            raise
        if _MIXED.search(str(problem)) and _is_readable(data, check):
            return None  # incompatible types are not damage of a row
        return re.sub(r"^JSON parse error: |\.? in row \d+$|\.$", "", str(problem))
    return None


def _check(data: bytes) -> None:
    """Raise for text that pyarrow does not refuse: not UTF-8, or so deeply nested that it would end the process."""
    if not data.isascii():
        data.decode()
    _, depths = bracket_depths(data)
    if len(depths) and depths.max() > DEEPEST:
        raise pa.ArrowInvalid(f"it has values nested in more than {DEEPEST} brackets")


def _is_readable(data: bytes, check: Callable[[bytes], pa.Table]) -> bool:
    try:
        check(data)
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
    table = pj.read_json(pa.BufferReader(data), read_options=read, parse_options=parse)
    for i, column in enumerate(table.columns):
        if pa.types.is_nested(column.type):
            table = table.set_column(i, table.field(i), pa.chunked_array(map(_repaired, column.chunks), column.type))
    return table


def _repaired(array: pa.Array) -> pa.Array:
    """Return an array in which lists of only nulls have all their nulls: pyarrow makes just one for each list."""
    if pa.types.is_list(array.type):
        is_null = pa.types.is_null(array.type.value_type)
        children, buffers = [pa.nulls(array.offsets[-1].as_py()) if is_null else _repaired(array.values)], 2
    elif pa.types.is_struct(array.type):
        children, buffers = [_repaired(array.field(i)) for i in range(array.type.num_fields)], 1
    else:
        return array
    return pa.Array.from_buffers(array.type, len(array), array.buffers()[:buffers], children=children)
