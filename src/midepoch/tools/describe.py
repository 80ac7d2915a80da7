"""States in words: the position and the pipeline of a run, and the differences between two states.

print(describe(state))                 # epoch 3, 41.2 %: position 412,000 of 1,000,000; next: row 17 of a.parquet …
differences(state, other_state)        # [] if one can be loaded where the other can

The data of a state is given as a dataset, or found on this machine by its fingerprint (``KnownState``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal import html
from midepoch._internal.hints import hinted
from midepoch.dataset import Dataset
from midepoch.errors import CheckpointNotFoundError, StateError
from midepoch.loader.loader import Loader
from midepoch.loader.options import LAST_BATCH
from midepoch.order import EpochOrder, Order, Selection, Shard, SourceLayout
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.planned import Planning, window_at
from midepoch.pipeline.plans import Plan
from midepoch.pipeline.spec import PipelineSpec, identity
from midepoch.sources import Source
from midepoch.sources.index import read_index
from midepoch.state.format import CAUSES, KEY, Saved, comparable, excluded_from_json, order_of, parse, parts_from_json
from midepoch.state.saved import load_global, one_of
from midepoch.storage.cache_files import default_index_dir

Int64Array = npt.NDArray[np.int64]
_SHOWN_CHANGES = 8
_MOST_SOURCES = 1 << 12
_OF_ALL = ": a resume needs the states of all ranks"
_OF_SHUFFLE = ("weights", "seed", "window", "aligned")
"""Fields that follow from the scope: if it differs, they add nothing."""


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
    rows, cursor, excluded = saved["rows"], saved.cursor, excluded_from_json(saved["excluded"], 1)
    order = None  # rows that were selected one by one or drawn by weight are not in a state
    if not saved["weights"] and re.fullmatch(r"\d+:\d+(,\d+:\d+)*", saved["selection"]) is not None:
        bounds = [part.split(":") for part in saved["selection"].split(",")]
        order = order_of(saved.fields, Selection.of_ranges([(int(first), int(stop)) for first, stop in bounds]))
    if cursor.position > rows or (order is not None and len(order) != rows):
        raise StateError(
            f"the state is damaged: position {cursor.position} of {rows} rows, selection {saved['selection']}."
        )
    known = KnownState(cursor, rows, order, None, excluded[0] if excluded else EMPTY, False, "nothing")
    folder = default_index_dir() if index_dir is None else Path(index_dir).expanduser()
    for path in sorted(folder.glob("*.midepoch-index")):
        index = read_index(path)
        if index is None or index.fingerprint != saved["data"]:
            continue
        known = replace(known, source=Source(index), fetched=not index.in_place, checked="index")
        if all(os.path.exists(file.path) for file in index.files[:1]):  # of several copies, preferred
            break
    return known


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


@dataclass(frozen=True)
class StateSummary:
    """The contents of a state. ``rows`` and ``share`` of a stream are None until an epoch of it has been iterated."""

    epoch: int
    position: int
    rows: int | None
    stream: bool
    order: str
    pipeline: str
    data: str
    lanes: int
    next_row: str | None = None
    """The next row and its file, if the data was found on this machine."""
    steps_left: int | None = None
    whose: str | None = None
    """The worker, shard or rank of the state, if it is not that of a complete run."""
    changes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    batches: str | None = None
    """The progress of batches by tokens. ``position`` is then that at which the window of rows in progress begins."""
    steps: int = 0
    """Steps since the run began, if they are counted."""
    excluded: str | None = None
    """Rows, batches or outputs that come and are not delivered."""

    @property
    def share(self) -> float | None:
        """The share of the epoch that has been delivered."""
        return None if not self.rows else min(1.0, self.position / self.rows)

    def lines(self) -> dict[str, str]:
        """The summary as lines, by name."""
        unit = "outputs" if self.stream else "rows"
        of = "" if self.rows is None else f" of {'about ' * self.stream}{self.rows:,}"
        share = "" if self.share is None else f" ({100 * self.share:.1f} %)"
        found: dict[str, str | None] = {
            "epoch": str(self.epoch),
            "position": f"{self.position:,}{of} {unit}{share}",
            "batches": self.batches,
            "steps": f"{self.steps:,}" if self.steps else None,
            "excluded": self.excluded,
            "next": self.next_row,
            "steps left": None if self.steps_left is None else f"{self.steps_left:,}",
            "order": self.order,
            "pipeline": None if self.pipeline == "none" else self.pipeline,
            "sources": "; ".join(self.sources) or None,
            "lanes": str(self.lanes) if self.lanes > 1 else None,
            "data": self.data,
            "belongs to": self.whose,
            "changed at resumes": "; ".join(self.changes[-_SHOWN_CHANGES:]) or None,
        }
        return {name: text for name, text in found.items() if text is not None}

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':<20}{text}" for name, text in self.lines().items())

    def _repr_html_(self) -> str:
        return html.table("State", self.lines(), self.share)


@hinted()
def describe(
    state: Any,
    *,
    batch_size: int | None = None,
    world_size: int = 1,
    last_batch: str | None = None,
    index_dir: str | os.PathLike[str] | None = None,
) -> StateSummary:
    """Describe a state, or the list of the states of all ranks, in words. Raises StateError if it is none.

    ``last_batch`` is that of the loader. With a ``batch_size`` (of a rank), the steps left of the epoch are included.
    """
    several = list(state) if isinstance(state, (list, tuple)) else [state]
    if not several:
        raise StateError("the list of the states of all ranks is empty.")
    parsed = [parse(one) for one in several]
    first, chosen = parsed[0], several[0]
    is_stream = first.in_lanes
    if is_stream:
        lanes = {number: lane.taken for one in parsed for number, lane in one.cursor.lanes.items()}
        position, rows = sum(lanes.values()), first["epoch_outputs"] or None
    else:
        chosen = one_of(several, Shard())
        chosen = chosen[0] if isinstance(chosen, list) else chosen  # ranks with leases, each at its own pace
        first = parse(chosen)
        position, rows = first.rows_before, first["rows"]
    by_tokens = bool(first["budget"]) and not is_stream
    is_rows = not is_stream and not by_tokens
    steps_left = batches = whose = None
    if batch_size and is_rows:
        if last_batch is not None and last_batch not in LAST_BATCH:
            raise ValueError(f"last_batch must be one of {', '.join(LAST_BATCH)}, got {last_batch!r}")
        plan = Plan.of(first.cursor, first["rows"], batch_size, world_size, last_batch, first.cursor.lane.done)
        steps_left = len(plan)
    if by_tokens:
        lane = first.cursor.lane
        inside, tokens = lane.taken - window_at(lane).first, json.loads(first["budget"])[0]
        rest = f", and a window of rows in progress: {inside} of it with max_tokens={tokens:,}" if inside else ""
        batches = f"{lane.taken:,} delivered{rest}"
    if first["workers"]:
        whose = f"worker {first['worker']} of {first['workers']} of a DataLoader, shards: {first['shards']}"
    elif first["shard"] is not None:
        whose = f"shard {first['shard']} of {first['shards']}"
    elif len(several) == 1 and first.leased is not None and first.leased.shard.count > 1:
        whose = f"rank {first.leased.shard.index} of {first.leased.shard.count}{_OF_ALL}"
    elif len(several) == 1 and is_stream and first.cursor.begun and len(lanes) < first["lanes"]:
        whose = f"one of several ranks, with {len(lanes)} of {first['lanes']} lanes{_OF_ALL}"
    return StateSummary(
        epoch=first["epoch"],
        position=position,
        rows=rows,
        stream=is_stream,
        order=_order_text(first),
        pipeline=first["pipeline"],
        data=first["data"],
        lanes=first["lanes"],
        next_row=of_index(chosen, index_dir).next_place() if whose is None and is_rows else None,
        steps_left=steps_left,
        whose=whose,
        changes=tuple(map(str, first["changes"])),
        sources=tuple(_source_texts(parts_from_json(first["parts"]), "")),
        batches=batches,
        steps=first["steps"],
        excluded=_excluded(parsed, "outputs" if is_stream else "batches" if by_tokens else "rows"),
    )


def _excluded(parsed: list[Saved], unit: str) -> str | None:
    """Return what comes after the position and is not delivered, in words."""
    lanes: dict[int, Intervals] = {}
    for one in parsed:
        for number, lane in one.cursor.lanes.items():
            lanes[number] = lanes.get(number, EMPTY).union(lane.done)
    ahead = sum(map(len, lanes.values()))
    texts = [f"{ahead:,} {unit} ahead"] if ahead else []
    rows = sum(map(len, excluded_from_json(parsed[0]["excluded"], _MOST_SOURCES)))
    texts += [f"{rows:,} row{'s' * (rows != 1)} in every epoch"] if rows else []
    return ", ".join(texts) or None


def _order_text(state: Saved) -> str:
    selected = "" if state["selection"] in ("", f"0:{state['rows']}") else f"rows {state['selection']}, "
    if state["scope"] == "none":
        return f"{selected}in order" if not state["parts"] else "by its sources"
    if state["weights"]:
        return f"{selected}{state['scope']}, {state['weights']}, seed {state['seed']}"
    window = f" of {state['window']} blocks" if state["window"] is not None else ""
    return f"{selected}shuffled by {state['scope']}{window}, seed {state['seed']}"


def _source_texts(tree: Mapping[str, Any], outer: str) -> Iterator[str]:
    """Yield the name of each source of a mix or another combination, its rows, steps and weight.

    Sources of a mix in a mix are named OUTER/INNER.
    """
    parts = tree.get("parts", ())
    names, weights = tree.get("names") or (), tree.get("weights") or ()
    for number, (part, name, weight) in enumerate(zip_longest(parts, names, weights)):
        if not isinstance(part, Mapping):
            raise StateError(f"the state is damaged: a source is {part!r:.40}.")
        whole = f"{outer}{name or f'source {number}'}"
        rows = f"{part['rows']:,} rows" if isinstance(part.get("rows"), int) else ""
        steps = "" if part.get("pipeline", "none") == "none" else str(part["pipeline"])
        share = "" if weight is None else f"weight {weight:g}"
        yield f"{whole}: {', '.join(filter(None, (rows, steps, share))) or 'no steps'}"
        yield from _source_texts(part, f"{whole}/")


class Difference(NamedTuple):
    """A field in which two states differ. ``cause`` is empty if the difference does not prevent a resume."""

    field: str
    first: Any
    second: Any
    cause: str


@hinted()
def differences(first: Any, second: Any) -> list[Difference]:
    """Return the differences between a state and another state, a dataset or a loader, with causes for a refusal."""
    state = _fields(first)
    if isinstance(second, (Dataset, Loader)):
        spec = second.pipeline
        other: Mapping[str, Any] = {"parts": {}, **identity(replace(spec, lanes=state["lanes"])), "unit": spec.unit}
    else:
        other = _fields(second)
    fields = []
    for name in ("epoch", "position", "lanes"):
        if name in other and state[name] != other[name]:
            fields.append(Difference(name, state[name], other[name], ""))
    shuffled = state["scope"] == other.get("scope", state["scope"])
    for name, cause in CAUSES.items():
        if name == "arguments" and not comparable(state[name], other.get(name), ()):
            continue
        if state[name] != other.get(name, state[name]) and (shuffled or name not in _OF_SHUFFLE):
            fields.append(Difference(name, state[name], other[name], cause))
    if state["unit"] != other["unit"]:
        cause = "steps that change the number of rows were added or removed"
        first_kind, second_kind = ("stream" if one["unit"] == "outputs" else "dataset" for one in (state, other))
        fields.append(Difference("kind", first_kind, second_kind, cause))
    if state["parts"] != other["parts"]:
        fields.append(Difference("parts", state["parts"], other["parts"], "the sources, or their steps, have changed"))
    return fields


def _fields(given: Any) -> dict[str, Any]:
    """Return the fields of a state, with the description of its sources."""
    saved = parse(given[0] if isinstance(given, (list, tuple)) and given else given)
    return {**saved.fields, "parts": parts_from_json(saved["parts"])}
