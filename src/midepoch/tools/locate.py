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
from midepoch.pipeline.planned import Planning
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources import Source
from midepoch.sources.index import Index, read_index
from midepoch.state.format import KEY, excluded_from_json, order_of, parse
from midepoch.state.saved import load_global, one_of
from midepoch.storage.cache_files import default_index_dir

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KnownState:
    """A state's cursor, and the order and the source of its rows, if they are known.

    ``checked``: what the state was checked against: "dataset", "index" or "nothing". ``excluded``: rows that are
    excluded in every epoch.
    """

    cursor: Cursor
    rows: int
    order: Order | None
    source: Source | None
    excluded: Intervals
    fetched: bool
    checked: str
    spec: PipelineSpec | None = None

    def at(self, epoch: int, notes: list[str]) -> EpochOrder | None:
        """Return the order of an epoch, if enough is known. Otherwise add what is missing to ``notes``."""
        if self.order is not None and self.source is not None:
            return self.order.at(epoch, self.source.layout)
        if self.order is not None and (self.order.shuffle is None or self.order.shuffle.scope == "rows"):
            return self.order.at(epoch, SourceLayout(np.array([0, self.rows]), np.array([0, self.rows])))
        missing = "the selected rows, or their weights, are" if self.order is None else "the first rows of blocks are"
        notes.append(f"{missing} not in the state. Pass the dataset to see rows and blocks.")
        return None

    def undelivered(self, cursor: Cursor) -> Intervals:
        """Return the positions after a cursor that are not delivered, with those of excluded rows if they are known."""
        order = self.at(cursor.epoch, []) if self.excluded else None
        lane, rows = cursor.lane, self.excluded.positions()
        excluded = EMPTY if order is None else Intervals.from_positions(order.positions_of_rows(rows))
        return lane.done.union(excluded).from_(lane.taken)

    def next_place(self) -> str | None:
        """Return the row at the state's position, and its file."""
        order, position = self.at(self.cursor.epoch, []), self.cursor.position
        if order is None or self.source is None or self.order is None or position >= self.rows:
            return None
        return self.source.place(int(self.order.selection.source_rows(order.chosen(np.array([position])))[0]))


def of_dataset(state: Any, dataset: Dataset | Loader, planning: Planning | None = None) -> KnownState:
    """Return a state with the order and source of a dataset. Raise as ``load_state_dict`` does if they do not match."""
    resumed = load_global(state, dataset.pipeline, (), planning)
    spec = resumed.spec
    excluded = spec.excluded[0] if spec.excluded else EMPTY
    data = (spec.rows, spec.order, spec.source, excluded, spec.source.fetched)
    return KnownState(resumed.cursor, *data, "dataset", spec)


def of_index(state: Any, index_dir: str | os.PathLike[str] | None) -> KnownState:
    """Return a state with the order that it describes, and the source with its fingerprint on this machine."""
    state = one_of(state, Shard())
    saved = parse(state)
    if saved["workers"] or saved["shard"] is not None:
        raise StateError("this is the state of one worker or shard, which fits only the same number of them.")
    order, cursor, excluded = _order(state), saved.cursor, excluded_from_json(saved["excluded"], 1)
    if cursor.position > saved["rows"] or (order is not None and len(order) != saved["rows"]):
        raise StateError(
            f"the state is damaged: position {cursor.position} of {saved['rows']} rows, selection {saved['selection']}."
        )
    index = _index_of(saved["data"], default_index_dir() if index_dir is None else Path(index_dir).expanduser())
    known = KnownState(cursor, saved["rows"], order, None, excluded[0] if excluded else EMPTY, False, "nothing")
    if index is None:
        return known
    return replace(known, source=Source((index,)), fetched=not index.in_place, checked="index")


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


def block_bytes(source: Source) -> Int64Array:
    """Return the approximate bytes of each block in its file: the share of its rows."""
    rows = np.diff(source.layout.block_starts)
    owner = np.repeat(np.arange(len(source.files)), source.files.blocks)
    share = source.files.size / np.maximum(1, source.files.rows)
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
