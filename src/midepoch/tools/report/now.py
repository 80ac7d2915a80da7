"""The last start of a run as a dashboard: does it run, how fast, how far, and what takes the time.

Also the speed of a run from the marks of its ledger, and its sources.
A number that is not known is None, and is not shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import PurePosixPath
from typing import Any

from midepoch.audit import Run
from midepoch.audit.consumed import LaneRun
from midepoch.audit.lanes import LeafPlace
from midepoch.audit.ledger import host_of, is_gone
from midepoch.audit.orders import KnownOrder
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
        figures = self.figures.plus(other.figures)
        return replace(other, seconds=self.seconds + other.seconds, waited=self.waited + other.waited, figures=figures)

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


def spans_by_rank(run: Run) -> dict[tuple[str, int], list[Span]]:
    """Return by start and rank the times between the marks of its passes.

    A pass begins with the delivery of its first batch.
    """
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for one in run.every:
        for rank, passed in one.of_rank.items():
            began, before = passed.header.time, Mark(1, 0, 0, Figures())
            for mark in passed.marks:
                seconds = (mark.elapsed - before.elapsed) / 1000
                if seconds <= 0 or mark.steps <= before.steps:
                    continue
                figures, waited = mark.figures.minus(before.figures), max(0, mark.waited - before.waited) / 1000
                span = Span(began + mark.elapsed / 1000, one.shape.epoch, seconds, waited, figures)
                found[one.shape.attempt, rank].append(span)
                before = mark
    return found


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


def curves(run: Run, starts: dict[str, int]) -> list[dict[str, Any]]:
    """Return by start and rank the points of ``Span``."""
    sizes = {one.shape.attempt: one.shape.ranks for one in run.every}
    by_start: dict[str, dict[int, list[Span]]] = defaultdict(dict)
    for (attempt, rank), spans in spans_by_rank(run).items():
        by_start[attempt][rank] = merged(spans)
    found = []
    for attempt, of_rank in by_start.items():
        if sizes[attempt] > _MOST_RANKS:
            of_rank = {-1: _together(of_rank)}
        for rank, spans in sorted(of_rank.items()):
            points = [span.point for span in spans[:: max(1, -(-len(spans) // _MOST_POINTS))]]
            found.append({"start": starts[attempt], "ranks": sizes[attempt], "rank": rank, "points": points})
    return found


def _together(curves: dict[int, list[Span]]) -> list[Span]:
    """Return the sum of all ranks, and the mean of their waiting, in spans of ten seconds."""
    tens: dict[int, list[Span]] = defaultdict(list)
    for spans in curves.values():
        for span in spans:
            tens[int(span.end // 10)].append(span)
    sums = ((ten, reduce(Span.then, spans)) for ten, spans in sorted(tens.items()))
    count = len(curves)
    return [
        replace(total, end=10.0 * ten, seconds=total.seconds / count, waited=total.waited / count)
        for ten, total in sums
    ]


_STOP = re.compile(r"^mix\[(\w+)")


def sources(run: Run, one: Generation, steps: int) -> list[dict[str, Any]]:
    """Return the sources of a run that has several, with the rows that its epoch has consumed of each after some steps.

    ``consumed`` is more than ``rows`` if a source is iterated again. ``weight``: its share of the outputs of a mix.
    """
    order = run.order_of(one)
    if len(order.sources) < 2:
        return []
    about, mix = _description(order), one.first.header.mix
    current = None if mix is None else mix.weights_at(run.reached(one, steps))
    weights = [weight for _, weight in _leaves(about if current is None else {**about, "weights": current})]
    consumed = _consumed(order, one, steps)
    total = sum(consumed)
    return [
        {
            "name": name,
            "rows": source.rows,
            "consumed": rows,
            "weight": weight,
            "share": rows / total if total else None,
        }
        for name, source, rows, weight in zip(names_of(order), order.sources, consumed, weights, strict=True)
    ]


def progress(run: Run, one: Generation, steps: int) -> float | None:
    """Return the part of its epoch that is consumed after a number of steps of a pass, or None if it has no end."""
    if not one.lanes:
        return run.reached(one, steps) / one.first.header.rows if one.first.header.rows else None
    if one.first.header.mix is not None and one.first.header.mix.schedule is not None:
        outputs = one.first.header.mix.schedule.plan[-1].outputs
        return min(1.0, run.reached(one, steps) / outputs) if outputs else None
    order = run.order_of(one)
    counts = iter(zip(_consumed(order, one, steps), (source.rows for source in order.sources), strict=True))
    return _progress(_description(order), counts)


def _progress(about: Mapping[str, Any], counts: Any) -> float | None:
    if "parts" not in about:
        consumed, rows = next(counts)
        return min(1.0, consumed / rows) if rows else None
    stop = _STOP.match(about["pipeline"])
    if stop is None:  # concat and zip: all rows of all parts
        pairs = [next(counts) for _ in _leaves(about)]
        total = sum(rows for _, rows in pairs)
        return min(1.0, sum(min(pair) for pair in pairs) / total) if total else None
    parts = [_progress(part, counts) for part in about["parts"]]
    known = [part for part, weight in zip(parts, about["weights"], strict=True) if weight]
    if stop[1] == "never" or any(part is None for part in known) or not known:
        return None
    return (max if stop[1] == "first" else min)(part for part in known if part is not None)


def _description(order: KnownOrder) -> dict[str, Any]:
    found: dict[str, Any] = order.about.get("parts") or {"pipeline": order.about.get("pipeline", "")}
    return found


def _consumed(order: KnownOrder, one: Generation, steps: int) -> list[int]:
    """Return by source the rows consumed in the epoch, over all lanes of a pass that has some."""
    rows = [source.rows for source in order.sources]
    sums = [0] * len(rows)
    for place in _places(order, one, steps):
        sums[place.leaf] += place.run * place.lane.before(rows[place.leaf]) + place.row + bool(place.part)
    return sums


def _places(order: KnownOrder, one: Generation, steps: int) -> Iterator[LeafPlace]:
    """Yield the places in the sources at which the lanes of a pass are after a number of steps."""
    lanes = LaneRun(order)
    for lane in range(one.lanes):
        track = one.owner(lane) or next((each for each in one.tracks.values() if lane in each.begin), None)
        if track is not None:
            yield from lanes.places(one, lane, track.at(lane, min(steps, track.delivered)))


def names_of(order: KnownOrder) -> list[str]:
    """Return the names of the sources: those of a mix, else of their files or folders if these differ."""
    given = [name for name, _ in _leaves(_description(order))]
    folders = [_folder(source.about.get("files", ())) for source in order.sources]
    distinct = len(set(folders)) == len(folders) and all(folders)
    return [
        name or (folder if distinct else f"source {number}")
        for number, (name, folder) in enumerate(zip(given, folders, strict=True))
    ]


def _leaves(about: Mapping[str, Any], name: str = "", share: float | None = 1.0) -> Iterator[tuple[str, float | None]]:
    """Yield for each source its names in the mixes around it, and its share of their outputs, or None."""
    parts = about.get("parts")
    if parts is None:
        yield name, share
        return
    names, weights = about.get("names") or [""] * len(parts), about.get("weights") or [0.0] * len(parts)
    for number, (part, own, weight) in enumerate(zip(parts, names, weights, strict=True)):
        own = own or (f"{number}" if name else "")
        of_part = share * weight / sum(weights) if any(weights) and share is not None else None
        yield from _leaves(part, f"{name}/{own}" if name and own else own or name, of_part)


def _folder(files: Sequence[str]) -> str:
    """Return a short name of some files: the name of the only one, or of their folder."""
    if not files:
        return ""
    first = PurePosixPath(files[0])
    return first.name if len(files) == 1 else first.parent.name


_SOON = 10.0
"""Seconds in which a run is expected to make a step, or the time of ten steps if that is more."""
_PATIENCE = 6.0
"""A process that cannot be seen from here has stopped after this many times as long."""
_RECENT = 60.0
"""Seconds by which the time to the end of the epoch is estimated."""
_REST = 0.1
"""Share of the waiting from which on work that is not measured apart is shown."""
_WORST = ("stopped", "quiet", "running")


def now(run: Run, made: float) -> dict[str, Any]:
    """Return the numbers of the last start. ``made``: the time at which the ledger was read."""
    attempt = run.every[-1].shape.attempt
    passes = [one for one in run.every if one.shape.attempt == attempt]
    last = passes[-1]
    finished, steps = run.is_finished(last), last.most_steps
    of_rank = {rank: spans for (name, rank), spans in spans_by_rank(run).items() if name == attempt}
    latest = {rank: merged(spans)[-1] for rank, spans in of_rank.items()}
    ranks = [_rank(rank, passes, latest.get(rank), made) for rank in sorted({r for one in passes for r in one.steps})]
    state = min((one["state"] for one in ranks), key=_WORST.index)
    state = "finished" if state != "running" and finished else state
    every = last.shape.ranks == len(latest)
    epoch = progress(run, last, steps)
    eta = _eta(run, last) if state in ("running", "quiet") and not finished else None
    places = _places(run.order_of(last), last, steps) if last.lanes else ()
    in_group = any(kind == "group" for place in places for kind, _ in place.part)  # outputs do not tell all its rows
    mix, position = last.first.header.mix, run.reached(last, steps)
    number = None if mix is None else mix.phase_at(position)
    phase = None if mix is None or mix.schedule is None or number is None else mix.schedule.plan[number].name
    return {
        "state": state,
        "last": max(one["last"] for one in ranks),
        "ranks": last.shape.ranks,
        "missing": list(last.missing),
        "batch": None if last.shape.batching.budget else last.shape.global_batch,
        "workers": last.first.header.workers,
        "epoch": last.shape.epoch,
        "phase": phase,
        "progress": 1.0 if finished else epoch,
        "progress_at_least": eta is None and not finished and in_group,
        "eta": eta,
        "rows_per_second": _sum(latest, "rows") if every else None,
        "tokens_per_second": (_sum(latest, "tokens") or _sum(latest, "slots")) if every else None,
        "waited": reduce(Span.then, latest.values()).waited_share if latest else None,
        **_work([span for spans in of_rank.values() for span in spans], here=not last.first.header.workers),
        "by_rank": ranks,
        "sources": sources(run, last, steps),
    }


def _rank(rank: int, passes: list[Generation], span: Span | None, made: float) -> dict[str, Any]:
    mine = [one.of_rank[rank] for one in passes if rank in one.of_rank]
    newest = mine[-1]
    last = max(one.last_time for one in mine)
    process, space = newest.header.process, newest.header.space
    pace = (last - newest.header.time) / max(1, newest.steps - 1)
    return {
        "rank": rank,
        "state": _state(made - last, pace, is_gone(process, space)),
        "last": last,
        "steps": sum(one.steps for one in mine),
        "machine": host_of(process),
        "rows_per_second": None if span is None else span.rate(span.figures.rows),
        "waited": None if span is None else span.waited_share,
    }


def _state(age: float, pace: float, gone: bool | None) -> str:
    """Return "running", "quiet" if no step was made for long, or "stopped"."""
    soon = max(_SOON, 10 * pace)
    if gone or (gone is None and age > _PATIENCE * soon):
        return "stopped"
    return "running" if age <= soon else "quiet"


def _sum(latest: dict[int, Span], name: str) -> float | None:
    rates = [span.rate(getattr(span.figures, name)) for span in latest.values()]
    return sum(filter(None, rates)) if rates and None not in rates else None


def _work(spans: list[Span], *, here: bool) -> dict[str, Any]:
    """Return the seconds of work by stage, the shares of padding and of full sequences, since the start.

    ``here``: all work was done while the model waited, by no workers.
    """
    whole = reduce(Span.then, spans) if spans else None
    total, seconds, waited = (Figures(), 0.0, 0.0) if whole is None else (whole.figures, whole.seconds, whole.waited)
    stages = {name: getattr(total, name) / 1000 for name in STAGES if getattr(total, name)}
    rest = waited - sum(stages.values())
    if here and stages and rest > _REST * waited:
        stages["other"] = rest
    is_packed = total.packed is not None and bool(total.places)
    padding = 1 - total.tokens / total.slots if total.tokens is not None and total.slots else None
    return {
        "waited_since_start": None if whole is None else whole.waited_share,
        "seconds": seconds,
        "stages": stages,
        "tokens_are_padded": total.tokens is None and total.slots is not None,
        "padding": None if padding is None or is_packed else max(0.0, padding),
        "packing": total.packed / total.places if is_packed and total.packed and total.places else None,
        "blocks_ready": total.ready / total.blocks if total.blocks and total.ready is not None else None,
    }


def _eta(run: Run, last: Generation) -> float | None:
    """Return the seconds to the end of the epoch, by the speed of the last minute of the pass."""
    rank = max(last.steps, key=lambda rank: last.steps[rank])
    marks = last.of_rank[rank].marks
    if not marks:
        return None
    newest = marks[-1]
    before = next((mark for mark in marks if newest.elapsed - mark.elapsed <= 1000 * _RECENT), newest)
    steps, elapsed = (before.steps, before.elapsed) if before.steps < newest.steps else (1, 0)
    reached = [progress(run, last, number) for number in (steps, newest.steps, last.steps[rank])]
    begin, end, here = reached
    if begin is None or end is None or here is None or end <= begin:
        return None
    return (1 - here) * (newest.elapsed - elapsed) / 1000 / (end - begin)
