"""Batches, shared by all sources of batches, and the plan of a loader's options."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from midepoch._internal.timings import Timings
from midepoch.loader.options import Options
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.plans import Plan, TokenPlan
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms.provenance import DocumentTable


class Made(NamedTuple):
    """A batch. ``value`` is presented (or collated). ``empty``: it has no row left.

    ``step``: its number in the plan, or the outputs of lanes that it is made of, or the cursor after it.
    """

    value: Any
    step: int | Cursor | StepOutputs
    rows: int = 0
    skipped: int = 0
    empty: bool = False
    timings: Timings | None = None
    """The time that a worker has spent since its last report."""
    traced: DocumentTable | None = None
    """The provenance of the rows without padding, if positions do not give it."""


class BatchSource(Protocol):
    """The batches of one rank from a cursor to the end of the epoch, in order. Used by one thread at a time."""

    def next(self) -> Made | None:
        """Return the next batch, or None at the end. Raises the errors of making it."""

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""


def make_plan(spec: PipelineSpec, options: Options, cursor: Cursor) -> Plan | TokenPlan:
    """Return the steps of all ranks from a cursor on."""
    if options.planning is None:
        size = options.batch_size if options.sizes is None else options.sizes
        done = spec.undelivered(cursor.epoch, cursor.lane)
        return Plan.of(cursor, spec.rows, size, spec.shard.count, options.last_batch, done)
    excluded = spec.excluded_positions(cursor.epoch)
    return TokenPlan.of(spec.leaf, options.planning, cursor, options.last_batch, excluded)


def batches_of(spec: PipelineSpec, options: Options, outputs: int, first_step: int = 0) -> int:
    """Return the number of batches of a rank in an epoch, given the number of outputs of all ranks.

    ``first_step``: the step of the run at which the epoch begins, for batch sizes that change.
    """
    size = options.batch_size if options.sizes is None else options.sizes
    plan = Plan.of(Cursor.start(0, first_step), outputs, size, spec.shard.count, options.last_batch)
    return plan.share(spec.shard)
