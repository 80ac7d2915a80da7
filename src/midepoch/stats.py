"""Throughput of a loader, and the time that the model waited for data.

stats = loader.stats()
stats.rows_per_second, stats.waited_share              # 81250.0, 0.02
loader.on_stats(to_tensorboard(writer), every=30)      # or to_wandb(run), or any function of (stats, batches)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Hook = Callable[["Stats", int], Any]
"""Function that receives the stats since the loader was created and the number of batches delivered so far."""


@dataclass(frozen=True)
class Stats:
    """Statistics of one loader on one rank, since its creation or since ``loader.stats(reset=True)``.

    >>> stats = Stats(batches=101, rows=6464, bytes=661_913_600, seconds=10.0, waited=0.5, first_batch=0.8)
    >>> round(stats.rows_per_second), round(stats.batches_per_second, 1), stats.waited_share
    (640, 10.0, 0.05)
    """

    batches: int = 0
    rows: int = 0
    """Delivered rows, or outputs where the pipeline changes their number, including padding."""
    bytes: int = 0
    """Approximate size of the delivered batches, estimated from a sample of them."""
    seconds: float = 0.0
    """Time from the first batch on, while batches were requested. The time between two passes is excluded."""
    waited: float = 0.0
    """Part of ``seconds`` in which a requested batch was not ready."""
    first_batch: float = 0.0
    """Seconds until the first batch of the last pass: start of workers, opening of files. Not part of the others."""
    passes: int = 1
    """Number of passes begun: epochs, or remainders of one."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of work by stage, summed over all workers: the sum may exceed ``seconds``."""
    blocks: int = 0
    """Requested blocks that have to be fetched or decoded (Parquet and similar formats, object stores)."""
    blocks_there: int = 0
    """Number of those that were ready when requested: cached or prefetched."""
    transport: float = 0.0
    """CPU seconds of workers for sending what they had made, summed over all of them."""
    tokens: int | None = None
    """Approximate number of delivered tokens without padding, from a sample of batches. None if it is not known."""
    token_slots: int | None = None
    """The same with padding. Columns ``input_ids``, ``tokens`` and ``token_ids`` are counted."""

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
        timed = self.batches - self.passes  # the clock starts after the first batch of a pass
        return amount * timed / self.batches / self.seconds if timed > 0 and self.seconds > 0 else 0.0

    @property
    def waited_share(self) -> float:
        """Fraction of the time in which the model waited for data: 0 is best."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second without padding, or with it if padding is not known. None without tokens."""
        tokens = self.token_slots if self.tokens is None else self.tokens
        return None if tokens is None else self._rate(tokens)

    @property
    def padding_share(self) -> float | None:
        """Fraction of the token slots that is padding. None if it is not known."""
        if self.tokens is None or not self.token_slots:
            return None
        return max(0.0, 1 - self.tokens / self.token_slots)

    @property
    def cache_hits(self) -> float | None:
        """Fraction of the blocks that were ready when requested. None if files are memory-mapped and need no cache."""
        return self.blocks_there / self.blocks if self.blocks else None

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """Return the main figures by name, for logging: ``wandb.log(loader.stats().scalars())``."""
        values = {
            "rows_per_second": self.rows_per_second,
            "bytes_per_second": self.bytes_per_second,
            "waited_share": self.waited_share,
            **{f"seconds/{name}": seconds for name, seconds in self.stages.items()},
        }
        if self.cache_hits is not None:
            values["cache_hits"] = self.cache_hits
        if self.tokens_per_second is not None:
            values["tokens_per_second"] = self.tokens_per_second
        if self.padding_share is not None:
            values["padding_share"] = self.padding_share
        return {prefix + name: value for name, value in values.items()}

    def __str__(self) -> str:
        text = (
            f"{self.batches:,} batches, {self.rows:,} rows; {self.rows_per_second:,.0f} rows/s, "
            f"{self.bytes_per_second / 1e6:,.1f} MB/s; the model waited {100 * self.waited_share:.1f} % of the time"
        )
        if self.cache_hits is not None:
            text += f"; {100 * self.cache_hits:.0f} % of {self.blocks:,} blocks were ready in time"
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.stages.items() if seconds >= 0.005)
        return f"{text}; work: {stages}" if stages else text


def to_tensorboard(writer: Any, prefix: str = "data/") -> Hook:
    """Return a hook that writes to a ``SummaryWriter`` of torch or tensorboardX."""

    def hook(stats: Stats, batches: int) -> None:
        for name, value in stats.scalars(prefix).items():
            writer.add_scalar(name, value, batches)

    return hook


def to_wandb(run: Any, prefix: str = "data/") -> Hook:
    """Return a hook that logs to a Weights & Biases run. It does not advance the step of W&B."""

    def hook(stats: Stats, batches: int) -> None:
        run.log({**stats.scalars(prefix), prefix + "batches": batches}, commit=False)

    return hook
