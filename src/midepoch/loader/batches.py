"""The batches of one rank in one epoch: which positions, read in chunks, presented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.engine import Engine
from midepoch.errors import MapError
from midepoch.loader.options import Options
from midepoch.order import epoch_end
from midepoch.pipeline import Pipeline
from midepoch.transforms import Batch, present, present_rows

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Global batches from a position of an epoch on: batch g is the positions [start + g·B, start + (g+1)·B)."""

    epoch: int
    start: int
    end: int
    global_batch: int

    @staticmethod
    def make(pipeline: Pipeline, options: Options, epoch: int, start: int) -> Plan:
        size = options.batch_size * pipeline.cut.count
        return Plan(epoch, start, epoch_end(start, pipeline.rows, size, options.drop_last), size)

    def __len__(self) -> int:
        return -(-(self.end - self.start) // self.global_batch)

    def bounds(self, step: int) -> tuple[int, int]:
        first = self.start + step * self.global_batch
        return first, min(first + self.global_batch, self.end)


@dataclass(frozen=True)
class Made:
    """A batch as far as it is made: ``value`` is presented (or collated). ``empty``: no row of it is left."""

    step: int
    value: Any
    skipped: int
    empty: bool = False


class BatchMaker:
    """Reads the steps of a plan in chunks that grow, and makes them into what is handed out."""

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self._engine = Engine(pipeline)
        self._collate = options.collate_fn
        self.format = pipeline.format or ("torch" if options.collate_fn is None else "python")

    def read(self, plan: Plan, first: int, stride: int) -> Iterator[list[tuple[int, Batch, int]]]:
        """Chunks of (step, rows as read, rows asked for), of steps first, first + stride, …"""
        cut = self._engine.pipeline.cut
        # One read for many small batches costs less; starting with one keeps the first batch quick.
        most = max(1, self._engine.chunk_rows * cut.count // plan.global_batch)
        size, step = 1, first
        while step < len(plan):
            steps = range(step, min(len(plan), step + size * stride), stride)
            parts = [cut.positions(*plan.bounds(each)) for each in steps]
            batches = self._engine.read_many(plan.epoch, parts)
            yield [(each, batch, len(part)) for each, batch, part in zip(steps, batches, parts, strict=True)]
            step, size = steps[-1] + stride, min(2 * size, most)

    def make(self, plan: Plan, step: int, batch: Batch, asked: int) -> Made:
        """Transform and present one batch. What is left for the main process is ``finish``."""
        batch = self._engine.transform(plan.epoch, batch)
        skipped = asked - len(batch)
        if not len(batch):
            return Made(step, None, skipped, empty=True)
        if self._collate is None:
            return Made(step, present(batch, self.format), skipped)
        rows = present_rows(batch, self.format)
        try:
            return Made(step, self._collate(rows), skipped)
        except Exception as problem:  # a StopIteration would end the epoch silently
            first, stop = plan.bounds(step)
            raise MapError(
                f"collate_fn failed on a batch of {len(rows)} rows (positions {first:,} to {stop - 1:,} of epoch "
                f"{plan.epoch}): {type(problem).__name__}: {problem}"
            ) from problem
