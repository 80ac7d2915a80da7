"""Text with one row per line (CSV, JSON lines, plain text). Blocks are byte ranges that end at the end of a row.

Such files have no metadata. The index reads them completely once, to find the number of rows, the types, the nullable
columns, and the unreadable rows. Under ``on_error="skip"`` the index contains the byte ranges of unreadable rows, which
are not part of the data. Byte offsets of compressed files refer to their decompressed contents.

Ends of rows, and elements of a JSON array, are found without parsing: strings by their quotes, and elements by the
depth of brackets, as arrays of positions, so that a scan costs less than parsing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats import Block, Scanned
from midepoch.sources.formats.compressed import contents, damage_of, read_ranges, skip
from midepoch.sources.names import not_the_data
from midepoch.sources.schemas import MIXED_REMEDY, lacking, nulls, widest
from midepoch.storage.damage import DamageError, is_damage
from midepoch.storage.stores import Entry, Store

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Problem = Callable[[bytes], str | None]
"""Function that returns the reason why rows cannot be read together, or None if they can."""

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'


def row_ends(data: bytes, delimiter: bytes | None) -> Int64Array:
    """Return the position after each line end that ends a row, for data that begins with a row.

    ``delimiter``: the delimiter of a format in which a quoted line end does not end a row, else None.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    if delimiter is None or b'"' not in data:
        return ends
    outside: Int64Array = ends[np.searchsorted(_quotes(data, delimiter), ends) % 2 == 0]
    return outside


def is_closed(data: bytes, delimiter: bytes) -> bool:
    """Return True if every quoted value ends."""
    return b'"' not in data or len(_quotes(data, delimiter)) % 2 == 0


def _quotes(data: bytes, delimiter: bytes) -> Int64Array:
    """Return the positions of the quotes that alternately begin and end quoted values, without quotes in mid-value.

    Two quotes inside a quoted value mean one. Counted as an end and a beginning, they change nothing.
    """
    text = np.frombuffer(data, np.uint8)
    found = np.flatnonzero(text == _QUOTE)
    begins = found[::2]
    before = text[begins - 1]
    proper = (before == delimiter[0]) | (before == _NEWLINE) | (before == _RETURN) | (before == _QUOTE)
    if (proper | (begins == 0)).all():  # no quote in the middle of a value: the common case, 10 times faster
        return found
    pieces = _quoted_value(delimiter).split(data)  # alternately text outside of quotes and a quoted value
    bounds = np.cumsum(np.fromiter(map(len, pieces[:-1]), np.int64, len(pieces) - 1))
    bounds[1::2] -= 1
    closed = len(pieces) == 1 or pieces[-2].count(b'"') % 2 == 0
    return bounds if closed else bounds[:-1]


@lru_cache(maxsize=8)
def _quoted_value(delimiter: bytes) -> re.Pattern[bytes]:
    # The quote comes before the lookbehind, so that the search jumps from quote to quote.
    return re.compile(rb'("(?<![^' + re.escape(delimiter) + rb'\r\n]")[^"]*(?:""[^"]*)*(?:"|\Z))')


def broken_rows(data: bytes, ends: Int64Array, problem: Problem) -> list[tuple[int, int]]:
    """Return the byte ranges of rows that cannot be read even alone, found by bisection."""
    bounds = [0, *ends.tolist()]
    if bounds[-1] < len(data):
        bounds.append(len(data))
    found, todo = [], [(0, len(bounds) - 1)]
    while todo:
        first, stop = todo.pop()
        if problem(data[bounds[first] : bounds[stop]]) is None:
            continue
        if stop - first == 1:
            found.append((bounds[first], bounds[stop]))
        else:
            middle = (first + stop) // 2
            todo += [(middle, stop), (first, middle)]
    return found


def broken_quoted_rows(data: bytes, delimiter: bytes, columns: int, problem: Problem) -> list[tuple[int, int]]:
    """Return the ranges of ``broken_rows`` for text in which quotes may be missing.

    An unclosed quote swallows the rows after it. Therefore a broken row with unbalanced quotes ends before the first of
    its lines that begins a valid row, and reading resumes there.
    """
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(data):
        rest = data[start:]
        again = len(rest)
        for first, stop in broken_rows(rest, row_ends(rest, delimiter), problem):
            resumed = _resumed(rest, first, stop, delimiter, columns)
            found.append((start + first, start + resumed))
            if resumed < stop:
                again = resumed
                break
        start += again
    return found


def _resumed(data: bytes, first: int, stop: int, delimiter: bytes, columns: int) -> int:
    if _sound_row(delimiter, None).fullmatch(data, first, stop):
        return stop  # it has too many or too few values, but its quotes are balanced
    sound = _sound_row(delimiter, columns)
    line = first
    while (line := data.find(b"\n", line, stop) + 1) and line < stop:
        if sound.match(data, line):
            return line
    return stop


@lru_cache(maxsize=8)
def _sound_row(delimiter: bytes, columns: int | None) -> re.Pattern[bytes]:
    """Return the pattern of a row of ``columns`` values (None: any number) with quotes only around values."""
    comma = re.escape(delimiter)
    value = rb'(?:"[^"]*(?:""[^"]*)*"|[^"\r\n' + comma + rb"]*)"
    count = b"*" if columns is None else b"{%d}" % (columns - 1)
    return re.compile(value + rb"(?:" + comma + value + rb")" + count + rb"(?:\r?\n|\Z)")


def without(data: bytes, ranges: list[tuple[int, int]]) -> bytes:
    """Return the data without these sorted ranges."""
    if not ranges:
        return data
    kept, position = [], 0
    for first, stop in ranges:
        kept.append(data[position:first])
        position = stop
    return b"".join([*kept, data[position:]])


SPACE = b" \t\r\n"
_BLANK = np.frombuffer(SPACE, np.uint8)
_COMMA = ord(",")
_OPEN, _CLOSE = b"{}"  # and square brackets, which differ from them in one bit
_CASE = 0x20


@dataclass(frozen=True)
class Elements:
    """Complete elements at the beginning of a text, which begins inside an array."""

    starts: Int64Array
    stops: Int64Array
    deepest: int
    """The most brackets around a value, also of an element that is not complete."""
    end: int | None = None
    """The position of the bracket that closes the array, None if it is not in this text."""
    wrong: int | None = None
    """The position of text that is no object, after the elements. What comes after it cannot be divided."""


def elements(data: bytes, *, is_first: bool) -> Elements:
    """Return the objects in a text. ``is_first``: no element comes before it, so that it begins without a comma."""
    brackets, depths = bracket_depths(data)
    closing = np.flatnonzero(depths < 0)
    end = int(brackets[closing[0]]) if len(closing) else None
    if end is not None:
        brackets, depths = brackets[: closing[0]], depths[: closing[0]]
    stops, deepest = brackets[depths == 0] + 1, int(depths.max(initial=0))
    starts = brackets[np.concatenate([[0], depths])[:-1] == 0][: len(stops)]
    values = np.frombuffer(data, np.uint8)
    proper = _separated(values, starts, stops, is_first) & (values[starts] == _OPEN) & (values[stops - 1] == _CLOSE)
    count = len(stops) if proper.all() else int(np.argmin(proper))
    last = int(stops[count - 1]) if count else 0
    is_end_wrong = end is not None and (data[end] != ord("]") or bool(data[last:end].strip(SPACE)))
    if count < len(stops) or is_end_wrong:
        return Elements(starts[:count], stops[:count], deepest, wrong=last)
    return Elements(starts, stops, deepest, end)


def _separated(values: Bytes, starts: Int64Array, stops: Int64Array, is_first: bool) -> npt.NDArray[np.bool_]:
    """Return True for each element that comes after one comma and white space, the first one without the comma."""
    sizes = starts - np.concatenate([[0], stops])[: len(starts)]
    owners = np.repeat(np.arange(len(starts)), sizes)
    before = values[np.arange(len(owners)) + (starts - np.cumsum(sizes))[owners]]
    signs = np.flatnonzero(~np.isin(before, _BLANK))
    commas = np.ones(len(starts), np.int64)
    commas[:is_first] = 0
    proper: npt.NDArray[np.bool_] = np.bincount(owners[signs], minlength=len(starts)) == commas
    proper[owners[signs[before[signs] != _COMMA]]] = False
    return proper


def bracket_depths(data: bytes) -> tuple[Int64Array, Int64Array]:
    """Return the positions of the brackets outside of strings, and the depth after each of them."""
    if b"\\" in data:  # outside of strings there is none in JSON; the parser refuses it
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    values = np.frombuffer(data, np.uint8)
    lowered = values | _CASE
    signs = np.flatnonzero((lowered == _OPEN | _CASE) | (lowered == _CLOSE | _CASE) | (values == _QUOTE))
    are_quotes = values[signs] == _QUOTE
    in_text = np.cumsum(are_quotes, dtype=np.uint8) & 1  # an even number stays even when it overflows
    brackets = signs[~(are_quotes | in_text.astype(np.bool_))]
    return brackets, np.cumsum(np.where(lowered[brackets] == _OPEN | _CASE, 1, -1))


BLOCK_BYTES = 8 << 20
_READ = 8 << 20
_MIXED = re.compile(r"Column\(/(?:/\[\]/)?(.+)\) changed from (\w+) to (\w+)")
_PARSER_WORDS = re.compile(r"^(?:JSON|CSV) parse error: (?:Row #\d+: )?|\.? in row \d+$|\.$")
LONGEST_HEAD = 1 << 20
_LONGEST_ROW = 32
"""Number of blocks after which the closing quote of an open quoted value is assumed to be missing."""


def check_text(data: bytes) -> None:
    """Raise UnicodeDecodeError for bytes that are not UTF-8."""
    if not data.isascii():
        data.decode()


class Piece(NamedTuple):
    """Some rows of a file: their byte offset, the number of the first line or element, and their bytes.

    ``is_cut``: it is known that they end with a row. ``is_shallow``: ``check_depth`` would find nothing.
    """

    offset: int
    number: int
    data: bytes
    is_cut: bool = False
    is_shallow: bool = False


class Dialect:
    """Syntax of rows in text. ``name`` tells it from others: the same bytes are other rows in another syntax.

    ``unit`` names a row by its number. ``about``: what else is needed to decode a block. ``mixed_is_text``: values of
    different types become text.
    """

    name = ""
    unit = "line {}"
    mixed_is_text = False

    @property
    def about(self) -> dict[str, Any]:
        return {}

    def ends(self, data: bytes) -> Int64Array:
        """Return the position after each row, for data that begins with a row. The last row may be missing."""
        return row_ends(data, None)

    def count(self, data: bytes) -> int:
        """Return the number of units in rows: of line feeds, carriage returns, or both together."""
        return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")

    def has_rows(self, data: bytes) -> bool:
        """Return True if the end of a file contains a row."""
        return bool(data.strip(SPACE))

    def is_closed(self, data: bytes) -> bool:
        """Return True if data ends with a row, not inside of one."""
        return True

    def check_depth(self, data: bytes) -> None:
        """Raise ``pa.ArrowException`` for values that are nested so deeply that ``parse`` would end the process."""

    def parse(self, data: bytes) -> pa.Table:
        """Return all rows. Raise ``pa.ArrowException`` or ``UnicodeDecodeError``."""
        raise NotImplementedError

    def is_readable(self, data: bytes) -> bool:
        """Return True if each row can be read, though not all of them together, because their types differ."""
        return False

    def problem(self, data: bytes) -> str | None:
        """Return the reason why rows cannot be read. None if each can be read alone."""
        try:
            self.check_depth(data)
            self.parse(data)
        except UnicodeDecodeError as problem:
            return not_the_data(data, "jsonl") or f"it is not UTF-8 text: {problem}"
        except pa.ArrowException as problem:
            if not is_damage(problem):
                raise
            if _MIXED.search(str(problem)) and self.is_readable(data):
                return None
            text = _PARSER_WORDS.sub("", str(problem)).rstrip()
            return "it is not a JSON object" if text.startswith("Column() changed from object") else text
        return None

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        """Return the byte ranges of rows that cannot be read even alone."""
        return broken_rows(data, self.ends(data), self.problem)

    def pieces(self, file: FilePieces) -> Iterator[Piece]:
        """Yield the contents of a file in pieces that end with a row, of about 8 MB."""
        rest, offset, number, enough = b"", file.start, 0, BLOCK_BYTES
        for data in file:
            number = number or 1 + self.count(file.head)
            rest += data
            if len(rest) < enough:
                continue
            cut = last = self._last_end(rest)
            if not cut and len(rest) >= _LONGEST_ROW * BLOCK_BYTES:
                cut = rest.rfind(b"\n") + 1
            enough = BLOCK_BYTES if cut else 2 * len(rest)
            if cut:
                yield Piece(offset, number, rest[:cut], is_cut=last > 0)
                offset, number, rest = offset + cut, number + self.count(rest[:cut]), rest[cut:]
        if file.is_damaged:
            rest = rest[: self._last_end(rest)]
        if self.has_rows(rest):
            yield Piece(offset, number, rest)

    def _last_end(self, data: bytes) -> int:
        ends = self.ends(data)
        return int(ends[-1]) if len(ends) else 0


def scan_text(store: Store, entry: Entry, dialect: Dialect, *, start: int, skip_damage: bool) -> Scanned:
    """Divide a file from byte ``start`` on into blocks, and parse every block once."""
    name = store.name(entry.path)
    file = FilePieces(store, entry, start, salvage=skip_damage)
    found = Scanned(pa.schema([]), inferred=True)
    schemas: list[pa.Schema] = []
    broken: list[tuple[int, int]] = []
    end = start
    for piece in dialect.pieces(file):
        table, ranges = _read(name, piece, dialect, skip_damage)
        if table.num_rows:
            found.offsets.append(piece.offset)
            found.rows.append(table.num_rows)
            found.nullable |= nulls(table)
            schemas.append(table.schema)
        number, position = piece.number, 0
        for first, stop in ranges:
            number, position = number + dialect.count(piece.data[position:first]), first
            found.broken_lines.append(number)
            broken.append((piece.offset + first, piece.offset + stop))
        end = piece.offset + len(piece.data)
    if broken and not schemas:
        raise DamageError(f"{name}: none of its {entry.size} bytes can be read as a row. Check the format.")
    found.complete, found.stop = not file.is_damaged, end if file.is_damaged else None
    found.schema = widest(name, schemas, text=dialect.mixed_is_text)
    found.decoded_bytes = float(end - start)
    for schema in schemas:
        found.nullable.update(lacking(pa.struct(list(found.schema)), pa.struct(list(schema))))
    found.fingerprint = f"{file.digest.hexdigest()}-{dialect.name}"
    found.footer = json.dumps({**dialect.about, "broken": broken}).encode()
    with store.open(entry) as opened:
        found.etag = opened.etag
    return found


def _read(name: str, piece: Piece, dialect: Dialect, skip_damage: bool) -> tuple[pa.Table, list[tuple[int, int]]]:
    """Return the rows of a piece, and the byte ranges of those that were left out."""
    data = piece.data
    try:
        if piece.is_cut or dialect.is_closed(data):
            if not piece.is_shallow:
                dialect.check_depth(data)
            return dialect.parse(data), []
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        if not is_damage(problem):
            raise
    ranges = dialect.broken(data)
    if ranges and not skip_damage:
        first, stop = ranges[0]
        place = dialect.unit.format(piece.number + dialect.count(data[:first]))
        raise FormatError(
            f'{name}: {place} cannot be read: {dialect.problem(data[first:stop])}. Fix it, or pass on_error="skip" to '
            "leave out rows that cannot be read."
        )
    rest = without(data, ranges)
    if ranges and not rest.strip():
        return pa.table({}), ranges
    try:
        return dialect.parse(rest), ranges
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        mixed = _MIXED.search(str(problem))
        if mixed is None:
            raise FormatError(f"{name}: {problem}.") from None
        column, one, other = mixed.groups()
        text = f"{name}: column {column!r} contains {one} in some rows and {other} in others. {MIXED_REMEDY}"
        raise FormatError(text) from None


class FilePieces:
    """Iterable over the contents of a file from byte ``start`` on, in pieces of ``_READ`` bytes.

    ``salvage``: use the readable part of a damaged file, and set ``is_damaged``.
    """

    def __init__(self, store: Store, entry: Entry, start: int, *, salvage: bool) -> None:
        self._store, self._entry, self.start, self.salvage = store, entry, start, salvage
        self.name = store.name(entry.path)
        self.digest = hashlib.blake2b(digest_size=16)
        self.head, self.is_damaged = b"", False

    def __iter__(self) -> Iterator[bytes]:
        with contents(self._store, self._entry) as file:
            self.head = bytes(file.read(self.start)) if self.start else b""
            self.digest.update(self.head)
            for data in self._read(file):
                self.digest.update(data)
                yield data

    def _read(self, file: Any) -> Iterator[bytes]:
        position = self.start
        try:
            while data := bytes(file.read(_READ)):
                position += len(data)
                yield data
        except (OSError, pa.ArrowException) as problem:
            damage = damage_of(self._store, self._entry, problem)
            if not self.salvage:
                raise FormatError(
                    f'{self.name}: {damage}. Copy the file again, or pass on_error="skip" to use the lines before the '
                    "damage."
                ) from None
            self.is_damaged = True
            yield self._before_damage(position)

    def _before_damage(self, position: int) -> bytes:
        """Return the contents from a position on. A failed read loses its bytes, so that reads become smaller."""
        found = bytearray()
        for size in (1 << 16, 1 << 8, 1):
            try:
                with contents(self._store, self._entry) as file:
                    skip(file, position + len(found))
                    while data := file.read(size):
                        found += data
            except (OSError, pa.ArrowException) as problem:
                if not is_damage(problem):
                    raise
        return bytes(found)


def beginning(store: Store, entry: Entry, is_enough: Callable[[bytes], bool]) -> bytes:
    """Return the first bytes of a file, up to about 1 MB. No more than necessary: the text after it may be damaged."""
    head = b""
    with contents(store, entry) as file:
        while not is_enough(head) and len(head) < LONGEST_HEAD and (data := bytes(file.read(max(64, len(head))))):
            head += data
    return head


def read_rows(store: Store, block: Block) -> bytes:
    """Return the bytes of a block without the rows that the index marks as broken."""
    (data,) = read_ranges(store, block, [(block.offset, block.end)])
    stop = block.offset + len(data)
    ranges = [
        (a - block.offset, b - block.offset) for a, b in about_rows(block.footer)["broken"] if block.offset <= a < stop
    ]
    return without(data, ranges)


@lru_cache(maxsize=64)
def about_rows(footer: bytes) -> dict[str, Any]:
    """Return what a dialect needs to decode blocks, and the byte ranges of broken rows."""
    about: dict[str, Any] = json.loads(footer)
    return about
