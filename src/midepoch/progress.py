"""A line of progress on long work: on a terminal or in a notebook only, and only if it takes long enough to wonder."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from midepoch.sources.index import Progress

_PATIENCE = 0.5
_EVERY = 0.1
_WIDTH = 24


def watched() -> bool:
    """Whether somebody looks at what is written: a terminal, or a notebook, which keeps no terminal."""
    try:
        return bool(sys.stderr.isatty()) or "ipykernel.zmqshell" in sys.modules
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class Bar:
    """One line that is drawn over and over. Writes nothing unless somebody looks."""

    def __init__(self, what: str, unit: str, *, patience: float = _PATIENCE) -> None:
        self._what, self._unit, self._watched = what, unit, watched()
        self._started = time.monotonic()
        self._due = self._started + patience
        self._first: int | None = None  # what was done before: of a resumed epoch, for one
        self._drawn = 0

    @property
    def due(self) -> bool:
        """Whether somebody looks, and it is time to draw again."""
        return self._watched and time.monotonic() >= self._due

    def update(self, done: int, total: int | None = None, more: str = "") -> None:
        """So much is done, of so much if that is known."""
        if self._first is None:
            self._first = done
        now = time.monotonic()
        if self._watched and (now >= self._due or (self._drawn and done == total)):
            self._due = now + _EVERY
            self._draw(done, total, more, now - self._started)

    def _draw(self, done: int, total: int | None, more: str, elapsed: float) -> None:
        text = f"{self._what} {done:,} {self._unit}"
        if total:
            full = int(_WIDTH * min(done, total) / total)
            text = f"{self._what} {'█' * full}{'░' * (_WIDTH - full)} {done:,}/{total:,} {self._unit}"
            new = done - (self._first or 0)
            text += f", {_time(elapsed / new * max(0, total - done))} left" if new > 0 else ""
        text += f", {more}" if more else ""
        text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be drawn over
        self._write(f"\r{text:<{self._drawn}}")  # blanks over what was longer: a notebook knows no erasing
        self._drawn = len(text)

    def _write(self, text: str) -> None:
        """A terminal that has gone away must not end the work that it was to watch."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self._watched = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._drawn and self._watched:
            self._write("\n")
        self._drawn = 0


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def shown(what: str, unit: str) -> Iterator[Progress]:
    """Yields ``report(done, total)``."""
    with Bar(what, unit) as bar:
        yield bar.update
