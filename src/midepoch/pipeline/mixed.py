"""Flows combined: concatenated, zipped, or mixed by weights, each part pass after pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import warn_once
from midepoch.errors import ColumnError
from midepoch.order import Shard
from midepoch.order.turns import MixOrder, spans
from midepoch.pipeline.chunk import (
    Chunk,
    Flow,
    Items,
    MixedRows,
    Pulled,
    Puller,
    RowRefs,
    bytes_in,
    joined,
    materialize,
)
from midepoch.pipeline.cursor import ConcatAt, FlowAt, MixAt, PartAt, RowAt, ZipAt, flatten, listed
from midepoch.pipeline.node import Concat, Mix
from midepoch.transforms import Batch

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
    schema.check()
    as_read = schema.leaves_as_read(base.parts[number].known)

    def conform(items: Items) -> Items:
        if isinstance(items, RowRefs):
            return replace(items, schema=schema, located=items.located if as_read else None)
        return items.changed(schema.conform) if isinstance(items, MixedRows) else schema.conform(materialize(items))

    return conform


class Concatenated:
    """Parts one after the other. ``kept``: rows of the leaves before a part that yielded outputs."""

    def __init__(
        self,
        concat: Concat,
        open_part: Callable[[int, FlowAt], Flow],
        starts: Sequence[FlowAt],
        kept: Callable[[int], tuple[int, ...]],
        cursor: ConcatAt,
    ) -> None:
        self._concat, self._open, self._starts, self._kept = concat, open_part, starts, kept
        self._number = cursor.number
        self._flow = open_part(cursor.number, cursor.at)

    def pull(self) -> Chunk | None:
        while True:
            chunk = self._flow.pull()
            if chunk is not None:
                return self._numbered(chunk, self._number, self._kept(self._number))
            if self._number + 1 >= len(self._starts):
                return None
            self._number += 1
            self._flow = self._open(self._number, self._starts[self._number])

    def _numbered(self, chunk: Chunk, number: int, kept: tuple[int, ...]) -> Chunk:
        items = conformer(self._concat, number)(chunk.items.with_ordinals(self._concat.tags[number] << 24))
        return Chunk(
            items,
            lambda outputs: ConcatAt(number, chunk.at(outputs), kept),
            lambda outputs: ConcatAt(number, chunk.before(outputs), kept),
        )


class Zipped:
    """Parts side by side."""

    def __init__(self, open_part: Callable[[int, FlowAt], Flow], cursor: ZipAt) -> None:
        self._intakes = [Puller(open_part(number, inner), inner) for number, inner in enumerate(cursor.parts)]
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
            lambda outputs: ZipAt(tuple(each.at(outputs) for each in taken)),
            lambda outputs: ZipAt(tuple(each.before(outputs) for each in taken)),
        )


Int64Array = npt.NDArray[np.int64]

Open = Callable[[int, int, Shard, FlowAt], Flow]
"""Function that opens a part, given its number, epoch, lane and cursor."""

FIRST, AGAIN, BORROWING = 0, 1, 2
"""Stages of a part: its first pass, a later one, or a pass over the shards of all lanes in turn.

The last is for a lane in which a pass yielded nothing, as when a source has fewer rows than there are lanes: the
weights apply in every lane.
"""

ENDED = 1 << 40
"""Number of the pass of a part that a scheduled mix cannot draw from any more, if its passes are not limited."""


def pair(epoch: int, run: int) -> int:
    """Return a small number, different for each pair: (0, 0), (1, 0), (0, 1), (2, 0) … are 0, 1, 2, 3 …"""
    return (epoch + run) * (epoch + run + 1) // 2 + run


def place_of(run: int, stage: int, epoch: int, lane: Shard) -> tuple[int, Shard]:
    """Return the epoch and the lane of a pass over a part."""
    if stage != BORROWING:
        return pair(epoch, run), lane
    shift = run % lane.count
    return pair(epoch, run_number(run, stage, lane)), Shard((lane.index + shift) % lane.count, lane.count)


def run_number(run: int, stage: int, lane: Shard) -> int:
    """Return the number of a pass. Lanes that borrow have numbers of their own, one for each round over all lanes."""
    return (run // lane.count + 1) * lane.count + lane.index if stage == BORROWING else run


class Part:
    """One part of a mix, pass after pass."""

    def __init__(
        self,
        number: int,
        mix: Mix,
        open_part: Open,
        start: FlowAt,
        epoch: int,
        lane: Shard,
        part: PartAt,
    ) -> None:
        self._number, self._open_part, self._start, self._epoch, self._lane = number, open_part, start, epoch, lane
        self._again, self._tag = mix.stop != "first", mix.tags[number]
        self._name = repr(mix.names[number] if mix.names else number)
        self._limited, self._most = mix.most_passes(number) is not None, mix.most_passes(number) or ENDED
        self._conform = conformer(mix, number)
        self._pass, self._stage, cursor = part.run, part.stage, part.at
        self._drawn: list[tuple[tuple[int, int, Puller, bool, bool], Pulled]] = []  # the last draw
        self.spent = part.run >= self._most
        """True if it has had all of its passes, or yields nothing, and a schedule does not draw from it any more."""
        if self.spent:
            cursor = start
            self._intake = Puller(_Nothing(), start)
        else:
            self._open(cursor)
        self._found = cursor != start  # this pass has yielded outputs
        # The round over all lanes has yielded outputs, or may have: outputs before a resume are not known.
        self._found_in_turn = self._found or part.run % lane.count > 0
        self.barren = False

    def _open(self, cursor: FlowAt) -> None:
        place = place_of(self._pass, self._stage, self._epoch, self._lane)
        self._intake = Puller(self._open_part(self._number, *place, cursor), cursor)

    @property
    def exhausted(self) -> bool:
        """Return True if it has been iterated once."""
        return self._stage != FIRST

    def has_more(self) -> bool:
        """Return True if this pass has outputs left."""
        return self._intake.has_more()

    def draw(self, count: int) -> Draw:
        """Return the next outputs, fewer only if the part has ended and is not iterated again."""
        # A part that yields nothing begins its pass again on resume, and finds that out again.
        before = PartAt(self._pass, self._stage, self._start if self.barren else self._intake.cursor)
        taken: list[tuple[int, int, Pulled]] = []
        ends: list[int] = []
        got, self._drawn = 0, []
        while got < count and not self.barren and not self.spent:
            begun = (self._pass, self._stage, self._intake, self._found, self._found_in_turn)
            pulled = self._intake.take(count - got)
            self._drawn.append((begun, pulled))
            if pulled.count:
                taken.append((self._pass, self._stage, pulled))
                got, self._found = got + pulled.count, True
            if got < count:
                ends.append(got)
                if not self._again:
                    if not self._found:
                        self._warn("so the mix ends there")
                    self._stage = AGAIN
                    break
                self._next_pass()
        numbers = [run_number(run, stage, self._lane) for run, stage, _ in taken]
        return Draw([(self._tag << 24) + number for number in numbers], self._conform, before, taken, ends)

    def give_back(self, keep: int) -> None:
        """Take back all but the first ``keep`` outputs of the last draw, and the passes that began after them."""
        for begun, pulled in self._drawn:
            if keep <= pulled.count:
                self._pass, self._stage, self._intake, self._found, self._found_in_turn = begun
                self._found |= keep > 0
                self.barren = self.spent = False
                self._intake.give_back(pulled, keep)
                return
            keep -= pulled.count

    def end(self) -> None:
        """Never draw from it again."""
        self._pass, self._stage, self._intake, self.spent = self._most, AGAIN, Puller(_Nothing(), self._start), True

    def _next_pass(self) -> None:
        """Begin again. If this pass yielded nothing, continue with the shards of all lanes in turn."""
        if self._limited and (not self._found or self._pass + 1 >= self._most):
            if not self._found and not self._pass:
                self._warn("so the others are drawn instead")
            self.spent = True
            return
        lanes, yielded, self._found = self._lane.count, self._found, False
        if self._stage != BORROWING and not yielded:
            self._pass, self._stage, self._found_in_turn = 0, BORROWING, False
            self.barren = lanes == 1  # there is no other lane
        else:
            self._pass, self._stage = self._pass + 1, max(self._stage, AGAIN)
            self._found_in_turn |= yielded
            if self._stage == BORROWING and self._pass % lanes == 0:
                self.barren, self._found_in_turn = not self._found_in_turn, False
        if self.barren:
            self._pass = 0
            self._warn("so the others are drawn instead")
        else:
            self._open(self._start)

    def _warn(self, result: str) -> None:
        everywhere = self.barren or self._lane.count == 1
        where, remedy = ("", "omit it") if everywhere else (" in a lane", "use fewer lanes: with_lanes()")
        warn_once("mix: source %s yields no row%s, %s. Check its filters, or %s.", self._name, where, result, remedy)


class _Nothing:
    """The flow of a part that is not iterated any more."""

    def pull(self) -> Chunk | None:
        return None


class Draw:
    """Outputs taken from a part in one call. ``ends``: numbers of outputs after which it began again, or ended."""

    def __init__(
        self,
        numbers: list[int],
        conform: Callable[[Items], Items],
        before: PartAt,
        taken: list[tuple[int, int, Pulled]],
        ends: list[int],
    ) -> None:
        self._numbers, self._conform, self._before, self._taken, self.ends = numbers, conform, before, taken, ends

    @property
    def count(self) -> int:
        """The number of outputs."""
        return sum(taken.count for _, _, taken in self._taken)

    @property
    def exhausted(self) -> bool:
        """True if the part had been iterated once before."""
        return self._before.stage != FIRST

    def items(self) -> Items | None:
        """Return the outputs. Ordinals separate the generators of functions for rows of other sources and passes."""
        if not self._taken:
            return None
        passes = [
            taken.items().with_ordinals(number)
            for number, (_, _, taken) in zip(self._numbers, self._taken, strict=True)
        ]
        return self._conform(joined(passes))

    def before(self, count: int) -> PartAt:
        """Return the cursor of the part right before one of them."""
        done = count
        for run, stage, taken in self._taken:
            if done < taken.count:
                return PartAt(run, stage, taken.before(done))
            done -= taken.count
        return self.at(count)

    def table(self, counts: Int64Array, coming: npt.NDArray[np.bool_]) -> Int64Array | None:
        """Return the numbers of many entries in one call, or None if a chunk has no such table.

        ``counts``: outputs before each. ``coming``: True where the entry is right before the next output.
        """
        pieces = [(run, stage, piece) for run, stage, taken in self._taken for piece in taken.pieces]
        if any(chunk.table is None for _, _, (chunk, _, _) in pieces):
            return None
        edges = np.cumsum([0, *(stop - start for _, _, (_, start, stop) in pieces)])
        # Entries after an output are of its piece, those right before one of the piece that follows.
        numbers = np.searchsorted(edges, counts) - 1
        if is_any := coming.any():
            numbers = np.where(coming, np.searchsorted(edges, counts, side="right") - 1, numbers)
        found: Int64Array | None = None
        for number in range(-1, len(pieces) + 1):
            mine = numbers == number
            for is_before in (False, True) if is_any else (False,):
                places = np.flatnonzero(mine & (coming == is_before) if is_any else mine)
                if not len(places):
                    continue
                if 0 <= number < len(pieces):
                    run, stage, (chunk, start, _) = pieces[number]
                    assert chunk.table is not None
                    inner = chunk.table(counts[places] + (start - edges[number]), is_before)
                    if inner is None:
                        return None
                    head: Any = run, stage
                else:  # before the first output, or after the last
                    part = self.at(int(counts[places[0]]))
                    head, inner = (part.run, part.stage), np.array(flatten(listed(part.at, counts=True)))
                width = 2 + inner.shape[-1]
                if found is None:
                    found = np.empty((len(counts), width), np.int64)
                if found.shape[1] != width:
                    return None
                found[places, :2], found[places, 2:] = head, inner
        return found

    def at(self, count: int) -> PartAt:
        """Return the cursor of the part after the first ``count``. It begins again only when more is needed."""
        entry = self._before
        for run, stage, taken in self._taken:
            if not count:
                break
            entry = PartAt(run, stage, taken.at(min(count, taken.count)))
            count -= min(count, taken.count)
        return entry


class Mixed:
    """Outputs of several parts, interleaved by their weights.

    A part that ends is iterated again in an epoch of its own, unless the first end is that of the mix. A part that
    yields nothing in any lane leaves its positions empty. A part of weight 0 is paused: it keeps its position.
    """

    def __init__(self, mix: Mix, open_part: Open, start: MixAt, epoch: int, lane: Shard, cursor: MixAt) -> None:
        self._mix, self._epoch, self._lane, self._growing = mix, epoch, lane, Growing()
        self._position, self._number, self._held = cursor.position, cursor.change, cursor.held
        self._parts = parts_of(mix, open_part, start, epoch, lane, cursor)
        self._use_order()
        self._ended = self._held_over = self._yielded = False

    def _use_order(self) -> None:
        """Draw in the order of the mix, or of that before a change."""
        held = self._held
        weights: Sequence[float] = self._mix.counts if held is None else held.weights
        numbers: Sequence[int] = range(len(weights)) if held is None else held.parts
        counts = self._mix.counts if held is None else spans(weights)
        self._order = MixOrder(counts, self._mix.seed, self._epoch, self._lane.index, self._number)
        self._active = [number for number, weight in zip(numbers, weights, strict=True) if weight and number >= 0]

    @property
    def _is_exhausted(self) -> bool:
        """True if every part that is drawn from was iterated once, and that ends the mix."""
        return self._mix.stop == "all" and all(self._parts[number].exhausted for number in self._active)

    def _change(self) -> None:
        """Draw by the weights after a change."""
        self._held, self._position, self._number = None, 0, self._number + 1
        self._held_over = False
        self._use_order()

    def pull(self) -> Chunk | None:
        if self._ended:
            return None
        if self._held is not None and (self._held_over or self._is_exhausted):
            # The mix before the change has ended. Groups of its last outputs end, too, as they did before the change.
            self._change()
            if self._yielded:
                return Chunk(_nothing(), lambda _: RowAt(), is_barrier=True)  # it has no outputs
        elif self._held is not None and self._position >= self._held.until:
            self._change()
        if self._is_exhausted:
            return None
        size, first, held, change = self._growing.next(), self._position, self._held, self._number
        if held is not None:
            size = min(size, held.until - first)
        sources = self._order.sources(first, first + size)
        if held is not None:
            sources = np.array(held.parts)[sources]
        places = [np.flatnonzero(sources == number) for number in range(len(self._parts))]
        draws = [part.draw(len(found)) for part, found in zip(self._parts, places, strict=True)]
        end = self._end(draws, places)
        if end is not None or all(self._parts[number].barren for number in self._active):
            size = size if end is None else end
            self._ended, self._held_over = held is None or self._mix.stop != "all", held is not None
        self._position += size
        items, filled = in_order(draws, places, size)
        self._growing.made(items)
        self._yielded = held is not None and len(filled) > 0

        def at(outputs: int) -> FlowAt:
            position = size if outputs == len(filled) else int(filled[outputs - 1]) + 1 if outputs else 0
            return after(position)

        def before(outputs: int) -> FlowAt:
            if outputs == len(filled):
                return at(outputs)
            position = int(filled[outputs])
            return after(position, int(sources[position]))

        def after(position: int, coming: int = -1) -> FlowAt:
            return MixAt(first + position, change, parts_after(draws, sources[:position], coming), held=held)

        def table(outputs: Int64Array, is_before: bool) -> Int64Array | None:
            if held is not None:
                return None
            last = outputs == len(filled)
            if is_before:
                positions = np.append(filled, size)[outputs]
            else:
                positions = np.where(outputs > 0, filled[np.maximum(outputs, 1) - 1] + 1, 0)
                positions = np.where(last, size, positions)
            columns = [np.full((len(outputs), 2), change)]
            columns[0][:, 0] = first + positions
            for number, draw in enumerate(draws):
                coming = is_before & ~last
                if is_before:
                    coming &= sources[np.minimum(positions, len(sources) - 1)] == number
                if (values := draw.table(np.searchsorted(places[number], positions), coming)) is None:
                    return None
                columns.append(values)
            return np.concatenate(columns, axis=1)

        return Chunk(items, at, before, table if len(filled) else None)

    def _end(self, draws: Sequence[Draw], places: Sequence[Int64Array]) -> int | None:
        """Return the position in this chunk at which the mix ends, if it does.

        It is where an ended part is needed or, with "all", after the last output of the last part to end.
        """
        if self._mix.stop == "first":
            ends = (int(positions[count]) for draw, positions in zip(draws, places, strict=True) for count in draw.ends)
            return min(ends, default=None)
        if self._mix.stop == "never":
            return None
        latest = 0
        for number in self._active:
            draw, positions = draws[number], places[number]
            if draw.exhausted:
                continue
            if not draw.ends and self._parts[number].has_more():
                return None
            count = draw.ends[0] if draw.ends else len(positions)
            latest = max(latest, int(positions[count - 1]) + 1 if count else 0)
        return latest


def parts_of(mix: Mix, open_part: Open, start: MixAt, epoch: int, lane: Shard, cursor: MixAt) -> list[Part]:
    """Open the parts of a mix at a cursor. ``start``: the cursor at the beginning of an epoch."""
    both = zip(start.parts, cursor.parts, strict=True)
    return [Part(number, mix, open_part, first.at, epoch, lane, part) for number, (first, part) in enumerate(both)]


def parts_after(draws: Sequence[Draw], sources: Int64Array, coming: int = -1) -> tuple[PartAt, ...]:
    """Return the cursors of the parts after draws from these sources. ``coming``: the part of the next output."""
    counts = np.bincount(sources, minlength=len(draws)).tolist()
    return tuple(
        draw.before(count) if number == coming else draw.at(count)
        for number, (draw, count) in enumerate(zip(draws, counts, strict=True))
    )


def in_order(draws: Sequence[Draw], places: Sequence[Int64Array], size: int) -> tuple[Items, Int64Array]:
    """Return the outputs of the parts in the order of their positions, up to the end, and those positions."""
    parts = [(items, where[: len(items)]) for draw, where in zip(draws, places, strict=True) if (items := draw.items())]
    if not parts:
        return _nothing(), np.zeros(0, np.int64)
    filled = np.concatenate([where for _, where in parts])
    order = np.argsort(filled, kind="stable")
    order = order[: int(np.searchsorted(filled[order], size))]
    return joined([items for items, _ in parts]).keep(order), filled[order]


def _nothing() -> Batch:
    none = np.zeros(0, np.int64)
    return Batch({}, none, none, True)
