"""CSV, JSON and plain text.

CSV and TSV have a header with names, then one row per line. Quoted values may contain line ends. JSON files have one
object per line, or one array of objects. Plain text has a row for each line, in one column ``text``. Its lines end as
Python's text files end them: with a line feed, a carriage return, or both. Blank lines are rows. A line feed at the end
of a file begins no row.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.json as pj

from midepoch._internal.hints import warn_once
from midepoch.errors import FormatError
from midepoch.sources.formats import Block, Format, Scanned, lines, table_of
from midepoch.sources.formats.lines import SPACE, Dialect, FilePieces, Int64Array, Piece
from midepoch.sources.names import COMPRESSIONS, format_of, not_the_data
from midepoch.storage.damage import DamageError
from midepoch.storage.stores import Entry, Store

_log = logging.getLogger("midepoch")
_BOM = b"\xef\xbb\xbf"
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


class CsvFormat(Format):
    """Format with blocks of about 8 MB. An empty field is null, or the empty text in text columns.

    ``code``: the character code of the delimiter. By default, the names of files determine it.
    """

    def __init__(self, code: str = "") -> None:
        self._chosen = chr(int(code)) if code else None

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        delimiter = self._chosen or _delimiter(entry.path)
        names, start = _header(store, entry, delimiter)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FormatError(
                f"{store.name(entry.path)}: several columns are named {', '.join(map(repr, twice))}. "
                "Rename them in the file, or add a header if that row is one of data."
            )
        other = next((each for each in ";,\t|" if each in names[0] and each != delimiter), None) if names else None
        if len(names) == 1 and other is not None and self._chosen is None:
            raise FormatError(
                f"{store.name(entry.path)}: its only column would be {names[0]!r:.60}. Pass delimiter={other!r}, or "
                f"delimiter={delimiter!r} if that is its name."
            )
        if any(map(_NUMBER.fullmatch, names)):
            _log.warning(
                "%s: its first row, %s, is used as names of columns. If that is a row, add a header to the file.",
                store.name(entry.path),
                ", ".join(map(repr, names[:8])),
            )
        found = lines.scan_text(store, entry, _CsvRows(names, delimiter), start=start, skip_damage=skip_damage)
        for field in found.schema:
            if field.type == pa.binary():  # what pyarrow makes of text that is not UTF-8
                _log.warning(
                    "%s: column %r is not UTF-8 text, and its values are bytes. Convert the file: "
                    "iconv -f latin1 -t utf-8.",
                    store.name(entry.path),
                    field.name,
                )
        if not len(found.schema):
            found.schema = pa.schema([(name, pa.null()) for name in names])
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        names = lines.about_rows(block.footer)["names"]
        present = [name for name in columns if name in names]
        data, delimiter = lines.read_rows(store, block), self._chosen or _delimiter(block.entry.path)
        if not present:
            return table_of([], [], _parse(data, names, delimiter).num_rows)
        return _parse(data, names, delimiter, present, {name: schema.field(name).type for name in present})


class _CsvRows(Dialect):
    mixed_is_text = True

    def __init__(self, names: list[str], delimiter: str) -> None:
        self._names, self._delimiter, self._bytes = names, delimiter, delimiter.encode()
        self.name = f"csv:{ord(delimiter)}"

    @property
    def about(self) -> dict[str, Any]:
        return {"names": self._names}

    def ends(self, data: bytes) -> Int64Array:
        return lines.row_ends(data, self._bytes)

    def has_rows(self, data: bytes) -> bool:
        """Return True also if white space contains rows: tabs as delimiters, or lines of spaces in a single column."""
        in_one_column = len(self._names) == 1 and re.search(rb"[ \t]\r?\n", data) is not None
        return super().has_rows(data) or self._bytes in data or in_one_column

    def is_closed(self, data: bytes) -> bool:
        return lines.is_closed(data, self._bytes)

    def parse(self, data: bytes) -> pa.Table:
        return _parse(data, self._names, self._delimiter)

    def problem(self, data: bytes) -> str | None:
        unclosed = None if self.is_closed(data) else "a quoted value begins in it and never ends"
        return super().problem(data) or unclosed

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        return lines.broken_quoted_rows(data, self._bytes, len(self._names), self.problem)


def _delimiter(path: str) -> str:
    name = path.lower()
    stem, suffix = os.path.splitext(name)
    return "\t" if (stem if suffix in COMPRESSIONS else name).endswith(".tsv") else ","


def _header(store: Store, entry: Entry, delimiter: str) -> tuple[list[str], int]:
    """Return the names in the first row, and the byte offset of the second row."""

    def bounds(head: bytes) -> tuple[int, int]:
        """Return the first byte of the first row, and its end, 0 if it has none."""
        blank = len(head) - len(head.removeprefix(_BOM).lstrip(b"\r\n"))
        ends = lines.row_ends(head[blank:], delimiter.encode())
        return blank, blank + int(ends[0]) if len(ends) else 0

    name, head = store.name(entry.path), lines.beginning(store, entry, lambda head: bounds(head)[1] > 0)
    blank, end = bounds(head)
    if not head.strip():
        raise DamageError(
            f"{name}: the file is empty: it has no header with names of columns. Write it again, or remove it."
        )
    if not end and (len(head) >= lines.LONGEST_HEAD or not lines.is_closed(head[blank:], delimiter.encode())):
        raise DamageError(f"{name}: its header has no end in {len(head)} bytes. Check for an unclosed quote.")
    end = end or len(head)
    chosen = "jsonl" if format_of(entry.path, None) == "jsonl" else ""  # then CSV was asked for by its name
    if (other := not_the_data(head, chosen)) is not None:
        raise DamageError(f"{name}: {other}.")
    try:
        text = head[blank:end].decode()
    except UnicodeDecodeError as problem:
        raise DamageError(f"{name}: its header is not UTF-8 text: {problem}. Save it as UTF-8.") from None
    if "\r" in text.rstrip("\r\n") and "\n" not in text:
        raise FormatError(f"{name}: its lines end with a carriage return only. Write them with \\n.")
    names = next(csv.reader(io.StringIO(text.strip("\r\n"), newline=""), delimiter=delimiter), [])
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


COLUMN = "text"
_SCHEMA = pa.schema([(COLUMN, pa.string())])
_FEED, _RETURN = b"\n\r"
_LONGEST = (1 << 31) - 1


class TextFormat(Format):
    """Format with blocks of about 8 MB."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        found = lines.scan_text(store, entry, _TextLines(), start=0, skip_damage=skip_damage)
        found.schema = _SCHEMA
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        table = pa.table([_lines(lines.read_rows(store, block))], schema=_SCHEMA)
        return table.select([name for name in columns if name == COLUMN])


class _TextLines(Dialect):
    name = "text"

    def ends(self, data: bytes) -> Int64Array:
        values = np.frombuffer(data, np.uint8)
        is_end = values == _FEED
        if b"\r" in data:  # the last byte may be the first half of a line end
            is_end[:-1] |= (values[:-1] == _RETURN) & ~is_end[1:]
        return np.flatnonzero(is_end) + 1

    def has_rows(self, data: bytes) -> bool:
        return len(data) > 0

    def parse(self, data: bytes) -> pa.Table:
        lines.check_text(data)
        return pa.table([_lines(data)], schema=_SCHEMA)


def _lines(data: bytes) -> pa.Array:
    """Return the lines without their ends, unchecked."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _FEED)
    text = data.replace(b"\n", b"")
    if len(text) > _LONGEST:
        raise pa.ArrowInvalid(f"a line has more than {_LONGEST} bytes")
    offsets = np.empty(len(ends) + 2, np.int32)
    offsets[0], offsets[-1] = 0, len(text)
    offsets[1:-1] = ends - np.arange(len(ends))
    count = len(ends) + (len(data) > 0 and not data.endswith(b"\n"))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


DEEPEST = 100
"""Maximum number of brackets around a value. An Arrow schema that is nested more than about 120 deep cannot be saved,
and pyarrow crashes at about 10,000."""


class JsonFormat(Format):
    """Format with blocks of about 8 MB. Missing fields are null. Types are those of the complete set of files."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        head = lines.beginning(store, entry, lambda head: bool(_without_blank(head)))
        first = _without_blank(head)
        if first.startswith(b"["):
            start = len(head) - len(first) + 1
            return lines.scan_text(store, entry, _JsonRows(in_array=True), start=start, skip_damage=skip_damage)
        if (other := not_the_data(first, "jsonl")) is not None:
            raise DamageError(f"{store.name(entry.path)}: {other}.")
        if re.match(rb'\{[ \t]*\r?\n\s*"', first):
            raise FormatError(
                f"{store.name(entry.path)}: this is a JSON object over several lines, expected one object per line or "
                "an array of objects. If there are several, write each on one line: json.dumps(row), without indent. "
                "Rows in a field of one object: "
                'midepoch.load_dataset("json", data_files=…, field="data", split="train").'
            )
        found = lines.scan_text(store, entry, _JsonRows(in_array=False), start=0, skip_damage=skip_damage)
        if sum(found.rows) == 1 and ".jsonl" not in entry.path and (about := _of_one_object(found.schema)):
            folder = store.name(posixpath.dirname(entry.path))  # which may have many of them
            warn_once("a file in %s is one JSON object, so one row. %s", folder, about)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        available = set(schema.names)
        wanted = pa.schema([schema.field(name) for name in columns if name in available])
        return _parse_json(lines.read_rows(store, block), wanted, in_array=lines.about_rows(block.footer)["array"])


def _of_one_object(schema: pa.Schema) -> str:
    """Return the sentences about an object that looks like a table, or "" if it looks like a row."""
    objects = [
        field.name for field in schema if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
    ]
    if objects:
        return (
            f"Its field {objects[0]!r} is a list of objects. If those are the rows: "
            f'midepoch.load_dataset("json", data_files=…, field={objects[0]!r}, split="train").'
        )
    named = [kind.field(0).name for kind in schema.types if pa.types.is_struct(kind) and kind.num_fields]
    if len(named) == len(schema) > 1 and not all(map(str.isdecimal, named)):
        return "If its values are the rows: midepoch.from_list(list(json.load(open(path)).values()))."
    if len(named) + sum(map(pa.types.is_list, schema.types)) == len(schema) > 1:
        return "If its values are columns, with the values of all rows: midepoch.from_pandas(pandas.read_json(path))."
    return ""


def _without_blank(head: bytes) -> bytes:
    return head.removeprefix(_BOM).lstrip(SPACE)


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
        return lines.elements(data, is_first=True).starts[1:] if self._in_array else super().ends(data)

    def count(self, data: bytes) -> int:
        return len(lines.elements(data, is_first=True).stops) if self._in_array else super().count(data)

    def check_depth(self, data: bytes) -> None:
        _, depths = lines.bracket_depths(data)
        if depths.max(initial=0) > DEEPEST:
            raise pa.ArrowInvalid(f"it has values nested in more than {DEEPEST} brackets")

    def parse(self, data: bytes) -> pa.Table:
        lines.check_text(data)
        return _parse_json(data, None, in_array=self._in_array)

    def problem(self, data: bytes) -> str | None:
        found, line = super().problem(data), data.strip()
        if found is not None and line.startswith(b"{'"):
            return "it has single quotes, as str(dict) writes them. JSON has double quotes: write it with json.dumps"
        if found is not None and line.endswith(b",") and not self._in_array:
            return "it ends with a comma, and JSON lines have none"
        return found

    def is_readable(self, data: bytes) -> bool:
        try:
            _parse_json(data, pa.schema([]), in_array=self._in_array)
        except pa.ArrowException:
            return False
        return True

    def pieces(self, file: FilePieces) -> Iterator[Piece]:
        return _element_pieces(file) if self._in_array else super().pieces(file)


def _parse_json(data: bytes, schema: pa.Schema | None, *, in_array: bool) -> pa.Table:
    """Return all rows, with these columns: objects in lines, or elements of an array with the commas between them.

    The elements become one value of one column.
    """
    if not in_array:
        # Without columns, pyarrow would lose the number of rows.
        return (
            _read_json(data, schema)
            if schema is None or len(schema)
            else table_of([], [], _read_json(data, None).num_rows)
        )
    wrapped = b'{"":[' + data.rstrip(SPACE + b",]") + b"]}"
    column = None if schema is None else pa.schema([("", pa.list_(pa.struct(list(schema))))])
    rows = _read_json(wrapped, column).column(0).combine_chunks().flatten()
    return table_of([field.name for field in rows.type], rows.flatten(), len(rows))


def _read_json(data: bytes, schema: pa.Schema | None) -> pa.Table:
    data = data.removeprefix(_BOM)
    if re.match(rb"\s*null", data):  # crashes pyarrow unless an object comes before it
        return _read_json(b"{}\n" + data, schema).slice(1)
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    read = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = pj.read_json(pa.BufferReader(data), read_options=read, parse_options=parse)
    for i, column in enumerate(table.columns):
        if pa.types.is_nested(column.type):
            table = table.set_column(
                i, table.field(i), pa.chunked_array(map(_with_all_nulls, column.chunks), column.type)
            )
    return table


def _with_all_nulls(array: pa.Array) -> pa.Array:
    """Return an array whose lists have all their nulls: pyarrow loses most of those before the first other value."""
    if pa.types.is_list(array.type):
        values = _with_all_nulls(array.values)
        lost = array.offsets[-1].as_py() - len(values)
        children, buffers = [pa.concat_arrays([pa.nulls(lost, values.type), values]) if lost > 0 else values], 2
    elif pa.types.is_struct(array.type):
        children, buffers = [_with_all_nulls(array.field(i)) for i in range(array.type.num_fields)], 1
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
        part, passed = lines.elements(rest, is_first=not number), 0
        if len(part.stops):
            first, passed = int(part.starts[0]), int(part.stops[-1])
            yield Piece(offset + first, number, rest[first:passed], is_shallow=part.deepest <= DEEPEST)
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
