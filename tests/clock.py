"""A clock of the ledger that a test moves."""

from __future__ import annotations


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now
