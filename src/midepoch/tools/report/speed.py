"""Speed of a run, from the marks of its ledger: rows and tokens per second, waiting, and work by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from midepoch.audit import Run
from midepoch.audit.passes import Generation
from midepoch.audit.records import Figures, Mark

_MOST_RANKS = 64
"""Maximum number of ranks with a curve of their own. Of more ranks, only the sum is shown."""
_MOST_POINTS = 600
_SHORTEST = 0.9
"""Seconds of a point of a curve. A single step that was ready in 14 ms is no rate."""
STAGES = ("read", "map", "combine", "collate", "transport")


@dataclass(frozen=True)
class Span:
    """The time between two marks of a rank: from the delivery of one batch to that of a later one."""

    end: float
    epoch: int
    seconds: float
    waited: float
    figures: Figures

    def then(self, other: Span) -> Span:
        """Return both as one. The time between them is not counted."""
        return Span(
            other.end,
            other.epoch,
            self.seconds + other.seconds,
            self.waited + other.waited,
            self.figures.plus(other.figures),
        )

    def rate(self, amount: int | None) -> float | None:
        return None if amount is None or self.seconds <= 0 else amount / self.seconds

    @property
    def tokens(self) -> int | None:
        """Tokens without padding, or with it if padding is not known."""
        return self.figures.slots if self.figures.tokens is None else self.figures.tokens

    @property
    def waited_share(self) -> float:
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 0.0

    @property
    def point(self) -> list[float | None]:
        """[time, rows/s, share of the time waited, seconds, epoch, tokens/s]"""
        rows, tokens = self.rate(self.figures.rows), self.rate(self.tokens)
        share = round(self.waited_share, 4)
        return [round(self.end, 3), round(rows or 0.0, 2), share, round(self.seconds, 3), self.epoch, tokens]


def spans_of(one: Generation, rank: int) -> Iterator[Span]:
    """Yield the time between the marks of a pass. It begins with the delivery of the first batch."""
    began, marks = one.marks[rank]
    before = Mark(1, 0, 0, Figures())
    for mark in marks:
        seconds = (mark.elapsed - before.elapsed) / 1000
        if seconds <= 0 or mark.steps <= before.steps:
            continue
        figures = (mark.figures or Figures()).minus(before.figures or Figures())
        waited = max(0, mark.waited - before.waited) / 1000
        yield Span(began + mark.elapsed / 1000, one.shape.epoch, seconds, waited, figures)
        before = mark


def merged(spans: list[Span]) -> list[Span]:
    """Return spans that are long enough for a rate: short ones are counted with their neighbours."""
    found: list[Span] = []
    pending: Span | None = None
    for span in spans:
        pending = span if pending is None else pending.then(span)
        if pending.seconds >= _SHORTEST:
            found.append(pending)
            pending = None
    if pending is not None:
        found[-1:] = [found[-1].then(pending)] if found else [pending]
    return found


def spans_by_rank(run: Run) -> dict[tuple[str, int], list[Span]]:
    """Return by start and rank the spans of all its passes."""
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for one in run.every:
        for rank in one.marks:
            found[one.shape.attempt, rank] += spans_of(one, rank)
    return found


def curves(run: Run, starts: dict[str, int]) -> list[dict[str, Any]]:
    """Return by start and rank the points of ``Span``."""
    sizes = {one.shape.attempt: one.shape.ranks for one in run.every}
    by_start: dict[str, dict[int, list[Span]]] = defaultdict(dict)
    for (attempt, rank), spans in spans_by_rank(run).items():
        if spans:
            by_start[attempt][rank] = merged(spans)
    found = []
    for attempt, of_rank in by_start.items():
        about = {"start": starts[attempt], "ranks": sizes[attempt]}
        if sizes[attempt] > _MOST_RANKS:
            points = {-1: _together(of_rank)}
        else:
            points = {rank: [span.point for span in spans] for rank, spans in sorted(of_rank.items())}
        found += [{**about, "rank": rank, "points": _thinned(each)} for rank, each in points.items()]
    return found


def _together(curves: dict[int, list[Span]]) -> list[list[float | None]]:
    """Return the sum of all ranks, and the mean of their waiting, in spans of ten seconds."""
    tens: dict[int, list[Span]] = defaultdict(list)
    for spans in curves.values():
        for span in spans:
            tens[int(span.end // 10)].append(span)
    points = []
    for ten, spans in sorted(tens.items()):
        total = spans[0]
        for span in spans[1:]:
            total = total.then(span)
        of_all = replace(total, end=10.0 * ten, seconds=total.seconds / len(curves), waited=total.waited / len(curves))
        points.append(of_all.point)
    return points


def _thinned(points: list[list[float | None]]) -> list[list[float | None]]:
    return points[:: max(1, -(-len(points) // _MOST_POINTS))]
