"""Edits of a run: functions from a pipeline and a cursor to others, applied between two steps.

Each returns the pipeline and the cursor from which the run continues. What was delivered does not change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple

from midepoch.audit.naming import rows_delivered_at
from midepoch.audit.run import Run, read_run
from midepoch.errors import CheckpointMismatchError
from midepoch.loader.lanes import LaneSteps
from midepoch.loader.options import Options
from midepoch.loader.plans import make_plan
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import Puller
from midepoch.pipeline.cursor import Cursor, LaneCursor, WindowAt, spared_key
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node, rows_by_source, source_names
from midepoch.pipeline.plans import TokenPlan
from midepoch.pipeline.reach import Reach, open_flow, outputs_of_rows, up_to_done
from midepoch.pipeline.rows import excluded_rows
from midepoch.pipeline.spec import PipelineSpec
from midepoch.pipeline.stages import Packing

_log = logging.getLogger("midepoch")
_MANY_STEPS = 1_000
"""Steps above which a warning is logged: running them may take minutes, if functions of the pipeline are slow."""


class Edited(NamedTuple):
    """A pipeline and the cursor from which it continues, and how many units or rows an edit left out."""

    spec: PipelineSpec
    cursor: Cursor
    left_out: int = 0


def without_steps(spec: PipelineSpec, options: Options, cursor: Cursor, given: Any) -> Edited:
    """Leave out steps, by their numbers in the run, from 1."""
    steps = _numbers(given, cursor.steps)
    if spec.unit == "rows":
        return _without_units(spec, options, cursor, steps)
    return _without_outputs(spec, options, cursor, steps)


def _without_units(spec: PipelineSpec, options: Options, cursor: Cursor, steps: Intervals) -> Edited:
    plan, before = make_plan(spec, options, cursor), cursor.steps + 1
    last = int(steps.stops[-1]) - 1
    if not plan.has(last - before):
        raise _not_in_epoch(last, cursor.steps + len(plan), cursor)
    found = [
        plan.units(int(first) - before, int(stop) - before)
        for first, stop in zip(steps.starts, steps.stops, strict=True)
    ]
    units, lane = EMPTY.union(*found), cursor.lane
    if isinstance(plan, TokenPlan) and lane.at is None:
        lane = replace(lane, at=WindowAt())
    lane = replace(lane, excluded=lane.excluded.union(units))
    return Edited(spec, Cursor.at_row(cursor.epoch, lane, cursor.steps, cursor.first), len(units))


def _without_outputs(spec: PipelineSpec, options: Options, cursor: Cursor, steps: Intervals) -> Edited:
    """Leave out the outputs of steps. They are known only after they are made, so the pipeline runs up to the last."""
    spec = spec.for_processes(spec.shard.count, begun=cursor.begun)
    lanes = spec.open(spec.shard, spec.bundles_here(shared=spec.shard.count > 1), cursor)
    beginning, last = lanes.cursor(), int(steps.stops[-1]) - 1
    if cursor.first and lanes.share.lanes.count > 1 and options.last_batch == "uneven":
        _log.warning(
            "exclude(steps=…): ranks with lanes of their own may have had different numbers of batches in earlier "
            "epochs, and then count different steps: this one is at step %d. Compare loader.steps of all ranks, or use "
            "exclude(rows=…) or exclude(documents=…).",
            cursor.steps,
        )
    if last - cursor.steps > _MANY_STEPS:
        _log.warning(
            "exclude(steps=…) runs the pipeline for %d steps, up to step %d: the outputs of a step are known only "
            "after it is made. Exclude steps shortly before they are delivered.",
            last - cursor.steps,
            last,
        )
    run, taken, count = LaneSteps(lanes, options, None, cursor.steps), [EMPTY] * len(lanes.numbers), 0
    while run.number < last:
        lanes.skip_done()
        before = lanes.outputs.copy()
        outputs = run.next()
        if outputs is None:
            break
        if steps.contains_one(run.number):
            edges = zip(taken, before, lanes.outputs, strict=True)
            taken = [done.union(Intervals.of(first, stop)) for done, first, stop in edges]
            count += outputs.total
    if run.number < last and lanes.share.lanes.count == 1:  # else other ranks may have it
        raise _not_in_epoch(last, run.number, cursor)
    if not count:
        _log.warning(
            "exclude(steps=…) leaves out nothing on this rank: its last step of epoch %d is %d.",
            cursor.epoch,
            run.number,
        )
    edited = dict(beginning.lanes)
    for number, units in zip(lanes.numbers, taken, strict=True):
        lane = edited[number]
        edited[number] = replace(lane, excluded=lane.excluded.union(units.minus(lane.ahead)))
    return Edited(spec, beginning._replace(lanes=edited), count)


def _numbers(given: Any, delivered: int) -> Intervals:
    """Return the numbers of steps that the user gave. Raise ValueError if some of them cannot be left out."""
    many = isinstance(given, range) and given.step == 1  # its ends are enough
    numbers = [*given[:1], *given[-1:]] if many else [given] if isinstance(given, int) else given
    try:
        found = [index(number) for number in numbers]
    except TypeError:
        found = []
    if not found or isinstance(given, (str, bytes, bool)) or min(found) < 1:
        raise ValueError(
            f"exclude(steps=…) takes numbers of steps, from 1, such as [149, 150] or range(149, 151), got {given!r:.60}"
        )
    if (first := min(found)) <= delivered:
        back = (
            f"Go back to a checkpoint of step {first - 1} or before, load its state"
            if first > 1
            else "Make the loader again"
        )
        raise ValueError(
            f"exclude(steps=…): step {first} was delivered already: the run is at step {delivered}. {back}, and "
            "exclude the step then."
        )
    return Intervals.of(given.start, given.stop) if many else Intervals.from_positions(found)


def _not_in_epoch(step: int, last: int, cursor: Cursor) -> ValueError:
    ends = f"its last step is {last}" if last > cursor.steps else "no step is left of it"
    return ValueError(
        f"exclude(steps=…): step {step} is not in epoch {cursor.epoch}: {ends}. Exclude steps of a later epoch "
        "when it has begun."
    )


def without_rows(spec: PipelineSpec, options: Options, cursor: Cursor, rows: Any) -> Edited:
    """Leave out rows of the sources, from the next batch on and in every later epoch."""
    excluded = rows_by_source(rows, spec.node.leaves, source_names(spec.node))
    before = spec.excluded or (EMPTY,) * len(excluded)
    together = tuple(a.union(b) for a, b in zip(before, excluded, strict=True))
    count = sum(map(len, together)) - sum(map(len, before))
    edited = replace(spec, excluded=together)
    if spec.unit == "outputs":
        return Edited(edited, _sparing(spec, edited, cursor), count)
    plan = make_plan(spec, options, cursor)
    if isinstance(plan, TokenPlan) and cursor.begun:  # its window is formed again, of the rows that are left
        lane = cursor.lane
        lane = LaneCursor(lane.taken, WindowAt(plan.batches.in_rows(lane), lane.taken))
        cursor = Cursor.at_row(cursor.epoch, lane, cursor.steps, cursor.first)
    return Edited(edited, cursor, count)


def _sparing(before: PipelineSpec, after: PipelineSpec, cursor: Cursor) -> Cursor:
    """Return a cursor in lanes from which more rows are excluded, except for those that outputs in progress have.

    Outputs before one that is done, and of groups in progress, keep their numbers: those that have only excluded rows
    are excluded as outputs.
    """
    bundles, lanes = before.bundles_here(shared=False), dict(cursor.lanes)

    def newly_excluded(leaf: int, epoch: int, lane: Shard) -> Intervals:
        engine = bundles.engines[leaf]
        known = excluded_rows(engine, before.excluded[leaf], epoch, lane) if before.excluded else EMPTY
        return excluded_rows(engine, after.excluded[leaf], epoch, lane).minus(known)

    for number, lane in cursor.lanes.items():
        own, spared, packing = Shard(number, before.lanes), dict(lane.spared), Packing(traced=True, noted=True)
        made = up_to_done(before.node, bundles, packing, cursor.epoch, own, lane, after.excluded)
        at = made.at(made.count)
        gone = EMPTY if before.node.joins_rows else outputs_of_rows(made, after.excluded, lane.taken)
        reached = list(Reach(bundles, packing, lane).drawn(before.node, at, cursor.epoch, own))
        from_here = Reach(bundles, packing, lane, again=True).drawn(before.node, lane.at, cursor.epoch, own)
        first = {drawn[:3]: drawn.row for drawn in from_here}
        for drawn in reached:
            passes = [each[1:] for each in packing.opened or () if each[0] == drawn.leaf]
            last = (drawn.epoch, drawn.lane)
            whole = passes[: passes.index(last)] if last in passes else passes
            for epoch, shard in [*whole, last]:
                key, rows = spared_key(drawn.leaf, epoch, shard.index), newly_excluded(drawn.leaf, epoch, shard)
                rows = rows.before_(drawn.row) if (epoch, shard) == last else rows
                rows = rows.from_(first.get((drawn.leaf, epoch, shard), 0))  # passes may have the key of an earlier one
                spared[key] = spared.get(key, EMPTY).union(rows)
        inside = sum(len(rows.minus(lane.spared.get(key, EMPTY))) for key, rows in spared.items())
        if inside and not made.count:
            _log.warning(
                "exclude: up to %d of these rows are still delivered: a window or batch inside of a source has drawn "
                "them, and is in progress.",
                inside,
            )
        excluded = lane.excluded.union(gone.minus(lane.ahead))
        edited = replace(lane, excluded=excluded, spared={key: rows for key, rows in spared.items() if rows})
        if made.count and _ends_with_all(before.node) and not _makes(after, cursor.epoch, own, edited, made.count):
            raise ValueError(
                "exclude(…): without these rows a source of the mix ends earlier, and with it a window or a group of "
                "which some outputs are delivered. Exclude their steps, or exclude the rows when the next epoch begins."
            )
        lanes[number] = edited
    return cursor._replace(lanes=lanes)


def _ends_with_all(node: Node) -> bool:
    """Return True if a mix ends with the last of its sources: what it draws depends on the rows that are left."""
    base = node.base
    if isinstance(base, Leaf):
        return False
    return (isinstance(base, Mix) and base.stop == "all") or any(map(_ends_with_all, base.parts))


def _makes(spec: PipelineSpec, epoch: int, own: Shard, lane: LaneCursor, count: int) -> bool:
    """Return True if a pipeline makes at least so many outputs from a cursor on, in the same groups."""
    flow = open_flow(spec.node, spec.bundles_here(shared=False), Packing(), epoch, own, lane.at, lane.spared)
    try:
        return Puller(flow, lane.at).take(count).count == count
    except CheckpointMismatchError:  # of the batches by tokens in progress
        return False


def mix_of(spec: PipelineSpec, what: str) -> Mix:
    """Return the mix of a pipeline. Raise TypeError if it has none."""
    base = spec.node.base
    if not isinstance(base, Mix):
        raise TypeError(f"{what}: the data is not a mix of sources. Make one with midepoch.mix.")
    return base


def checked_weights(given: Any, spec: PipelineSpec) -> tuple[float, ...]:
    """Return weights that the user gave, in the order of the sources."""
    mix = mix_of(spec, "set_weights")
    if isinstance(given, Mapping):
        if not mix.names:
            raise TypeError("set_weights: the sources of the mix have no names. Pass a list of weights.")
        unknown = [str(name) for name in given if name not in mix.names]
        if unknown:
            raise ValueError(f"set_weights: there is no source {unknown[0]!r}. The sources are {', '.join(mix.names)}.")
        given = [given.get(name, 0.0) for name in mix.names]
    try:
        weights = tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        raise TypeError(f"set_weights takes a dict or a list of weights, got {given!r:.60}") from None
    if len(weights) != len(mix.parts):
        raise ValueError(f"set_weights: expected {len(mix.parts)} weights, one for each source, got {len(weights)}.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"set_weights: weights must be 0 or more, and at least one above 0, got {list(weights)}.")
    first = 0
    for number, (part, weight) in enumerate(zip(mix.parts, weights, strict=True)):
        leaves = range(first, first + len(part.leaves))
        first += len(leaves)
        if weight and not any(_rows_left(spec, leaf) for leaf in leaves):
            raise ValueError(f"set_weights: source {mix.names[number] if mix.names else number} has no rows. Use 0.")
    return weights


def _rows_left(spec: PipelineSpec, leaf: int) -> int:
    """Return the rows of a source that are not excluded."""
    excluded = len(spec.excluded[leaf]) if spec.excluded else 0
    source = spec.node.leaves[leaf]
    return min(source.rows, max(0, len(source.order.selection) - excluded))


class Weights(dict[str, float]):
    """The weights of a mix by source, which are changed by a method."""

    def __reduce__(self) -> tuple[type, tuple[dict[str, float]]]:
        return dict, (dict(self),)  # a copy is a plain one

    def __setitem__(self, name: str, value: float) -> None:
        raise TypeError(f"loader.weights does not change in place. Use loader.set_weights({{{name!r}: {value!r}, …}}).")


def rows_of_documents(documents: Any, sources: Iterable[str]) -> dict[int, list[int]]:
    """Return rows by source, as provenance, ``midepoch audit`` and ``Run`` name documents.

    ``documents``: a batch with ``doc_ids``, those alone, or (source, row) pairs, also those of ``Document`` and
    ``Delivery``.
    """
    names, pairs = list(sources), documents
    if isinstance(documents, Mapping):
        columns = documents.get("doc_ids", documents)
        pairs = list(zip(*(_plain(columns.get(name, ())) for name in ("source", "row")), strict=True))
    try:
        found = [(one.source, one.row) if hasattr(one, "row") else tuple(one) for one in pairs]
        if isinstance(documents, str) or not found or any(len(pair) != 2 for pair in found):
            raise TypeError("no pairs")
        found = [(source, index(row)) for source, row in found]
    except TypeError:
        raise TypeError(
            "exclude(documents=…) takes a batch with provenance, its doc_ids, or (source, row) pairs such as "
            f"[('web', 17)], got {documents!r:.60}. Batches have provenance after loader(…, provenance=True), and with "
            "a collate_fn that keeps row['doc_ids']."
        ) from None
    rows: dict[int, list[int]] = {}
    for source, row in found:
        if isinstance(source, str) and source not in names:
            raise ValueError(f"exclude(documents=…): there is no source {source!r}. There are: {', '.join(names)}.")
        rows.setdefault(names.index(source) if source in names else index(source), []).append(row)
    return rows


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def documents_of(folder: Any, steps: Any, spec: PipelineSpec) -> list[tuple[int, int]]:
    """Return the rows, by the number of their source, that a recorded run delivered at some steps.

    Raises DataNotFoundError if it did not, and ValueError if it read other data.
    """
    run = folder if isinstance(folder, Run) else read_run(folder)
    known = [(source.about["data"], source.about["selection"]) for source in run.order.sources]
    here = [(leaf.source.fingerprint, leaf.order.selection.text) for leaf in spec.node.leaves]
    if known != here:
        raise ValueError(
            f"exclude(run=…): the run in {run.folder} read other data, or other rows of it. Pass a run of this data."
        )
    found = (pair for step in _steps_in(steps) for pair in rows_delivered_at(run, step))
    return [(source, row) for source, row in found if source < len(here)]  # others have left the mix


def _steps_in(given: Any) -> list[int]:
    return [int(step) for step in _numbers(given, 0).positions()]
