"""Consumption of each epoch by each start of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from midepoch.audit import Run
from midepoch.audit.passes import Generation
from midepoch.tools.report.now import now
from midepoch.tools.report.speed import curves


def of_run(run: Run, made: float) -> dict[str, Any]:
    """Return the contents of the ledger as plain numbers. ``made``: the time at which it was read."""
    starts = {name: number for number, name in enumerate(dict.fromkeys(one.shape.attempt for one in run.every))}
    kept = set(map(_key, run.generations))
    order = run.order
    pieces = _pieces(run, starts, kept)
    return {
        "folder": run.folder.name,
        "name": run.streams[run.stream],
        "steps": run.steps,
        "unit": run.unit,
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
                "excluded": proof.excluded,
                "leases": None if proof.leases is None else proof.leases.totals,
                "steps": proof.steps,
                "exact": proof.exact,
                "complete": proof.complete,
                "examples": list(proof.examples),
                "pieces": pieces.get(proof.epoch, []),
            }
            for proof in run.epochs
        ],
        "weight_changes": [one._asdict() for one in run.weight_changes],
        "passes": [_pass(run, one, starts[one.shape.attempt], _key(one) in kept) for one in run.every],
        "speed": curves(run, starts),
        "now": now(run, made),
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
        begin, kept_steps = run.reached(one, 0), one.kept_steps if _key(one) in kept else 0
        common, most = (pick(min(count, kept_steps) for count in one.steps.values()) for pick in (min, max))
        common = 0 if one.missing else common
        edges = [run.reached(one, steps) for steps in (common, most, one.most_steps)]
        ahead = sum(count > common for count in one.steps.values()) / one.shape.ranks
        parts = ((begin, edges[0], 1.0, False), (edges[0], edges[1], ahead, False), (edges[1], edges[2], 1.0, True))
        here += [
            {**about, "from": first, "to": stop, "share": share, "again": again}
            for first, stop, share, again in parts
            if stop > first
        ]
    return {epoch: _joined(pieces) for epoch, pieces in found.items()}


def _joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pieces of one start that follow each other as one: a pass may have been left and continued."""
    joined: list[dict[str, Any]] = []
    for piece in pieces:
        if joined and piece == {**joined[-1], "from": joined[-1]["to"], "to": piece["to"]}:
            joined[-1] = {**piece, "from": joined[-1]["from"]}
        else:
            joined.append(piece)
    return joined


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


def _pass(run: Run, one: Generation, start: int, kept: bool) -> dict[str, Any]:
    return {
        "start": start,
        "epoch": one.shape.epoch,
        "from": run.reached(one, 0),
        "to": run.reached(one, one.most_steps),
        "ranks": one.shape.ranks,
        "batch": one.shape.global_batch,
        "workers": one.workers,
        "began": one.times[0],
        "last": one.times[1],
        "how": one.how,
        "kept": kept,
        "missing": len(one.missing),
    }
