"""Leaving out steps or rows that are not delivered yet: ``Loader.exclude``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index
from typing import Any

from midepoch.loader.counted import Counted
from midepoch.loader.equal import RankConsistencyCheck
from midepoch.loader.lanes import LaneSteps
from midepoch.loader.plans import Plan
from midepoch.loader.token_plan import TokenPlan
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursors
from midepoch.pipeline.excluded import rows_by_source, source_names
from midepoch.pipeline.lanes import Lanes
from midepoch.pipeline.rows import BundlesHere
from midepoch.pipeline.spec import PipelineSpec

_log = logging.getLogger("midepoch")
_MANY_STEPS = 1_000
"""Steps above which a warning is logged: running them may take minutes, if functions of the pipeline are slow."""


class Excluding(Counted):
    """The method of a loader that leaves out steps or rows."""

    _counterparts: RankConsistencyCheck | None = None
    _excluded: tuple[int, Mapping[int, Intervals]] = (0, {})
    """An epoch, and what ``exclude(steps=…)`` left out of it in this process."""

    def exclude(
        self, *, steps: range | None = None, rows: Iterable[int] | Mapping[str | int, Iterable[int]] | None = None
    ) -> int:
        """Leave out steps of this epoch, or rows. Return the number of rows (or outputs) that are left out.

        ``steps``: a range of steps of this epoch that are not delivered yet. Steps are numbered from 0 as by
        ``loader.steps``, if the loader counts them, else from the beginning of the epoch: step k is global batch k. An
        excluded step counts as taken, so later steps keep their numbers. Its rows stay excluded if the batch size or
        the world size changes later.

        ``rows``: numbers of rows before shuffling; with several sources, a dict by the name or number of the source.
        They are left out of the rest of this epoch and of every later one.

        If the pipeline changes the number of rows (a filter, ``pack``, ``mix``), excluding steps runs it up to the last
        of them, which takes as long as delivering these steps.

        The state has the exclusion. Call it with the same arguments on all ranks: before iterating, between two
        batches, or after ``load_state_dict``. With batches by ``max_tokens``, it returns the number of batches.
        """
        if (steps is None) == (rows is None):
            raise TypeError("exclude() takes either steps= or rows=. Pass one of them.")
        cursor = self.next_cursor()
        if steps is not None:
            first, stop = _range_of(steps)
            before = _done_by_lane(cursor)
            cursor, count = self._without_steps(cursor, first, stop)
            known = self._excluded[1] if self._excluded[0] == cursor.epoch else {}
            self._excluded = (
                cursor.epoch,
                {
                    lane: done.minus(before.get(lane, EMPTY)).union(known.get(lane, EMPTY))
                    for lane, done in _done_by_lane(cursor).items()
                },
            )
            _log.info("steps %d to %d are excluded: %d %s", first, stop - 1, count, self._counted_unit)
            self._continue_at(cursor, self._spec)
            return count
        assert rows is not None
        spec, count = self._without_rows(cursor, rows)
        _log.info("%d rows are excluded from the next batch on", count)
        self._continue_at(cursor, spec)
        return count

    def excluded_places(self, cursor: Cursor) -> dict[int, Intervals]:
        """Return what is excluded after a cursor, for the ledger: outputs by lane, or positions under lane 0.

        Acknowledged leases are not part of it.
        """
        epoch, known = self._excluded
        found = {
            lane: known.get(lane, EMPTY).intersection(done)
            for lane, done in (_done_by_lane(cursor) if epoch == cursor.epoch else {}).items()
        }
        if self._spec.excluded and self._spec.has_positions:
            rows = self._spec.excluded_positions(cursor.epoch).from_(cursor.position)
            found[0] = rows.union(found.get(0, EMPTY))
        return {lane: places for lane, places in found.items() if places}

    @property
    def _counted_unit(self) -> str:
        if not self._spec.has_positions:
            return "outputs"
        return "rows" if self._options.planning is None else "batches"

    def next_cursor(self) -> Cursor:
        """Return the cursor from which the next batch is delivered."""
        at = self._where()
        live = self._live()
        if live is not None and live.is_open:
            return live.start if live.start.epoch > at.epoch else at
        return Cursor(at.epoch + 1, steps=at.steps) if self._is_over(at) else at

    def _continue_at(self, cursor: Cursor, spec: PipelineSpec) -> None:
        """Continue at a cursor, with a spec that differs in what is not delivered yet."""
        raise NotImplementedError

    def _without_steps(self, cursor: Cursor, first: int, stop: int) -> tuple[Cursor, int]:
        """Return a cursor without the steps, and the number of rows, batches or outputs in them."""
        plan = self.plan(cursor)
        if plan is None:
            return self._without_outputs(cursor, first, stop)
        assert isinstance(plan, (Plan, TokenPlan))
        numbers = plan.numbers
        _check_ahead(first, numbers.number(0))
        begin, end = numbers.step(first), numbers.step(stop)
        if not plan.has(numbers.step(stop - 1)):
            count = plan.share(self.shard) if isinstance(plan, TokenPlan) else len(plan)
            raise _not_in_epoch(stop - 1, numbers.number(count - 1) if count else -1, cursor.epoch)
        if begin == end:
            return cursor, 0
        low, high = plan.between(begin, end)
        done = cursor.done.union(Intervals.of(low, high))
        count = high - low - plan.done.count(low, high)
        if isinstance(plan, TokenPlan):
            return plan.beginning(done), count
        return cursor._replace(done=done), count

    def _without_outputs(self, cursor: Cursor, first: int, stop: int) -> tuple[Cursor, int]:
        """Return a cursor in lanes without the steps, and the number of outputs in them on this rank.

        The outputs of a step are known only after it is made, so the pipeline runs ahead, up to the last of the steps.
        """
        spec, options = self._spec, self._options
        if not cursor.begun:
            spec = spec.for_processes(spec.shard.count)
        lanes = spec.open(spec.shard, BundlesHere(spec.leaves, shared=spec.shard.count > 1), cursor)
        beginning = lanes.cursor()
        size = options.batch_size * spec.shard.count
        counts = options.counts(cursor)
        number = cursor.steps if counts else cursor.position // size
        _check_ahead(first, number)
        if stop - number > _MANY_STEPS:
            _log.warning(
                "exclude(steps=…) runs the pipeline for %d steps, up to step %d: the outputs of a step are known only "
                "after it is made. Exclude steps shortly before they are delivered.",
                stop - number,
                stop - 1,
            )
        steps = LaneSteps(lanes, options, None, number, counts=True)
        taken = [EMPTY] * len(lanes.numbers)
        count = 0
        while steps.number < stop:
            before = lanes.outputs.copy()
            deal = steps.next()
            if deal is None:
                break
            if first < steps.number <= stop:
                taken = [
                    done.union(Intervals.of(a, b)) for done, a, b in zip(taken, before, lanes.outputs, strict=True)
                ]
                count += deal.total
        if steps.number < stop and lanes.share.lanes.count == 1:  # else other ranks may have it
            raise _not_in_epoch(stop - 1, steps.number - 1, cursor.epoch)
        return _with_done(beginning, lanes, taken)._replace(steps=cursor.steps), count

    def _without_rows(self, cursor: Cursor, rows: Any) -> tuple[PipelineSpec, int]:
        """Return the spec without some rows, and the number of rows that were not excluded before."""
        spec = self._spec
        if self._options.planning is not None:
            raise ValueError(
                "exclude(rows=…) is not possible with batches by max_tokens, which are planned with these rows. "
                "Exclude the steps that have them, or choose other rows: ds.select(…).loader(…)."
            )
        if not spec.has_positions and cursor.begun:
            raise ValueError(
                "exclude(rows=…): this pipeline changes the number of rows, so rows can be excluded only at the "
                "beginning of an epoch. Exclude steps, or call it before the first batch of an epoch."
            )
        excluded = rows_by_source(rows, spec.node.leaves, source_names(spec.node))
        before = spec.excluded or (EMPTY,) * len(excluded)
        together = tuple(a.union(b) for a, b in zip(before, excluded, strict=True))
        return replace(spec, excluded=together), sum(map(len, together)) - sum(map(len, before))


def _done_by_lane(cursor: Cursor) -> dict[int, Intervals]:
    """Return what is not delivered after a cursor: outputs by lane, or positions under lane 0."""
    if cursor.lanes is None:
        return {0: cursor.done}
    return {lane: at.done for lane, at in cursor.lanes.by_lane.items()}


def _with_done(cursor: Cursor, lanes: Lanes, taken: list[Intervals]) -> Cursor:
    assert cursor.lanes is not None
    by_lane = dict(cursor.lanes.by_lane)
    for lane, done in zip(lanes.numbers, taken, strict=True):
        by_lane[lane] = replace(by_lane[lane], done=by_lane[lane].done.union(done))
    return cursor._replace(lanes=LaneCursors(by_lane, cursor.lanes.known))


def _range_of(steps: Any) -> tuple[int, int]:
    """Return the first step, and the one after the last."""
    if not isinstance(steps, range) or steps.step != 1 or not len(steps):
        raise ValueError(f"exclude(steps=…) takes a range of steps such as range(100, 120), got {steps!r:.60}")
    return index(steps.start), index(steps.stop)


def _check_ahead(first: int, number: int) -> None:
    if first < number:
        raise ValueError(
            f"exclude(steps=…): step {first} is not ahead. The next step is {number}. "
            "To leave out earlier steps, load a state from before them first."
        )


def _not_in_epoch(step: int, last: int, epoch: int) -> ValueError:
    ends = f"its last step is {last}" if last >= 0 else "no step is left of it"
    return ValueError(
        f"exclude(steps=…): step {step} is not in epoch {epoch}: {ends}. Exclude steps of a later epoch "
        "when it has begun."
    )
