"""The consumption of a schedule, before it costs GPU time: rows, tokens and passes by source and phase.

from midepoch.tools.schedule_plan import plan_schedule
plan = plan_schedule(schedule, {"web": web, "code": code})
plan.totals, plan.caps, plan.problem
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch._internal.checks import integer
from midepoch._internal.hints import hinted
from midepoch.dataset import Dataset
from midepoch.open import from_files
from midepoch.order.schedule import OPEN, Schedule
from midepoch.tools.schedule_run import ConstantShares, SimulatedRun, drawn, estimated


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
    stretches: tuple[ConstantShares, ...]
    """Shares between two changes of the weights, in the order of the run."""
    problem: str | None
    notes: tuple[str, ...]


@hinted()
def plan_schedule(
    schedule: Schedule,
    sources: Mapping[str, Any] | None = None,
    *,
    column: str | None = None,
    ranks: int = 1,
    eos: bool = False,
    seed: int = 0,
) -> SchedulePlan:
    """Return what a schedule will consume.

    ``sources``: datasets or paths by name; by default the paths in the schedule. ``column``: the tokens of a row, by
    default "input_ids" where it exists. ``eos``: ``pack()`` adds a token to each document. ``seed``: that of the mix.
    """
    ranks = integer(ranks, "plan_schedule(ranks=…)", 1)
    schedule.batch_sizes(ranks)  # a loader would refuse what it refuses
    given = schedule.sources if sources is None else sources
    unknown = [name for name in given if name not in schedule.names]
    if unknown and sources is not None:
        raise ValueError(
            f"source {unknown[0]!r} has no weight in any phase. The sources are {', '.join(schedule.names)}."
        )
    datasets = {name: _opened(value) for name, value in given.items() if name in schedule.names}
    sizes = {name: size_of(ds, column, eos) for name, ds in datasets.items()}
    names = tuple(datasets) + tuple(name for name in schedule.names if name not in datasets)
    means, notes = _means(schedule, names, sizes)
    caps = [
        schedule.max_passes.get(name) if name in sizes and (means or schedule.unit == "rows") else None
        for name in names
    ]
    limits = [None if most is None else (most, sizes[name].rows) for name, most in zip(names, caps, strict=True)]
    run = drawn(schedule, names, limits, ranks, seed) if schedule.unit == "rows" else None
    exact = run is not None
    if run is None:
        run = estimated(schedule, names, limits, means or [1.0] * len(names))
    rows_known = schedule.unit == "rows" or means is not None
    return _report(schedule, names, sizes, run, ranks, exact, rows_known, notes)


def size_of(ds: Dataset, column: str | None = None, eos: bool = False) -> SourceSize:
    """Return the size of a source. Without ``column`` its tokens are those in "input_ids", if it has that column."""
    if column is None and "input_ids" not in ds.column_names:
        return SourceSize(len(ds))
    lengths = ds.lengths(column or "input_ids")
    return SourceSize(len(ds), int(lengths.sum()) + int(np.count_nonzero(lengths) if eos else 0))


def _opened(value: Any) -> Dataset:
    if isinstance(value, Dataset):
        return value
    if not isinstance(value, (str, os.PathLike, list, tuple)):
        raise TypeError(f"a source is a dataset or its paths, got {value!r:.60}")
    return from_files(value)


def _means(
    schedule: Schedule, names: Sequence[str], sizes: Mapping[str, SourceSize]
) -> tuple[list[float] | None, list[str]]:
    """Return the mean tokens in a row of each source, if any is known, and notes about those that are not."""
    known = {name: size.mean for name, size in sizes.items() if size.mean}
    missing = [name for name in names if name not in known]
    notes = []
    if schedule.unit == "tokens" and not known:
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
        notes.append(f"max_passes of {', '.join(unlimited)} cannot be checked without the data.")
    if unopened := [name for name in names if name not in sizes]:
        notes.append(f"passes over {', '.join(unopened)} are not counted. Name the paths of these sources.")
    if not known:
        return None, notes
    common = sum(sizes[name].tokens or 0 for name in known) / sum(sizes[name].rows for name in known)
    return [known.get(name) or common for name in names], notes


def _report(
    schedule: Schedule,
    names: Sequence[str],
    sizes: Mapping[str, SourceSize],
    run: SimulatedRun,
    ranks: int,
    exact: bool,
    rows_known: bool,
    notes: Sequence[str],
) -> SchedulePlan:
    phases = []
    for number, one in enumerate(schedule.plan):
        uses = _uses(schedule, names, sizes, run, number, rows_known)
        rows, tokens = _sum(use.rows for use in uses), _sum(use.tokens for use in uses)
        stop = one.stop if one.stop < OPEN else None
        shape = (one.global_batch_size, one.sequence_length)
        phases.append(PhaseUse(one.name, one.start, stop, one.steps, *shape, rows, tokens, uses))
    totals = _uses(schedule, names, sizes, run, None, rows_known)
    caps = tuple(
        Cap(
            names[event.source],
            schedule.max_passes[names[event.source]],
            schedule.plan[event.phase].name,
            event.position,
            _step(schedule, event.position),
            {name: share for name, share in zip(names, event.shares, strict=True) if share},
        )
        for event in run.events
    )
    steps = _sum(one.steps for one in schedule.plan)
    problem = None
    if run.end is not None:
        phase, position = schedule.plan[run.end[0]], run.end[1]
        step = _step(schedule, position)
        after = "" if step is None else f", after {step:,} steps"
        if phase.stop < OPEN:
            problem = (
                f"phase {phase.name!r} cannot be filled: all of its sources have reached max_passes at {position:,} "
                f"{schedule.unit}{after}. The run ends there. Raise max_passes, or shorten the run."
            )
        else:
            notes = [*notes, f"the run ends at {position:,} {schedule.unit}{after}: all passes are used up."]
    elif schedule.total is None:
        notes = [*notes, f"phase {schedule.plan[-1].name!r} has no end: its sources are iterated again and again."]
    return SchedulePlan(
        schedule.unit, exact, ranks, steps, sizes, tuple(phases), totals, caps, run.stretches, problem, tuple(notes)
    )


def _uses(
    schedule: Schedule,
    names: Sequence[str],
    sizes: Mapping[str, SourceSize],
    run: SimulatedRun,
    phase: int | None,
    known: bool,
) -> tuple[Use, ...]:
    """Return the uses of the sources in a phase, or in the run. ``known``: rows are known, not only tokens."""
    rows, taken = (
        (run.rows.sum(axis=0), run.taken.sum(axis=0)) if phase is None else (run.rows[phase], run.taken[phase])
    )
    shares = rows / rows.sum() if rows.any() and not np.isinf(rows).any() else np.zeros(len(names))
    if np.isinf(rows).any():
        shares = np.array(run.stretches[-1].shares)
    found = []
    for number, name in enumerate(names):
        size, tokens, passes = sizes.get(name), None, None
        endless = bool(np.isinf(rows[number]))
        if schedule.unit == "tokens":
            tokens = _integer(taken[number])
        elif size is not None and size.mean is not None and not endless:
            tokens = round(float(rows[number]) * size.mean)
        if known and size is not None and size.rows and not endless:
            passes = float(rows[number]) / size.rows
        found.append(Use(name, float(shares[number]), _integer(rows[number]) if known else None, tokens, passes))
    return tuple(found)


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if None in found else sum(value or 0 for value in found)


def _integer(value: float) -> int | None:
    return None if np.isinf(value) else round(float(value))


def _step(schedule: Schedule, position: int) -> int | None:
    """Return the complete steps before a position, if the batch sizes are known."""
    steps = 0
    for phase in schedule.plan:
        if not phase.global_batch_size or (schedule.unit == "tokens" and not phase.sequence_length):
            return None
        size = phase.global_batch_size * (phase.sequence_length or 1 if schedule.unit == "tokens" else 1)
        if position < phase.stop:
            return steps + (position - phase.start) // size
        steps += (phase.stop - phase.start) // size
    return steps
