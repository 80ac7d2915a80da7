"""States for tests, at any row."""

from __future__ import annotations

from typing import Any


def at_row(state: dict[str, Any], position: int, **fields: Any) -> dict[str, Any]:
    """Return a state of rows after so many of them. ``fields``: other fields to change."""
    return {**state, "position": position, "cursor": {"0": {"taken": position}} if position else {}, **fields}
