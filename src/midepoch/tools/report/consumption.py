"""Consumption of each epoch by each start of the run, and its speed over time and ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from midepoch.audit import Run
from midepoch.audit.coverage import pieces_of
from midepoch.audit.passes import Generation

_MOST_RANKS = 64
"""Maximum number of ranks with a curve of their own. Of more ranks, only the sum is shown."""
_MOST_POINTS = 600


def of_run(run: Run) -> dict[str, Any]:
    """Return the contents of the ledger as plain numbers."""
    starts = {name: number for number, name in enumerate(dict.fromkeys(one.shape.attempt for one in run.every))}
    kept = set(map(_key, run.generations))
    order = run.order
    pieces = _pieces(run, starts, kept)
    return {
        "folder": run.folder.name,
        "name": run.streams[run.stream],
        "steps": run.steps,
        "exact": run.exact,
        "problems": run.problems,
        "starts": len(starts),
        "worlds": run.worlds,
        "seed": order.about["seed"],
        "pipeline": order.about["pipeline"],
        "epochs": [
            {
                "epoch": proof.epoch,
                "rows": proof.rows,
                "once": proof.once,
                "repeated": proof.repeated,
                "never": proof.never,
                "dropped": proof.dropped,
                "filtered": proof.filtered,
                "pending": proof.pending,
                "skipped": proof.skipped,
                "again": proof.again,
                "steps": proof.steps,
                "exact": proof.exact,
                "complete": proof.complete,
                "examples": list(proof.examples),
                "pieces": pieces[proof.epoch],
            }
            for proof in run.epochs
        ],
        "passes": [_pass(one, starts[one.shape.attempt], _key(one) in kept) for one in run.every],
        "speed": _speed(run, starts),
    }


def _key(one: Generation) -> Any:
    """Return the key of a pass, also in the history that the weights have."""
    return one.shape, one.beginning


def _pieces(run: Run, starts: dict[str, int], kept: set[Any]) -> dict[int, list[dict[str, Any]]]:
    """Return by epoch the positions that each pass delivered: kept, or repeated after a crash."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in [*run.generations, *(one for one in run.every if _key(one) not in kept)]:
        about = {"start": starts[one.shape.attempt], "ranks": one.shape.ranks}
        here = found[one.shape.epoch]
        if one.lanes:
            here += _lane_pieces(run, one, about, _key(one) in kept)
            continue
        made = max(map(one.made, one.steps))
        gone = one.shape.start if _key(one) not in kept else one.until
        if _key(one) in kept:
            for piece in pieces_of(one):
                share = 1.0 if piece.residues is None else len(piece.residues) / piece.modulus
                here.append({**about, "from": piece.start, "to": piece.stop, "share": share, "again": False})
        if made > gone:
            here.append({**about, "from": gone, "to": made, "share": 1.0, "again": True})
    return found


def _lane_pieces(run: Run, one: Generation, about: dict[str, Any], kept: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of the sources that a pass consumed, counted over all lanes."""
    lanes = run.lanes_of(one)
    begin = lanes.rows_before(one)
    reached = begin + lanes.rows_of(one, one.kept_steps if kept else 0)
    made = begin + lanes.rows_of(one, max(one.steps.values()))
    if reached > begin:
        yield {**about, "from": begin, "to": reached, "share": 1.0, "again": False}
    if made > reached:
        yield {**about, "from": reached, "to": made, "share": 1.0, "again": True}


def _pass(one: Generation, start: int, kept: bool) -> dict[str, Any]:
    return {
        "start": start,
        "epoch": one.shape.epoch,
        "from": one.shape.start,
        "to": max(map(one.made, one.steps)),
        "ranks": one.shape.ranks,
        "batch": one.shape.global_batch,
        "began": one.times[0],
        "last": one.times[1],
        "how": one.how,
        "kept": kept,
        "missing": len(one.missing),
    }


def _speed(run: Run, starts: dict[str, int]) -> list[dict[str, Any]]:
    """Return by pass and rank: [time, rows/s, share of the time waited, seconds], between two marks."""
    found = []
    for one in run.every:
        ranks = one.shape.ranks
        own = one.shape.global_batch / ranks
        about = {"start": starts[one.shape.attempt], "epoch": one.shape.epoch, "ranks": ranks}
        curves = {rank: _curve(began, marks, own) for rank, (began, marks) in one.marks.items()}
        curves = {rank: points for rank, points in curves.items() if points}
        if ranks > _MOST_RANKS:
            curves = {-1: _all_together(curves)} if curves else {}
        for rank, points in sorted(curves.items()):
            found.append({**about, "rank": rank, "points": _thinned(points)})
    return found


def _curve(began: float, marks: tuple[tuple[int, int, int], ...], rows: float) -> list[list[float]]:
    points, last = [], (0, 0, 0)
    for mark in marks:
        steps, span, waited = mark[0] - last[0], mark[1] - last[1], mark[2] - last[2]
        if span > 0 and steps > 0:
            share = round(min(1.0, waited / span), 4)
            points.append([round(began + mark[1] / 1000, 3), round(1000 * steps * rows / span, 2), share, span / 1000])
            last = mark
    return points


def _all_together(curves: dict[int, list[list[float]]]) -> list[list[float]]:
    """Return the sum of all ranks' rows/s, and the mean of their waiting, in spans of ten seconds."""
    spans: dict[int, list[list[float]]] = defaultdict(list)
    for points in curves.values():
        for point in points:
            spans[int(point[0] // 10)].append(point)
    ranks = len(curves)
    return [
        [
            10.0 * span,
            sum(point[1] for point in points) * ranks / len(points),
            sum(point[2] for point in points) / len(points),
            sum(point[3] for point in points),
        ]
        for span, points in sorted(spans.items())
    ]


def _thinned(points: list[list[float]]) -> list[list[float]]:
    return points[:: max(1, -(-len(points) // _MOST_POINTS))]
