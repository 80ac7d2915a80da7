"""Batch sizes that change with the steps of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any


@dataclass(frozen=True)
class BatchSizes:
    """A batch size from each of some steps on. Steps are counted from 0 over the whole run.

    >>> sizes = BatchSizes.of({0: 4, 10: 8})
    >>> sizes.at(9), sizes.at(10), sizes.before(12), sizes.step_at(56)
    (4, 8, 56, 12)
    """

    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(given: Any) -> BatchSizes:
        """Return the schedule of a mapping {first step: batch size}. Raise TypeError or ValueError if it is none."""
        what = "batch_size takes a number of rows, or a dict of first steps and sizes such as {0: 8, 1000: 16}"
        if not isinstance(given, Mapping):
            raise TypeError(f"{what}, got {given!r:.60}")
        try:
            given = {index(step): index(size) for step, size in given.items()}
        except TypeError:
            raise TypeError(f"{what}, got {given!r:.60}") from None
        if not given:
            raise TypeError(f"{what}, got {given!r:.60}")
        steps = tuple(sorted(given))
        if steps[0] != 0 or min(given.values()) < 1:
            raise ValueError(f"{what}: the first step is 0, and sizes are at least 1. Got {given!r:.60}")
        return BatchSizes(steps, tuple(given[step] for step in steps))

    @property
    def text(self) -> str:
        """The schedule in words."""
        return ",".join(f"{step}:{size}" for step, size in zip(self.steps, self.sizes, strict=True))

    @staticmethod
    def of_text(text: str) -> BatchSizes:
        """Return the schedule that a text describes."""
        return BatchSizes.of(
            {int(step): int(size) for step, _, size in (one.partition(":") for one in text.split(","))}
        )

    def at(self, step: int) -> int:
        """Return the batch size of a step."""
        return self.sizes[bisect_right(self.steps, step) - 1]

    def before(self, step: int) -> int:
        """Return the rows of all steps before one."""
        number = bisect_right(self.steps, step) - 1
        return self._starts[number] + (step - self.steps[number]) * self.sizes[number]

    def step_at(self, rows: int) -> int:
        """Return the number of steps that are complete after a number of rows."""
        number = bisect_right(self._starts, rows) - 1
        return self.steps[number] + (rows - self._starts[number]) // self.sizes[number]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for number in range(1, len(self.steps)):
            starts.append(starts[-1] + (self.steps[number] - self.steps[number - 1]) * self.sizes[number - 1])
        return starts
