"""Rows of text: the positions at which they end, and which of them cannot be read. Bytes in, positions out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Problem = Callable[[bytes], str | None]
"""The reason why some rows cannot be read together, None if they can."""

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'


def row_ends(data: bytes, delimiter: bytes | None) -> Int64Array:
    """The position after each line end that ends a row, of data that begins with a row.

    ``delimiter``: that of a format in which a line end in quotes ends no row.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    if delimiter is None or b'"' not in data:
        return ends
    outside: Int64Array = ends[np.searchsorted(_quotes(data, delimiter), ends) % 2 == 0]
    return outside


def is_closed(data: bytes, delimiter: bytes) -> bool:
    """Return whether every quoted value ends."""
    return b'"' not in data or len(_quotes(data, delimiter)) % 2 == 0


def _quotes(data: bytes, delimiter: bytes) -> Int64Array:
    """Positions of the quotes that begin and end quoted values, in turn. A quote in the middle of a value is neither.

    Two quotes inside of a quoted value stand for one: as an end and a beginning they change nothing.
    """
    text = np.frombuffer(data, np.uint8)
    found = np.flatnonzero(text == _QUOTE)
    begins = found[::2]
    before = text[begins - 1]
    proper = (before == delimiter[0]) | (before == _NEWLINE) | (before == _RETURN) | (before == _QUOTE)
    if (proper | (begins == 0)).all():  # no quote in the middle of a value: the common case, 10 times faster
        return found
    pieces = _quoted_value(delimiter).split(data)  # what is outside of quotes, a quoted value, and so on in turn
    bounds = np.cumsum(np.fromiter(map(len, pieces[:-1]), np.int64, len(pieces) - 1))
    bounds[1::2] -= 1
    closed = len(pieces) == 1 or pieces[-2].count(b'"') % 2 == 0
    return bounds if closed else bounds[:-1]


@lru_cache(maxsize=8)
def _quoted_value(delimiter: bytes) -> re.Pattern[bytes]:
    # The quote comes before the check of what precedes it: so the search goes from quote to quote.
    return re.compile(rb'("(?<![^' + re.escape(delimiter) + rb'\r\n]")[^"]*(?:""[^"]*)*(?:"|\Z))')


def broken_rows(data: bytes, ends: Int64Array, problem: Problem) -> list[tuple[int, int]]:
    """From where to where the rows lie that cannot be read even alone, found by halving."""
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
    """As ``broken_rows``, where quotes may be missing.

    A quote that was never closed swallows the rows after it. So a broken row whose quotes are not in order ends before
    the first of its lines that begins a sound row, and reading resumes there.
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
        return stop  # it has too many or too few values, but its quotes are in order
    sound = _sound_row(delimiter, columns)
    line = first
    while (line := data.find(b"\n", line, stop) + 1) and line < stop:
        if sound.match(data, line):
            return line
    return stop


@lru_cache(maxsize=8)
def _sound_row(delimiter: bytes, columns: int | None) -> re.Pattern[bytes]:
    """A row of so many values, of any number with None, with quotes only around values."""
    comma = re.escape(delimiter)
    value = rb'(?:"[^"]*(?:""[^"]*)*"|[^"\r\n' + comma + rb"]*)"
    count = b"*" if columns is None else b"{%d}" % (columns - 1)
    return re.compile(value + rb"(?:" + comma + value + rb")" + count + rb"(?:\r?\n|\Z)")


def without(data: bytes, ranges: list[tuple[int, int]]) -> bytes:
    """The data without some ranges of it, which are sorted."""
    if not ranges:
        return data
    kept, position = [], 0
    for first, stop in ranges:
        kept.append(data[position:first])
        position = stop
    return b"".join([*kept, data[position:]])
