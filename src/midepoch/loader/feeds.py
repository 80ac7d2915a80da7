"""Feeds: the batches of one pass on one rank, from a plan where positions can be computed, else from lanes.

This is the place where a loader asks which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable

from midepoch._internal.processes import silent_at_exit
from midepoch._internal.progress import Timings
from midepoch.loader.batches import BatchMaker
from midepoch.loader.direct import DirectBatches, GroupedBatches, ThreadedBatches
from midepoch.loader.lanes import EqualSteps, LaneBatches
from midepoch.loader.movers import FedBatches, MovedBatches, Mover, is_of_jax, mover_for
from midepoch.loader.options import Options
from midepoch.loader.plans import BatchSource, MadeBatch, make_plan
from midepoch.loader.workers import BundlePool, WorkerBatches, WorkerPool
from midepoch.order import Shard
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.plans import Delivered, PlanStep, StepPlan
from midepoch.pipeline.rows import Bundles, BundlesHere
from midepoch.pipeline.spec import PipelineSpec


class PlanFeed:
    """The batches of a rank from a cursor to the end of the epoch, by a plan. They are opened with the first one."""

    finds_end = False
    """True if the end of an epoch is known only when another batch is asked for."""
    packed = (0, 0)
    begun = False

    def __init__(self, plan: StepPlan, shard: Shard, open_source: Callable[[StepPlan], BatchSource]) -> None:
        self.plan, self._shard, self._open = plan, shard, open_source
        self._source: BatchSource | None = None

    def next(self) -> MadeBatch | None:
        """Return the next batch, or None at the end. Raises the errors of making it."""
        if self._source is None:
            if not self.plan.has(0):
                return None
            self._source = self._open(self.plan)
        return self._source.next()

    def after(self, made: MadeBatch) -> Delivered:
        """Return the place after a batch."""
        assert isinstance(made.step, int)
        return PlanStep(self.plan, made.step)

    def left(self, delivered: int) -> int | None:
        """Return the number of batches that follow after so many, if it is known."""
        return max(0, self.plan.share(self._shard) - delivered) if self.plan.count_known() else None

    def complete(self, delivered: int) -> bool:
        """Return True if it is known that nothing follows for this rank after so many batches."""
        return not self.plan.has_for(delivered, self._shard)

    @property
    def end(self) -> Cursor:
        """The cursor at the end of the epoch."""
        return self.plan.end_cursor

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        source, self._source = self._source, None
        return source is None or source.close()


class LaneFeed:
    """The batches of a rank to the end of the epoch, from lanes. Its methods are documented on ``PlanFeed``.

    ``wrap``: moves the batches to a device.
    """

    plan = None
    finds_end = True

    def __init__(self, lanes: LaneBatches, wrap: Callable[[BatchSource], BatchSource]) -> None:
        self._lanes, self._source = lanes, wrap(lanes)

    def next(self) -> MadeBatch | None:
        return self._source.next()

    def close(self) -> bool:
        return self._source.close()

    def after(self, made: MadeBatch) -> Delivered:
        assert not isinstance(made.step, int)
        return made.step

    def left(self, delivered: int) -> int | None:  # noqa: ARG002
        return None

    def complete(self, delivered: int) -> bool:  # noqa: ARG002
        return False

    @property
    def begun(self) -> bool:
        """True if a step was taken that had a batch for some rank."""
        return self._lanes.begun

    @property
    def end(self) -> Cursor:
        return self._lanes.end

    @property
    def packed(self) -> tuple[int, int]:
        """Tokens packed so far, and the token slots of their sequences."""
        return self._lanes.packed


Feed = PlanFeed | LaneFeed


class Feeds:
    """Opens feeds, and keeps makers and workers between them. Disposable: nothing of it is saved."""

    def __init__(self, options: Options, equal: EqualSteps | None, timings: Timings) -> None:
        self._options, self._equal, self._timings = options, equal, timings
        self._maker: BatchMaker | None = None
        self._pool: WorkerPool | None = None
        self._bundles: BundlesHere | BundlePool | None = None
        self._mover: Mover | None = None

    def open(self, spec: PipelineSpec, cursor: Cursor, *, alone: bool = False, plan: StepPlan | None = None) -> Feed:
        """Open the batches of a rank from a cursor on.

        ``alone``: ranks do not agree on their steps. ``plan``: other steps than all from the cursor on.
        """
        if self._mover is None:
            self._mover = mover_for(self._options)
        if spec.unit == "rows":
            plan = make_plan(spec, self._options, cursor) if plan is None else plan
            return PlanFeed(plan, spec.shard, lambda steps: self._moved(spec, self._planned(spec, steps)))
        equal = None if alone else self._equal
        lanes = LaneBatches(spec, self._options, lambda: self._make_bundles(spec), cursor, equal, self._timings)
        return LaneFeed(lanes, lambda source: self._moved(spec, source, waits=equal is not None))

    def _moved(self, spec: PipelineSpec, source: BatchSource, *, waits: bool = False) -> BatchSource:
        """Move batches to a device ahead, if the loader does. ``waits``: for other ranks."""
        if self._mover is None:
            return source
        kind = spec.format or "torch" if self._options.collate_fn is None else "python"
        if is_of_jax(self._options.device) and kind in ("torch", "jax"):
            kind = "numpy"  # which go to their device directly
        if waits or self._calls_functions(spec, source):
            return MovedBatches(source, self._mover, kind)
        return FedBatches(source, self._mover, kind)

    def _calls_functions(self, spec: PipelineSpec, source: BatchSource) -> bool:
        """Return True if a source calls functions of the user in this process. They stay in the caller's thread."""
        if isinstance(source, WorkerBatches):
            return False
        if self._options.collate_fn is not None:
            return True
        return spec.node.has_later_functions if self._options.num_workers else spec.node.has_functions

    def _planned(self, spec: PipelineSpec, plan: StepPlan) -> BatchSource:
        """Open the batches of a plan: copied, made by threads or workers, or made of groups of rows."""
        options = self._options
        if self._maker is None:
            self._maker = BatchMaker(spec.leaf, options, self._timings)
        if self._maker.direct:
            return DirectBatches(self._maker, plan, options.prefetch, options.num_workers)
        if spec.base.group is not None:
            return GroupedBatches(self._maker, self._make_bundles(spec), plan, spec.shard, spec.groups)
        if not options.num_workers or self._maker.decodes_only:
            return ThreadedBatches(self._maker, plan, options.prefetch)
        if self._pool is None or not self._pool.is_here:
            self._pool = WorkerPool(spec.leaf, options)
        return self._pool.begin(plan)

    def _make_bundles(self, spec: PipelineSpec) -> Bundles:
        if isinstance(self._bundles, BundlePool) and not self._bundles.is_here:
            self._bundles = None
        if self._bundles is None:
            leaves = (spec.leaf,) if spec.unit == "rows" else spec.leaves
            if self._options.num_workers and not spec.node.plain:
                self._bundles = BundlePool(leaves, self._options, self._timings)
            else:
                self._bundles = BundlesHere(leaves, shared=spec.shard.count > 1, timings=self._timings)
        self._bundles.begin(spec.excluded if spec.unit == "outputs" else ())
        return self._bundles

    def leave(self, feed: Feed | None, *, edited: bool = False) -> None:
        """Close a feed. Workers stop with it unless they are persistent, or the pass continues after an edit."""
        if feed is None:
            return
        if not feed.close():
            self.forget()  # a thread may still use them
        if isinstance(self._bundles, BundlePool) and not edited:
            self._bundles.forget()
        if self._options.num_workers and not self._options.persistent_workers and not edited:
            self.close()

    def forget(self) -> None:
        """Create new makers for the next feed: the pipeline has changed."""
        self.close()
        self._maker = None

    def close(self) -> None:
        """Stop the workers, and discard unfinished batches."""
        pools = (self._pool, self._bundles)
        self._pool = self._bundles = None
        for pool in pools:
            if pool is not None:
                pool.close()

    @silent_at_exit
    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None or getattr(self, "_bundles", None) is not None:
            self.close()
