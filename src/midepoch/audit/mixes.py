"""The mix of a pass, as far as it may change during a run: weights that were set, and the schedule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from midepoch.order.schedule import Schedule, shares
from midepoch.order.shard import Shard
from midepoch.pipeline.node import Mix, Node

if TYPE_CHECKING:
    from midepoch.audit.passes import Generation


class WeightChange(NamedTuple):
    """Weights that ``Loader.set_weights`` has set, and the first step that has them.

    ``weights``: shares of 1, by the name of the source, or its number if it has no name. ``phase``: the phase of the
    schedule in which they apply, if there is a schedule.
    """

    step: int
    epoch: int
    position: int
    phase: str | None
    weights: dict[str, float]


@dataclass(frozen=True)
class RecordedMix:
    """Names of the sources, weights that were set and the number of their phase, and the schedule as text."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    phase: int = 0
    text: str = ""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the pass."""
        return Schedule.from_dict(json.loads(self.text)) if self.text else None

    def phase_at(self, position: int) -> int | None:
        """Return the number of the phase at a position of the pass, or None if it is not known."""
        for number, phase in enumerate(() if self.schedule is None else self.schedule.plan):
            last = self.schedule is not None and number + 1 == len(self.schedule.plan)
            if phase.outputs is None:
                return number if last else None
            if position < phase.outputs or last:
                return number
        return None

    def weights_at(self, position: int) -> tuple[float, ...] | None:
        """Return the weights at a position of the pass as shares of 1, or None if they are not known."""
        number = self.phase_at(position)
        if self.weights is not None and (self.schedule is None or number == self.phase):
            return shares(self.weights)
        if self.schedule is None or number is None:
            return None
        phase = self.schedule.plan[number]
        if phase.final_weights is None:
            return shares([float(phase.weights.get(name, 0)) for name in self.names])
        if phase.outputs is None:
            return None
        outputs = max(1, phase.outputs - phase.first_output)
        place = phase.start + (phase.stop - phase.start) * (position - phase.first_output) // outputs
        segments = self.schedule.segments(self.names, Shard())
        segment = segments.at(place)
        return segments.weights[-1 if segment is None else segment]

    def change(self, step: int, epoch: int, position: int) -> WeightChange:
        """Return the weights that were set, as a change at a step."""
        assert self.weights is not None
        weights = shares(self.weights)
        names = self.names or tuple(map(str, range(len(weights))))
        phase = None if self.schedule is None else self.schedule.plan[self.phase].name
        return WeightChange(step, epoch, position, phase, dict(zip(names, weights, strict=True)))


def mix_of(node: Node, epoch: int) -> dict[str, Any]:
    """Return the field of a header for the mix, if it has a schedule or weights that were set.

    With a schedule, weights apply only in the epoch in which they were set.
    """
    mix = node.base
    if not isinstance(mix, Mix) or (mix.learned is None and mix.schedule is None):
        return {}
    fields: dict[str, Any] = {"names": list(mix.names)}
    if mix.learned is not None and (mix.schedule is None or mix.learned.epoch == epoch):
        fields |= {"phase": mix.learned.phase, "weights": list(mix.learned.weights)}
    if mix.schedule is not None:
        fields["schedule"] = mix.schedule.text
    return {"mix": fields}


def read_mix(fields: Mapping[str, Any] | None) -> RecordedMix | None:
    """Return the mix in a header."""
    if fields is None:
        return None
    weights = fields.get("weights")
    return RecordedMix(
        tuple(fields["names"]),
        None if weights is None else tuple(weights),
        fields.get("phase", 0),
        fields.get("schedule", ""),
    )


def weight_changes(passes: Iterable[tuple[int, Generation]]) -> list[WeightChange]:
    """Return the changes of weights over the passes of a run. Each comes with the number of steps before it."""
    found: list[WeightChange] = []
    last = None
    for steps, one in passes:
        mix = one.first.mix
        current = None if mix is None or mix.weights is None else (mix.phase, mix.weights)
        if current is not None and current != last and mix is not None:
            found.append(mix.change(steps + 1, one.shape.epoch, one.cursor.position))
        last = current
    return found
