"""Batches of lanes, if positions cannot be computed. Ranks agree on the number of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from midepoch._internal.timings import Timings
from midepoch.errors import MidepochError
from midepoch.loader.equal import EqualSteps
from midepoch.loader.options import Options
from midepoch.loader.phase_sizes import PhaseSizes
from midepoch.loader.plans import Made
from midepoch.loader.present import Presenter
from midepoch.order import Shard
from midepoch.pipeline.chunk import Bunches, Items
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes, StepOutputs
from midepoch.pipeline.rows import Bundles, BundlesHere
from midepoch.pipeline.spec import PipelineSpec


class LaneSteps:
    """The steps of one rank. A step is ``PADDING`` if other ranks have outputs left and this one has not."""

    PADDING = object()

    def __init__(self, lanes: Lanes, options: Options, equal: EqualSteps | None, first_step: int = 0) -> None:
        self._lanes, self._size, self._last_batch = lanes, options.batch_size, options.last_batch
        self._sizes, self._step = options.sizes, first_step
        self._phases = None if options.schedule is None else PhaseSizes(options.schedule, lanes)
        self._equal = equal
        self._ready: deque[StepOutputs] = deque()
        self._left, self._over = 0, False
        self._failure: Exception | None = None
        if equal is not None:
            equal.begin()

    @property
    def number(self) -> int:
        """The number of steps so far, in the run."""
        return self._step

    def next(self) -> Any:
        """Return the next outputs, or PADDING, or None at the end."""
        if self._equal is None:
            return self._take()
        while not self._left:
            if self._over:
                return None
            self._agree(self._equal)
        if self._failure is not None and not self._ready:
            raise self._failure
        self._left -= 1
        return self._ready.popleft() if self._ready else self.PADDING

    def _take(self) -> StepOutputs | None:
        if self._lanes.done is not None:
            self._lanes.skip_done()
        size, left = self._size if self._sizes is None else self._sizes.at(self._step), None
        if self._phases is not None:
            size, left = self._phases.next()
        full = size * self._lanes.share.shard.count  # outputs of a step, of all ranks that share the lanes
        full = full if left is None else min(full, left)
        outputs = self._lanes.take(size, left)
        if outputs is None or (self._last_batch == "drop" and outputs.total < full):
            return None
        self._step += 1
        outputs.steps = self._step
        return outputs

    def _agree(self, equal: EqualSteps) -> None:
        """Look ahead, and agree. An error ahead is raised in its turn, after the good steps before it."""
        ahead = equal.ahead
        try:
            while len(self._ready) < ahead and (deal := self._take()) is not None:
                self._ready.append(deal)
        except Exception as problem:
            if not self._ready:
                raise
            self._failure = problem
        counts = equal.agree(len(self._ready) if self._failure is None else ahead)
        self._left = min(counts) if self._last_batch == "drop" else max(counts)
        self._over = self._left < ahead
        while self._over and len(self._ready) > self._left:
            self._ready.pop()


class LaneBatches:
    """The batches of a rank, made of the outputs of its lanes."""

    def __init__(
        self,
        spec: PipelineSpec,
        options: Options,
        bundles: Callable[[], Bundles],
        cursor: Cursor,
        equal: EqualSteps | None,
        timings: Timings,
    ) -> None:
        self._spec, self._options, self._bundles, self._epoch = spec, options, bundles, cursor.epoch
        self._presenter = Presenter(spec, options)
        self._mine = bundles()
        self._lanes = spec.open(spec.shard, self._mine, cursor, traced=bool(options.provenance))
        self._delivered_steps = cursor.steps
        self._steps = LaneSteps(self._lanes, options, equal, cursor.steps)
        self._timings, self._skipped, self._counted = timings, self._count_skipped(), (0, 0)
        here = isinstance(self._mine, BundlesHere) or not any(leaf.tail or leaf.can_skip for leaf in spec.leaves)
        self._measures = here and equal is None  # else workers or other ranks are waited for
        self._last: Items | None = None
        self.begun = False
        """True if a step was taken, by this rank or by others that share its lanes."""

    @property
    def packed(self) -> tuple[int, int]:
        """Tokens packed so far, and the token slots of their sequences."""
        return self._lanes.packing.tokens, self._lanes.packing.places

    @property
    def end(self) -> Cursor:
        """The cursor at the end of the epoch. Outputs that are left in the lanes are omitted."""
        return self._lanes.cursor().at_end()._replace(steps=self._delivered_steps)

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end."""
        while (deal := self._measured_step() if self._measures else self._steps.next()) is not None:
            self.begun = True
            self._delivered_steps = self._delivered_steps + 1 if deal is LaneSteps.PADDING else deal.steps
            began = perf_counter()
            if deal is LaneSteps.PADDING:
                # This rank has reached its end, and others have not.
                value, traced = self._presenter.padding(self._something(), self._epoch)
                return Made(value, self.end, traced=traced)
            rows = deal.items.row_count if isinstance(deal.items, Bunches) else len(deal.items)
            if len(deal.items):
                self._last = deal.items
                value, traced = self._presenter.batch(deal.items, self._epoch)
            elif self._options.last_batch == "pad":
                value, traced = self._presenter.padding(deal.some, self._epoch)
            else:
                continue  # all of it is for other ranks
            self._timings.present += perf_counter() - began
            if self.packed != self._counted:
                self._count_packed()
            before, self._skipped = self._skipped, self._count_skipped()
            return Made(value, deal, rows, self._skipped - before, traced=traced)
        return None

    def _measured_step(self) -> Any:
        """Return the next step. What it took besides reading and functions was mixing, packing and grouping."""
        timings, began = self._timings, perf_counter()
        before = timings.read + timings.functions
        deal = self._steps.next()
        timings.combine += max(0.0, perf_counter() - began - (timings.read + timings.functions - before))
        return deal

    def close(self) -> bool:
        """Leave the workers to their pool."""
        return True

    def _count_packed(self) -> None:
        (tokens, places), (before, places_before) = self.packed, self._counted
        self._timings.packed += tokens - before
        self._timings.places += places - places_before
        self._counted = tokens, places

    def _count_skipped(self) -> int:
        return self._mine.skipped + self._lanes.packing.skipped

    def _something(self) -> Items:
        """Return some outputs to pad with.

        They are the last outputs of this rank; after a resume the first of the epoch; or, if its lanes have none, the
        first of another rank, which has one, else there would be no step.
        """
        if self._last is None:
            beginning = Cursor(self._epoch)
            deal = self._first(self._spec.shard, beginning) or self._first(Shard(), beginning)
            if deal is None:
                raise MidepochError('there are no rows to pad with. Use last_batch="drop".')
            self._last = deal.some
        return self._last

    def _first(self, process: Shard, beginning: Cursor) -> StepOutputs | None:
        traced = bool(self._options.provenance)
        return self._spec.open(process, self._bundles(), beginning, traced=traced).take(1)
