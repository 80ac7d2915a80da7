"""Progress of long operations: a line in a terminal or notebook, and the work time of a process by stage.

Workers send their work times with a batch at intervals; the main process adds them up.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from time import perf_counter

Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""

_PATIENCE = 0.5
_EVERY = 0.1
_WIDTH = 24


def watched() -> bool:
    """Return True if stderr is a terminal, or if this is a notebook, where it is not."""
    try:
        return bool(sys.stderr.isatty()) or "ipykernel.zmqshell" in sys.modules
    except (AttributeError, ValueError):  # stderr is None, or closed
        return False


class Bar:
    """One line that is redrawn in place. Without a terminal or notebook nothing is written."""

    def __init__(self, title: str, unit: str, *, patience: float = _PATIENCE) -> None:
        self._title, self._unit, self._watched = title, unit, watched()
        self._started = time.monotonic()
        self._due = self._started + patience
        self._first: int | None = None  # amount done before this line began, as in a resumed epoch
        self._drawn = 0

    @property
    def due(self) -> bool:
        """True if the line is visible and it is time to redraw it."""
        return self._watched and time.monotonic() >= self._due

    def update(self, done: int, total: int | None = None, more: str = "") -> None:
        """Show the amount done, and the total if it is known."""
        if self._first is None:
            self._first = done
        now = time.monotonic()
        if self._watched and (now >= self._due or (self._drawn and done == total)):
            self._due = now + _EVERY
            self._draw(done, total, more, now - self._started)

    def _draw(self, done: int, total: int | None, more: str, elapsed: float) -> None:
        text = f"{self._title} {done:,} {self._unit}"
        if total:
            full = int(_WIDTH * min(done, total) / total)
            text = f"{self._title} {'█' * full}{'░' * (_WIDTH - full)} {done:,}/{total:,} {self._unit}"
            new = done - (self._first or 0)
            text += f", {_time(elapsed / new * max(0, total - done))} left" if new > 0 else ""
        text += f", {more}" if more else ""
        text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be drawn over
        self._write(f"\r{text:<{self._drawn}}")  # blanks over a longer line: notebooks have no erase sequence
        self._drawn = len(text)

    def _write(self, text: str) -> None:
        """Write to stderr. A closed terminal must not stop the work that it shows."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self._watched = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn and self._watched:
            self._write("\n")
        self._drawn = 0


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def shown(title: str, unit: str) -> Iterator[Progress]:
    """Yield a function ``report(done, total)`` that draws a progress line."""
    with Bar(title, unit) as bar:
        yield bar.update


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
