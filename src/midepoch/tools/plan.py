"""The effect of a resume, before it costs GPU time: accepted or refused, the next rows, steps left, blocks to read.

from midepoch.tools.plan import plan_resume
plan = plan_resume(state, ds, world_size=6, batch_size=48, num_workers=4)
plan.accepted, plan.steps_left, plan.batches[0][5]     # the rows that rank 5 gets first
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from midepoch._internal.hints import hinted
from midepoch._internal.values import integer
from midepoch.audit.lanes import places, tree_of
from midepoch.dataset import Dataset
from midepoch.errors import StateError, WorldError
from midepoch.loader.lanes import check_equal_steps
from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, check_drop
from midepoch.loader.plans import make_plan
from midepoch.order import EpochOrder, Shard
from midepoch.order.budget import Budget
from midepoch.pipeline.cursor import Cursor, listed
from midepoch.pipeline.lanes import Share, estimated_length
from midepoch.pipeline.planned import Planning
from midepoch.pipeline.plans import Plan
from midepoch.pipeline.reach import start
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.lengths import lengths_of
from midepoch.state.format import Saved, parse
from midepoch.state.saved import load_global, one_of
from midepoch.tools.describe import KnownState, block_bytes, of_dataset, of_index


@dataclass(frozen=True)
class MachineReads:
    """The reads of one machine until the end of the epoch: rows it delivers, blocks it reads, approximate bytes."""

    ranks: tuple[int, int]
    rows: int
    blocks: int | None
    bytes: int | None


@dataclass(frozen=True)
class ResumePlan:
    """The effect of a resume. If it is not ``accepted``, ``problem`` is the reason, and the rest is empty."""

    accepted: bool
    problem: str | None
    checked: str
    """Reference of the check of the state: "dataset", "index" (its data was found by its fingerprint), or "nothing"."""
    epoch: int = 0
    position: int = 0
    rows: int = 0
    global_batch: int = 0
    steps_left: int = 0
    steps_per_epoch: int = 0
    dropped: int = 0
    padded: int = 0
    ranks_left_out: int = 0
    """Number of ranks without a row of the last step (under ``last_batch="uneven"``)."""
    batches: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The rows of the next steps, by step and rank: row numbers in the dataset before shuffling."""
    lanes: tuple[tuple[int, ...], ...] = ()
    """The lanes of each rank, if steps change the number of rows. Then ``batches`` is empty."""
    machines: tuple[MachineReads, ...] = ()
    notes: tuple[str, ...] = ()
    excluded: int = 0
    """Rows (batches by tokens, or outputs) of the rest of the epoch that are not delivered."""


@hinted()
def plan_resume(
    state: Any,
    dataset: Dataset | Loader | None = None,
    *,
    world_size: int,
    batch_size: int | None = None,
    num_workers: int = 0,
    last_batch: str | None = None,
    steps: int = 3,
    machines: int = 1,
    index_dir: str | os.PathLike[str] | None = None,
) -> ResumePlan:
    """Return the effect of loading a state on ``world_size`` ranks with ``batch_size`` rows each.

    Batches by ``max_tokens`` need no batch size: pass their loader or, with the settings of the state, the dataset.

    Without a dataset, the state's data is searched by its fingerprint among the indexes on this machine. ``machines``:
    number of machines over which the ranks are spread evenly. ``steps``: number of steps whose rows are listed.
    ``last_batch``: default is that of the loader if one is given, else "uneven".
    """
    size = integer(world_size, "plan(world_size=…)", 1)
    machines = integer(machines, "plan(machines=…)", 1)
    integer(num_workers, "plan(num_workers=…)")
    if size % machines:
        raise ValueError(f"{size} ranks cannot be spread evenly over {machines} machines")
    if last_batch is None:
        last_batch = dataset.last_batch if isinstance(dataset, Loader) else "uneven"
    first = state[0] if isinstance(state, (list, tuple)) and state else state
    saved = parse(first) if isinstance(first, Mapping) else None
    by_tokens = saved is not None and bool(saved["budget"]) and not saved.in_lanes
    if batch_size is None and not by_tokens:
        raise TypeError("plan needs the batch size (--batch-size, or batch_size=…): the rows of each rank at a step.")
    options = Options(1 if by_tokens else integer(batch_size, "plan(batch_size=…)", 1), last_batch=last_batch)
    steps = integer(steps, "plan(steps=…)")
    try:
        if saved is not None and dataset is None and (saved.in_lanes or by_tokens):
            return _without_dataset(state, saved, options, size)
        if saved is not None and dataset is not None and saved.in_lanes:
            return _plan_lanes(state, dataset, options, size, machines)
        if by_tokens and dataset is not None:
            options = replace(options, planning=_planning(state, dataset))
        known = of_dataset(state, dataset, options.planning) if dataset is not None else of_index(state, index_dir)
        return _plan_steps(known, options, size, steps, machines)
    except (StateError, WorldError, ValueError) as problem:
        return ResumePlan(False, str(problem), "dataset" if dataset is not None else "nothing")


def _without_dataset(state: Any, saved: Saved, options: Options, ranks: int) -> ResumePlan:
    """Plan the resume of what cannot be computed from the state alone."""
    if saved.in_lanes:
        note = "its pipeline was not checked: what is left of its sources is known with the dataset only (--dataset)."
        size, lanes = options.batch_size * ranks, _lanes_of_ranks(saved["lanes"], ranks)
        at = (saved["epoch"], saved["position"])
        return ResumePlan(True, None, "nothing", *at, global_batch=size, lanes=lanes, notes=(note,))
    saved = parse(one_of(state, Shard()))
    note = "steps of batches by max_tokens depend on the lengths of rows. Pass the loader or dataset to see them."
    return ResumePlan(True, None, "nothing", saved["epoch"], saved.rows_before, saved["rows"], notes=(note,))


def _planning(state: Any, dataset: Dataset | Loader) -> Planning:
    """Return the settings of batches by tokens: those of a loader, or of the state by a column of the dataset."""
    if isinstance(dataset, Loader):
        if dataset.options.planning is None:
            raise ValueError("the state is of batches by max_tokens, and the loader has none. Pass max_tokens to it.")
        return dataset.options.planning
    text = parse(one_of(state, Shard()))["budget"]
    budget = Budget(1, length=json.loads(text)[-1]).earlier(text)
    name = None if budget is None else dataset.pipeline.base.stored_column(budget.length)[0]
    if budget is None or name is None:
        raise ValueError("the settings of batches by max_tokens are not in this state. Pass the loader.")
    found = lengths_of(dataset.pipeline.source, name)
    return Planning(budget, found, found.total / max(1, len(found)))


def _plan_steps(known: KnownState, options: Options, ranks: int, steps: int, machines: int) -> ResumePlan:
    """Plan the resume of steps whose positions can be computed, by the plan that a loader makes."""
    cursor, notes = known.cursor, []
    if known.checked == "nothing":
        notes.append("its data was not found among the indexes on this machine, so it was not checked against any.")
    check_drop(known.rows, options, ranks)
    plan, later = (
        make_plan(replace(known.spec, shard=Shard(0, ranks)), options, one)
        if known.spec is not None
        else Plan.of(one, known.rows, options.batch_size, ranks, options.last_batch, known.undelivered(one))
        for one in (cursor, cursor.next_epoch())
    )
    check_equal_steps(plan, options, Shard(0, ranks))
    if cursor.begun and not plan.has(0):
        notes.append(f"epoch {cursor.epoch} is over: it continues with epoch {cursor.epoch + 1}.")
        cursor, plan = cursor.next_epoch(), later
    order = known.at(cursor.epoch, notes)
    batches: list[tuple[tuple[int, ...], ...]] = []
    while order is not None and len(batches) < steps and plan.has(len(batches)):
        positions = [plan.ask([len(batches)], Shard(rank, ranks)).positions for rank in range(ranks)]
        batches.append(tuple(tuple(order.chosen(mine).tolist()) for mine in positions))
    taken = cursor.lane.taken
    position = plan.rows_before(taken)
    left_out, padded, dropped = 0, 0, 0
    if isinstance(plan, Plan):
        dropped, padded, left_out = plan.done.before(known.rows) - plan.end, plan.padding, plan.left_out(ranks)
        excluded = known.undelivered(cursor).count(taken, known.rows)
        own = [range(m * ranks // machines, (m + 1) * ranks // machines) for m in range(machines)]
        readings = [_reading(known, order, plan, ranks, one) for one in own]
    else:
        assert known.source is not None
        left, excluded = known.rows - position, cursor.lane.done.count(taken, plan.count())
        left_out = -(plan.count() - taken - excluded) % ranks if options.last_batch == "uneven" else 0
        readings = [MachineReads((0, ranks - 1), left, None, int(left * known.source.bytes_per_row))]
        notes.append("the global batch counts batches by max_tokens, one for each rank.")
    return ResumePlan(
        accepted=True,
        problem=None,
        checked=known.checked,
        epoch=cursor.epoch,
        position=position,
        rows=known.rows,
        global_batch=options.batch_size * ranks,
        steps_left=len(plan),
        steps_per_epoch=len(later),
        dropped=dropped,
        padded=padded,
        ranks_left_out=left_out,
        batches=tuple(batches),
        machines=tuple(readings),
        notes=tuple(notes),
        excluded=excluded,
    )


def _plan_lanes(state: Any, dataset: Dataset | Loader, options: Options, ranks: int, machines: int) -> ResumePlan:
    """Plan the resume of a pipeline that changes the number of rows, by what is left of its lanes."""
    size, notes = options.batch_size * ranks, []
    resumed = load_global(state, dataset.pipeline)
    spec, cursor = resumed.spec, resumed.cursor
    if cursor.lanes_ended:
        notes.append(f"epoch {cursor.epoch} is over: it continues with epoch {cursor.epoch + 1}.")
        cursor = cursor.next_epoch()
    for rank in range(ranks):
        spec.check_known(cursor, Shard(rank, ranks))
    if spec.lanes % ranks:
        notes.append(
            f"{ranks} ranks do not divide {spec.lanes} lanes: some lanes are run by several ranks, each completely."
        )
    lanes = _lanes_of_ranks(spec.lanes, ranks)
    total = spec.epoch_outputs or estimated_length(spec.node, cursor, spec.lanes)
    excluded = sum(len(lane.done) for lane in cursor.lanes.values())
    notes.append(f"the number of steps left is {'an estimate' if total is not None else 'not known'}")
    each, readings = ranks // machines, []
    for first in range(0, ranks, each):
        own = sorted({lane for rank in range(first, first + each) for lane in lanes[rank]})
        readings.append(_left_of_lanes(spec, cursor, (first, first + each - 1), own))
    return ResumePlan(
        accepted=True,
        problem=None,
        checked="dataset",
        epoch=cursor.epoch,
        position=cursor.position,
        rows=0 if total is None else round(total),
        global_batch=size,
        steps_left=0 if total is None else max(0, -(-round(total - cursor.position - excluded) // size)),
        steps_per_epoch=0 if total is None else -(-round(total) // size),
        lanes=lanes,
        machines=tuple(readings),
        notes=tuple(notes),
        excluded=excluded,
    )


def _lanes_of_ranks(lanes: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    shares = (Share.of(lanes, Shard(rank, ranks)) for rank in range(ranks))
    return tuple(tuple(share.lanes.positions(0, lanes).tolist()) for share in shares)


def _left_of_lanes(spec: PipelineSpec, cursor: Cursor, ranks: tuple[int, int], lanes: list[int]) -> MachineReads:
    """Return the reads of some lanes until the end of the epoch: rows of the sources, blocks, bytes."""
    tree, fresh = tree_of(spec.node), start(spec.node)
    rows, size = 0, 0.0
    blocks: dict[int, set[int]] = {}
    for lane in lanes:
        at = cursor.lanes[lane].at if lane in cursor.lanes else fresh
        for place in places(tree, listed(at, counts=True), cursor.epoch, Shard(lane, spec.lanes)):
            leaf = spec.leaves[place.leaf]
            first, total = place.row, place.lane.before(leaf.rows)
            if first < 0 or first >= total:
                continue
            rows += total - first
            uses = leaf.order.at(place.epoch, leaf.source.layout).uses()
            wanted = ((uses.lane < 0) | (uses.lane == place.lane.index)) & (
                uses.last >= first * place.lane.count + place.lane.index
            )
            mine = np.unique(uses.blocks[wanted])
            size += 0 if leaf.source.fetched else (total - first) * leaf.source.bytes_per_row
            blocks.setdefault(place.leaf, set()).update(mine.tolist())
    for number, found in blocks.items():
        source = spec.leaves[number].source
        size += float(block_bytes(source)[sorted(found)].sum()) if source.fetched else 0
    return MachineReads(ranks, rows, sum(map(len, blocks.values())), int(size))


def _reading(known: KnownState, order: EpochOrder | None, plan: Plan, ranks: int, own: range) -> MachineReads:
    """Return the reads of some ranks until the end of the epoch, by the blocks of the lanes that they read."""
    rows = sum(Shard(r, ranks).before(plan.end) - Shard(r, ranks).before(plan.start) for r in own)
    span = (own.start, own.stop - 1)
    if order is None or known.source is None or known.order is None:
        return MachineReads(span, rows, None, None if known.source is None else int(rows * known.source.bytes_per_row))
    uses = order.uses()
    wanted = (uses.last >= plan.start) & (uses.first < plan.rows)
    if known.order.lanes % ranks == 0:
        wanted &= (uses.lane < 0) | np.isin(uses.lane % ranks, list(own))
    blocks = np.unique(uses.blocks[wanted])
    # Mapped files are read row by row; blocks that are fetched or decoded, completely and once for each machine.
    size = int(block_bytes(known.source)[blocks].sum())
    return MachineReads(
        span, rows, len(blocks), size if known.fetched else min(size, int(rows * known.source.bytes_per_row))
    )
