"""Elements of a JSON array in text: bytes in, positions out.

No element is parsed here. Strings are found by their quotes, and elements by the depth of brackets, as arrays of
positions, so that a scan costs less than parsing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

SPACE = b" \t\r\n"
_QUOTE, _COMMA = b'",'
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
    quotes = np.flatnonzero(values == _QUOTE)
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
