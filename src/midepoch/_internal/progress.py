"""Progress line for long operations, in a terminal or notebook only."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

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

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
