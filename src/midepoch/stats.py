"""What a loader measures of itself: how fast it is, and how long it let the model wait.

stats = loader.stats()
stats.rows_per_second, stats.waited_share              # 81250.0, 0.02
loader.on_stats(to_tensorboard(writer), every=30)      # or to_wandb(run), or any function of stats and batches so far
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Hook = Callable[["Stats", int], Any]
"""Called with the stats since the loader was made, and the number of batches handed over so far."""


@dataclass(frozen=True)
class Stats:
    """Of one loader on one rank, since it was made or since ``loader.stats(reset=True)``.

    >>> stats = Stats(batches=101, rows=6464, bytes=661_913_600, seconds=10.0, waited=0.5, first_batch=0.8)
    >>> round(stats.rows_per_second), round(stats.batches_per_second, 1), stats.waited_share
    (640, 10.0, 0.05)
    """

    batches: int = 0
    rows: int = 0
    """Rows (of a stream: outputs) handed over, padding included."""
    bytes: int = 0
    """About so many, by the size of batches that were weighed now and then."""
    seconds: float = 0.0
    """From the first batch on, while batches were asked for: not the time between two epochs or before a break."""
    waited: float = 0.0
    """Seconds of those in which a batch was asked for and not there yet."""
    first_batch: float = 0.0
    """Seconds until the first batch of the last pass, which starts workers and opens files; not part of the others."""
    passes: int = 1
    """How many times an iteration was begun: an epoch, or the rest of one."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of work by stage, over all workers: with several, they may add up to more than ``seconds``."""
    blocks: int = 0
    """Blocks asked for, where they are fetched or decoded (Parquet and the like; object stores)."""
    blocks_there: int = 0
    """How many of them were there when they were asked for: kept, or read ahead."""

    @property
    def rows_per_second(self) -> float:
        return self._rate(self.rows)

    @property
    def bytes_per_second(self) -> float:
        return self._rate(self.bytes)

    @property
    def batches_per_second(self) -> float:
        return self._rate(self.batches)

    def _rate(self, amount: float) -> float:
        timed = self.batches - self.passes  # the clock starts when the first batch of a pass is there
        return amount * timed / self.batches / self.seconds if timed > 0 and self.seconds > 0 else 0.0

    @property
    def waited_share(self) -> float:
        """Which part of its time the model waited for data: 0 is best."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def cache_hits(self) -> float | None:
        """Which part of the blocks was there when it was asked for; None where files are mapped and need no cache."""
        return self.blocks_there / self.blocks if self.blocks else None

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """As numbers with names, for whatever draws curves: ``wandb.log(loader.stats().scalars())``."""
        found = {
            "rows_per_second": self.rows_per_second,
            "bytes_per_second": self.bytes_per_second,
            "waited_share": self.waited_share,
            **{f"seconds/{name}": seconds for name, seconds in self.stages.items()},
        }
        if self.cache_hits is not None:
            found["cache_hits"] = self.cache_hits
        return {prefix + name: value for name, value in found.items()}

    def __str__(self) -> str:
        text = (
            f"{self.batches:,} batches, {self.rows:,} rows; {self.rows_per_second:,.0f} rows/s, "
            f"{self.bytes_per_second / 1e6:,.1f} MB/s; the model waited {100 * self.waited_share:.1f} % of the time"
        )
        if self.cache_hits is not None:
            text += f"; {100 * self.cache_hits:.0f} % of {self.blocks:,} blocks were there in time"
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.stages.items() if seconds >= 0.005)
        return f"{text}; work: {stages}" if stages else text


def to_tensorboard(writer: Any, prefix: str = "data/") -> Hook:
    """A hook that writes to a ``SummaryWriter`` of torch or tensorboardX."""

    def hook(stats: Stats, batches: int) -> None:
        for name, value in stats.scalars(prefix).items():
            writer.add_scalar(name, value, batches)

    return hook


def to_wandb(run: Any, prefix: str = "data/") -> Hook:
    """A hook that logs to a run of Weights & Biases, beside what the training loop logs: W&B's step is not moved."""

    def hook(stats: Stats, batches: int) -> None:
        run.log({**stats.scalars(prefix), prefix + "batches": batches}, commit=False)

    return hook
