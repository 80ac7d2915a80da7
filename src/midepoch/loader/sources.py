"""The engine of a loader: opens the source of batches for a pipeline, and keeps workers between passes."""

from __future__ import annotations

from midepoch._internal.threads import silent_at_exit
from midepoch._internal.timings import Timings
from midepoch.loader.batches import BatchMaker
from midepoch.loader.bundles import BundlePool
from midepoch.loader.direct import DirectBatches
from midepoch.loader.equal import EqualSteps
from midepoch.loader.grouped import GroupedBatches
from midepoch.loader.lanes import LaneBatches
from midepoch.loader.moved import FedBatches, MovedBatches, Mover
from midepoch.loader.movers import is_of_jax, mover_for
from midepoch.loader.options import Options
from midepoch.loader.plans import BatchSource, StepPlan
from midepoch.loader.threads import ThreadedBatches
from midepoch.loader.workers import WorkerBatches, WorkerPool
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.rows import Bundles, BundlesHere
from midepoch.pipeline.spec import PipelineSpec


class Sources:
    """Opens sources of batches. Disposable: nothing of it is saved."""

    def __init__(self, options: Options, equal: EqualSteps | None, timings: Timings) -> None:
        self._options, self._equal, self._timings = options, equal, timings
        self._maker: BatchMaker | None = None
        self._pool: WorkerPool | None = None
        self._bundles: BundlesHere | BundlePool | None = None
        self._mover: Mover | None = None

    def open(self, spec: PipelineSpec, cursor: Cursor, plan: StepPlan | None, *, alone: bool = False) -> BatchSource:
        """Open the batches of a rank from a cursor on. ``plan``: its steps, if positions can be computed.

        ``alone``: ranks do not agree on their steps.
        """
        equal = None if alone else self._equal
        if self._mover is None:
            self._mover = mover_for(self._options)
        source = self._open(spec, cursor, plan, equal)
        if self._mover is None:
            return source
        kind = spec.format or "torch" if self._options.collate_fn is None else "python"
        if is_of_jax(self._options.device) and kind in ("torch", "jax"):
            kind = "numpy"  # which go to their device directly
        if (plan is None and equal is not None) or self._calls_functions(spec, source):
            return MovedBatches(source, self._mover, kind)
        return FedBatches(source, self._mover, kind)

    def _calls_functions(self, spec: PipelineSpec, source: BatchSource) -> bool:
        """Return True if a source calls functions of the user in this process. They stay in the caller's thread."""
        if isinstance(source, WorkerBatches):
            return False
        if self._options.collate_fn is not None:
            return True
        return spec.node.has_later_functions if self._options.num_workers else spec.node.has_functions

    def _open(self, spec: PipelineSpec, cursor: Cursor, plan: StepPlan | None, equal: EqualSteps | None) -> BatchSource:
        options = self._options
        if plan is None:
            return LaneBatches(spec, options, lambda: self._make_bundles(spec), cursor, equal, self._timings)
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
            leaves = (spec.leaf,) if spec.has_positions else spec.leaves
            if self._options.num_workers and (spec.has_positions or not spec.node.plain):
                self._bundles = BundlePool(leaves, self._options, self._timings)
            else:
                self._bundles = BundlesHere(leaves, shared=spec.shard.count > 1, timings=self._timings)
        self._bundles.begin()
        return self._bundles

    def leave(self, source: BatchSource | None) -> None:
        """Close a source. Workers stop with it unless they are persistent."""
        if source is None:
            return
        if not source.close():
            self.forget()  # a thread may still use them
        if self._options.num_workers and not self._options.persistent_workers:
            self.close()

    def forget(self) -> None:
        """Create new engines for the next source: the pipeline has changed."""
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
