"""A run by a schedule without its data: the draws of each source, by phase, as ``pipeline.scheduled`` makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from midepoch.order.schedule import OPEN, Schedule, shares
from midepoch.order.selection import Shard
from midepoch.order.turns import Turns, count, draw_of
from midepoch.pipeline.scheduled import EVENTS

FloatArray = npt.NDArray[np.float64]
Limit = tuple[int, int] | None
"""The most passes over a source, and its rows."""

_EXACT_ROWS, _EXACT_STRETCHES = 10**9, 1 << 14
"""Rows, and stretches over all lanes, up to which draws are counted exactly: at most 10 s."""


class ConstantShares(NamedTuple):
    """Shares of the sources from one change of the weights to the next. ``stop`` is None without an end."""

    phase: int
    start: int
    stop: int | None
    shares: tuple[float, ...]


class Event(NamedTuple):
    """The end of the last pass over a source, and the shares from there on."""

    source: int
    phase: int
    position: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class SimulatedRun:
    """The draws of a run. Infinite numbers are those of a phase without an end."""

    rows: FloatArray
    """Draws by phase and source."""
    taken: FloatArray
    """The same in the unit of the schedule."""
    stretches: tuple[ConstantShares, ...]
    events: tuple[Event, ...]
    end: tuple[int, int] | None
    """Phase and position at which all sources are used up, if that comes before the end of the schedule."""


class _Draws(Protocol):
    """Draws with constant weights, up to the next change of the schedule."""

    def first_beyond(self, left: Mapping[int, float]) -> tuple[float, int] | None:
        """Return the amount before the first draw for which a source has no rows left, and that source."""

    def rows(self, amount: float) -> FloatArray:
        """Return the rows of each source in the first ``amount``."""


_Make = Callable[[tuple[float, ...], float | None, int], _Draws]


class _Exact:
    """Draws as the run makes them."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def first_beyond(self, left: Mapping[int, float]) -> tuple[float, int] | None:
        draws = ((draw_of(self._turns, source, int(rows)), source) for source, rows in left.items())
        return min(((draw, source) for draw, source in draws if draw is not None), default=None)

    def rows(self, amount: float) -> FloatArray:
        return count(self._turns, int(amount)).astype(np.float64)


class _Even:
    """Draws in proportion to the weights, of rows that have the mean length of their source."""

    def __init__(self, weights: Sequence[float], length: float | None, means: Sequence[float]) -> None:
        of_draws = np.array(shares(weights))
        self._rows_per_unit: FloatArray = of_draws / float(of_draws @ np.array(means))
        self._length = math.inf if length is None else length

    def first_beyond(self, left: Mapping[int, float]) -> tuple[float, int] | None:
        ends = [(rows / self._rows_per_unit[source], source) for source, rows in left.items()]
        return min(((float(end), source) for end, source in ends if end < self._length), default=None)

    def rows(self, amount: float) -> FloatArray:
        return self._rows_per_unit * amount


@dataclass
class _Lane:
    """The course of one lane of a run. Positions are those of the lane."""

    rows: FloatArray
    taken: FloatArray
    stretches: list[ConstantShares] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    end: tuple[int, float] | None = None


def drawn(
    schedule: Schedule, names: Sequence[str], limits: Sequence[Limit], ranks: int, seed: int
) -> SimulatedRun | None:
    """Return the draws of a schedule in rows, exactly. None if there are too many to be counted."""
    last = schedule.total or schedule.plan[-1].start + sum(limit[0] * limit[1] for limit in limits if limit is not None)
    segments = len(schedule.segments(names, Shard()).stops)
    if last > _EXACT_ROWS or ranks * segments > _EXACT_STRETCHES:
        return None
    lanes = []
    for index in range(ranks):
        lane = Shard(index, ranks)
        lefts = [None if limit is None else limit[0] * lane.before(limit[1]) for limit in limits]

        def make(weights: tuple[float, ...], length: float | None, number: int, index: int = index) -> _Draws:
            return _Exact(Turns(weights, None if length is None else int(length), seed, 0, index, number))

        lanes.append(_run(schedule, names, lane, lefts, make, [1.0] * len(names)))
    return _joined(lanes, ranks)


def estimated(
    schedule: Schedule, names: Sequence[str], limits: Sequence[Limit], means: Sequence[float]
) -> SimulatedRun:
    """Return the draws of a schedule by shares and mean lengths. In a schedule of rows all lengths are 1."""
    lefts = [None if limit is None else limit[0] * limit[1] for limit in limits]
    means = means if schedule.unit == "tokens" else [1.0] * len(names)

    def make(weights: tuple[float, ...], length: float | None, _: int) -> _Draws:
        return _Even(weights, length, means)

    return _joined([_run(schedule, names, Shard(), lefts, make, means)], 1)


def _run(
    schedule: Schedule,
    names: Sequence[str],
    lane: Shard,
    limits: Sequence[int | None],
    make: _Make,
    means: Sequence[float],
) -> _Lane:
    shape = (len(schedule.plan), len(names))
    found = _Lane(np.zeros(shape), np.zeros(shape))
    left = {source: float(limit) for source, limit in enumerate(limits) if limit is not None}
    spent: set[int] = set()
    position: float = 0
    segments = schedule.segments(names, lane)
    for segment, (stop, weights, phase) in enumerate(
        zip(segments.stops, segments.weights, segments.phases, strict=True)
    ):
        events = 0
        while position < stop:
            active = tuple(0.0 if source in spent else weight for source, weight in enumerate(weights))
            if not any(active):
                found.end = (phase, position)
                return found
            length = stop - position if stop < OPEN else None
            draws = make(active, length, (segment << EVENTS) + events)
            beyond = draws.first_beyond({source: rows for source, rows in left.items() if active[source]})
            if beyond is None and length is None:  # it has no end
                endless = np.where(np.array(active) > 0, np.inf, 0.0)
                found.rows[phase] += endless
                found.taken[phase] += endless
                found.stretches.append(ConstantShares(phase, round(position), None, shares(active)))
                return found
            amount = beyond[0] if beyond is not None else length or 0
            rows = draws.rows(amount)
            found.rows[phase] += rows
            found.taken[phase] += rows * np.array(means)
            for source in left:
                left[source] = max(0.0, left[source] - rows[source])
            if amount:
                end = position + amount if beyond is not None else stop
                found.stretches.append(ConstantShares(phase, round(position), round(end), shares(active)))
            position = position + amount if beyond is not None else stop
            if beyond is not None:
                spent.add(beyond[1])
                events += 1
                rest = [0.0 if source in spent else weight for source, weight in enumerate(weights)]
                found.events.append(Event(beyond[1], phase, round(position), shares(rest)))
    return found


def _joined(lanes: Sequence[_Lane], ranks: int) -> SimulatedRun:
    """Return the run of all lanes. Places are those of the first lane that reaches them, over all lanes."""
    events: dict[int, Event] = {}
    for lane in lanes:
        for event in lane.events:
            position = event.position * ranks
            if event.source not in events or position < events[event.source].position:
                events[event.source] = event._replace(position=position)
    stretches = tuple(
        one._replace(start=one.start * ranks, stop=None if one.stop is None else one.stop * ranks)
        for one in lanes[0].stretches
    )
    ends = [(lane.end[0], round(lane.end[1] * ranks)) for lane in lanes if lane.end is not None]
    return SimulatedRun(
        np.sum([lane.rows for lane in lanes], axis=0),
        np.sum([lane.taken for lane in lanes], axis=0),
        stretches,
        tuple(sorted(events.values(), key=lambda event: (event.position, event.source))),
        min(ends, key=lambda end: end[1], default=None),
    )
