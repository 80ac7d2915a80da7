"""Weights of a mix during a run: ``Loader.set_weights``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from midepoch.distributed import rendezvous
from midepoch.errors import WorldError
from midepoch.loader.exclusion import Excluding
from midepoch.order.schedule import shares
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.node import Mix
from midepoch.state.learned import phase_at, with_weights

_log = logging.getLogger("midepoch")


class Weighting(Excluding):
    """The methods of a loader that concern the weights of a mix."""

    _changes = 0

    @property
    def weights(self) -> dict[str, float] | tuple[float, ...]:
        """The weights of the mix at the next batch, as shares of 1: by name, or a tuple if its sources have no names.

        In a phase with ``final_weights`` they are the weights at its beginning.
        """
        mix = self._mix("weights")
        weights: Sequence[float] = mix.current
        if mix.schedule is not None:
            cursor = self.next_cursor()
            phase = phase_at(self._spec, cursor)
            weights = [mix.schedule.plan[phase].weights.get(name, 0.0) for name in mix.names]
            if mix.learned is not None and mix.learned.applies(cursor.epoch, phase):
                weights = mix.learned.weights
        found = shares(weights)
        return dict(zip(mix.names, found, strict=True)) if mix.names else found

    @property
    def phase(self) -> str | None:
        """The name of the phase of the next batch, or None if the data is not mixed by a schedule."""
        schedule = self._spec.node.schedule
        return None if schedule is None else schedule.plan[phase_at(self._spec, self.next_cursor())].name

    def set_weights(self, weights: Mapping[str, float] | Sequence[float]) -> None:
        """Change the weights of the mix from the next batch on, for methods that learn them during the run.

        ``weights``: by the name of the source (0 if it is not named), or a list. With a schedule, they apply until the
        phase ends in this epoch. The state has them, so a resume continues with them. Steps after the mix (shuffle,
        batch, pack) first deliver the rows that they have drawn with the weights before.

        Call it at the same step on all ranks. The weights of the first rank to call it apply on all of them.
        """
        mix = self._mix("set_weights")
        chosen = _checked(weights, mix)
        cursor = self.next_cursor()
        if cursor.lanes is not None and any(len(lane.done) for lane in cursor.lanes.by_lane.values()):
            raise ValueError(
                "set_weights: some of the next batches are excluded or already acknowledged, and other weights would "
                "put other rows in their place. Call it after these batches."
            )
        phase, chosen = self._agreed(phase_at(self._spec, cursor), chosen, cursor)
        spec, cursor = with_weights(self._spec, cursor, phase, chosen)
        _log.info(
            "set_weights: the weights of the mix are %s from the next batch on", [round(weight, 6) for weight in chosen]
        )
        self._continue_at(cursor, spec)

    def _mix(self, what: str) -> Mix:
        base = self._spec.node.base
        if not isinstance(base, Mix):
            raise TypeError(f"{what}: the data is not a mix of sources. Make one with midepoch.mix.")
        return base

    def _agreed(self, phase: int, weights: tuple[float, ...], cursor: Cursor) -> tuple[int, tuple[float, ...]]:
        """Return the weights of the first rank. Raise WorldError if it called at another position."""
        if self._counterparts is None:
            return phase, weights
        self._changes += 1
        here = [cursor.epoch, cursor.position]
        text = json.dumps([here, phase, weights])
        agreed = rendezvous.first_value(f"weights/{self._counterparts.name}/{self._changes}", text)
        if agreed is None:
            return phase, weights
        there, phase, weights = json.loads(agreed)
        if there != here:
            raise WorldError(
                f"set_weights was called at position {here[1]:,} of epoch {here[0]} on this rank, and at position "
                f"{there[1]:,} of epoch {there[0]} on another. Call it at the same step on all ranks."
            )
        return phase, tuple(weights)


def _checked(given: Any, mix: Mix) -> tuple[float, ...]:
    """Return weights in the order of the sources."""
    if isinstance(given, Mapping):
        if not mix.names:
            raise TypeError("set_weights: the sources of the mix have no names. Pass a list of weights.")
        unknown = [str(name) for name in given if name not in mix.names]
        if unknown:
            raise ValueError(f"set_weights: there is no source {unknown[0]!r}. The sources are {', '.join(mix.names)}.")
        given = [given.get(name, 0.0) for name in mix.names]
    try:
        weights = tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        raise TypeError(f"set_weights takes a dict or a list of weights, got {given!r:.60}") from None
    if len(weights) != len(mix.parts):
        raise ValueError(f"set_weights: expected {len(mix.parts)} weights, one for each source, got {len(weights)}.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"set_weights: weights must be 0 or more, and at least one above 0, got {list(weights)}.")
    for number, (part, weight) in enumerate(zip(mix.parts, weights, strict=True)):
        if weight and not any(leaf.rows for leaf in part.leaves):
            raise ValueError(f"set_weights: source {mix.names[number] if mix.names else number} has no rows. Use 0.")
    return weights
