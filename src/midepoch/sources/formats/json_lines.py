"""JSON: one object per line, or one array of objects."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.json as pj

from midepoch.errors import FormatError
from midepoch.sources.formats import lines
from midepoch.sources.formats.base import Block, Format, Scanned, table_of
from midepoch.sources.formats.compressed import contents
from midepoch.sources.formats.cutting import (
    SPACE,
    Elements,
    Int64Array,
    bracket_depths,
    broken_rows,
    elements,
    row_ends,
    without,
)
from midepoch.sources.formats.lines import MIXED_REMEDY, lacking, nulls, read_rows, scan_lines, widest
from midepoch.storage.damage import is_damage
from midepoch.storage.open_files import Entry
from midepoch.storage.stores import Store

_BOM = b"\xef\xbb\xbf"
_BLANK = 1 << 20
"""Maximum number of blank bytes at the beginning of a file that are skipped to find its first character."""
DEEPEST = 100
"""Maximum number of brackets around a value. An Arrow schema that is nested more than about 120 deep cannot be saved,
and pyarrow crashes at about 10,000."""
_MIXED = re.compile(r"Column\(/(?:/\[\]/)?(.+)\) changed from (\w+) to (\w+)")


class JsonFormat(Format):
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

    name, delimiter = "json", None

    def ends(self, data: bytes) -> Int64Array:
        return row_ends(data, None)

    def has_rows(self, data: bytes, head: bytes) -> bool:
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
            return table_of([], [], len(rows))
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
        return table_of([], [], _parse(data).num_rows)
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
    """Return an array whose lists have all their nulls: pyarrow loses most of those before the first other value."""
    if pa.types.is_list(array.type):
        values = _repaired(array.values)
        lost = array.offsets[-1].as_py() - len(values)
        children, buffers = [pa.concat_arrays([pa.nulls(lost, values.type), values]) if lost > 0 else values], 2
    elif pa.types.is_struct(array.type):
        children, buffers = [_repaired(array.field(i)) for i in range(array.type.num_fields)], 1
    else:
        return array
    return pa.Array.from_buffers(array.type, len(array), array.buffers()[:buffers], children=children)


_log = logging.getLogger("midepoch")
_NAMED = 10
"""Maximum number of elements that are named in the log."""


class Parser(Protocol):
    """Parser of consecutive elements, with the commas between them."""

    def parse(self, data: bytes) -> pa.Table: ...

    def problem(self, data: bytes) -> str | None: ...

    def refused(self, problem: Exception) -> str: ...


def is_array(footer: bytes) -> bool:
    """Return True if the blocks with this footer are elements of an array."""
    return footer.startswith(b'{"array"')


def scan_array(store: Store, entry: Entry, parser: Parser, *, start: int, skip_damage: bool) -> Scanned:
    """Divide an array whose first element may begin at byte ``start`` into blocks, and parse every block once."""
    name = store.name(entry.path)
    pieces = lines.FilePieces(store, entry, start, salvage=skip_damage)
    text = _Array(name, pieces, start, skip_damage)
    found = Scanned(pa.schema([]), inferred=True, stop=start)
    schemas: list[pa.Schema] = []
    broken: list[tuple[int, int]] = []
    numbers: list[int] = []
    for offset, data, part in text:
        table, bad = _read_elements(name, text.number, data, part, parser, skip_damage)
        if table.num_rows:
            found.offsets.append(offset)
            found.rows.append(table.num_rows)
            found.nullable |= nulls(table)
            schemas.append(table.schema)
        if broken and broken[-1][1] == found.stop:  # with the comma that comes after it
            broken[-1] = (broken[-1][0], offset)
        broken += [(offset + first, offset + stop) for _, first, stop in bad]
        numbers += [text.number + i for i, _, _ in bad]
        found.stop = offset + len(data)
    found.complete = text.is_complete
    found.schema = widest(name, schemas)
    found.decoded_bytes = float(found.stop or 0) - start
    for schema in schemas:
        found.nullable |= lacking(found.schema, schema)
    found.fingerprint = pieces.digest.hexdigest()
    found.footer = json.dumps({"array": True, "broken": broken}).encode()
    if numbers:
        listed = ", ".join(map(str, numbers[:_NAMED])) + ", …" * (len(numbers) > _NAMED)
        _log.warning("%s: skipped %d elements that cannot be read: %s", name, len(numbers), listed)
    with store.open(entry) as file:
        found.etag = file.etag
    return found


Bad = list[tuple[int, int, int]]
"""Elements of a block that cannot be read: their numbers in it, and their byte ranges."""


def _read_elements(
    name: str, number: int, data: bytes, part: Elements, parser: Parser, skip_damage: bool
) -> tuple[pa.Table, Bad]:
    """Return the rows of a block, and the elements that were left out. ``number`` is that of its first element."""
    try:
        return parser.parse(data), []
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        if not is_damage(problem):
            raise
    ends = part.starts[1:] - part.starts[0]
    bounds = {first: i for i, first in enumerate([0, *ends.tolist()])}
    bad = [(bounds[first], first, stop) for first, stop in broken_rows(data, ends, parser.problem)]
    if bad and not skip_damage:
        i, first, stop = bad[0]
        raise FormatError(
            f"{name}: element {number + i} of the array (the first is 0) cannot be read: "
            f'{parser.problem(data[first:stop])}. Fix it, or pass on_error="skip" to leave out such elements.'
        )
    try:
        return parser.parse(without(data, [(first, stop) for _, first, stop in bad])), bad
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        raise FormatError(f"{name}: {parser.refused(problem)}") from None


class _Array:
    """Iterable over the blocks of an array: their byte offset, their bytes and the elements in them.

    ``number``: that of the first element of the last block. ``is_complete``: all elements were found.
    """

    def __init__(self, name: str, pieces: lines.FilePieces, start: int, skip_damage: bool) -> None:
        self._name, self._pieces, self._offset, self._skips = name, pieces, start, skip_damage
        self._next = self.number = 0
        self.is_complete = True

    def __iter__(self) -> Iterator[tuple[int, bytes, Elements]]:
        rest, enough, part = b"", lines.BLOCK_BYTES, None
        for data in self._pieces:
            if part is not None and (part.end is not None or part.wrong is not None):
                if part.wrong is not None and not self._skips:
                    break
                rest = rest if part.wrong is not None else rest + data.lstrip(SPACE)[:1]  # all of the file is hashed
                continue
            rest += data
            if len(rest) < enough:
                continue
            part = elements(rest, is_first=not self._next)
            enough = lines.BLOCK_BYTES if len(part.stops) else 2 * len(rest)
            yield from self._block(rest, part)
            rest = self._passed(rest, part)
        if part is None or (part.end is None and part.wrong is None):
            part = elements(rest, is_first=not self._next)
            yield from self._block(rest, part)
            rest = self._passed(rest, part)
        self._check_end(rest, part)

    def _block(self, data: bytes, part: Elements) -> Iterator[tuple[int, bytes, Elements]]:
        if len(part.stops):
            self.number, self._next = self._next, self._next + len(part.stops)
            first, stop = int(part.starts[0]), int(part.stops[-1])
            yield self._offset + first, data[first:stop], part

    def _passed(self, data: bytes, part: Elements) -> bytes:
        """Return the data after these elements, or after the end of the array."""
        last = int(part.stops[-1]) if len(part.stops) else 0
        stop = last if part.end is None else part.end + 1
        self._offset += stop
        return data[stop:]

    def _check_end(self, rest: bytes, part: Elements) -> None:
        here = rest.lstrip(SPACE + b",")[:20]
        if part.end is not None:
            if not here and b"," not in rest:
                return
            problem = f"there is text after the end of the array: {here!r}"
        elif part.wrong is not None:
            problem = f"element {self._next} of the array (the first is 0) is not an object: {here!r}"
        else:
            problem = f"the array has no end: element {self._next} (the first is 0) is incomplete or missing"
        if not self._skips:
            raise FormatError(
                f"{self._name}: {problem}. Expected an array of objects, with commas between them. Write the file "
                'again, or pass on_error="skip" to use the elements before the damage.'
            )
        self.is_complete = False
