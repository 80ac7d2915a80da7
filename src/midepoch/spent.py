"""How long a process worked at each stage, and how often a block was there when it was asked for: a few sums.

Workers send theirs along with a batch now and then; the main process adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from time import perf_counter

_SEND_SECONDS = 0.1


@dataclass
class Spent:
    """Seconds of work, and blocks."""

    read: float = 0.0
    """Finding, fetching, decoding and gathering rows."""
    functions: float = 0.0
    """The user's maps and filters."""
    present: float = 0.0
    """Putting rows together as batches: formats, collate functions."""
    blocks: int = 0
    """Blocks asked for that are fetched or decoded."""
    blocks_there: int = 0
    """How many of them need not be made then: they were kept, or read ahead."""

    def add(self, other: Spent) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def taken(self) -> Spent:
        """What there is, and begin anew."""
        found = replace(self)
        self.__init__()  # type: ignore[misc]
        return found


class Parcel:
    """What a worker sends along of what it has spent: at most ten times a second."""

    def __init__(self, spent: Spent) -> None:
        self._spent, self._due = spent, 0.0

    def take(self) -> Spent | None:
        """What it has spent since it last told, if it is time to tell."""
        now = perf_counter()
        if now < self._due:
            return None
        self._due = now + _SEND_SECONDS
        return self._spent.taken()
