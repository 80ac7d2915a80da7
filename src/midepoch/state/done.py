"""The field ``done`` of a state: what comes after the position and is not delivered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order.budget import Budget
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, PlannedAt
from midepoch.state.format import json_in


def done_text(cursor: Cursor) -> str:
    """Return what is done after a cursor, as text."""
    if cursor.lanes is None:
        return cursor.done.encode()
    texts = {lane: at.done.encode() for lane, at in sorted(cursor.lanes.by_lane.items()) if at.done}
    return json.dumps(texts, separators=(",", ":"))


def done_of_all(first: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Intervals:
    """Return what is done after the position of the state that is loaded, in any of the states of that position."""
    place = (first["epoch"], first["position"])
    done = [Intervals.decode(one["done"]) for one in states if (one["epoch"], one["position"]) == place and one["done"]]
    return EMPTY.union(*done).from_(first["position"]) if done else EMPTY


def done_in_lanes(text: str) -> dict[int, Intervals]:
    """Return the outputs of each lane that are done."""
    return sets_by_lane(json_in(text or "{}", dict, "done"), "done")


def sets_by_lane(texts: Any, name: str) -> dict[int, Intervals]:
    """Return the sets of outputs that a field has as {lane: text}."""
    if not isinstance(texts, dict) or not all(k.isdecimal() and isinstance(text, str) for k, text in texts.items()):
        raise StateError(f"the state is damaged: {name!r} is {texts!r:.40}.")
    return {int(lane): Intervals.decode(text) for lane, text in texts.items()}


def changed_mix() -> CheckpointMismatchError:
    """Return the error for another mix while outputs are done."""
    return CheckpointMismatchError(
        "done",
        "outputs after the position are excluded or acknowledged",
        "another mix",
        "they are known by their numbers, which other weights or sources would give to other rows. Resume with the "
        "same mix, and change it once they are passed",
    )


def excluded_from_batches(rows: int) -> CheckpointMismatchError:
    """Return the error for batches by tokens while rows are excluded."""
    return CheckpointMismatchError(
        "excluded",
        f"{rows:,} rows are excluded",
        "batches by max_tokens",
        "such batches are planned with all rows. Resume with batches of a number of rows",
    )


def changed_batches(done: Intervals, at: PlannedAt | None, budget: Budget) -> CheckpointMismatchError:
    """Return the error for other batches by tokens while batches, or rows, are done."""
    by_tokens = at is not None and bool(at.legs)
    last = int(done.stops[-1])
    return CheckpointMismatchError(
        "max_tokens",
        at.legs[-1][0] if at is not None and at.legs else "batches of a fixed number of rows",
        budget.text,
        f"{'batches' if by_tokens else 'rows'} after the position are excluded or acknowledged, and these batches are "
        f"others. Resume as before until position {last:,}, and change it then",
    )
