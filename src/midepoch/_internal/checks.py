"""Validation of integer arguments."""

from __future__ import annotations

import operator
from typing import Any

LARGEST = 2**62


def integer(value: Any, what: str, least: int = 0) -> int:
    """Return the value as an int. Raise TypeError if it is not an integer, ValueError if it is below ``least``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{what}: expected an integer, got {value!r}")
    if not least <= number < LARGEST:
        raise ValueError(f"{what}: expected at least {least}, got {value}")
    return number
