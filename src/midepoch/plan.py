"""What a resume would do, before anyone pays for GPUs: accepted or refused, the next rows, steps left, what is read.

from midepoch.plan import plan_resume
plan = plan_resume(state, ds, world_size=6, batch_size=48, num_workers=4)
plan.accepted, plan.steps_left, plan.batches[0][5]     # the rows that rank 5 gets first
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch.checks import whole
from midepoch.dataset import Dataset
from midepoch.errors import StateError, WorldError
from midepoch.known import Known, of_dataset, of_index
from midepoch.loader.batches import Plan
from midepoch.loader.equal import check_reach
from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, check_drop
from midepoch.order import Cut, EpochOrder


@dataclass(frozen=True)
class Reading:
    """What one machine reads until the end of the epoch: rows it hands out, blocks it touches, about how many bytes."""

    ranks: tuple[int, int]
    rows: int
    blocks: int | None
    bytes: int | None


@dataclass(frozen=True)
class ResumePlan:
    """What a resume would do. If it is not ``accepted``, ``problem`` says why, and the rest is empty."""

    accepted: bool
    problem: str | None
    checked: str
    """Against what the state was checked: "dataset", "index" (its data was found by its fingerprint), or "nothing"."""
    epoch: int = 0
    position: int = 0
    rows: int = 0
    global_batch: int = 0
    steps_left: int = 0
    steps_per_epoch: int = 0
    dropped: int = 0
    padded: int = 0
    ranks_left_out: int = 0
    """How many ranks get no row of the last step (under ``ends="uneven"``)."""
    batches: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The next steps: for each of them, for each rank, the rows by their numbers in the dataset before the shuffle."""
    machines: tuple[Reading, ...] = ()
    notes: tuple[str, ...] = ()


def plan_resume(
    state: Any,
    dataset: Dataset | Loader | None = None,
    *,
    world_size: int,
    batch_size: int,
    num_workers: int = 0,
    ends: str | None = None,
    steps: int = 3,
    machines: int = 1,
    index_dir: str | os.PathLike[str] | None = None,
) -> ResumePlan:
    """What loading a state would do on ``world_size`` ranks with ``batch_size`` rows each.

    Without a dataset the state's data is looked up among the indexes on this machine by its fingerprint. ``machines``:
    over how many the ranks are spread, evenly. ``steps``: of how many steps to tell the rows. ``ends``: as the loader
    has it, if one is given, else "uneven".
    """
    size = whole(world_size, "plan(world_size=…)", 1)
    machines = whole(machines, "plan(machines=…)", 1)
    whole(num_workers, "plan(num_workers=…)")
    if size % machines:
        raise ValueError(f"{size} ranks cannot be spread evenly over {machines} machines")
    if ends is None:
        ends = dataset.ends if isinstance(dataset, Loader) else "uneven"
    options = Options(whole(batch_size, "plan(batch_size=…)", 1), ends=ends)
    try:
        _refuse_streams(state)
        known = of_dataset(state, dataset) if dataset is not None else of_index(state, index_dir)
        check_drop(known.rows, options, size)
        check_reach(
            Plan.of(known.cursor.epoch, known.cursor.position, known.rows, batch_size * size, ends),
            options,
            Cut(0, size),
        )
    except (StateError, WorldError, ValueError) as problem:
        return ResumePlan(False, str(problem), "dataset" if dataset is not None else "nothing")
    return _plan(known, options, size, whole(steps, "plan(steps=…)"), machines)


def _refuse_streams(state: Any) -> None:
    for one in state if isinstance(state, (list, tuple)) else [state]:
        if isinstance(one, Mapping) and one.get("flow"):
            raise StateError(
                f"this is the state of a stream ({one.get('pipeline')}): what comes next is not known before it runs. "
                "check_state of the stream tells whether it fits."
            )


def _plan(known: Known, options: Options, ranks: int, steps: int, machines: int) -> ResumePlan:
    epoch, position = known.cursor
    notes = list(known.notes)
    size = options.batch_size * ranks
    plan = Plan.of(epoch, position, known.rows, size, options.ends)
    if position and not len(plan):
        notes.append(f"epoch {epoch} is over: it goes on with epoch {epoch + 1}.")
        epoch, position = epoch + 1, 0
        plan = Plan.of(epoch, 0, known.rows, size, options.ends)
    batches: list[tuple[tuple[int, ...], ...]] = []
    order = known.at(epoch, notes)
    for step in range(min(steps, len(plan)) if order is not None else 0):
        positions = [Cut(rank, ranks).positions(plan.bounds(step)[0], plan.reach(step)) for rank in range(ranks)]
        assert order is not None
        batches.append(tuple(tuple(order.chosen(mine % known.rows).tolist()) for mine in positions))
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
        steps_per_epoch=len(Plan.of(epoch, 0, known.rows, size, options.ends)),
        dropped=known.rows - plan.end,
        padded=plan.reach(len(plan) - 1) - plan.end if len(plan) else 0,
        ranks_left_out=plan.left_out(ranks),
        batches=tuple(batches),
        machines=tuple(readings),
        notes=tuple(notes),
    )


def _reading(known: Known, order: EpochOrder | None, plan: Plan, ranks: int, mine: range) -> Reading:
    """Blocks with a row between here and the end of the epoch, of the lanes that these ranks read."""
    rows = sum(Cut(r, ranks).before(plan.end) - Cut(r, ranks).before(plan.start) for r in mine)
    span = (mine.start, mine.stop - 1)
    if order is None or known.layout is None or known.order is None or known.block_bytes is None:
        return Reading(span, rows, None, None if known.row_bytes is None else int(rows * known.row_bytes))
    uses = order.uses()
    wanted = (uses.last >= plan.start) & (uses.first < plan.end)
    if known.order.lanes % ranks == 0:
        wanted &= (uses.lane < 0) | np.isin(uses.lane % ranks, list(mine))
    blocks = np.unique(uses.blocks[wanted])
    # Mapped files are read row by row; blocks that are fetched or decoded, as a whole and once for a machine.
    size = int(known.block_bytes[blocks].sum())
    return Reading(span, rows, len(blocks), size if known.fetched else min(size, int(rows * (known.row_bytes or 0))))
