"""Measurements of a running loader: statistics, hooks, a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import Any, TypeVar

from midepoch._internal import html
from midepoch._internal.checks import integer
from midepoch._internal.progress import Bar
from midepoch._internal.resumable import Resumable
from midepoch.loader.meter import Meter
from midepoch.loader.options import Options
from midepoch.pipeline.spec import PipelineSpec
from midepoch.stats import Hook, Stats

Self = TypeVar("Self", bound="Measured")


class Measured(Resumable):
    """The methods of a loader that measure it, and its use in a ``with`` statement."""

    def __init__(self, workers: int) -> None:
        self.meter = Meter(workers)

    @property
    def pipeline(self) -> PipelineSpec:
        """The frozen definition of the data it loads."""
        raise NotImplementedError

    @property
    def options(self) -> Options:
        """The settings of its batches."""
        raise NotImplementedError

    @property
    def position(self) -> int:
        """The number of rows of the epoch that have been delivered to all ranks together."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        raise NotImplementedError

    @property
    def estimated_len(self) -> int | None:
        """The approximate number of batches of an epoch, or None before the first batch."""
        raise NotImplementedError

    def stats(self, *, reset: bool = False) -> Stats:
        """Return the speed of delivery, the time that the model waited, and the work that took the time.

        On this rank, since the loader was created, or since the last call with ``reset=True``.
        """
        return self.meter.stats(reset=reset)

    def on_stats(self, hook: Hook, *, every: float = 30.0) -> None:
        """Call ``hook(stats, batches)`` every ``every`` seconds while batches are delivered.

        ``midepoch.stats`` has hooks for TensorBoard and Weights & Biases. They are called when the next batch is
        requested, so that their errors lose no batch.
        """
        if not callable(hook):
            raise TypeError(f"expected a hook, a function of stats and batches, got {hook!r}")
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds, got {every!r}")
        self.meter.on_stats(hook, every)

    def progress(self, *, done: int = 0) -> Iterator[Any]:
        """Iterate the next pass with a progress bar, on a terminal or in a notebook.

        ``for batch in loader.progress(): …``. ``done``: batches of the epoch that were delivered before, so that the
        bar of a resumed run starts there.
        """
        done, batches, epoch = integer(done, "progress(done=…)"), iter(self), self.epoch
        with Bar(f"epoch {epoch}", "batches", patience=0.0) as bar:
            first = True
            for batch in batches:
                yield batch  # no statement before it: an interrupt there would lose a batch
                done += 1
                if first or bar.due:
                    stats, total, first = self.stats(), self._total(batches, done), False
                    speed = f"{stats.rows_per_second:,.0f} rows/s, waited {100 * stats.waited_share:.0f} %"
                    bar.update(done, total, speed)

    def _total(self, batches: Iterator[Any], done: int) -> int | None:
        """Return the approximate number of batches of the epoch."""
        left = length_hint(batches, -1)
        if left >= 0:
            return done + left
        total = self.estimated_len
        return None if total is None else max(done, total)

    def _repr_html_(self) -> str:
        spec, options, stats, at = self.pipeline, self.options, self.stats(), self.position
        total: float | None = spec.rows if spec.has_positions else spec.epoch_outputs or None
        if total is None and (batches := self.estimated_len) is not None:
            total = batches * options.batch_size * spec.shard.count
        about = {
            "pipeline": None if spec.node.text == "none" else spec.node.text,
            "at": f"epoch {self.epoch}, position {at:,}"
            + (f" of {'' if spec.has_positions else 'about '}{total:,.0f}" if total else ""),
            "batch size": options.batch_size,
            "workers": options.num_workers,
            "rank": f"{spec.shard.index} of {spec.shard.count}",
            "lanes": spec.lanes if spec.lanes > 1 else None,
            "so far": str(stats) if stats.batches else None,
        }
        return html.table("Loader", {k: v for k, v in about.items() if v is not None}, at / total if total else None)

    def close(self) -> None:
        """Stop threads and workers now."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
