"""Plain text: a row for each line, in one column ``text``.

Lines end as Python's text files end them: with a line feed, a carriage return, or both. Blank lines are rows. A line
feed at the end of a file begins no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from midepoch.sources.formats.base import Block, NoStatistics, Scanned
from midepoch.sources.formats.cutting import Int64Array, broken_rows
from midepoch.sources.formats.lines import read_rows, scan_lines
from midepoch.sources.stores import Entry, Store

COLUMN = "text"
_SCHEMA = pa.schema([(COLUMN, pa.string())])
_FEED, _RETURN = b"\n\r"
_LONGEST = (1 << 31) - 1


class TextFormat(NoStatistics):
    """Format with blocks of about 8 MB."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        found = scan_lines(store, entry, _TextLines(), start=0, skip_damage=skip_damage)
        found.schema = _SCHEMA
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002
        lines = _lines(read_rows(store, block))
        return pa.table([lines], schema=_SCHEMA).select([name for name in columns if name == COLUMN])


class _TextLines:
    """Implementation of ``lines.Dialect`` for plain text in UTF-8."""

    delimiter = None

    def ends(self, data: bytes) -> Int64Array:
        values = np.frombuffer(data, np.uint8)
        is_end = values == _FEED
        if b"\r" in data:  # the last byte may be the first half of a line end
            is_end[:-1] |= (values[:-1] == _RETURN) & ~is_end[1:]
        return np.flatnonzero(is_end) + 1

    def has_rows(self, data: bytes, head: bytes) -> bool:  # noqa: ARG002
        return len(data) > 0

    def parse(self, data: bytes) -> pa.Table:
        lines = _lines(data)
        lines.validate(full=True)
        return pa.table([lines], schema=_SCHEMA)

    def problem(self, data: bytes) -> str | None:
        if len(data) > _LONGEST:
            return f"it has {len(data)} bytes, more than 2 GiB"
        try:
            data.decode()
        except UnicodeDecodeError as problem:
            return f"it is not UTF-8 text: {problem}"
        return None

    def broken(self, data: bytes) -> list[tuple[int, int]]:
        return broken_rows(data, self.ends(data), self.problem)

    def refused(self, problem: Exception) -> str:
        return f"{problem}."


def _lines(data: bytes) -> pa.Array:
    """Return the lines without their ends, unchecked: text that is not UTF-8 is found by ``validate``."""
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
