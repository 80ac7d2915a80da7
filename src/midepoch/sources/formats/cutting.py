"""Ends of rows in text, and unreadable rows. Bytes in, positions out.

Elements of a JSON array are found, too. None is parsed here. Strings are found by their quotes, and elements by the
depth of brackets, as arrays of positions, so that a scan costs less than parsing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

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
_JSON_QUOTE, _COMMA = b'",'
_OPEN, _CLOSE = b"{}"  # and square brackets, which differ from them in one bit
_CASE = 0x20


@dataclass(frozen=True)
class Elements:
    """Complete elements at the beginning of a text, which begins inside an array."""

    starts: Int64Array
    stops: Int64Array
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
    stops = brackets[depths == 0] + 1
    opening = np.flatnonzero(depths[:-1] == 0) + 1
    firsts = np.concatenate([[0], opening])[: len(stops)].astype(np.int64)
    starts = brackets[firsts]
    good = _separated(data, starts, stops, is_first)
    values = np.frombuffer(data, np.uint8)
    proper = good & (values[starts] == _OPEN) & (values[stops - 1] == _CLOSE)
    count = len(stops) if proper.all() else int(np.argmin(proper))
    wrong: int | None = None
    if count < len(stops):
        wrong, end = int(stops[count - 1]) if count else 0, None
    elif end is not None:
        rest = data[int(stops[-1]) if len(stops) else 0 : end].strip(SPACE)
        if rest or data[end] != ord("]"):
            wrong, end = int(stops[-1]) if len(stops) else 0, None
    return Elements(starts[:count], stops[:count], end, wrong)


def bracket_depths(data: bytes) -> tuple[Int64Array, Int64Array]:
    """Return the positions of the brackets outside of strings, and the depth after each of them."""
    if b"\\" in data:  # outside of strings there is none in JSON; the parser refuses it
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    values = np.frombuffer(data, np.uint8)
    lowered = values | _CASE
    brackets = np.flatnonzero((lowered == _OPEN | _CASE) | (lowered == _CLOSE | _CASE))
    quotes = np.flatnonzero(values == _JSON_QUOTE)
    if len(quotes):
        brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    steps = np.where(lowered[brackets] == _OPEN | _CASE, 1, -1)
    return brackets, np.cumsum(steps)


def _separated(data: bytes, starts: Int64Array, stops: Int64Array, is_first: bool) -> npt.NDArray[np.bool_]:
    """Return True for each element that comes after white space and exactly one comma (none for the first element)."""
    values = np.frombuffer(data, np.uint8)
    begins = np.concatenate([[0], stops[:-1]])[: len(starts)].astype(np.int64)
    sizes = starts - begins
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    between = values[np.arange(bounds[-1]) - np.repeat(bounds[:-1] - begins, sizes)]
    commas = between == _COMMA
    others = ~commas & (between != ord(" ")) & (between != ord("\n")) & (between != ord("\r")) & (between != ord("\t"))
    found = np.diff(np.concatenate([[0], np.cumsum(commas)])[bounds])
    foreign = np.diff(np.concatenate([[0], np.cumsum(others)])[bounds])
    expected = np.ones(len(starts), np.int64)
    if is_first and len(expected):
        expected[0] = 0
    good: npt.NDArray[np.bool_] = (found == expected) & (foreign == 0)
    return good
