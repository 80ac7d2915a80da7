"""Flows mixed by a schedule: weights that change with the position, and sources with a limited number of passes."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.order.schedule import OPEN, Segments
from midepoch.order.turns import Turns
from midepoch.pipeline.chunk import Chunk, Items, MixedRows, materialize
from midepoch.pipeline.cursor import HeldWeights, MixAt
from midepoch.pipeline.mixed import Draw, Growing, Open, in_order, parts_after, parts_of
from midepoch.pipeline.node import Mix
from midepoch.pipeline.stages import lengths_in

Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger("midepoch")
_TIMES = 4
"""Chunks by tokens are read here, not by ``pack``, and are as large as those that it reads: 16 MiB. A quarter of that
would take a quarter more time.
"""


def draw_number(segment: int, change: int) -> int:
    """Return the number by which the draws of a segment are shuffled, after a number of changes in it."""
    return (segment << 20) + change % (1 << 20)


class Setting(NamedTuple):
    """The weights at a place of a lane, and the draws up to their next change, if they are known."""

    weights: tuple[float, ...]
    rows: int | None


def setting(
    mix: Mix, segments: Segments, epoch: int, clock: int, position: int, spent: Sequence[bool]
) -> Setting | None:
    """Return the weights that apply at a position of a stretch of draws, or None if nothing is left to draw from."""
    assert mix.schedule is not None
    number = segments.at(clock)
    if number is None:
        return None
    weights = segments.weights[number]
    if mix.learned is not None and mix.learned.applies(epoch, segments.phases[number]):
        weights = mix.learned.weights
    weights = tuple(0.0 if over else weight for weight, over in zip(weights, spent, strict=True))
    if not any(weights):
        return None
    stop = segments.stops[number]
    known = mix.schedule.unit == "rows" and stop < OPEN
    return Setting(weights, stop - clock + position if known else None)


class ConstantDraws(NamedTuple):
    """Draws of a chunk with constant weights, from its draw ``start`` on."""

    start: int
    position: int
    segment: int
    change: int
    turns: Turns


class Scheduled:
    """Outputs of several parts, interleaved by weights that a schedule gives.

    A part that has had all of its passes is not drawn from any more: the others take its share.
    """

    def __init__(self, mix: Mix, open_part: Open, start: MixAt, epoch: int, lane: Shard, cursor: MixAt) -> None:
        assert mix.schedule is not None
        self._mix, self._epoch, self._lane = mix, epoch, lane
        self._position, self._segment, self._change, self._held = (
            cursor.position,
            cursor.segment,
            cursor.change,
            cursor.held,
        )
        self._clock = cursor.clock or 0
        self._segments = mix.schedule.segments(mix.names, lane)
        self._by_tokens = mix.schedule.unit == "tokens"
        self._growing = Growing(_TIMES if self._by_tokens else 1)
        self._mean = 1.0  # tokens in a row, of the last chunk
        self._parts = parts_of(mix, open_part, start, epoch, lane, cursor)
        self._turns: Turns | None = None
        self._ended = False

    def pull(self) -> Chunk | None:
        while not self._ended:
            if (chunk := self._pull()) is not None:
                return chunk
        return None

    def _pull(self) -> Chunk | None:
        """Return the next outputs, or None if the weights change first, or at the end."""
        segment = self._segments.at(self._clock)
        if segment is None or not self._begin(segment):
            self._ended = True
            return None
        assert self._turns is not None
        stretches, size = self._stretches(segment)
        sources = _sources(stretches, size)
        places = [np.flatnonzero(sources == number) for number in range(len(self._parts))]
        draws = [part.draw(len(mine)) for part, mine in zip(self._parts, places, strict=True)]
        spent = [int(mine[draw.count]) for draw, mine in zip(draws, places, strict=True) if draw.count < len(mine)]
        cut = min(spent, default=size)
        items, _ = in_order(draws, places, cut)
        clocks = None
        if self._by_tokens and cut:
            items, clocks = self._counted(items)
            over = int(np.searchsorted(clocks, self._segments.stops[segment]))  # the document that reaches the end
            if over <= cut and over < len(clocks) - 1:
                cut, items, clocks = over, items.slice(0, over), clocks[: over + 1]
        is_over = clocks is not None and int(clocks[-1]) >= self._segments.stops[segment]
        is_spent = cut in spent and not is_over  # else its next draw is in another segment, if there is one
        if cut < size:
            for part, mine in zip(self._parts, places, strict=True):
                part.give_back(int(np.searchsorted(mine, cut)))
        chunk = self._chunk(draws, sources, stretches, items, clocks) if cut else None
        last = stretches[bisect_right(stretches, cut, key=_start) - 1]
        self._segment, self._change, self._turns = last.segment, last.change, last.turns
        self._position = last.position + cut - last.start
        if clocks is not None:
            self._mean = max(1.0, (int(clocks[-1]) - self._clock) / cut)
        self._clock += cut if clocks is None else int(clocks[-1]) - self._clock
        if is_spent:
            self._end_part(int(sources[cut]))
        self._growing.made(items)
        return chunk

    def _stretches(self, segment: int) -> tuple[list[ConstantDraws], int]:
        """Return the next draws, up to where their weights are known, and their number."""
        assert self._turns is not None
        size = self._growing.next()
        found = [ConstantDraws(0, self._position, self._segment, self._change, self._turns)]
        if self._by_tokens or self._held is not None:
            left = self._segments.stops[segment] - self._clock
            # Rows after the end of the segment are given back: in short phases with 64 segments, most of the work.
            size = min(size, 1 + int(left / self._mean) if self._by_tokens else left)
            return found, size if self._held is None else min(size, self._held.until - self._position)
        while (end := self._segments.stops[segment] - self._clock) < size:
            following = self._segments.at(self._clock + end)
            turns = None if following is None else self._turns_at(self._clock + end, 0, following, 0)
            if following is None or turns is None:
                return found, end
            found.append(ConstantDraws(end, 0, following, 0, turns))
            segment = following
        return found, size

    def _turns_at(self, clock: int, position: int, segment: int, change: int) -> Turns | None:
        """Return the draws at a place of the schedule, or None if nothing is left to draw from."""
        spent = [part.spent for part in self._parts]
        found = setting(self._mix, self._segments, self._epoch, clock, position, spent)
        return None if found is None else self._turned(found, segment, change)

    def _turned(self, weights: Setting, segment: int, change: int) -> Turns:
        return Turns(*weights, self._mix.seed, self._epoch, self._lane.index, draw_number(segment, change))

    def _begin(self, segment: int) -> bool:
        """Prepare the draws at this place. Return False if nothing is left to draw from."""
        held = self._held
        if held is not None and self._position >= held.until:
            held = self._held = None
            self._next_change()
        if held is None and self._segment != segment:
            self._position, self._segment, self._change, self._turns = 0, segment, 0, None
        if self._turns is None:
            if held is not None:
                weights = Setting(held.weights, held.rows if held.rows >= 0 else None)
                self._turns = self._turned(weights, self._segment, self._change)
            else:
                self._turns = self._turns_at(self._clock, self._position, self._segment, self._change)
        if self._turns is None:
            self._warn(segment)
        return self._turns is not None

    def _next_change(self) -> None:
        self._position, self._change, self._turns = 0, self._change + 1, None

    def _end_part(self, number: int) -> None:
        """Stop drawing from a part. The others take its share."""
        self._parts[number].end()
        if self._held is not None:  # the outputs in progress had the same weights without it
            until, rows = self._held.until - self._position, self._held.rows
            weights = tuple(0.0 if one == number else weight for one, weight in enumerate(self._held.weights))
            rows = rows - self._position if rows >= 0 else rows
            self._held = HeldWeights(until, weights, (), rows) if any(weights) else None
        self._next_change()

    def _counted(self, items: Items) -> tuple[Items, Int64Array]:
        """Return outputs that are read, and the position of the schedule before each of them and after the last."""
        if self._mix.tokens is None:
            raise ValueError(
                "the schedule counts tokens, and the column with the tokens is not known. Call pack() on the mix, or "
                "pass mix(…, length='input_ids')."
            )
        column, more = self._mix.tokens
        if not isinstance(items, MixedRows):
            items = batch = materialize(items)
            lengths = lengths_in(column, batch.columns[column])
        else:
            lengths = np.zeros(len(items), np.int64)
            for number in np.unique(items.which).tolist():
                mine = np.flatnonzero(items.which == number)
                part = items.batches[number].keep(items.places[mine])
                lengths[mine] = lengths_in(column, part.columns[column])
        return items, self._clock + np.concatenate([[0], np.cumsum(lengths + more * (lengths > 0))]).astype(np.int64)

    def _chunk(
        self,
        draws: Sequence[Draw],
        sources: Int64Array,
        stretches: Sequence[ConstantDraws],
        items: Items,
        clocks: Int64Array | None,
    ) -> Chunk:
        clock, held = self._clock, self._held

        def at(outputs: int) -> MixAt:
            return after(outputs, stretches[max(0, bisect_left(stretches, outputs, key=_start) - 1)])

        def before(outputs: int) -> MixAt:
            if outputs == len(items):
                return at(outputs)
            return after(outputs, stretches[bisect_right(stretches, outputs, key=_start) - 1], int(sources[outputs]))

        def after(outputs: int, stretch: ConstantDraws, coming: int = -1) -> MixAt:
            position, parts = stretch.position + outputs - stretch.start, parts_after(draws, sources[:outputs], coming)
            now = clock + outputs if clocks is None else int(clocks[outputs])
            return MixAt(position, stretch.change, parts, stretch.segment, now, held)

        return Chunk(items, at, before)

    def _warn(self, segment: int) -> None:
        assert self._mix.schedule is not None
        phase = self._mix.schedule.plan[self._segments.phases[segment]]
        _log.warning(
            "the mix ends in phase %r, before the end of the schedule: all of its sources have reached max_passes. "
            "Raise max_passes, or check the schedule with midepoch plan --schedule.",
            phase.name,
        )


def _start(stretch: ConstantDraws) -> int:
    return stretch.start


def _sources(stretches: Sequence[ConstantDraws], size: int) -> Int64Array:
    """Return the source of each draw of a chunk."""
    ends = [*(stretch.start for stretch in stretches[1:]), size]
    found = [
        stretch.turns.sources(stretch.position, stretch.position + end - stretch.start)
        for stretch, end in zip(stretches, ends, strict=True)
    ]
    return found[0] if len(found) == 1 else np.concatenate(found)
