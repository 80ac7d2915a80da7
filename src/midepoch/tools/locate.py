"""The data of a state: given as a dataset, or found on this machine by its fingerprint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.dataset import Dataset
from midepoch.errors import CheckpointNotFoundError, StateError
from midepoch.loader.loader import Loader
from midepoch.order import EpochOrder, Order, Selection, Shard, SourceLayout
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.node import Excluded
from midepoch.sources.index import Index, read_index
from midepoch.state.format import KEY, excluded_from_json, order_of, parse
from midepoch.state.saved import load_global, one_of
from midepoch.storage.cache_files import default_index_dir

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KnownState:
    """A state's cursor and order, and the first rows of its blocks and files, if they were found.

    ``checked``: what the state was checked against: "dataset", "index" or "nothing".
    """

    cursor: Cursor
    rows: int
    order: Order | None
    layout: SourceLayout | None
    block_bytes: Int64Array | None
    row_bytes: float | None
    fetched: bool
    checked: str
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    excluded: Intervals = EMPTY
    """Rows that are excluded in every epoch."""

    def at(self, epoch: int, notes: list[str]) -> EpochOrder | None:
        """Return the order of an epoch, if enough is known. Otherwise add what is missing to ``notes``."""
        if self.order is None:
            notes.append(
                "the selected rows, or their weights, are not in the state. Pass the dataset to see rows and blocks."
            )
            return None
        by_rows = self.order.shuffle is None or self.order.shuffle.scope == "rows"
        if self.layout is None:
            if not by_rows:
                notes.append("the first rows of blocks are not in the state. Pass the dataset to see rows and blocks.")
                return None
            return self.order.at(epoch, SourceLayout(np.array([0, self.rows]), np.array([0, self.rows])))
        return self.order.at(epoch, self.layout)

    def excluded_at(self, epoch: int) -> Intervals:
        """Return the positions of excluded rows in an epoch, or none if its order is not known."""
        order = self.at(epoch, []) if self.excluded else None
        return EMPTY if order is None else Intervals.from_positions(order.positions_of_rows(self.excluded.positions()))

    def place(self, position: int) -> str | None:
        """Return the row at a position of the state's epoch, and its file."""
        order = self.at(self.cursor.epoch, [])
        if order is None or self.layout is None or self.order is None or position >= self.rows:
            return None
        row = int(self.order.selection.source_rows(order.chosen(np.array([position])))[0])
        number = int(np.searchsorted(self.layout.file_starts, row, side="right")) - 1
        return f"row {row - int(self.layout.file_starts[number])} of {self.files[number]}"


def of_dataset(state: Any, dataset: Dataset | Loader) -> KnownState:
    resumed = load_global(state, dataset.pipeline)
    pipeline = resumed.spec
    source = pipeline.source
    sizes = np.concatenate([block_bytes(index) for index in source.indexes])
    return KnownState(
        _without_done(resumed.cursor, pipeline.undelivered(resumed.cursor.epoch, resumed.cursor.lane)),
        pipeline.rows,
        pipeline.order,
        source.layout,
        sizes,
        source.bytes_per_row,
        source.fetched,
        "dataset",
        tuple(source.name(file) for file in source.files),
        excluded=pipeline.excluded[0] if pipeline.excluded else EMPTY,
    )


def of_index(state: Any, index_dir: str | os.PathLike[str] | None) -> KnownState:
    state = one_of(state, Shard())
    parse(state)
    if state.get("workers") or state.get("shard") is not None:
        raise StateError("this is the state of one worker or shard, which fits only the same number of them.")
    saved, order = parse(state), _order(state)
    cursor, excluded = saved.cursor, excluded_from_json(saved["excluded"], 1)
    if cursor.position > state["rows"] or (order is not None and len(order) != state["rows"]):
        raise StateError(
            f"the state is damaged: position {cursor.position} of {state['rows']} rows, selection {state['selection']}."
        )
    folder = default_index_dir() if index_dir is None else Path(index_dir).expanduser()
    index = _index_of(state["data"], folder)
    if index is None:
        note = "its data was not found among the indexes on this machine, so it was not checked against any."
        known = KnownState(cursor, state["rows"], order, None, None, None, False, "nothing", notes=(note,))
        return _without(known, excluded)
    files = np.concatenate([[0], np.cumsum(index.files.rows)])
    total = int(files[-1])
    row_bytes = index.row_bytes or int(index.files.size.sum()) / max(1, total)
    fetched = index.ends is not None and index.format.partition(":")[0] not in ("tokens", "megatron")
    known = KnownState(
        cursor,
        state["rows"],
        order,
        SourceLayout(index.starts, files),
        block_bytes(index),
        row_bytes,
        fetched,
        "index",
        tuple(index.files.paths),
    )
    return _without(known, excluded)


def _without(known: KnownState, excluded: Excluded) -> KnownState:
    """Return what is known of a state without the rows that are excluded, if their positions can be computed."""
    if not excluded:
        return known
    known = replace(known, excluded=excluded[0])
    lane = known.cursor.lane
    done = lane.done.union(known.excluded_at(known.cursor.epoch)).from_(lane.taken)
    return replace(known, cursor=_without_done(known.cursor, done))


def _without_done(cursor: Cursor, done: Intervals) -> Cursor:
    """Return a cursor of rows with what is not delivered after it."""
    return Cursor.at_row(cursor.epoch, replace(cursor.lane, excluded=done, ahead=EMPTY), cursor.steps)


def _order(state: Mapping[str, Any]) -> Order | None:
    """Return the order that a state describes, or None if rows were selected one by one or drawn by weight."""
    if state.get("weights") or re.fullmatch(r"\d+:\d+(,\d+:\d+)*", state["selection"]) is None:
        return None
    ranges = [tuple(map(int, part.split(":"))) for part in state["selection"].split(",")]
    selection = Selection.of_ranges([(a, b) for a, b in ranges])
    return order_of(state, selection)


def _index_of(fingerprint: str, folder: Path) -> Index | None:
    """Return the index of some data. Of several copies, prefer one whose files still exist."""
    gone: Index | None = None
    for path in sorted(folder.glob("*.midepoch-index")):
        index = read_index(path)
        if index is not None and index.fingerprint == fingerprint:
            if all(os.path.exists(file.path) for file in index.files[:1]):
                return index
            gone = gone or index
    return gone


def block_bytes(index: Index) -> Int64Array:
    """Return the approximate bytes of each block in its file: the share of its rows."""
    if not index.files:
        return np.zeros(0, dtype=np.int64)
    rows = np.diff(index.starts)
    owner = np.repeat(np.arange(len(index.files)), index.files.blocks)
    share = index.files.size / np.maximum(1, index.files.rows)
    return np.asarray(rows * share[owner], dtype=np.int64)


def state_in(tree: Any, part: str | None = None) -> Any:
    """Return the state of a pipeline in a checkpoint: the only one, or the one with a name."""
    states = dict(_states(tree, ""))
    if part is not None:
        states = {name: state for name, state in states.items() if name == part}
    if len(states) != 1:
        named, there = f" called {part!r}" if part else "", ", ".join(states) or "none"
        raise CheckpointNotFoundError(
            f"expected one state of a pipeline{named}, found: {there}. Pass a state_dict() of a loader or dataset, and "
            "the name of one if there are several (--part)."
        )
    return next(iter(states.values()))


def _states(tree: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        if KEY in tree:
            return [(name or "state", tree)]
        return [found for key, value in tree.items() for found in _states(value, f"{name}.{key}".strip("."))]
    if isinstance(tree, (list, tuple)) and tree and all(isinstance(one, Mapping) and KEY in one for one in tree):
        return [(name or "state", list(tree))]
    return []
