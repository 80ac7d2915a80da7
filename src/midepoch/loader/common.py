"""What loaders of datasets and of streams have in common: how they are measured, shown and closed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import Any, TypeVar

from midepoch import html
from midepoch.checks import whole
from midepoch.loader.meter import Meter
from midepoch.loader.options import Options
from midepoch.order import Cut
from midepoch.progress import Bar
from midepoch.resumable import Resumable
from midepoch.stats import Hook, Stats

Self = TypeVar("Self", bound="AnyLoader")


class AnyLoader(Resumable):
    """Batches, epoch after epoch.

    Each ``iter()`` goes through one epoch: from its beginning, or from where a loaded state left off. When it has been
    gone through, the next ``iter()`` is the next epoch. A ``break`` moves nothing, unless the last batch of a dataset
    was out.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._meter = Meter(options.num_workers)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, where that can be known."""
        raise NotImplementedError

    @property
    def options(self) -> Options:
        """How batches are made."""
        return self._options

    @property
    def meter(self) -> Meter:
        """What counts the batches that are handed over."""
        return self._meter

    @property
    def ends(self) -> str | None:
        """What becomes of the last global batch if it is not whole."""
        return self._options.ends

    @property
    def cut(self) -> Cut:
        """Which share of every global batch this rank gets: ``index`` of ``count``."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, so far as that is known. Setting it is ``set_epoch``."""
        return self._epoch()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """How many rows (of a stream: outputs) of the epoch all ranks together have been handed."""
        raise NotImplementedError

    def _epoch(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The one a loaded state is in is gone on with where it was left; any other starts anew."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads and workers now; they also end with the loader, and with the process however it ends."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self, *, reset: bool = False) -> Stats:
        """How fast batches were handed over, how long the model waited for them, and what took the time.

        Since the loader was made, or since the last call with ``reset=True``. On this rank.
        """
        return self._meter.stats(reset=reset)

    def on_stats(self, hook: Hook, *, every: float = 30.0) -> None:
        """Call ``hook(stats, batches)`` every so many seconds, while batches are handed over.

        ``midepoch.stats`` has hooks for TensorBoard and Weights & Biases. They are called when the next batch is asked
        for: what one raises loses no batch.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be a function of stats and batches, got {hook!r}")
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds, got {every!r}")
        self._meter.on_stats(hook, every)

    def progress(self, *, done: int = 0) -> Iterator[Any]:
        """The batches of the next pass, with a bar on a terminal or in a notebook: ``for batch in loader.progress():``.

        ``done``: batches of the epoch that were had before, so that the bar of a resumed run starts there.
        """
        done, batches, epoch = whole(done, "progress(done=…)"), iter(self), self.epoch
        with Bar(f"epoch {epoch}", "batches", patience=0.0) as bar:
            first = True
            for batch in batches:
                yield batch  # and nothing before it: an interrupt there would lose a batch
                done += 1
                if first or bar.due:
                    stats, left, first = self.stats(), self._batches_left(batches, done), False
                    speed = f"{stats.rows_per_second:,.0f} rows/s, waited {100 * stats.waited_share:.0f} %"
                    bar.update(done, None if left is None else done + left, speed)

    def _batches_left(self, batches: Iterator[Any], number: int) -> int | None:  # noqa: ARG002
        return length_hint(batches)

    def _shown(self) -> tuple[dict[str, Any], float | None]:
        """What a notebook shows of it, and which share of the epoch is over."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        about, share = self._shown()
        options, cut, stats = self._options, self.cut, self.stats()
        about |= {
            "batch size": options.batch_size,
            "workers": options.num_workers,
            "rank": f"{cut.index} of {cut.count}",
        }
        if stats.batches:
            about["so far"] = str(stats)
        return html.table(type(self).__name__, about, share)
