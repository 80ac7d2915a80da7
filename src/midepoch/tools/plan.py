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
from midepoch.pipeline.plans import Plan, TokenPlan
from midepoch.pipeline.reach import start
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.lengths import lengths_of
from midepoch.state.format import parse
from midepoch.state.saved import load_global, one_of
from midepoch.tools.locate import KnownState, block_bytes, of_dataset, of_index


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
    saved = [parse(one) for one in (state if isinstance(state, (list, tuple)) else [state]) if isinstance(one, Mapping)]
    planned = bool(saved) and bool(saved[0]["budget"]) and not saved[0].in_lanes
    if batch_size is None and not planned:
        raise TypeError("plan_resume() needs batch_size, the rows of each rank at a step.")
    options = Options(1 if planned else integer(batch_size, "plan(batch_size=…)", 1), last_batch=last_batch)
    try:
        if planned:
            return plan_batches(state, dataset, options, size, integer(steps, "plan(steps=…)"))
        if saved and saved[0].in_lanes:
            return plan_lanes(state, dataset, options, size, machines)
        known = of_dataset(state, dataset) if dataset is not None else of_index(state, index_dir)
        check_drop(known.rows, options, size)
        check_equal_steps(
            _steps_of(known, options, size),
            options,
            Shard(0, size),
        )
    except (StateError, WorldError, ValueError) as problem:
        return ResumePlan(False, str(problem), "dataset" if dataset is not None else "nothing")
    return _plan(known, options, size, integer(steps, "plan(steps=…)"), machines)


def plan_batches(state: Any, dataset: Dataset | Loader | None, options: Options, ranks: int, steps: int) -> ResumePlan:
    """Plan the resume of batches by tokens, by the lengths of the rows."""
    if dataset is None:
        found = parse(one_of(state, Shard()))
        note = "steps of batches by max_tokens depend on the lengths of rows. Pass the loader or dataset to see them."
        return ResumePlan(True, None, "nothing", found["epoch"], found.rows_before, found["rows"], notes=(note,))
    planning = dataset.options.planning if isinstance(dataset, Loader) else _planning_of(state, dataset)
    if planning is None:
        raise ValueError("the state is of batches by max_tokens, and the loader has none. Pass max_tokens to it.")
    resumed = load_global(state, dataset.pipeline, (), planning)
    spec, cursor, notes = resumed.spec, resumed.cursor, []
    shards = [replace(spec, shard=Shard(rank, ranks)) for rank in range(ranks)]
    options = replace(options, planning=planning)
    plan = _token_plan(shards[0], options, cursor)
    if not plan.has(0):
        notes.append(f"epoch {cursor.epoch} is over: it continues with epoch {cursor.epoch + 1}.")
        cursor = cursor.next_epoch()
        plan = _token_plan(shards[0], options, cursor)
    order = spec.leaf.order.at(cursor.epoch, spec.source.layout)
    batches = []
    for step in range(steps):
        if plan.has(step):
            asked = [plan.ask([step], each.shard).positions for each in shards]
            batches.append(tuple(tuple(order.chosen(positions).tolist()) for positions in asked))
    lane = cursor.lane
    before, total = plan.rows_before(lane.taken), plan.count()
    excluded = lane.done.count(lane.taken, total)
    left = total - lane.taken - excluded
    whole = _token_plan(shards[0], options, Cursor(cursor.epoch)).count()
    own = [
        MachineReads((0, ranks - 1), spec.rows - before, None, int((spec.rows - before) * spec.source.bytes_per_row))
    ]
    return ResumePlan(
        accepted=True,
        problem=None,
        checked="dataset",
        epoch=cursor.epoch,
        position=before,
        rows=spec.rows,
        global_batch=ranks,
        steps_left=-(-left // ranks),
        steps_per_epoch=-(-whole // ranks),
        ranks_left_out=-left % ranks if options.last_batch == "uneven" else 0,
        batches=tuple(batches),
        machines=tuple(own),
        notes=(*notes, "the global batch counts batches by max_tokens, one for each rank."),
        excluded=excluded,
    )


def _token_plan(spec: PipelineSpec, options: Options, cursor: Cursor) -> TokenPlan:
    plan = make_plan(spec, options, cursor)
    assert isinstance(plan, TokenPlan)
    return plan


def _planning_of(state: Any, dataset: Dataset) -> Planning:
    """Return the settings of the batches in a state, of a dataset whose column they are counted by."""
    text = parse(one_of(state, Shard()))["budget"]
    budget = Budget(1, length=json.loads(text)[-1]).earlier(text) if text else None
    name = None if budget is None else dataset.pipeline.base.stored_column(budget.length)[0]
    if budget is None or name is None:
        raise ValueError("the settings of batches by max_tokens are not in this state. Pass the loader.")
    found = lengths_of(dataset.pipeline.source, name)
    return Planning(budget, found, found.total / max(1, len(found)))


def plan_lanes(state: Any, dataset: Dataset | Loader | None, options: Options, ranks: int, machines: int) -> ResumePlan:
    """Plan the resume of a pipeline that changes the number of rows, by what is left of its lanes."""
    if dataset is None:
        return _plan_without_data(state, options, ranks)
    whole_state = load_global(state, dataset.pipeline)
    spec, cursor = whole_state.spec, whole_state.cursor
    notes = []
    if cursor.lanes_ended:
        notes.append(f"epoch {cursor.epoch} is over: it continues with epoch {cursor.epoch + 1}.")
        cursor = cursor.next_epoch()
    shares = [Share.of(spec.lanes, Shard(rank, ranks)) for rank in range(ranks)]
    for rank in range(ranks):
        spec.check_known(cursor, Shard(rank, ranks))
    if spec.lanes % ranks:
        notes.append(
            f"{ranks} ranks do not divide {spec.lanes} lanes: some lanes are run by several ranks, each completely."
        )
    lanes = [tuple(share.lanes.positions(0, spec.lanes).tolist()) for share in shares]
    total = spec.epoch_outputs or estimated_length(spec.node, cursor, spec.lanes)
    size = options.batch_size * ranks
    excluded = sum(len(lane.done) for lane in cursor.lanes.values())
    steps = 0 if total is None else max(0, -(-round(total - cursor.position - excluded) // size))
    notes.append(
        "the number of steps left is an estimate" if total is not None else "the number of steps left is not known"
    )
    each = ranks // machines
    readings = []
    for machine in range(machines):
        mine = range(machine * each, (machine + 1) * each)
        readings.append(
            _left_of_lanes(spec, cursor, (mine.start, mine.stop - 1), sorted({n for r in mine for n in lanes[r]}))
        )
    return ResumePlan(
        accepted=True,
        problem=None,
        checked="dataset",
        epoch=cursor.epoch,
        position=cursor.position,
        rows=0 if total is None else round(total),
        global_batch=size,
        steps_left=steps,
        steps_per_epoch=0 if total is None else -(-round(total) // size),
        lanes=tuple(lanes),
        machines=tuple(readings),
        notes=tuple(notes),
        excluded=excluded,
    )


def _plan_without_data(state: Any, options: Options, ranks: int) -> ResumePlan:
    """Plan the resume of a pipeline in lanes by its state alone: who runs which lanes, and nothing of its sources."""
    found = parse(state[0] if isinstance(state, (list, tuple)) else state)
    lanes = [
        tuple(Share.of(found["lanes"], Shard(rank, ranks)).lanes.positions(0, found["lanes"]).tolist())
        for rank in range(ranks)
    ]
    note = "its pipeline was not checked: what is left of its sources is known with the dataset only (--dataset)."
    return ResumePlan(
        accepted=True,
        problem=None,
        checked="nothing",
        epoch=found["epoch"],
        position=found["position"],
        global_batch=options.batch_size * ranks,
        lanes=tuple(lanes),
        notes=(note,),
    )


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
        if source.fetched:
            sizes = np.concatenate([block_bytes(index) for index in source.indexes])
            size += float(sizes[sorted(found)].sum())
    return MachineReads(ranks, rows, sum(map(len, blocks.values())), int(size))


def _steps_of(known: KnownState, options: Options, ranks: int) -> Plan:
    at = known.cursor
    return Plan.of(at, known.rows, options.batch_size, ranks, options.last_batch, at.lane.done)


def _plan(known: KnownState, options: Options, ranks: int, steps: int, machines: int) -> ResumePlan:
    epoch, position = known.cursor.epoch, known.cursor.position
    notes = list(known.notes)
    size = options.batch_size * ranks
    plan = _steps_of(known, options, ranks)
    following = known.cursor.next_epoch()
    excluded = known.excluded_at(epoch + 1)
    later = Plan.of(following, known.rows, options.batch_size, ranks, options.last_batch, excluded)
    if position and not len(plan):
        notes.append(f"epoch {epoch} is over: it continues with epoch {epoch + 1}.")
        epoch, position, plan = epoch + 1, 0, later
    batches: list[tuple[tuple[int, ...], ...]] = []
    order = known.at(epoch, notes)
    for step in range(min(steps, len(plan)) if order is not None else 0):
        positions = [plan.ask([step], Shard(rank, ranks)).positions for rank in range(ranks)]
        assert order is not None
        batches.append(tuple(tuple(order.chosen(mine).tolist()) for mine in positions))
    readings = [
        _reading(known, order, plan, ranks, range(m * ranks // machines, (m + 1) * ranks // machines))
        for m in range(machines)
    ]
    return ResumePlan(
        accepted=True,
        problem=None,
        checked=known.checked,
        epoch=epoch,
        position=position,
        rows=known.rows,
        global_batch=size,
        steps_left=len(plan),
        steps_per_epoch=len(later),
        dropped=plan.done.before(known.rows) - plan.end,
        padded=plan.padding,
        ranks_left_out=plan.left_out(ranks),
        batches=tuple(batches),
        machines=tuple(readings),
        notes=tuple(notes),
        excluded=plan.done.count(plan.first_position(0), known.rows) + plan.first_position(0) - position,
    )


def _reading(known: KnownState, order: EpochOrder | None, plan: Plan, ranks: int, own: range) -> MachineReads:
    """Return the reads of some ranks until the end of the epoch, by the blocks of the lanes that they read."""
    rows = sum(Shard(r, ranks).before(plan.end) - Shard(r, ranks).before(plan.start) for r in own)
    span = (own.start, own.stop - 1)
    if order is None or known.layout is None or known.order is None or known.block_bytes is None:
        return MachineReads(span, rows, None, None if known.row_bytes is None else int(rows * known.row_bytes))
    uses = order.uses()
    wanted = (uses.last >= plan.start) & (uses.first < plan.rows)
    if known.order.lanes % ranks == 0:
        wanted &= (uses.lane < 0) | np.isin(uses.lane % ranks, list(own))
    blocks = np.unique(uses.blocks[wanted])
    # Mapped files are read row by row; blocks that are fetched or decoded, completely and once for each machine.
    size = int(known.block_bytes[blocks].sum())
    return MachineReads(
        span, rows, len(blocks), size if known.fetched else min(size, int(rows * (known.row_bytes or 0)))
    )
