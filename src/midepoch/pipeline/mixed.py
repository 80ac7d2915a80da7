"""Flows mixed by weights: the outputs of several parts in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.order.mixing import MixOrder, spans
from midepoch.pipeline.chunk import Chunk, Items, joined
from midepoch.pipeline.combined import Growing
from midepoch.pipeline.cursor import At
from midepoch.pipeline.node import Mix
from midepoch.pipeline.passes import Draw, Open, Part
from midepoch.transforms import Batch

Int64Array = npt.NDArray[np.int64]


class Mixed:
    """Outputs of several parts, interleaved by their weights.

    Cursor: [position, schedule_version, [[pass, stage of the part, cursor of the part], …]], and the previous mix after
    a change, until the outputs in progress are complete.

    A part that ends is iterated again in an epoch of its own, unless the first end is that of the mix. A part that
    yields nothing in any lane leaves its positions empty. A part of weight 0 is paused: it keeps its position.
    """

    def __init__(self, mix: Mix, open_part: Open, start: At, epoch: int, lane: Shard, cursor: At) -> None:
        self._mix, self._epoch, self._lane, self._growing = mix, epoch, lane, Growing()
        self._position, self._schedule_version, parts, *old = cursor
        self._old: At = old[0] if old else None  # the mix before a change, as long as it still applies
        self._parts = [
            Part(number, mix, open_part, start[2][number][2], epoch, lane, *part) for number, part in enumerate(parts)
        ]
        self._use_order()
        self._ended = self._held_over = self._yielded = False

    def _use_order(self) -> None:
        """Draw in the order of the mix, or of that before a change."""
        if self._old is None:
            weights: Sequence[float] = self._mix.counts
            numbers: Sequence[int] = range(len(weights))
            order = MixOrder(self._mix.counts, self._mix.seed, self._epoch, self._lane.index, self._schedule_version)
        else:
            weights, numbers = zip(*self._old[1], strict=True)
            order = old_order(self._old, self._mix.seed, self._epoch, self._lane.index, self._schedule_version)
        self._order = order
        self._active = [number for number, weight in zip(numbers, weights, strict=True) if weight and number >= 0]

    @property
    def _is_exhausted(self) -> bool:
        """True if every part that is drawn from was iterated once, and that ends the mix."""
        return self._mix.stop == "all" and all(self._parts[number].exhausted for number in self._active)

    def _change(self) -> None:
        """Draw by the weights after a change."""
        self._old, self._position, self._schedule_version = None, 0, self._schedule_version + 1
        self._held_over = False
        self._use_order()

    def pull(self) -> Chunk | None:
        if self._ended:
            return None
        if self._old is not None and (self._held_over or self._is_exhausted):
            # The mix before the change has ended. Groups of its last outputs end, too, as they did before the change.
            self._change()
            if self._yielded:
                return Chunk(_nothing(), lambda _: None, is_barrier=True)
        elif self._old is not None and self._position >= self._old[0]:
            self._change()
        if self._is_exhausted:
            return None
        size, first, old = self._growing.next(), self._position, self._old
        if old is not None:
            size = min(size, old[0] - first)
        sources = self._order.sources(first, first + size)
        if old is not None:
            sources = np.array([number for _, number in old[1]])[sources]
        places = [np.flatnonzero(sources == number) for number in range(len(self._parts))]
        draws = [part.draw(len(found)) for part, found in zip(self._parts, places, strict=True)]
        end = self._end(draws, places)
        if end is not None or all(self._parts[number].barren for number in self._active):
            size = size if end is None else end
            self._ended, self._held_over = old is None or self._mix.stop != "all", old is not None
        self._position += size
        schedule_version, items, filled = self._schedule_version, *in_order(draws, places, size)
        self._growing.made(items)
        self._yielded = old is not None and len(filled) > 0

        def at(outputs: int) -> At:
            position = size if outputs == len(filled) else int(filled[outputs - 1]) + 1 if outputs else 0
            return after(position)

        def before(outputs: int) -> At:
            if outputs == len(filled):
                return at(outputs)
            position = int(filled[outputs])
            return after(position, int(sources[position]))

        def after(position: int, coming: int = -1) -> At:
            counts = np.bincount(sources[:position], minlength=len(draws)).tolist()
            parts = [
                draw.before(count) if number == coming else draw.at(count)
                for number, (draw, count) in enumerate(zip(draws, counts, strict=True))
            ]
            return [first + position, schedule_version, parts, *([old] if old is not None else [])]

        def table(outputs: Int64Array, is_before: bool) -> Int64Array | None:
            if old is not None:
                return None
            last = outputs == len(filled)
            if is_before:
                positions = np.append(filled, size)[outputs]
            else:
                positions = np.where(outputs > 0, filled[np.maximum(outputs, 1) - 1] + 1, 0)
                positions = np.where(last, size, positions)
            columns = [(first + positions)[:, None], np.full((len(outputs), 1), schedule_version)]
            for number, draw in enumerate(draws):
                drawn = np.concatenate([[0], np.cumsum(sources == number)])[positions]
                coming = is_before & ~last & (sources[np.minimum(positions, len(sources) - 1)] == number)
                if (values := draw.table(drawn, coming)) is None:
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


def old_order(old: At, seed: int, epoch: int, lane: int, schedule_version: int) -> MixOrder:
    """Return the schedule of a mix before it was changed.

    ``old``: [position up to which it applies, [[weight, current number of the part], …]].
    """
    return MixOrder(spans([weight for weight, _ in old[1]]), seed, epoch, lane, schedule_version)


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
