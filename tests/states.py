"""States for tests: at any row, and with other fields."""

from __future__ import annotations

from typing import Any

LANE: dict[str, Any] = {"taken": 0, "at": None, "excluded": "", "ahead": "", "ended": 0, "spared": []}
"""What follows the number of a lane, with its defaults."""


def at_row(state: dict[str, Any], position: int, **fields: Any) -> dict[str, Any]:
    """Return a state of rows after so many of them. ``fields``: other fields to change."""
    return {**state, "position": position, "cursor": [[0, position]] if position else [], **fields}


def lanes_of(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the cursor of each lane by its number. Fields that the state omits are missing."""
    return {number: dict(zip(LANE, lane, strict=False)) for number, *lane in state["cursor"]}


def with_lane(state: dict[str, Any], number: int, **fields: Any) -> dict[str, Any]:
    """Return a state with other fields of one lane, of which defaults at the end are omitted."""
    lanes = lanes_of(state)
    lane = [{**LANE, **lanes[number], **fields}[name] for name in LANE]
    while len(lane) > 1 and lane[-1] == list(LANE.values())[len(lane) - 1]:
        lane.pop()
    cursor = [[number, *lane] if entry[0] == number else entry for entry in state["cursor"]]
    return {**state, "cursor": cursor}


def with_more(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a state with other fields that few states have."""
    return {**state, "more": [list(pair) for pair in (dict(state["more"]) | fields).items()]}
