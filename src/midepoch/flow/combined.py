"""Several flows as one: mixed by weights, one after the other, or side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.errors import ColumnError
from midepoch.flow.chunk import At, Chunk, Flow, Intake, Items, Pieces, Refs, Taken, bytes_in, joined, real
from midepoch.flow.spec import Concat, Mix
from midepoch.order.mixing import Schedule, spans
from midepoch.transforms import Batch

Int64Array = npt.NDArray[np.int64]
Open = Callable[[int, int, At], Flow]
"""Opens a part by its number, in an epoch, at a cursor."""

_FIRST, _MOST = 16, 4096
_QUICK, _SLOW = 0.01, 0.05
"""Seconds: chunks that took less than the one are made larger, those that took more than the other smaller."""
_CHUNK_BYTES = 4 << 20


class Growing:
    """How many outputs to make at once: few at first, so that the first batch comes soon, and never more than are made
    in a moment and take a few megabytes. What is made does not depend on it.
    """

    def __init__(self) -> None:
        self._size = _FIRST
        self._began = 0.0

    def next(self) -> int:
        self._began = perf_counter()
        return self._size

    def made(self, items: Items) -> None:
        """The chunk that was asked for last is made."""
        took, size = perf_counter() - self._began, bytes_in(items)
        if took > _SLOW or size > 2 * _CHUNK_BYTES:
            self._size = max(1, self._size // 2)
        elif took < _QUICK and 2 * size <= _CHUNK_BYTES:
            self._size = min(2 * self._size, _MOST)


class Mixed:
    """Cursor: [position, era, [[pass, whether it was exhausted before, cursor of the part], …]], and what the mix was
    before it was changed, while something is gone on with that was begun then.

    A part that ends is gone through again in an epoch of its own, unless the first end is that of the mix. One of which
    nothing comes at all (in this lane) leaves its positions empty.
    """

    def __init__(self, mix: Mix, open_part: Open, start: At, epoch: int, lane: int, cursor: At) -> None:
        self._mix, self._epoch, self._lane, self._growing = mix, epoch, lane, Growing()
        self._position, self._era, parts, *old = cursor
        self._old: At = old[0] if old else None  # what it was before it was changed, while it stays so
        self._schedule = self._make_schedule()
        self._parts = [
            _Part(number, mix, open_part, start[2][number][2], epoch, *part) for number, part in enumerate(parts)
        ]
        self._ended = False

    def _make_schedule(self) -> Schedule:
        if self._old is None:
            return Schedule(self._mix.counts, self._mix.seed, self._epoch, self._lane, self._era)
        return old_schedule(self._old, self._mix.seed, self._epoch, self._lane, self._era)

    def pull(self) -> Chunk | None:
        if self._ended or (self._mix.stop == "all" and all(part.exhausted for part in self._parts)):
            return None
        if self._old is not None and self._position >= self._old[0]:
            self._old, self._position, self._era = None, 0, self._era + 1
            self._schedule = self._make_schedule()
        size, first, old = self._growing.next(), self._position, self._old
        if old is not None:
            size = min(size, old[0] - first)
        sources = self._schedule.sources(first, first + size)
        if old is not None:
            sources = np.array([number for _, number in old[1]])[sources]
        places = [np.flatnonzero(sources == number) for number in range(len(self._parts))]
        draws = [part.draw(len(found)) for part, found in zip(self._parts, places, strict=True)]
        end = self._end(draws, places)
        if end is not None or all(part.barren for part in self._parts):
            self._ended, size = True, size if end is None else end
        self._position += size
        era, items, filled = self._era, *_in_order(draws, places, size)
        self._growing.made(items)

        def at(outputs: int) -> At:
            position = size if outputs == len(filled) else int(filled[outputs - 1]) + 1 if outputs else 0
            return behind(position)

        def before(outputs: int) -> At:
            if outputs == len(filled):
                return at(outputs)
            position = int(filled[outputs])
            return behind(position, int(sources[position]))

        def behind(position: int, coming: int = -1) -> At:
            counts = np.bincount(sources[:position], minlength=len(draws)).tolist()
            parts = [
                draw.before(count) if number == coming else draw.at(count)
                for number, (draw, count) in enumerate(zip(draws, counts, strict=True))
            ]
            return [first + position, era, parts, *([old] if old is not None else [])]

        return Chunk(items, at, before)

    def _end(self, draws: Sequence[_Draw], places: Sequence[Int64Array]) -> int | None:
        """Where the mix ends among the positions of this chunk, if it does: where the part that ends it is needed."""
        ends = sorted(
            (int(found[count]), number)
            for number, (draw, found) in enumerate(zip(draws, places, strict=True))
            for count in draw.ends
        )
        if self._mix.stop == "first":
            return ends[0][0] if ends else None
        if self._mix.stop == "never":
            return None
        before = {number for number, draw in enumerate(draws) if draw.exhausted}
        for place, number in ends:
            before.add(number)
            if len(before) == len(draws):
                return place
        return None


def old_schedule(old: At, seed: int, epoch: int, lane: int, era: int) -> Schedule:
    """How a mix was before it was changed, by [up to which position, [[weight, number of the part now], …]]."""
    return Schedule(spans([weight for weight, _ in old[1]]), seed, epoch, lane, era)


class _Part:
    """One flow of a mix, pass after pass."""

    def __init__(
        self,
        number: int,
        mix: Mix,
        open_part: Open,
        start: At,
        epoch: int,
        run: int,
        exhausted: int,
        cursor: At,
    ) -> None:
        self._number, self._open, self._start, self._epoch = number, open_part, start, epoch
        self._again, self._tag = mix.stop != "first", mix.tags[number]
        self._conform = conformer(mix, number)
        self._pass, self.exhausted = run, bool(exhausted)
        self._intake = Intake(open_part(number, pair(epoch, run), cursor), cursor)
        self._found = cursor != start  # something came of this pass
        self.barren = False

    def draw(self, count: int) -> _Draw:
        """The next outputs; fewer only if the part has ended and is not gone through again."""
        # One that is barren begins its pass again on resume, to find that out again.
        before = [self._pass, int(self.exhausted), self._start if self.barren else self._intake.cursor]
        taken: list[tuple[int, Taken]] = []
        ends: list[int] = []
        exhausted, got = self.exhausted, 0
        while got < count and not self.barren:
            some = self._intake.take(count - got)
            if some.count:
                taken.append((self._pass, some))
                got, self._found = got + some.count, True
            if got < count:
                ends.append(got)
                self.exhausted = True
                self.barren = self._again and not self._found
                if not self._again or self.barren:
                    break
                self._pass, self._found = self._pass + 1, False
                flow = self._open(self._number, pair(self._epoch, self._pass), self._start)
                self._intake = Intake(flow, self._start)
        return _Draw(self._tag, self._conform, before, taken, ends, exhausted)


class _Draw:
    """What was taken of a part at once. ``ends``: behind how many outputs it had to begin again, or could not go on."""

    def __init__(
        self,
        tag: int,
        conform: Callable[[Items], Items],
        before: At,
        taken: list[tuple[int, Taken]],
        ends: list[int],
        exhausted: bool,
    ) -> None:
        self._tag, self._conform, self._before, self._taken = tag, conform, before, taken
        self.ends, self.exhausted = ends, exhausted

    def items(self) -> Items | None:
        """What was taken. Rows of other sources and other passes are told apart, for the generators of functions."""
        if not self._taken:
            return None
        passes = [taken.items().told_apart((self._tag << 24) + run) for run, taken in self._taken]
        return self._conform(joined(passes))

    def before(self, count: int) -> At:
        """The part's entry in the cursor from which one of them comes first."""
        done = count
        for run, taken in self._taken:
            if done < taken.count:
                return [run, int(self.exhausted or any(end <= count for end in self.ends)), taken.before(done)]
            done -= taken.count
        return self.at(count)

    def at(self, count: int) -> At:
        """The part's entry in the cursor, behind the first ``count``: it begins again only when more is needed."""
        if not count:
            return self._before
        exhausted = int(self.exhausted or any(end < count for end in self.ends))
        run, cursor = self._before[0], self._before[2]
        for of_run, taken in self._taken:
            run, cursor = of_run, taken.at(min(count, taken.count))
            if count <= taken.count:
                break
            count -= taken.count
        return [run, exhausted, cursor]


def conformer(base: Mix | Concat, number: int) -> Callable[[Items], Items]:
    """Brings outputs of a part to the schema of all."""
    schema = base.schema
    as_read = schema.leaves_as_read(base.parts[number].known)

    def conform(items: Items) -> Items:
        if isinstance(items, Refs):
            return replace(items, schema=schema, located=items.located if as_read else None)
        return items.changed(schema.conform) if isinstance(items, Pieces) else schema.conform(items)

    return conform


def pair(epoch: int, run: int) -> int:
    """A number for each pair, no two the same, and small: (0, 0), (1, 0), (0, 1), (2, 0) … are 0, 1, 2, 3 …"""
    return (epoch + run) * (epoch + run + 1) // 2 + run


def _in_order(draws: Sequence[_Draw], places: Sequence[Int64Array], size: int) -> tuple[Items, Int64Array]:
    """Outputs of the parts, each at its place, up to the end; and their places."""
    found = [(items, where[: len(items)]) for draw, where in zip(draws, places, strict=True) if (items := draw.items())]
    if not found:
        none = np.zeros(0, np.int64)
        return Batch({}, none, none, True), none
    filled = np.concatenate([where for _, where in found])
    order = np.argsort(filled, kind="stable")
    order = order[: int(np.searchsorted(filled[order], size))]
    return joined([items for items, _ in found]).keep(order), filled[order]


class Concatenated:
    """Cursor: [number of the part, its cursor]."""

    def __init__(self, concat: Concat, open_part: Callable[[int, At], Flow], starts: Sequence[At], cursor: At) -> None:
        self._concat, self._open, self._starts = concat, open_part, starts
        self._number, inner = cursor
        self._flow = open_part(self._number, inner)

    def pull(self) -> Chunk | None:
        while True:
            chunk = self._flow.pull()
            if chunk is not None:
                return _numbered(chunk, self._concat, self._number)
            if self._number + 1 >= len(self._starts):
                return None
            self._number += 1
            self._flow = self._open(self._number, self._starts[self._number])


def _numbered(chunk: Chunk, concat: Concat, number: int) -> Chunk:
    items = conformer(concat, number)(chunk.items.told_apart(concat.tags[number] << 24))
    return Chunk(items, lambda outputs: [number, chunk.at(outputs)], lambda outputs: [number, chunk.before(outputs)])


class Zipped:
    """Cursor: [cursor of each part]."""

    def __init__(self, open_part: Callable[[int, At], Flow], cursor: At) -> None:
        self._intakes = [Intake(open_part(number, inner), inner) for number, inner in enumerate(cursor)]
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
        batches = [real(each.items()).slice(0, count) for each in taken]
        columns: dict[str, Any] = {}
        for batch in batches:
            twice = columns.keys() & batch.columns.keys()
            if twice:
                raise ColumnError(f"zip: two of the parts have a column {min(twice)!r}: rename it in one of them.")
            columns.update(batch.columns)
        owned = all(batch.owned for batch in batches)
        nullable = {name: paths for batch in batches for name, paths in batch.nullable.items()}
        first = batches[0]
        made = Batch(columns, first.rows, first.places, owned, nullable, first.ordinals)
        self._growing.made(made)
        return Chunk(
            made,
            lambda outputs: [each.at(outputs) for each in taken],
            lambda outputs: [each.before(outputs) for each in taken],
        )
