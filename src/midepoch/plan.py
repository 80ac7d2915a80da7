"""What a resume would do, before anyone pays for GPUs: accepted or refused, the next rows, steps left, what is read.

from midepoch.plan import plan_resume
plan = plan_resume(state, ds, world_size=6, batch_size=48, num_workers=4)
plan.accepted, plan.steps_left, plan.batches[0][5]     # the rows that rank 5 gets first
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch import state as states
from midepoch.checks import whole
from midepoch.dataset import Dataset
from midepoch.errors import CheckpointNotFoundError, StateError, WorldError
from midepoch.loader.batches import Plan
from midepoch.loader.equal import check_reach
from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, check_drop
from midepoch.order import Cut, EpochOrder, Layout, Order, Selection
from midepoch.sources.index import Index, default_index_dir, read_index

Int64Array = npt.NDArray[np.int64]


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
        known = _of_dataset(state, dataset) if dataset is not None else _of_index(state, index_dir)
        check_drop(known.rows, options, size)
        check_reach(
            Plan.of(known.cursor.epoch, known.cursor.position, known.rows, batch_size * size, ends),
            options,
            Cut(0, size),
        )
    except (StateError, WorldError, ValueError) as problem:
        return ResumePlan(False, str(problem), "dataset" if dataset is not None else "nothing")
    return known.plan(options, size, whole(steps, "plan(steps=…)"), machines)


def _refuse_streams(state: Any) -> None:
    for one in state if isinstance(state, (list, tuple)) else [state]:
        if isinstance(one, Mapping) and one.get("flow"):
            raise StateError(
                f"this is the state of a stream ({one.get('pipeline')}): what comes next is not known before it runs. "
                "check_state of the stream tells whether it fits."
            )


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of the data of a state: its order, and where its blocks begin, if it was found."""

    cursor: states.Cursor
    rows: int
    order: Order | None
    layout: Layout | None
    block_bytes: Int64Array | None
    row_bytes: float | None
    fetched: bool
    checked: str
    notes: tuple[str, ...] = ()

    def plan(self, options: Options, ranks: int, steps: int, machines: int) -> ResumePlan:
        epoch, position = self.cursor
        notes = list(self.notes)
        size = options.batch_size * ranks
        plan = Plan.of(epoch, position, self.rows, size, options.ends)
        if position and not len(plan):
            notes.append(f"epoch {epoch} is over: it goes on with epoch {epoch + 1}.")
            epoch, position = epoch + 1, 0
            plan = Plan.of(epoch, 0, self.rows, size, options.ends)
        batches: list[tuple[tuple[int, ...], ...]] = []
        order = self._at(epoch, notes)
        for step in range(min(steps, len(plan)) if order is not None else 0):
            positions = [Cut(rank, ranks).positions(plan.bounds(step)[0], plan.reach(step)) for rank in range(ranks)]
            assert order is not None
            batches.append(tuple(tuple(order.chosen(mine % self.rows).tolist()) for mine in positions))
        readings = [
            self._reading(order, plan, ranks, range(m * ranks // machines, (m + 1) * ranks // machines))
            for m in range(machines)
        ]
        return ResumePlan(
            accepted=True,
            problem=None,
            checked=self.checked,
            epoch=epoch,
            position=position,
            rows=self.rows,
            global_batch=size,
            steps_left=len(plan),
            steps_per_epoch=len(Plan.of(epoch, 0, self.rows, size, options.ends)),
            dropped=self.rows - plan.end,
            padded=plan.reach(len(plan) - 1) - plan.end if len(plan) else 0,
            ranks_left_out=plan.left_out(ranks),
            batches=tuple(batches),
            machines=tuple(readings),
            notes=tuple(notes),
        )

    def _at(self, epoch: int, notes: list[str]) -> EpochOrder | None:
        if self.order is None:
            notes.append("which rows were selected is not in the state: give the dataset to see rows and blocks.")
            return None
        by_rows = self.order.shuffle is None or self.order.shuffle.scope == "rows"
        if self.layout is None:
            if not by_rows:
                notes.append("where blocks begin is not in the state: give the dataset to see rows and blocks.")
                return None
            return self.order.at(epoch, Layout(np.array([0, self.rows]), np.array([0, self.rows])))
        return self.order.at(epoch, self.layout)

    def _reading(self, order: EpochOrder | None, plan: Plan, ranks: int, mine: range) -> Reading:
        """Blocks with a row between here and the end of the epoch, of the lanes that these ranks read."""
        rows = sum(Cut(r, ranks).before(plan.end) - Cut(r, ranks).before(plan.start) for r in mine)
        span = (mine.start, mine.stop - 1)
        if order is None or self.layout is None or self.order is None or self.block_bytes is None:
            return Reading(span, rows, None, None if self.row_bytes is None else int(rows * self.row_bytes))
        uses = order.uses()
        wanted = (uses.last >= plan.start) & (uses.first < plan.end)
        if self.order.lanes % ranks == 0:
            wanted &= (uses.lane < 0) | np.isin(uses.lane % ranks, list(mine))
        blocks = np.unique(uses.blocks[wanted])
        # Mapped files are read row by row; blocks that are fetched or decoded, as a whole and once for a machine.
        size = int(self.block_bytes[blocks].sum())
        return Reading(span, rows, len(blocks), size if self.fetched else min(size, int(rows * (self.row_bytes or 0))))


def _of_dataset(state: Any, dataset: Dataset | Loader) -> _Known:
    pipeline = dataset.pipeline
    resumed = states.load_global(state, pipeline)
    pipeline = states.adopt(resumed, pipeline)
    source = pipeline.source
    sizes = np.concatenate([_block_bytes(index) for index in source.indexes])
    return _Known(
        resumed.cursor,
        pipeline.rows,
        pipeline.order,
        source.layout,
        sizes,
        source.bytes_per_row,
        source.fetched,
        "dataset",
    )


def _of_index(state: Any, index_dir: str | os.PathLike[str] | None) -> _Known:
    state = states.one_of(state, Cut())
    states.check(state)
    if state.get("workers") or state.get("shard") is not None:
        raise StateError("the state is that of one worker or shard, which fits just the same number of them.")
    cursor, order = states.Cursor(state["epoch"], state["position"]), _order(state)
    if cursor.position > state["rows"] or (order is not None and len(order) != state["rows"]):
        raise StateError(
            f"the state is damaged: position {cursor.position} of {state['rows']} rows, selection {state['selection']}."
        )
    folder = default_index_dir() if index_dir is None else Path(index_dir).expanduser()
    index = _index_of(state["data"], folder)
    if index is None:
        note = "its data was not found among the indexes on this machine: it was not checked against any."
        return _Known(cursor, state["rows"], order, None, None, None, False, "nothing", (note,))
    files = np.cumsum([0, *(file.rows for file in index.files)], dtype=np.int64)
    total = int(files[-1])
    row_bytes = index.row_bytes or sum(file.size for file in index.files) / max(1, total)
    fetched = index.ends is not None
    return _Known(
        cursor, state["rows"], order, Layout(index.starts, files), _block_bytes(index), row_bytes, fetched, "index"
    )


def _order(state: Mapping[str, Any]) -> Order | None:
    """The order that a state tells of, as far as it does: which rows were picked one by one it does not."""
    if re.fullmatch(r"\d+:\d+(,\d+:\d+)*", state["selection"]) is None:
        return None
    ranges = [tuple(map(int, part.split(":"))) for part in state["selection"].split(",")]
    selection = Selection.of_ranges([(a, b) for a, b in ranges])
    return states.order_of(state, selection)


def _index_of(fingerprint: str, folder: Path) -> Index | None:
    for path in sorted(folder.glob("*.midepoch-index")):
        index = read_index(path)
        if index is not None and index.fingerprint == fingerprint:
            return index
    return None


def _block_bytes(index: Index) -> Int64Array:
    """About how many bytes each block has in its file: its rows' share."""
    if not index.files:
        return np.zeros(0, dtype=np.int64)
    rows = np.diff(index.starts)
    owner = np.repeat(np.arange(len(index.files)), [file.blocks for file in index.files])
    share = np.array([file.size / max(1, file.rows) for file in index.files])
    return np.asarray(rows * share[owner], dtype=np.int64)


def state_in(tree: Any, part: str | None = None) -> Any:
    """The state of a pipeline in what a checkpoint holds: the only one there is, or the one under a name."""
    found = dict(_states(tree, ""))
    if part is not None:
        found = {name: state for name, state in found.items() if name == part}
    if len(found) != 1:
        there = ", ".join(found) or "none"
        raise CheckpointNotFoundError(
            f"there must be one state of a pipeline to plan with{f' called {part!r}' if part else ''}, found: {there}."
        )
    return next(iter(found.values()))


def _states(tree: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        if states.KEY in tree:
            return [(name or "state", tree)]
        return [found for key, value in tree.items() for found in _states(value, f"{name}.{key}".strip("."))]
    if isinstance(tree, (list, tuple)) and tree and all(isinstance(one, Mapping) and states.KEY in one for one in tree):
        return [(name or "state", list(tree))]
    return []
