"""Retention: the rules by which old steps are removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midepoch._internal.hints import hinted_methods
from midepoch._internal.values import integer
from midepoch.checkpoint.manifest import Manifest


@hinted_methods({})
@dataclass(frozen=True)
class Keep:
    """Retention rules. A step is kept if any rule keeps it. Without a rule, all steps are kept.

    ``last``: the newest steps, this many. ``every``: steps whose number is divisible by it. ``best``: this many steps
    with the best ``metadata[metric]``, the smallest or (``mode="max"``) the largest. ``hours``: steps no older.

    >>> Keep(last=3, every=10_000)
    Keep(last=3, every=10000, best=None, metric=None, mode='min', hours=None)
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if getattr(self, name) is not None:
                integer(getattr(self, name), f"Keep({name}=…)", 1)
        if (self.best is None) != (self.metric is None):
            raise ValueError(f"Keep: give best and metric together, got best={self.best}, metric={self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Keep: mode is 'min' or 'max', got {self.mode!r}")
        if self.hours is not None and not self.hours > 0:
            raise ValueError(f"Keep: hours must be more than 0, got {self.hours}")

    def dropped(self, intact: Sequence[Manifest], now: float) -> list[int]:
        """Return the steps that no rule keeps, of the intact ones in commit order. The newest is always kept."""
        if not intact or all(rule is None for rule in (self.last, self.every, self.best, self.hours)):
            return []
        kept = {manifest.step for manifest in intact[-(self.last or 1) :]}
        if self.every:
            kept |= {manifest.step for manifest in intact if not manifest.step % self.every}
        if self.hours is not None:
            kept |= {manifest.step for manifest in intact if manifest.time >= now - 3600 * self.hours}
        if self.best:
            scored = [manifest for manifest in intact if _score(manifest, self.metric) is not None]
            scored.sort(key=lambda manifest: _score(manifest, self.metric), reverse=self.mode == "max")
            kept |= {manifest.step for manifest in scored[: self.best]}
        return [manifest.step for manifest in intact if manifest.step not in kept]


def parse_keep(keep: int | Keep | None, name: str) -> Keep:
    """Return the rules that an argument stands for: ``keep=3`` keeps the last three steps."""
    if isinstance(keep, Keep):
        return keep
    return Keep() if keep is None else Keep(last=integer(keep, name, 1))


def _score(manifest: Manifest, metric: str | None) -> Any:
    value = manifest.metadata.get(metric or "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None
