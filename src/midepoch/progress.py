"""A line of progress on long work: shown on a terminal only, and only if the work takes long enough to wonder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from midepoch.sources.index import Progress

_PATIENCE = 0.5


@contextmanager
def shown(what: str, unit: str) -> Iterator[Progress]:
    """Yields ``report(done, total)``."""
    started = time.monotonic()
    drawn = False

    def report(done: int, total: int) -> None:
        nonlocal drawn
        elapsed = time.monotonic() - started
        if not sys.stderr.isatty() or (elapsed < _PATIENCE and not drawn):
            return
        left = elapsed / done * (total - done)
        full = int(24 * done / total)
        bar = "█" * full + "░" * (24 - full)
        sys.stderr.write(f"\r{what} {bar} {done:,}/{total:,} {unit}, {left:.0f} s left \x1b[K")
        sys.stderr.flush()
        drawn = True

    try:
        yield report
    finally:
        if drawn:
            sys.stderr.write("\n")
