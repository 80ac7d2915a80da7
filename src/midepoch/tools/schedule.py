"""The consumption of a schedule, before it costs GPU time: rows, tokens and passes by source and phase.

from midepoch.tools.schedule import plan_schedule
plan = plan_schedule(schedule, {"web": web, "code": code})
plan.totals, plan.caps, plan.problem
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import hinted
from midepoch._internal.values import integer
from midepoch.dataset import Dataset
from midepoch.errors import ColumnError
from midepoch.open import from_files
from midepoch.order.schedule import OPEN, Schedule, shares
from midepoch.order.selection import Shard
from midepoch.order.turns import Turns, count, draw_of
from midepoch.pipeline.scheduled import draw_number
from midepoch.transforms.encode import Tokenize

FloatArray = npt.NDArray[np.float64]
Limit = tuple[int, int] | None
"""The most passes over a source, and its rows."""

_EXACT_ROWS, _EXACT_STRETCHES = 10**9, 1 << 14
"""Rows, and stretches over all lanes, up to which draws are counted exactly: at most 10 s."""

_TEXT = ("string", "large_string", "string_view")
_SAMPLE = 1000
"""Rows of a source that are tokenized: means of web pages are then known within about 10 %."""


class Event(NamedTuple):
    """The end of the last pass over a source, and the shares from there on."""

    source: int
    phase: int
    position: int
    shares: tuple[float, ...]


@dataclass
class SimulatedRun:
    """The draws of a run, or of one of its lanes. Infinite numbers are those of a phase without an end."""

    rows: FloatArray
    """Draws by phase and source."""
    endless: tuple[float, ...] | None = None
    """Shares of the sources in the part without an end, if there is one."""
    events: list[Event] = field(default_factory=list)
    end: tuple[int, float] | None = None
    """Phase and position at which all sources are used up, if that comes before the end of the schedule."""


def drawn(
    schedule: Schedule, names: Sequence[str], limits: Sequence[Limit], ranks: int, seed: int
) -> SimulatedRun | None:
    """Return the draws of a schedule in rows, exactly. None if there are too many to be counted."""
    last = schedule.total or schedule.plan[-1].start + sum(limit[0] * limit[1] for limit in limits if limit is not None)
    segments = len(schedule.segments(names, Shard()).stops)
    if last > _EXACT_ROWS or ranks * segments > _EXACT_STRETCHES:
        return None
    lanes = [
        _simulated(schedule, names, Shard(index, ranks), limits, [1.0] * len(names), seed) for index in range(ranks)
    ]
    return _joined(lanes, ranks)


def estimated(
    schedule: Schedule, names: Sequence[str], limits: Sequence[Limit], means: Sequence[float]
) -> SimulatedRun:
    """Return the draws of a schedule by shares and mean lengths. In a schedule of rows all lengths are 1."""
    means = means if schedule.unit == "tokens" else [1.0] * len(names)
    return _joined([_simulated(schedule, names, Shard(), limits, means, None)], 1)


def _simulated(
    schedule: Schedule,
    names: Sequence[str],
    lane: Shard,
    limits: Sequence[Limit],
    means: Sequence[float],
    seed: int | None,
) -> SimulatedRun:
    """Return the draws of a lane, with its own positions: as the run makes them.

    Without a seed, they are in proportion to the weights, of rows that have the mean length of their source.
    """
    run = SimulatedRun(np.zeros((len(schedule.plan), len(names))))
    left = {n: float(limit[0] * lane.before(limit[1])) for n, limit in enumerate(limits) if limit is not None}
    spent: set[int] = set()
    position: float = 0
    segments = schedule.segments(names, lane)
    for segment, (stop, weights, phase) in enumerate(
        zip(segments.stops, segments.weights, segments.phases, strict=True)
    ):
        events = 0
        while position < stop:
            active = tuple(0.0 if source in spent else weight for source, weight in enumerate(weights))
            if not any(active):
                run.end = (phase, position)
                return run
            length = stop - position if stop < OPEN else math.inf
            rate = np.array(shares(active)) / float(np.array(shares(active)) @ np.array(means))
            most, number = None if math.isinf(length) else int(length), draw_number(segment, events)
            turns = None if seed is None else Turns(active, most, seed, 0, lane.index, number)
            ends = []  # amounts before the first draw for which a source has no rows left
            for source in (one for one in left if active[one]):
                end = left[source] / rate[source] if turns is None else draw_of(turns, source, int(left[source]))
                if end is not None and end < length:
                    ends.append((float(end), source))
            amount, used_up = min(ends, default=(length, -1))
            if math.isinf(amount):
                run.rows[phase, np.array(active) > 0] = np.inf
                run.endless = shares(active)
                return run
            rows = rate * amount if turns is None else count(turns, int(amount))
            run.rows[phase] += rows
            left = {source: max(0.0, most - float(rows[source])) for source, most in left.items()}
            position = stop if used_up < 0 else position + amount
            if used_up >= 0:
                spent.add(used_up)
                events += 1
                rest = [0.0 if source in spent else weight for source, weight in enumerate(weights)]
                run.events.append(Event(used_up, phase, round(position), shares(rest)))
    return run


def _joined(lanes: Sequence[SimulatedRun], ranks: int) -> SimulatedRun:
    """Return the run of all lanes. Places are those of the first lane that reaches them, over all lanes."""
    events: dict[int, Event] = {}
    for event in sorted((event for lane in lanes for event in lane.events), key=lambda event: event.position):
        events.setdefault(event.source, event._replace(position=event.position * ranks))
    ends = [(lane.end[0], round(lane.end[1] * ranks)) for lane in lanes if lane.end is not None]
    return SimulatedRun(
        np.sum([lane.rows for lane in lanes], axis=0),
        next((lane.endless for lane in lanes if lane.endless is not None), None),
        sorted(events.values(), key=lambda event: (event.position, event.source)),
        min(ends, key=lambda end: end[1], default=None),
    )


@dataclass(frozen=True)
class SourceSize:
    """The rows of a source, and the tokens in them (with an end-of-sequence token each, if one is added)."""

    rows: int
    tokens: int | None = None

    @property
    def mean(self) -> float | None:
        """The mean number of tokens in a row."""
        return None if self.tokens is None or not self.rows else self.tokens / self.rows


@dataclass(frozen=True)
class Use:
    """The rows and tokens that a phase, or the run, takes from a source. None: unknown, or without an end."""

    source: str
    share: float
    """Share of the rows."""
    rows: int | None
    tokens: int | None
    passes: float | None


@dataclass(frozen=True)
class PhaseUse:
    """A phase, and what it takes from each source. ``start`` and ``stop`` are in the unit of the schedule."""

    name: str
    start: int
    stop: int | None
    steps: int | None
    global_batch_size: int | None
    sequence_length: int | None
    rows: int | None
    tokens: int | None
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Cap:
    """The place at which a source has had all of its passes, and the shares of the others from there on."""

    source: str
    max_passes: int
    phase: str
    position: int
    step: int | None
    shares: Mapping[str, float]


@dataclass(frozen=True)
class SchedulePlan:
    """The consumption of a schedule. ``problem``: the reason for which it cannot be run to its end, or None."""

    unit: str
    exact: bool
    """True if rows are those of the run, False if they are estimated from shares and mean lengths."""
    ranks: int
    steps: int | None
    sizes: Mapping[str, SourceSize]
    phases: tuple[PhaseUse, ...]
    totals: tuple[Use, ...]
    caps: tuple[Cap, ...]
    problem: str | None
    notes: tuple[str, ...]
    errors: Mapping[str, float] = field(default_factory=dict)
    """The relative error (95 %) of the tokens of each source of which only a sample was tokenized."""
    unchecked: tuple[str, ...] = ()
    """The sources whose ``max_passes`` could not be checked."""


@hinted()
def plan_schedule(
    schedule: Schedule,
    sources: Mapping[str, Any] | None = None,
    *,
    column: str | Mapping[str, str] | None = None,
    tokenizer: Any = None,
    ranks: int = 1,
    eos: bool = False,
    seed: int = 0,
) -> SchedulePlan:
    """Return what a schedule will consume.

    ``sources``: datasets or paths by name; by default the paths in the schedule. ``column``: the tokens of a row, of
    all sources or by name; by default "input_ids" where it exists, else with a tokenizer "text". ``tokenizer``: counts
    the tokens of 1,000 rows of each source whose column is text. ``eos``: ``pack()`` adds a token to each document.
    ``seed``: that of the mix.
    """
    ranks = integer(ranks, "plan_schedule(ranks=…)", 1)
    schedule.batch_sizes(ranks)  # a loader would refuse what it refuses
    given = schedule.sources if sources is None else sources
    unknown = [name for name in given if name not in schedule.names]
    if unknown and sources is not None:
        raise ValueError(
            f"source {unknown[0]!r} has no weight in any phase. The sources are {', '.join(schedule.names)}."
        )
    for value in given.values():
        if not isinstance(value, (Dataset, str, os.PathLike, list, tuple)):
            raise TypeError(f"a source is a dataset or its paths, got {value!r:.60}")
    datasets = {
        name: value if isinstance(value, Dataset) else from_files(value)
        for name, value in given.items()
        if name in schedule.names
    }
    columns = column if isinstance(column, Mapping) else dict.fromkeys(datasets, column)
    if others := [name for name in columns if name not in schedule.names]:
        raise ValueError(f"column of {others[0]!r}: the sources are {', '.join(schedule.names)}.")
    measured = {name: size_of(ds, columns.get(name), eos, tokenizer) for name, ds in datasets.items()}
    sizes = {name: size for name, (size, _) in measured.items()}
    names = tuple(datasets) + tuple(name for name in schedule.names if name not in datasets)
    means, notes, unchecked = _means(schedule, names, sizes)
    errors = {name: error for name, (_, error) in measured.items() if error}
    if errors:
        within = ", ".join(f"{name} within {100 * error:.1f} %" for name, error in errors.items())
        notes.append(f"tokens are estimated from {_SAMPLE:,} rows of each source: {within}, with 95 % probability.")
    in_rows = schedule.unit == "rows"
    passes = schedule.max_passes if means or in_rows else {}
    limits = [(passes[name], sizes[name].rows) if name in passes and name in sizes else None for name in names]
    exact = drawn(schedule, names, limits, ranks, seed) if in_rows else None
    assumed = means or [1.0] * len(names)
    run = exact or estimated(schedule, names, limits, assumed)
    lengths = [sizes[name].mean if name in sizes else None for name in names] if in_rows else assumed

    def uses(rows: FloatArray) -> tuple[Use, ...]:
        """Return the uses of the sources, given the rows of each."""
        of_rows = np.array(run.endless) if np.isinf(rows).any() else rows / (rows.sum() or 1.0)
        found = []
        for name, taken, share, length in zip(names, rows.tolist(), of_rows.tolist(), lengths, strict=True):
            known = in_rows or means is not None  # otherwise only their tokens are known
            total = sizes[name].rows if name in sizes and known and not math.isinf(taken) else 0
            tokens = None if length is None else _integer(taken * length)
            found.append(Use(name, share, _integer(taken) if known else None, tokens, taken / total if total else None))
        return tuple(found)

    phases = []
    for one, rows in zip(schedule.plan, run.rows, strict=True):
        mine, stop = uses(rows), one.stop if one.stop < OPEN else None
        sums = _sum(use.rows for use in mine), _sum(use.tokens for use in mine)
        shape = (one.global_batch_size, one.sequence_length)
        phases.append(PhaseUse(one.name, one.start, stop, one.steps, *shape, *sums, mine))
    caps = []
    for event in run.events:
        name, phase = names[event.source], schedule.plan[event.phase].name
        rest = {other: share for other, share in zip(names, event.shares, strict=True) if share}
        step = _step(schedule, event.position)
        caps.append(Cap(name, schedule.max_passes[name], phase, event.position, step, rest))
    problem = _end(schedule, run, notes)
    return SchedulePlan(
        unit=schedule.unit,
        exact=exact is not None,
        ranks=ranks,
        steps=_sum(one.steps for one in schedule.plan),
        sizes=sizes,
        phases=tuple(phases),
        totals=uses(run.rows.sum(axis=0)),
        caps=tuple(caps),
        problem=problem,
        notes=tuple(notes),
        errors=errors,
        unchecked=unchecked,
    )


def size_of(
    ds: Dataset, column: str | None = None, eos: bool = False, tokenizer: Any = None
) -> tuple[SourceSize, float]:
    """Return the size of a source, and the relative error of its tokens if they are those of a sample.

    Without ``column`` its tokens are those in "input_ids", or of "text" with a tokenizer, if it has that column.
    """
    present = ds.column_names
    column = column or next(
        (name for name in ("input_ids", *["text"] * (tokenizer is not None)) if name in present), None
    )
    if column is None:
        return SourceSize(len(ds)), 0.0
    if column not in present or not len(ds) or str(ds.schema.field(column).type) not in _TEXT:
        lengths = ds.lengths(column)
        return SourceSize(len(ds), int(lengths.sum()) + int(np.count_nonzero(lengths) if eos else 0)), 0.0
    if tokenizer is None:
        raise ColumnError(
            f"column {column!r} is text, and its characters are not tokens. Pass a tokenizer (--tokenizer), or the "
            "column with the tokens (--column)."
        )
    rows = np.sort(np.random.default_rng(0).permutation(len(ds))[:_SAMPLE])
    texts = ds.select_columns(column).select(rows).with_format("python")[:][column]
    counted = np.array([len(tokens) for tokens in Tokenize(tokenizer)(texts)["input_ids"]])
    counted = counted + (counted > 0) * eos
    mean, unseen = float(counted.mean()), 1 - len(rows) / len(ds)
    error = 1.96 * float(counted.std()) * math.sqrt(unseen / len(rows)) / mean if mean else 0.0
    return SourceSize(len(ds), round(mean * len(ds))), error


def _means(
    schedule: Schedule, names: Sequence[str], sizes: Mapping[str, SourceSize]
) -> tuple[list[float] | None, list[str], tuple[str, ...]]:
    """Return the mean tokens in a row of each source, if any is known, and notes about those that are not.

    Also return the sources whose ``max_passes`` cannot be checked.
    """
    known = {name: size.mean for name, size in sizes.items() if size.mean}
    missing = [name for name in names if name not in known]
    notes = []
    if schedule.unit == "tokens" and not known and sizes:
        notes.append(
            f"the tokens of {', '.join(sizes)} are not known, so rows and passes are not counted: there is no column "
            "'input_ids'. Pass a tokenizer for text (--tokenizer), or the column with the tokens (--column)."
        )
    elif schedule.unit == "tokens" and not known:
        notes.append(
            "no lengths of documents are known: tokens are divided by weight, as if the documents of all sources had "
            "the same mean length. Name the paths of the sources, and the column with the tokens."
        )
    elif schedule.unit == "tokens" and missing:
        notes.append(
            f"the lengths of documents of {', '.join(missing)} are not known: their mean is taken to be that of the "
            "other sources."
        )
    unlimited = [name for name in schedule.max_passes if name not in (sizes if schedule.unit == "rows" else known)]
    if unlimited:
        what = "number of tokens" if all(name in sizes for name in unlimited) else "data"
        notes.append(f"max_passes of {', '.join(unlimited)} cannot be checked without the {what}.")
    if unopened := [name for name in names if name not in sizes]:
        notes.append(f"passes over {', '.join(unopened)} are not counted. Name the paths of these sources.")
    if not known:
        return None, notes, tuple(unlimited)
    common = sum(sizes[name].tokens or 0 for name in known) / sum(sizes[name].rows for name in known)
    return [known.get(name) or common for name in names], notes, tuple(unlimited)


def _end(schedule: Schedule, run: SimulatedRun, notes: list[str]) -> str | None:
    """Return the reason for which a schedule cannot be run to its end, if any. Add an end that it may have to notes."""
    if run.end is None:
        if schedule.total is None:
            notes.append(f"phase {schedule.plan[-1].name!r} has no end: its sources are iterated again and again.")
        return None
    phase, position = schedule.plan[run.end[0]], int(run.end[1])
    step = _step(schedule, position)
    place = f"{position:,} {schedule.unit}" + ("" if step is None else f", after {step:,} steps")
    if phase.stop >= OPEN:
        notes.append(f"the run ends at {place}: all passes are used up.")
        return None
    return (
        f"phase {phase.name!r} cannot be filled: all of its sources have reached max_passes at {place}. The run ends "
        "there. Raise max_passes, or shorten the run."
    )


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if None in found else sum(value or 0 for value in found)


def _integer(value: float) -> int | None:
    return None if math.isinf(value) else round(value)


def _step(schedule: Schedule, position: int) -> int | None:
    """Return the complete steps before a position, if the batch sizes are known."""
    steps = 0
    for phase in schedule.plan:
        size = (phase.global_batch_size or 0) * (phase.sequence_length or 0 if schedule.unit == "tokens" else 1)
        if not size:
            return None
        steps += (min(position, phase.stop) - phase.start) // size
        if position < phase.stop:
            break
    return steps
