"""Numbers of steps where positions are not delivered: a run of them counts as the steps that it would have filled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midepoch.order.intervals import Intervals
from midepoch.order.sizes import BatchSizes


@dataclass(frozen=True)
class StepNumbers:
    """The steps of a plan: how many positions come before each, of those that remain, and its number in the run.

    Steps are split into stretches of consecutive numbers. ``steps``, ``begins`` and ``numbers`` are those of the first
    step of each stretch.
    """

    sizes: BatchSizes
    steps: Sequence[int]
    begins: Sequence[int]
    numbers: Sequence[int]

    @staticmethod
    def of(done: Intervals, start: int, first: int, sizes: BatchSizes) -> StepNumbers:
        """Return the steps from a position on, of which the first has the number ``first``."""
        steps, begins, numbers = [0], [start], [first]
        lengths = done.stops - done.starts
        long = np.flatnonzero(lengths >= min(sizes.sizes))
        places = done.before(done.starts[long]).tolist()
        for place, length in zip(places, lengths[long].tolist(), strict=True):
            passed, number = max(0, place - begins[-1]), numbers[-1]
            count = _steps_to(sizes, number, passed)
            begin = begins[-1] + sizes.before(number + count) - sizes.before(number)
            number += count
            if jump := steps_filled(sizes, number, length):
                steps.append(steps[-1] + count)
                begins.append(begin)
                numbers.append(number + jump)
        return StepNumbers(sizes, steps, begins, numbers)

    def begin(self, step: int) -> int:
        """Return the positions that remain before a step."""
        stretch = bisect_right(self.steps, step) - 1
        number = self.numbers[stretch]
        return self.begins[stretch] + self.sizes.before(number + step - self.steps[stretch]) - self.sizes.before(number)

    def number(self, step: int) -> int:
        """Return the number of a step in the run."""
        stretch = bisect_right(self.steps, step) - 1
        return self.numbers[stretch] + step - self.steps[stretch]

    def step(self, number: int) -> int:
        """Return the first step with this number, or a later one."""
        stretch = max(0, bisect_right(self.numbers, number) - 1)
        step = self.steps[stretch] + max(0, number - self.numbers[stretch])
        return step if stretch + 1 == len(self.steps) else min(step, self.steps[stretch + 1])

    def count(self, stop: int) -> int:
        """Return the number of steps that begin before ``stop``."""
        stretch = bisect_right(self.begins, stop - 1) - 1
        if stretch < 0:
            return 0
        count = self.steps[stretch] + _steps_to(self.sizes, self.numbers[stretch], stop - self.begins[stretch])
        return count if stretch + 1 == len(self.steps) else min(count, self.steps[stretch + 1])


def steps_filled(sizes: BatchSizes, number: int, rows: int) -> int:
    """Return the complete steps, from one on, that a number of rows would fill."""
    return sizes.step_at(sizes.before(number) + rows) - number


def _steps_to(sizes: BatchSizes, number: int, rows: int) -> int:
    """Return the steps from one on that are needed for a number of rows."""
    before = sizes.before(number)
    steps = sizes.step_at(before + rows)
    return steps + (sizes.before(steps) < before + rows) - number
