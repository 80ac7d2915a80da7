"""The plan of a training run as one value: phases with weights, sequence lengths and batch sizes, and max_passes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import index
from os import PathLike, fspath
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import hinted_methods, nearest
from midepoch.order.selection import Shard

OPEN = 2**62
"""The end of a phase without a length."""


def paths_of(given: Any, source: str) -> str | list[str]:
    """Return the path or paths of a source as text."""
    if isinstance(given, (str, PathLike)):
        return str(given)
    if not isinstance(given, Sequence) or not given or not all(isinstance(path, (str, PathLike)) for path in given):
        raise TypeError(f"schedule: sources: {source!r} needs a path or a list of paths, got {given!r:.60}")
    return [str(path) for path in given]


def title_of(phase: Any, number: int) -> str:
    """Return the name of a phase for messages."""
    name = phase.get("name") if isinstance(phase, Mapping) else None
    return f"phase {name!r:.60}" if name else f"phase {number + 1}"


def count_of(value: Any, what: str, required: bool = False) -> int | None:
    """Return a field that counts as an int of at least 1, or None if it is not given."""
    if value is None and not required:
        return None
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = int(value) if isinstance(value, float) and value.is_integer() else None  # 1e9 in YAML
    if number is None:
        raise TypeError(f"{what} must be an integer, got {value!r:.60}")
    if not 0 < number < OPEN:
        raise ValueError(f"{what} must be at least 1, got {value!r:.60}")
    return number


def weights_of(value: Any, what: str) -> dict[str, float] | None:
    """Return weights by name, or None if they are not given."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{what} is a dict by name of the source, such as {{'web': 0.7, 'code': 0.3}}, got {value!r:.60}"
        )
    weights = {str(name): weight for name, weight in value.items()}
    numbers = [isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in weights.values()]
    if not all(numbers) or not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()):
        raise ValueError(f"{what} must be numbers of at least 0, got {dict(value)!r:.60}")
    if not any(weights.values()):
        raise ValueError(f"{what}: at least one weight must be above 0, got {dict(value)!r:.60}")
    return weights


Int64Array = npt.NDArray[np.int64]

STAIRS = 64
"""Steps of equal length in which weights change linearly over a phase."""

_LENGTHS = ("steps", "rows", "tokens")


@hinted_methods({}, only=("__init__",))
@dataclass(frozen=True)
class Phase:
    """One phase of a training run.

    ``steps``, ``rows`` or ``tokens``: its length, over all ranks. Only the last phase may have none: it lasts until the
    sources end.

    ``weights``: by the name of the source; a source that is not named has weight 0. With ``final_weights`` they change
    linearly over the phase. ``sequence_length``: tokens in each sequence that ``pack()`` makes.
    ``global_batch_size``: rows in a batch, over all ranks.

    ``weights``, ``sequence_length`` and ``global_batch_size`` default to those of the phase before.
    """

    name: str
    weights: Mapping[str, float] | None = None
    steps: int | None = None
    rows: int | None = None
    tokens: int | None = None
    final_weights: Mapping[str, float] | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a phase needs a name, such as 'warm-up', got {self.name!r:.60}")
        for name in (*_LENGTHS, "sequence_length", "global_batch_size"):
            object.__setattr__(self, name, count_of(getattr(self, name), f"phase {self.name!r}: {name}"))
        given = [name for name in _LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"phase {self.name!r} has {' and '.join(given)}: give its length in one of them.")
        for name in ("weights", "final_weights"):
            object.__setattr__(self, name, weights_of(getattr(self, name), f"phase {self.name!r}: {name}"))
        if self.final_weights is not None and not given:
            raise ValueError(f"phase {self.name!r}: final_weights need a length, in steps, rows or tokens.")

    @property
    def unit(self) -> str | None:
        """The unit of its length: "steps", "rows" or "tokens", or None if it has no length."""
        return next((name for name in _LENGTHS if getattr(self, name) is not None), None)


@dataclass(frozen=True)
class PhasePlan:
    """A phase with the values that it keeps from the phases before it, and its position in the run.

    ``start`` and ``stop`` are in the unit of the schedule. ``outputs``: the rows (or sequences) before its end, over
    the whole run, if they are known.
    """

    name: str
    start: int
    stop: int
    weights: Mapping[str, float]
    final_weights: Mapping[str, float] | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    first_output: int = 0
    outputs: int | None = None

    @property
    def steps(self) -> int | None:
        """The number of steps, if the batch size is known."""
        if self.outputs is None or not self.global_batch_size:
            return None
        return (self.outputs - self.first_output) // self.global_batch_size


@hinted_methods({"__init__": {"weights": "Give each Phase its weights."}})
@dataclass(frozen=True)
class Schedule:
    """The plan of a training run in phases. It depends only on the position, not on ranks or workers.

    ``max_passes``: the most passes over a source, by its name. After that, the other sources take over its share.
    ``sources``: paths of the sources, for ``midepoch plan --schedule``.

    schedule = Schedule(
        [
            Phase("warm-up", {"web": 1.0}, steps=1_000, sequence_length=2048, global_batch_size=256),
            Phase("main", {"web": 0.7, "code": 0.3}, steps=20_000, sequence_length=4096),
            Phase("anneal", steps=2_000, final_weights={"code": 0.5, "math": 0.5}),
        ],
        max_passes={"math": 4},
    )
    """

    phases: Sequence[Phase]
    max_passes: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str | list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        phases = self.phases
        if isinstance(phases, (str, Mapping)) or not isinstance(phases, Sequence) or not phases:
            raise TypeError(f"a schedule takes a list of phases, got {phases!r:.60}")
        phases = tuple(
            phase if isinstance(phase, Phase) else _from_dict(Phase, phase, title_of(phase, number))
            for number, phase in enumerate(phases)
        )
        object.__setattr__(self, "phases", phases)
        names = [phase.name for phase in phases]
        if len(set(names)) < len(names):
            raise ValueError(f"two phases have the same name: {', '.join(names)}. Give each its own name.")
        for name, value in (("max_passes", self.max_passes), ("sources", self.sources)):
            if not isinstance(value, Mapping):
                raise TypeError(f"schedule: {name} is a dict by name of the source, got {value!r:.60}")
            object.__setattr__(self, name, {str(source): each for source, each in value.items()})
        passes = {
            source: count_of(most, f"schedule: max_passes of {source!r}", required=True)
            for source, most in self.max_passes.items()
        }
        object.__setattr__(self, "max_passes", passes)
        object.__setattr__(self, "sources", {source: paths_of(given, source) for source, given in self.sources.items()})
        names = list(self.names)
        for source in passes:
            if source not in names:
                raise ValueError(
                    f"schedule: max_passes of {source!r}: no phase has a weight for it. The sources are "
                    f"{', '.join(names)}."
                )

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def unit(self) -> str:
        """The unit of positions: "tokens" if a phase has a length in tokens or a sequence length, else "rows"."""
        counted = any(phase.tokens is not None or phase.sequence_length is not None for phase in self.phases)
        return "tokens" if counted else "rows"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sources with a weight, in the order of their first use."""
        found: dict[str, None] = {}
        for phase_plan in self.plan:
            found.update(dict.fromkeys((*phase_plan.weights, *(phase_plan.final_weights or ()))))
        return tuple(found)

    @property
    def total(self) -> int | None:
        """The end of the last phase in the unit of the schedule, or None if it has no length."""
        return None if self.plan[-1].stop >= OPEN else self.plan[-1].stop

    @cached_property
    def plan(self) -> tuple[PhasePlan, ...]:
        """The phases, each with all of its values. A phase ends with a complete batch, if the batch size is known."""
        found: list[PhasePlan] = []
        weights: Mapping[str, float] | None = None
        length = batch = None
        at = 0
        outputs: int | None = 0
        for number, phase in enumerate(self.phases):
            weights = phase.weights if phase.weights is not None else weights
            if weights is None:
                raise ValueError(f"phase {phase.name!r} needs weights: there is no phase before it.")
            length, batch = phase.sequence_length or length, phase.global_batch_size or batch
            if length is None and any(one.sequence_length for one in self.phases):
                raise ValueError(f"phase {phase.name!r} needs a sequence_length, as other phases have one.")
            if phase.unit is None and number + 1 < len(self.phases):
                raise ValueError(
                    f"phase {phase.name!r} has no end: pass steps=, rows= or tokens=. Only the last may have none."
                )
            rows, amount = self._amounts(phase, length, batch)
            stop = OPEN if amount is None else at + amount
            after = outputs + rows if rows is not None and outputs is not None else None
            found.append(
                PhasePlan(phase.name, at, stop, weights, phase.final_weights, length, batch, outputs or 0, after)
            )
            weights = phase.final_weights or weights
            at, outputs = stop, after
        return tuple(found)

    def _amounts(self, phase: Phase, length: int | None, batch: int | None) -> tuple[int | None, int | None]:
        """Return the outputs of a phase, if they are known, and its length in the unit of the schedule."""
        unit, name = self.unit, phase.name
        if phase.unit is None:
            return None, None
        if phase.steps is not None:
            if batch is None:
                raise ValueError(
                    f"phase {name!r} lasts {phase.steps:,} steps: give it a global_batch_size, so that its end does "
                    "not depend on the number of ranks."
                )
            if unit == "tokens" and length is None:
                raise ValueError(
                    f"phase {name!r} lasts {phase.steps:,} steps, and other phases are in tokens: give it a "
                    "sequence_length, or give all phases in steps."
                )
            rows = phase.steps * batch
            return rows, rows if unit == "rows" else rows * (length or 1)
        if phase.rows is not None:
            if unit == "tokens":
                raise ValueError(f"phase {name!r} is in rows, and the schedule counts tokens. Use steps or tokens.")
            rows = phase.rows if batch is None else -(-phase.rows // batch) * batch
            return rows, rows
        assert phase.tokens is not None
        if length is None:
            return None, phase.tokens
        sequences = -(-phase.tokens // length)
        sequences = sequences if batch is None else -(-sequences // batch) * batch
        return sequences, sequences * length

    def at(self, position: int) -> PhasePlan:
        """Return the phase at a position, in the unit of the schedule. After the end it is the last one."""
        return next((one for one in self.plan if position < one.stop), self.plan[-1])

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as a dict for YAML or JSON."""
        phases = [
            {one.name: _plain(value) for one in fields(phase) if (value := getattr(phase, one.name)) is not None}
            for phase in self.phases
        ]
        more = {"max_passes": dict(self.max_passes), "sources": dict(self.sources)}
        return {"phases": phases} | {name: value for name, value in more.items() if value}

    @staticmethod
    def from_dict(given: Any) -> Schedule:
        """Return the schedule of a dict as ``to_dict`` makes it. Raises TypeError or ValueError if it is not valid."""
        schedule: Schedule = _from_dict(Schedule, given, "a schedule")
        return schedule

    @staticmethod
    def load(path: str | PathLike[str]) -> Schedule:
        """Return the schedule in a .yaml, .yml or .json file. Errors name the file, the phase and the field.

        YAML requires PyYAML, which is in the extra ``midepoch[cli]``.
        """
        from midepoch._internal import plain_files

        given = plain_files.read(path)
        try:
            return Schedule.from_dict(given)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"{fspath(path)}: {problem}") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the schedule to a .yaml, .yml or .json file, atomically."""
        from midepoch._internal import plain_files

        plain_files.write(path, self.to_dict())

    @cached_property
    def text(self) -> str:
        """The schedule as JSON, without the paths of its sources, as a state stores it."""
        given = self.to_dict()
        given.pop("sources", None)
        return json.dumps(given, separators=(",", ":"))

    def batch_sizes(self, ranks: int) -> dict[int, int] | None:
        """Return the batch sizes of a rank by the first step at which they apply. None if the phases have none."""
        if any(one.global_batch_size is None for one in self.plan):
            return None
        found: dict[int, int] = {}
        step: int | None = 0
        for one in self.plan:
            size, rest = divmod(one.global_batch_size or 0, ranks)
            if rest:
                raise ValueError(
                    f"phase {one.name!r}: a global batch of {one.global_batch_size:,} rows cannot be divided equally "
                    f"among {ranks} ranks. Use a multiple of {ranks}."
                )
            if size not in list(found.values())[-1:]:
                if step is None:
                    raise ValueError(
                        f"phase {one.name!r} has another global_batch_size than the phase before, which has a length "
                        "in tokens and no sequence_length: the step at which it ends is not known. Give the phases a "
                        "sequence_length, or one global_batch_size."
                    )
                found[step] = size
            step = None if step is None or one.steps is None else step + one.steps
        return found

    def segments(self, names: Sequence[str], lane: Shard) -> Segments:
        """Return the weights over the positions of a lane, for sources in this order."""
        starts, stops, weights, phases = [0], list[int](), list[tuple[float, ...]](), list[int]()
        for number, phase_plan in enumerate(self.plan):
            begin, end = starts[-1] if not stops else stops[-1], self._lane_end(number, lane)
            first = [float(phase_plan.weights.get(name, 0)) for name in names]
            if phase_plan.final_weights is None:
                parts = [(end, first)]
            else:
                last = [float(phase_plan.final_weights.get(name, 0)) for name in names]
                parts = _stairs(begin, end, shares(first), shares(last))
            for stop, values in parts:
                stops.append(stop)
                weights.append(shares(values))
                phases.append(number)
        return Segments(tuple(stops), tuple(weights), tuple(phases))

    def lengths(self, lane: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of sequences of a lane after which each phase ends, and the sequence length of each."""
        ends = [OPEN if one.outputs is None else lane.before(one.outputs) for one in self.plan]
        return tuple(ends), tuple(one.sequence_length or 0 for one in self.plan)

    def _lane_end(self, number: int, lane: Shard) -> int:
        """Return the position in a lane at which a phase ends. Outputs go to the lanes in turn."""
        phase_plan = self.plan[number]
        if phase_plan.stop >= OPEN:
            return OPEN
        if self.unit == "rows" or phase_plan.sequence_length is None:
            return lane.before(phase_plan.stop)
        ends, lengths = self.lengths(lane)
        before = (0, *ends)
        return sum((ends[one] - before[one]) * lengths[one] for one in range(number + 1))


@dataclass(frozen=True)
class Segments:
    """Constant weights over the positions of a lane: segment i ends at ``stops[i]`` and belongs to ``phases[i]``."""

    stops: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    phases: tuple[int, ...]

    @cached_property
    def _stops(self) -> Int64Array:
        return np.array(self.stops, dtype=np.int64)

    def at(self, position: int) -> int | None:
        """Return the number of the segment at a position, or None after the end."""
        number = int(np.searchsorted(self._stops, position, side="right"))
        return number if number < len(self.stops) else None


def _stairs(begin: int, end: int, first: Sequence[float], last: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Return the ends and the weights of the steps in which weights change from the first to the last."""
    count = max(1, min(STAIRS, end - begin))
    found = []
    for number in range(count):
        part = (number + 0.5) / count
        values = [a + (b - a) * part for a, b in zip(first, last, strict=True)]
        found.append((begin + (end - begin) * (number + 1) // count, values))
    return found


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights as shares of 1."""
    total = sum(weights)
    return tuple(weight / total for weight in weights) if total else tuple(weights)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _from_dict(kind: Any, given: Any, what: str) -> Any:
    names = [one.name for one in fields(kind)]
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a dict with {', '.join(names)}, got {given!r:.60}")
    unknown = [str(name) for name in given if name not in names]
    if unknown:
        hint = nearest(unknown[0], names, "{!r}")
        raise ValueError(
            f"{what} has no field {unknown[0]!r}. {hint}{' ' if hint else ''}Its fields are {', '.join(names)}."
        )
    missing = [name for name in names[:1] if name not in given]
    if missing:
        raise ValueError(f"{what} needs {missing[0]!r}, got {', '.join(map(str, given)) or 'nothing'}.")
    return kind(**given)
