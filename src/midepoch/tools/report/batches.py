"""Batches by tokens: padding, tokens per batch, and the balance over ranks, planned again from the stored lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.audit import Run
from midepoch.errors import StateError
from midepoch.pipeline.plans import TokenPlan

_MOST_BATCHES = 20_000
_POINTS = 200

Array = npt.NDArray[Any]


def batches(run: Run) -> dict[str, Any] | None:
    """Return the numbers of the batches of the last pass. None if they are not by tokens."""
    last = run.generations[-1]
    if not last.shape.batching.budget or last.in_lanes:
        return None
    try:
        plan = run.plan_of(last)
    except StateError as problem:
        return {"problem": str(problem)}
    assert isinstance(plan, TokenPlan)
    known, first = plan.batches, last.shape.start
    budget, lengths = known.planning.budget, known.planning.lengths
    order = run.order.source.at(last.shape.epoch)
    rows: list[int] = []
    tokens, slots, costs = list[int](), list[int](), list[float]()
    while len(rows) < _MOST_BATCHES and known.window_of(first + len(rows)) is not None:
        own = lengths.of(order.chosen(known.positions(first + len(rows))))
        sizes = -(-np.maximum(own, 1) // budget.multiple) * budget.multiple
        rows.append(len(own))
        tokens.append(int(own.sum()))
        slots.append(len(own) * int(sizes.max()) if budget.padded else int(sizes.sum()))
        costs.append(len(own) * float(sizes.max()) ** 2 if budget.padded else float((sizes.astype(float) ** 2).sum()))
    if not rows:
        return None
    whole = len(rows) // last.shape.ranks * last.shape.ranks
    by_step = np.array(slots[:whole], dtype=np.float64).reshape(-1, last.shape.ranks)
    by_cost = np.array(costs[:whole]).reshape(-1, last.shape.ranks)
    return {
        "epoch": last.shape.epoch,
        "count": len(rows),
        "all": known.total == first + len(rows),
        "max_tokens": budget.tokens,
        "window": budget.window,
        "padded": budget.padded,
        "balance": budget.balance,
        "padding": 1 - sum(tokens) / sum(slots),
        "fill": float(np.mean(slots)) / budget.tokens,
        "rows": [int(np.min(rows)), float(np.median(rows)), int(np.max(rows))],
        "tokens": float(np.mean(tokens)),
        "spread": {"tokens": _spread(by_step), "quadratic": _spread(by_cost)},
        "steps": _thinned(by_step),
        "ranks": last.shape.ranks,
    }


def _spread(by_step: Array) -> float | None:
    """Return by how much the largest cost of a step exceeds the mean of its ranks, on average."""
    return float((by_step.max(axis=1) / by_step.mean(axis=1) - 1).mean()) if by_step.size else None


def _thinned(by_step: Array) -> list[list[float]]:
    """Return some steps: number, mean tokens with padding of a rank, and the most of a rank."""
    chosen = np.unique(np.linspace(0, len(by_step) - 1, _POINTS).astype(int)).tolist() if len(by_step) else []
    return [[step + 1, float(by_step[step].mean()), float(by_step[step].max())] for step in chosen]
