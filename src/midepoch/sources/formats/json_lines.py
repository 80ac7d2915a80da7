"""JSON: one object per line, or one array of objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from midepoch.errors import FormatError
from midepoch.sources.formats import lines
from midepoch.sources.formats.base import Block, Format, Scanned, table_of
from midepoch.sources.formats.compressed import contents
from midepoch.sources.formats.cutting import SPACE, Int64Array, bracket_depths, elements
from midepoch.sources.formats.lines import Dialect, FilePieces, Piece, about_rows, check_text, read_rows, scan_text
from midepoch.sources.names import not_the_data
from midepoch.storage.damage import DamageError
from midepoch.storage.stores import Entry, Store

_BOM = b"\xef\xbb\xbf"
_BLANK = 1 << 20
"""Maximum number of blank bytes at the beginning of a file that are skipped to find its first character."""
DEEPEST = 100
"""Maximum number of brackets around a value. An Arrow schema that is nested more than about 120 deep cannot be saved,
and pyarrow crashes at about 10,000."""


class JsonFormat(Format):
    """Format with blocks of about 8 MB. Missing fields are null. Types are those of the complete set of files."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        blank, first = _beginning(store, entry)
        if first.startswith(b"["):
            return scan_text(store, entry, _JsonRows(in_array=True), start=blank + 1, skip_damage=skip_damage)
        if (other := not_the_data(first)) is not None:
            raise DamageError(f"{store.name(entry.path)}: {other}.")
        if re.match(rb'\{[ \t]*\r?\n\s*"', first):
            raise FormatError(
                f"{store.name(entry.path)}: this is one JSON object over several lines, expected one object per line "
                'or an array of objects. Open a field of it with midepoch.load_dataset("json", data_files=…, field=…).'
            )
        return scan_text(store, entry, _JsonRows(in_array=False), start=0, skip_damage=skip_damage)

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        available = set(schema.names)
        wanted = pa.schema([schema.field(name) for name in columns if name in available])
        return _parse(read_rows(store, block), wanted, in_array=about_rows(block.footer)["array"])


def _beginning(store: Store, entry: Entry) -> tuple[int, bytes]:
    """Return the number of blank bytes at the beginning of a file, and some bytes after them."""
    head, first = b"", b""
    with contents(store, entry) as file:
        # Read no more than necessary: the text after it may be damaged.
        while not first and len(head) < _BLANK and (data := bytes(file.read(max(64, len(head))))):
            head += data
            first = head.removeprefix(_BOM).lstrip(SPACE)
    return len(head) - len(first), first


class _JsonRows(Dialect):
    """Objects, one per line, or the elements of an array. Checks that text is UTF-8, which pyarrow does not."""

    name = "json"

    def __init__(self, *, in_array: bool) -> None:
        self._in_array = in_array
        self.unit = "element {} of the array (the first is 0)" if in_array else super().unit

    @property
    def about(self) -> dict[str, Any]:
        return {"array": self._in_array}

    def ends(self, data: bytes) -> Int64Array:
        return elements(data, is_first=True).starts[1:] if self._in_array else super().ends(data)

    def count(self, data: bytes) -> int:
        return len(elements(data, is_first=True).stops) if self._in_array else super().count(data)

    def parse(self, data: bytes) -> pa.Table:
        check_text(data)
        _, depths = bracket_depths(data)
        if len(depths) and depths.max() > DEEPEST:  # it would end the process
            raise pa.ArrowInvalid(f"it has values nested in more than {DEEPEST} brackets")
        return _parse(data, None, in_array=self._in_array)

    def is_readable(self, data: bytes) -> bool:
        try:
            _parse(data, pa.schema([]), in_array=self._in_array)
        except pa.ArrowException:
            return False
        return True

    def pieces(self, file: FilePieces) -> Iterator[Piece]:
        return _element_pieces(file) if self._in_array else super().pieces(file)


def _parse(data: bytes, schema: pa.Schema | None, *, in_array: bool) -> pa.Table:
    """Return all rows, with these columns: objects in lines, or elements of an array with the commas between them.

    The elements become one value of one column.
    """
    if not in_array:
        # Without columns, pyarrow would lose the number of rows.
        return _read(data, schema) if schema is None or len(schema) else table_of([], [], _read(data, None).num_rows)
    wrapped = b'{"":[' + data.rstrip(SPACE + b",]") + b"]}"
    column = None if schema is None else pa.schema([("", pa.list_(pa.struct(list(schema))))])
    rows = _read(wrapped, column).column(0).combine_chunks().flatten()
    return table_of([field.name for field in rows.type], rows.flatten(), len(rows))


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


def _element_pieces(file: FilePieces) -> Iterator[Piece]:
    """Yield the elements of an array in pieces of about 8 MB, without the text before and after them.

    Raise FormatError, or set ``is_damaged``, if the array has no end or contains something else.
    """
    rest, offset, number, enough, part = b"", file.start, 0, lines.BLOCK_BYTES, None
    for data in chain(file, [b""]):
        if part is not None and (part.end is not None or part.wrong is not None):
            rest = rest.lstrip(SPACE) or data  # all of the file is hashed
            continue
        rest += data
        if data and len(rest) < enough:
            continue
        part, passed = elements(rest, is_first=not number), 0
        if len(part.stops):
            first, passed = int(part.starts[0]), int(part.stops[-1])
            yield Piece(offset + first, number, rest[first:passed])
            number += len(part.stops)
        enough = lines.BLOCK_BYTES if passed else 2 * len(rest)
        passed = passed if part.end is None else part.end + 1
        offset, rest = offset + passed, rest[passed:]
    assert part is not None
    if part.end is not None and not rest.strip(SPACE):
        return
    found = rest.lstrip(SPACE + b",")[:20]
    if part.end is not None:
        problem = f"there is text after the end of the array: {found!r}"
    elif part.wrong is not None:
        problem = f"element {number} of the array (the first is 0) is not an object: {found!r}"
    else:
        problem = f"the array has no end: element {number} (the first is 0) is incomplete or missing"
    if not file.salvage:
        raise FormatError(
            f"{file.name}: {problem}. Expected an array of objects, with commas between them. Write the file again, or "
            'pass on_error="skip" to use the elements before the damage.'
        )
    file.is_damaged = True
