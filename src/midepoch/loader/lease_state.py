"""The acknowledged part of a pass, as steps of a plan or outputs of lanes; and the steps that are left of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from midepoch.loader.plans import Asked, EpochPlan, StepPlan
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursors
from midepoch.pipeline.lanes import Share, StepOutputs

Outputs = Mapping[int, Intervals]
"""Numbers of outputs, by lane."""


class Frontier(NamedTuple):
    """The progress of acknowledgements. ``oldest``: the first step that is not in ``acked``.

    ``at``: the cursor after it or, if ``over`` (nothing is out), that after the step before. ``complete``: the pass has
    no more steps, and nothing is out.
    """

    acked: Intervals
    oldest: int
    at: Any
    over: bool
    complete: bool


class Taken(Protocol):
    """The acknowledged part of a pass, in the units of a state."""

    def add(self, steps: Mapping[int, Any], *, recorded: bool) -> Outputs:
        """Add acknowledged steps, with the cursors after them. Return their outputs by lane, or as lane 0 their turns.

        ``recorded``: False if the latter are not needed.

        Adding a step twice does no harm.
        """

    def saved(self, frontier: Frontier, *, alone: bool) -> tuple[Cursor, str]:
        """Return the cursor of a state, and what one of several ranks adds to it. ``alone``: this is the only rank."""


class LeasedSteps:
    """Acknowledged steps of a plan."""

    def __init__(self, plan: EpochPlan, start: Cursor, shard: Shard) -> None:
        self._plan, self._start, self._shard = plan, start, shard

    def add(self, steps: Mapping[int, Any], *, recorded: bool) -> Outputs:
        return {0: self._turns(Intervals.from_positions(steps))} if recorded else {}

    def _turns(self, steps: Intervals) -> Intervals:
        return Intervals.of(self._plan.turns(steps.starts), self._plan.turns(steps.stops))

    def saved(self, frontier: Frontier, *, alone: bool) -> tuple[Cursor, str]:
        plan, oldest = self._plan, frontier.oldest
        turns = self._turns(frontier.acked.from_(oldest))
        if alone:
            # Among the positions in between, those that are not delivered in the pass are done as well.
            done = Intervals.of(plan.done.remaining(turns.starts), plan.done.remaining(turns.stops - 1) + 1)
            return plan.cursor_with(self._start, oldest, done, alone=True), ""
        # At the end there may be one more step, with nothing for this rank.
        (turn,) = plan.turns(np.array([oldest + frontier.complete])).tolist()
        fields = [self._shard.index, self._shard.count, turn, turns.encode()]
        return plan.cursor_with(self._start, oldest, EMPTY, alone=False), json.dumps(fields, separators=(",", ":"))


class LeasedLanes:
    """Acknowledged outputs of lanes."""

    def __init__(self, shard: Shard, share: Share) -> None:
        self._shard, self._share = shard, share
        self._outputs: dict[int, Intervals] = {}

    def add(self, steps: Mapping[int, Any], *, recorded: bool) -> Outputs:  # noqa: ARG002
        found: dict[int, tuple[list[int], list[int]]] = {}
        for deal in steps.values():
            assert isinstance(deal, StepOutputs)
            for lane, first, stop in deal.own_outputs():
                starts, stops = found.setdefault(lane, ([], []))
                starts.append(first)
                stops.append(stop)
        outputs = {lane: Intervals.of(*edges) for lane, edges in found.items()}
        for lane, some in outputs.items():
            while True:  # a signal handler may add some meanwhile
                before = self._outputs.get(lane, EMPTY)
                after = before.union(some)
                if self._outputs.get(lane, EMPTY) is before:
                    self._outputs[lane] = after
                    break
        return outputs

    def saved(self, frontier: Frontier, *, alone: bool) -> tuple[Cursor, str]:
        cursor = lane_cursor(frontier)
        if cursor.lanes is None:
            return cursor, ""
        is_shared = self._share.shard.count > 1
        texts = {lane: self._outputs[lane].encode() for lane in sorted(self._outputs) if is_shared}
        own = "" if alone else json.dumps([self._shard.index, self._shard.count, texts], separators=(",", ":"))
        if is_shared:
            return cursor, own
        lanes = {
            lane: replace(one, done=one.done.union(self._outputs.get(lane, EMPTY)).from_(one.outputs))
            for lane, one in cursor.lanes.by_lane.items()
        }
        return cursor._replace(lanes=LaneCursors(lanes, cursor.lanes.known)), own


def lane_cursor(frontier: Frontier) -> Cursor:
    """Return the cursor of lanes before the oldest step that is not acknowledged."""
    at = frontier.at
    if isinstance(at, StepOutputs):
        at = at.cursor() if frontier.over else at.cursor(0)
    assert isinstance(at, Cursor)
    return at


@dataclass(frozen=True)
class RemainingSteps:
    """The steps of a plan without those that are acknowledged. Step i is the i-th that remains."""

    plan: StepPlan
    acked: Intervals

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def rows(self) -> int:
        return self.plan.rows

    @property
    def end(self) -> int | None:
        return self.plan.end

    @property
    def end_cursor(self) -> Cursor:
        return self.plan.end_cursor

    def _step(self, number: int) -> int:
        """Return the number in the plan of a step that remains."""
        return self.acked.remaining(number)

    def has(self, step: int) -> bool:
        return self.plan.has(self._step(step))

    def has_for(self, step: int, shard: Shard) -> bool:
        return self.plan.has_for(self._step(step), shard)

    def share(self, shard: Shard) -> int:
        return self.acked.before(self.plan.share(shard))

    def ask(self, steps: Sequence[int], shard: Shard) -> Asked:
        parts = [self.plan.ask(run, shard) for run in _runs([self._step(step) for step in steps])]
        if len(parts) == 1:
            return parts[0]
        offsets = [0, *accumulate(len(part.positions) for part in parts)]
        ends = [0, *(offset + end for part, offset in zip(parts, offsets, strict=False) for end in part.ends[1:])]
        genuine = None if parts[-1].genuine is None else offsets[-2] + parts[-1].genuine  # padding is in the last step
        known = [part.rows for part in parts if part.rows is not None]
        rows = np.concatenate(known) if len(known) == len(parts) else None
        return Asked(np.concatenate([part.positions for part in parts]), ends, genuine, rows)

    def batch_rows(self, shard: Shard) -> int:
        return self.plan.batch_rows(shard)

    def first_position(self, step: int) -> int:
        return self.plan.first_position(self._step(step))

    def place(self, step: int) -> str:
        return self.plan.place(self._step(step))

    def cursor(self, step: int) -> Cursor:
        return self.plan.cursor(self._step(step))

    def left_out(self, ranks: int) -> int:
        return self.plan.left_out(ranks)

    def known(self, rows: int) -> int:
        return self.plan.known(rows)


def _runs(steps: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive steps."""
    run: list[int] = []
    for step in steps:
        if run and step != run[-1] + 1:
            yield run
            run = []
        run.append(step)
    yield run
