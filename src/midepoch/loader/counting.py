"""Counting: how many batches an epoch has, where a cursor is in it, and whether something is left.

Where positions can be computed this follows from a plan, else from the outputs so far.
"""

from __future__ import annotations

from typing import Any

from midepoch.audit.orders import MOST_ROWS
from midepoch.audit.records import RecordedBatching
from midepoch.loader.lanes import check_equal_steps
from midepoch.loader.options import Options
from midepoch.loader.plans import batches_of, make_plan
from midepoch.pipeline.cursor import Cursor, WindowAt
from midepoch.pipeline.lanes import estimated_length as estimated_outputs
from midepoch.pipeline.lanes import is_endless, known_length
from midepoch.pipeline.plans import UNKNOWN, StepPlan, TokenPlan
from midepoch.pipeline.spec import PipelineSpec
from midepoch.stats import Stats


def batching(options: Options) -> RecordedBatching:
    """Return the settings of batches, as a ledger records them."""
    size = str(options.batch_size) if options.sizes is None else options.sizes.text
    ends = options.last_batch or ("uneven" if options.planning is None else "dealt")
    return RecordedBatching(size, ends, "" if options.budget is None else options.budget.text)


def end_of_epoch(spec: PipelineSpec, options: Options, cursor: Cursor) -> int:
    """Return the units of an epoch, if they are known or can be counted quickly, else UNKNOWN."""
    return UNKNOWN if spec.unit == "outputs" else make_plan(spec, options, cursor).known(MOST_ROWS)


def check_new(spec: PipelineSpec, options: Options, cursor: Cursor) -> None:
    """Raise the errors of a new loader: a rank without a batch, or a state without lanes that it needs."""
    spec.check_known(cursor, spec.shard)
    if spec.unit == "rows" and options.planning is None:  # else when a pass begins: its batches have to be counted
        check_equal_steps(make_plan(spec, options, Cursor()), options, spec.shard)


def check_start(spec: PipelineSpec, options: Options, cursor: Cursor) -> None:
    """Raise the errors of a pass that begins at a cursor."""
    steps = make_plan(spec, options, cursor)
    check_equal_steps(steps, options, spec.shard)
    if isinstance(steps, TokenPlan) and not cursor.begun and spec.rows and not steps.has(0):
        raise ValueError(
            f"no batch would be left: there are fewer batches by tokens than the {spec.shard.count} ranks, and "
            'the last step is dropped if it has none for every rank. Use last_batch="pad", or omit it.'
        )


def check_window(spec: PipelineSpec, options: Options, cursor: Cursor) -> None:
    """Plan the window in progress of batches by tokens: its batches must be those that were saved."""
    if options.planning is not None:
        make_plan(spec, options, cursor).has(0)


def is_over(spec: PipelineSpec, options: Options, cursor: Cursor, running: StepPlan | None) -> bool:
    """Return True if nothing is left of the epoch at a cursor, as far as it is known.

    ``running``: the plan of a pass in progress that has the cursor.
    """
    if spec.unit == "outputs":
        return cursor.lanes_ended
    at = cursor.lane.at
    if isinstance(at, WindowAt):
        over = at.rows.taken >= spec.rows
        if over or options.last_batch != "drop":
            return over
        if isinstance(running, TokenPlan):
            return not running.has_after(cursor.lane.taken)
    return cursor.begun and cursor.lane.taken > 0 and not make_plan(spec, options, cursor).has(0)


def position(spec: PipelineSpec, options: Options, cursor: Cursor, running: StepPlan | None) -> int:
    """Return the rows (or outputs) of the epoch before a cursor, of all ranks together."""
    if spec.unit == "outputs":
        return outputs_of(spec, cursor)
    if not isinstance(cursor.lane.at, WindowAt):
        return cursor.lane.taken
    steps = make_plan(spec, options, cursor) if running is None else running
    return steps.rows_before(cursor.lane.taken)


def outputs_of(spec: PipelineSpec, cursor: Cursor) -> int:
    """Return the outputs of all lanes before a cursor, if the unknown ones are as far as those of this rank."""
    return cursor.position * spec.lanes // max(1, len(cursor.lanes))


def length(spec: PipelineSpec, options: Options, cursor: Cursor, *, over: bool) -> int:
    """Return the number of batches of an epoch on this rank. Raises TypeError if it is not known before running."""
    if options.steps_per_epoch:
        return options.steps_per_epoch
    first = first_step(options, cursor, over=over)
    if spec.unit == "rows":
        return make_plan(spec, options, Cursor.start(cursor.epoch + over, first)).share(spec.shard)
    known = known_length(spec.node)
    if is_endless(spec.node):
        raise TypeError(
            f"the loader has no number of batches: {spec.node.text} never ends. Pass steps_per_epoch=…, the number of "
            "batches of a pass."
        )
    if known is None or not (spec.state_is_global or spec.node.is_rows):
        raise TypeError(
            f"the number of batches is not known before the dataset has run ({spec.node.text}). Use "
            "estimated_len, which estimates it from the batches so far."
        )
    return batches_of(spec, options, known, first)


def first_step(options: Options, cursor: Cursor, *, over: bool) -> int:
    """Return the step of the run at which the epoch began, or begins if the last one is over."""
    if options.schedule is not None:  # every epoch begins with the first phase
        return 0
    return cursor.steps if over else cursor.first


def estimated_length(spec: PipelineSpec, options: Options, cursor: Cursor, *, over: bool) -> int | None:
    """Return the approximate number of batches of an epoch, or None before the first batch."""
    if spec.unit == "rows" or options.steps_per_epoch:
        return length(spec, options, cursor, over=over)
    first = first_step(options, cursor, over=over)
    if spec.epoch_outputs:  # they were counted
        return batches_of(spec, options, spec.epoch_outputs, first)
    outputs = estimated_outputs(spec.node, cursor, spec.lanes)
    if outputs is None:
        return None
    if options.sizes is not None:
        return max(1, batches_of(spec, options, round(outputs), first))
    return max(1, round(outputs / (options.batch_size * spec.shard.count)))


def rows_of_epoch(spec: PipelineSpec, options: Options, batches: int | None) -> tuple[float, bool] | None:
    """Return the rows (or outputs) of an epoch, and True if they are known exactly. None if nothing is known."""
    if spec.unit == "rows":
        return (spec.rows, True) if spec.rows else None
    rows = spec.epoch_outputs or (None if batches is None else batches * options.batch_size * spec.shard.count)
    return (rows, False) if rows else None


def text(spec: PipelineSpec, options: Options, batch_size: int | None, epoch: int, at: int) -> str:
    """Return a loader in words."""
    lanes = f"{spec.lanes} lanes; " if spec.lanes > 1 else ""
    size = f"batch_size={batch_size if options.sizes is None else options.sizes.text}"
    size = size if options.budget is None else f"max_tokens={options.budget.tokens:,}"
    return (
        f"Loader({f'{spec.rows:,} rows' if spec.unit == 'rows' else spec.node.text}; "
        f"{size}; num_workers={options.num_workers}; "
        f"rank {spec.shard.index} of {spec.shard.count}; {lanes}at epoch {epoch}, position {at:,})"
    )


def about(
    spec: PipelineSpec, options: Options, epoch: int, at: int, rows: tuple[float, bool] | None, stats: Stats
) -> dict[str, Any]:
    """Return a loader as a table for notebooks."""
    of = f" of {'' if rows[1] else 'about '}{rows[0]:,.0f}" if rows else ""
    shown = {
        "pipeline": None if spec.node.text == "none" else spec.node.text,
        "at": f"epoch {epoch}, position {at:,}{of}",
        "batch size": options.batch_size,
        "workers": options.num_workers,
        "rank": f"{spec.shard.index} of {spec.shard.count}",
        "lanes": spec.lanes if spec.lanes > 1 else None,
        "so far": str(stats) if stats.batches else None,
    }
    return {name: value for name, value in shown.items() if value is not None}
