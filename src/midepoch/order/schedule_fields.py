"""Fields of a schedule as people write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from os import PathLike
from typing import Any

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
