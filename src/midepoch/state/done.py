"""The field ``done`` of a state: what comes after the position and is not delivered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order.budget import Budget
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, PlannedAt


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
    try:
        found = json.loads(text or "{}")
        if not all(lane.isdecimal() and isinstance(each, str) for lane, each in found.items()):
            raise ValueError("lanes")
    except (ValueError, AttributeError, RecursionError):
        raise StateError(f"the state is damaged: 'done' is {text!r:.40}.") from None
    return {int(lane): Intervals.decode(each) for lane, each in found.items()}


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
