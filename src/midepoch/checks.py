"""Arguments that must be whole numbers."""

from __future__ import annotations

import operator
from typing import Any

LARGEST = 2**62


def whole(value: Any, what: str, least: int = 0) -> int:
    """The value as an int of at least ``least``; TypeError or ValueError that quotes it otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{what}: expected a whole number, got {value!r}")
    if not least <= number < LARGEST:
        raise ValueError(f"{what}: expected at least {least}, got {value}")
    return number
