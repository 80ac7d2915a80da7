"""Resuming with another schedule, and weights that are set during a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from midepoch.order.schedule import OPEN, Schedule
from midepoch.pipeline.cursor import At
from midepoch.pipeline.node import Learned, Mix
from midepoch.pipeline.passes import ENDED
from midepoch.pipeline.scheduled import EVENTS, Setting, is_held, setting
from midepoch.state.changing import Found, LaneContext, are_weights, entry_of, refused
from midepoch.state.format import unreadable


def saved_mix(base: Mix, saved: Mapping[str, Any]) -> Mix | None:
    """Return the mix by a schedule that a state describes, as far as its draws depend on it. None if it is damaged."""
    names, text, parts = saved.get("names"), saved.get("schedule"), saved.get("parts")
    if not isinstance(names, list) or not isinstance(text, str) or not isinstance(parts, list):
        return None
    if not names or len(names) != len(parts) or not all(isinstance(name, str) for name in names):
        return None
    try:
        schedule = Schedule.from_dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    if not set(schedule.names) <= set(names):
        return None
    weights = tuple(float(schedule.plan[0].weights.get(name, 0)) for name in names)
    learned = learned_in(saved, len(names))
    return replace(base, names=tuple(names), weights=weights, schedule=schedule, learned=learned)


def learned_in(saved: Mapping[str, Any], parts: int) -> Learned | None:
    """Return the weights that were set during the run from the description of a mix."""
    learned = saved.get("learned")
    if learned is None:
        return None
    match learned:
        case [int(epoch), int(phase), list(weights)] if len(weights) == parts and are_weights(weights):
            return Learned(epoch, phase, tuple(map(float, weights)))
        case _:
            raise unreadable(f"the weights of its mix are {learned!r:.60}")


def learned_with(schedule: Schedule, before: Mix) -> Learned | None:
    """Return the weights that were set during the run, unless a changed schedule has others for their phase."""
    learned = before.learned
    if learned is None or before.schedule is None or learned.phase >= len(schedule.plan):
        return None
    old, new = before.schedule.plan[learned.phase], schedule.plan[learned.phase]
    same = (old.name, old.weights, old.final_weights) == (new.name, new.weights, new.final_weights)
    return learned if same else None


def changed_schedule(
    base: Mix, before: Mix, found: Sequence[Found], at: At, need: int | None, of: LaneContext, where: str
) -> At:
    """Return the cursor of a mix by a previous schedule as one of the current mix.

    Nothing changes if the current draws are the same: then only later phases differ. Otherwise the current weights
    apply from here on, or from the end of the outputs in progress.
    """
    if not _fits(at, len(before.names)):
        return at  # not a cursor of such a mix: refused by the check that follows
    position, number, each, clock, *held = at
    entries = [entry_of(one, each, {} if need == 0 else None, of) for one in found]
    kept = [one.old for one in found] == list(range(len(before.names)))
    if kept and (before.schedule, before.learned) == (base.schedule, base.learned):
        return [position, number, entries, clock, *held]
    old, new = _setting(before, each, at, of), _setting(base, entries, at, of)
    segment = _segment(base, clock, of)
    if held and position < held[0][0]:
        if kept and (need == 0 or (need is not None and position + need <= held[0][0])):
            return [position, number, entries, clock, *held]
        raise refused("the weights before a change", "another change", where)
    if kept and old == new and number >> EVENTS == segment:
        return [position, number, entries, clock]
    if not held and number >> EVENTS != _segment(before, clock, of):  # the next draw begins another segment anyway
        return [0, (segment or 0) << EVENTS, entries, clock]
    if need == 0 or segment is None or old is None:
        events = (number + 1) % (1 << EVENTS)
        return [0, ((segment or 0) << EVENTS) + events, entries, clock]
    inside = need == 1 or (need is not None and old.rows is not None and position + need <= old.rows)
    if kept and inside and need is not None:
        rows = -1 if old.rows is None else old.rows
        return [position, number, entries, clock, [position + need, list(old.weights), rows]]
    raise refused("the schedule", "another schedule", where)


def _setting(mix: Mix, entries: Sequence[At], at: At, of: LaneContext) -> Setting | None:
    assert mix.schedule is not None
    spent = [entry[0] >= (mix.most_passes(number) or ENDED) for number, entry in enumerate(entries)]
    return setting(mix, mix.schedule.segments(mix.names, of.lane), of.epoch, at[3], at[0], spent)


def _segment(mix: Mix, clock: int, of: LaneContext) -> int | None:
    assert mix.schedule is not None
    return mix.schedule.segments(mix.names, of.lane).at(clock)


def _fits(at: At, parts: int) -> bool:
    whole = isinstance(at, list) and len(at) in (4, 5) and isinstance(at[2], list) and len(at[2]) == parts
    return (
        whole
        and all(isinstance(one, int) and 0 <= one < OPEN for one in (at[0], at[1], at[3]))
        and all(isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int) for entry in at[2])
        and (len(at) == 4 or is_held(at[4], parts))
    )
