"""Work time of a process by stage, and its requested blocks.

Workers send theirs with a batch at intervals; the main process adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from time import perf_counter

_SEND_SECONDS = 0.1


@dataclass
class Timings:
    """Seconds of work by stage, and numbers of blocks."""

    read: float = 0.0
    """Finding, fetching, decoding and gathering rows."""
    functions: float = 0.0
    """Running the user's maps and filters."""
    combine: float = 0.0
    """Mixing, packing and grouping rows, where the main process reads them itself."""
    present: float = 0.0
    """Assembling batches from rows: formats, collate functions."""
    transport: float = 0.0
    """Sending what workers made to the main process."""
    blocks: int = 0
    """Requested blocks that have to be fetched or decoded."""
    blocks_there: int = 0
    """Number of those that were ready when requested: cached or prefetched."""
    packed: int = 0
    """Tokens in the packed sequences that were made."""
    places: int = 0
    """Places for tokens in those."""

    def add(self, other: Timings) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def taken(self) -> Timings:
        """Return a copy of the sums, and reset them to zero."""
        sums = replace(self)
        self.__init__()  # type: ignore[misc]
        return sums


class TimingReports:
    """Timings that a worker sends with its batches, at most ten times a second."""

    def __init__(self, timings: Timings) -> None:
        self._timings, self._due = timings, 0.0

    def take(self) -> Timings | None:
        """Return the timings since they were last sent. None if it is too early to send."""
        now = perf_counter()
        if now < self._due:
            return None
        self._due = now + _SEND_SECONDS
        return self._timings.taken()
