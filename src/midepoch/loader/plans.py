"""Plans and batches, shared by all sources of batches: the steps of one rank in one epoch, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from midepoch._internal.timings import Timings
from midepoch.loader.options import Options
from midepoch.order import Shard, epoch_end
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import StepOutputs
from midepoch.pipeline.spec import PipelineSpec


class Made(NamedTuple):
    """A batch, and the cursor after it. ``value`` is presented (or collated). ``empty``: it has no row left."""

    value: Any
    cursor: Cursor | StepOutputs
    rows: int = 0
    skipped: int = 0
    empty: bool = False
    timings: Timings | None = None
    """The time that a worker has spent since its last report."""


class BatchSource(Protocol):
    """The batches of one rank from a cursor to the end of the epoch, in order. Used by one thread at a time."""

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""


@dataclass(frozen=True)
class Plan:
    """Global batches from a position of an epoch on: batch g is the positions [start + g·B, start + (g+1)·B).

    ``padded``: the last one is as large as the others, with padding after the end of the epoch.
    """

    epoch: int
    start: int
    end: int
    global_batch: int
    padded: bool = False

    @staticmethod
    def make(spec: PipelineSpec, options: Options, cursor: Cursor) -> Plan:
        """Return the plan of a rank from a cursor on."""
        batch = options.batch_size * spec.shard.count
        return Plan.of(cursor.epoch, cursor.position, spec.rows, batch, options.last_batch)

    @staticmethod
    def of(epoch: int, start: int, rows: int, global_batch: int, last_batch: str | None) -> Plan:
        return Plan(
            epoch, start, epoch_end(start, rows, global_batch, last_batch == "drop"), global_batch, last_batch == "pad"
        )

    def __len__(self) -> int:
        return -(-(self.end - self.start) // self.global_batch)

    def bounds(self, step: int) -> tuple[int, int]:
        first = self.start + step * self.global_batch
        return first, min(first + self.global_batch, self.end)

    def cursor(self, step: int) -> Cursor:
        """Return the cursor after a batch."""
        return Cursor(self.epoch, min(self.start + (step + 1) * self.global_batch, self.end))

    @property
    def end_cursor(self) -> Cursor:
        """The cursor after the last batch."""
        return Cursor(self.epoch, self.end)

    def reach(self, step: int) -> int:
        """Return the position at which a batch ends, including its padding."""
        return self.start + (step + 1) * self.global_batch if self.padded else self.bounds(step)[1]

    def share(self, shard: Shard) -> int:
        """Return the number of batches of one rank: all, unless the last one has no row for it."""
        if not len(self):
            return 0
        last = len(self) - 1
        return last + bool(len(shard.positions(self.bounds(last)[0], self.reach(last))))

    def left_out(self, ranks: int) -> int:
        """Return the number of ranks for which the last batch has no row."""
        return 0 if self.padded or not len(self) else max(0, ranks - (self.end - self.bounds(len(self) - 1)[0]))


def batches_of(spec: PipelineSpec, options: Options, outputs: int) -> int:
    """Return the number of batches of a rank, given the number of outputs of all ranks."""
    if options.last_batch == "uneven":
        # The last step does not count if it has no output for this rank.
        return -(-spec.shard.before(outputs) // options.batch_size)
    step = options.batch_size * spec.shard.count
    return outputs // step if options.last_batch == "drop" else -(-outputs // step)
