"""Flows concatenated or zipped, and helpers for all combinations of flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from midepoch.errors import ColumnError
from midepoch.pipeline.chunk import Chunk, Flow, Items, Pieces, Puller, RowRefs, bytes_in, materialize
from midepoch.pipeline.cursor import At, PartsAt
from midepoch.pipeline.node import Concat, Mix

_FIRST, _MOST = 16, 4096
_QUICK, _SLOW = 0.01, 0.05
"""Seconds: chunks that took less than the first grow, those that took more than the second shrink."""
_CHUNK_BYTES = 4 << 20


class Growing:
    """The number of outputs of the next chunk. The outputs themselves do not depend on it.

    It begins small, so that the first batch comes soon, and grows while a chunk takes little time and a few megabytes.
    ``times``: how many times as large as usual a chunk may be.
    """

    def __init__(self, times: int = 1) -> None:
        self._size, self._times = _FIRST, times
        self._began = 0.0

    def next(self) -> int:
        self._began = perf_counter()
        return self._size

    def made(self, items: Items) -> None:
        """Note that the last requested chunk is made."""
        took, size = (perf_counter() - self._began) / self._times, bytes_in(items) // self._times
        if took > _SLOW or size > 2 * _CHUNK_BYTES:
            self._size = max(1, self._size // 2)
        elif took < _QUICK and 2 * size <= _CHUNK_BYTES:
            self._size = min(2 * self._size, _MOST)


def conformer(base: Mix | Concat, number: int) -> Callable[[Items], Items]:
    """Return a function that converts outputs of a part to the schema of the combination."""
    schema = base.schema
    as_read = schema.leaves_as_read(base.parts[number].known)

    def conform(items: Items) -> Items:
        if isinstance(items, RowRefs):
            return replace(items, schema=schema, located=items.located if as_read else None)
        return items.changed(schema.conform) if isinstance(items, Pieces) else schema.conform(materialize(items))

    return conform


class Concatenated:
    """Parts one after the other. Cursor: [number of the part, its cursor].

    ``kept``: rows of the leaves before a part that yielded outputs.
    """

    def __init__(
        self,
        concat: Concat,
        open_part: Callable[[int, At], Flow],
        starts: Sequence[At],
        kept: Callable[[int], Sequence[int]],
        cursor: At,
    ) -> None:
        self._concat, self._open, self._starts, self._kept = concat, open_part, starts, kept
        self._number, inner = cursor
        self._flow = open_part(self._number, inner)

    def pull(self) -> Chunk | None:
        while True:
            chunk = self._flow.pull()
            if chunk is not None:
                return self._numbered(chunk, self._number, self._kept(self._number))
            if self._number + 1 >= len(self._starts):
                return None
            self._number += 1
            self._flow = self._open(self._number, self._starts[self._number])

    def _numbered(self, chunk: Chunk, number: int, kept: Sequence[int]) -> Chunk:
        items = conformer(self._concat, number)(chunk.items.with_ordinals(self._concat.tags[number] << 24))
        return Chunk(
            items,
            lambda outputs: PartsAt([number, chunk.at(outputs)], kept),
            lambda outputs: PartsAt([number, chunk.before(outputs)], kept),
        )


class Zipped:
    """Parts side by side. Cursor: [cursor of each part]."""

    def __init__(self, open_part: Callable[[int, At], Flow], cursor: At) -> None:
        self._intakes = [Puller(open_part(number, inner), inner) for number, inner in enumerate(cursor)]
        self._growing = Growing()
        self._ended = False

    def pull(self) -> Chunk | None:
        if self._ended:
            return None
        size = self._growing.next()
        taken = [intake.take(size) for intake in self._intakes]
        count = min(each.count for each in taken)
        self._ended = count < size
        if not count:
            return None
        batches = [materialize(each.items()).slice(0, count) for each in taken]
        columns: dict[str, Any] = {}
        for batch in batches:
            twice = columns.keys() & batch.columns.keys()
            if twice:
                raise ColumnError(f"zip: two parts have a column {min(twice)!r}. Rename it in one of them.")
            columns.update(batch.columns)
        owned = all(batch.owned for batch in batches)
        nullable = {name: paths for batch in batches for name, paths in batch.nullable.items()}
        first = batches[0]
        made = replace(first, columns=columns, owned=owned, nullable=nullable)
        self._growing.made(made)
        return Chunk(
            made,
            lambda outputs: [each.at(outputs) for each in taken],
            lambda outputs: [each.before(outputs) for each in taken],
        )
