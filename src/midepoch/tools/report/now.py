"""The last start of a run as a dashboard: does it run, how fast, how far, and what takes the time.

A number that is not known is None, and is not shown.
"""

from __future__ import annotations

from typing import Any

from midepoch.audit import Run
from midepoch.audit.ledger import host_of, is_gone
from midepoch.audit.passes import Generation
from midepoch.audit.records import Figures
from midepoch.tools.report.mixture import is_in_group, progress, sources_of
from midepoch.tools.report.speed import STAGES, Span, merged, spans_by_rank

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
    finished = run.is_finished(last)
    of_rank = {rank: spans for (name, rank), spans in spans_by_rank(run).items() if name == attempt and spans}
    latest = {rank: merged(spans)[-1] for rank, spans in of_rank.items()}
    ranks = [_rank(rank, passes, latest.get(rank), made) for rank in sorted({r for one in passes for r in one.steps})]
    state = min((one["state"] for one in ranks), key=_WORST.index)
    state = "finished" if state != "running" and finished else state
    every = last.shape.ranks == len(latest)
    epoch = progress(run, last, max(last.steps.values()))
    eta = _eta(run, last) if state in ("running", "quiet") and not finished else None
    return {
        "state": state,
        "last": max(one["last"] for one in ranks),
        "ranks": last.shape.ranks,
        "missing": list(last.missing),
        "batch": None if last.shape.batching.budget else last.shape.global_batch,
        "workers": last.workers,
        "epoch": last.shape.epoch,
        "phase": _phase(run, last),
        "progress": 1.0 if finished else epoch,
        "progress_at_least": eta is None and not finished and is_in_group(run, last, max(last.steps.values())),
        "eta": eta,
        "rows_per_second": _sum(latest, "rows") if every else None,
        "tokens_per_second": (_sum(latest, "tokens") or _sum(latest, "slots")) if every else None,
        "waited": _waited(list(latest.values())),
        "waited_since_start": _waited([span for spans in of_rank.values() for span in spans]),
        **_work(of_rank, here=not last.workers),
        "by_rank": ranks,
        "sources": _sources(run, last),
    }


def _phase(run: Run, last: Generation) -> str | None:
    """Return the name of the phase of a schedule after the last step, if it is known."""
    mix, position = last.first.mix, run.reached(last, last.most_steps)
    number = None if mix is None else mix.phase_at(position)
    return None if mix is None or mix.schedule is None or number is None else mix.schedule.plan[number].name


def _rank(rank: int, passes: list[Generation], span: Span | None, made: float) -> dict[str, Any]:
    mine = [one for one in passes if rank in one.steps]
    newest = mine[-1]
    last = max(one.last_steps[rank] for one in mine)
    process, space = newest.processes[rank]
    pace = (last - newest.marks[rank][0]) / max(1, newest.steps[rank] - 1)
    return {
        "rank": rank,
        "state": _state(made - last, pace, is_gone(process, space)),
        "last": last,
        "steps": sum(one.steps[rank] for one in mine),
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
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def _waited(spans: list[Span]) -> float | None:
    seconds = sum(span.seconds for span in spans)
    return min(1.0, sum(span.waited for span in spans) / seconds) if seconds else None


def _work(of_rank: dict[int, list[Span]], *, here: bool) -> dict[str, Any]:
    """Return the seconds of work by stage, the shares of padding and of full sequences, since the start.

    ``here``: all work was done while the model waited, by no workers.
    """
    total, seconds, waited = Figures(), 0.0, 0.0
    for spans in of_rank.values():
        for span in spans:
            total, seconds, waited = total.plus(span.figures), seconds + span.seconds, waited + span.waited
    stages = {name: getattr(total, name) / 1000 for name in STAGES if getattr(total, name)}
    rest = waited - sum(stages.values())
    if here and stages and rest > _REST * waited:
        stages["other"] = rest
    is_packed = total.packed is not None and bool(total.places)
    padding = 1 - total.tokens / total.slots if total.tokens is not None and total.slots else None
    return {
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
    marks = last.marks[rank][1]
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


def _sources(run: Run, last: Generation) -> list[dict[str, Any]]:
    """Return the sources of a run that has several, with the rows that the epoch has consumed of each."""
    sources = sources_of(run, last, max(last.steps.values()))
    total = sum(one.consumed for one in sources)
    if len(sources) < 2:
        return []
    return [{**vars(one), "share": one.consumed / total if total else None} for one in sources]
