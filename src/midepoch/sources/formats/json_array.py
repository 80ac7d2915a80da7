"""One JSON array of objects. Blocks are byte ranges of consecutive elements, found by one scan of bounded memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.damage import is_damage
from midepoch.sources.formats import lines
from midepoch.sources.formats.base import Scanned
from midepoch.sources.formats.cutting import broken_rows, without
from midepoch.sources.formats.elements import SPACE, Elements, elements
from midepoch.sources.formats.inferred import lacking, nulls, widest
from midepoch.sources.stores import Entry, Store

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
        table, bad = _read(name, text.number, data, part, parser, skip_damage)
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


def _read(
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
