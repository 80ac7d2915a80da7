"""Fields of a schedule as people write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any


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
