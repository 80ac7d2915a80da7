"""The figures of one loader: rows per second, time in `next()`, the first batch, CPU of the main process."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.feeding.models import Batch, Training


@dataclass(frozen=True)
class Figures:
    """One measurement. ``next_share``: share of the time that the caller spent in ``next()``.

    ``cpu_ms``: CPU of all threads of the main process for each batch; in training that includes starting kernels.
    ``thread_ms``: that of the thread that calls ``next()``. Neither includes waiting.
    """

    rows_per_second: float
    next_share: float
    cpu_ms: float
    thread_ms: float
    batches: int
    seconds: float
    first_batch: float | None = None


class Feed:
    """Batches of a loader without end, epoch after epoch. Counts the seconds in ``next()``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        started = time.perf_counter()
        self._loader = make()
        self._batches = self._all()
        self.first = next(self._batches)
        self.first_batch = time.perf_counter() - started
        self.waited = 0.0

    def _all(self) -> Iterator[Batch]:
        while True:
            rows = 0
            for batch in self._loader:
                rows += rows_of(batch)
                yield batch
            if not rows:
                raise RuntimeError("the loader has no full batch")

    def next(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Stop the workers. Those of torch stop with their iterator."""
        if callable(close := getattr(self._loader, "close", None)):
            close()
        del self._loader, self._batches, self.first
        if multiprocessing.active_children():
            gc.collect()


def rows_of(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def measure(
    batch_of: Callable[[], Batch],
    use: Callable[[Batch], None],
    *,
    seconds: float,
    warm_up: float,
    wait: Callable[[], None],
    waited: Callable[[], float],
) -> Figures:
    """Take and use batches for some seconds. The device is waited for at both ends only."""
    until = time.perf_counter() + warm_up
    while time.perf_counter() < until:
        use(batch_of())
    wait()
    start, cpu, thread, before = time.perf_counter(), time.process_time(), time.thread_time(), waited()
    rows = batches = 0
    while time.perf_counter() < start + seconds or not batches:
        batch = batch_of()
        use(batch)
        rows, batches = rows + rows_of(batch), batches + 1
    wait()
    elapsed = time.perf_counter() - start
    cpu, thread = time.process_time() - cpu, time.thread_time() - thread
    return Figures(
        rows_per_second=rows / elapsed,
        next_share=(waited() - before) / elapsed,
        cpu_ms=1000 * cpu / batches,
        thread_ms=1000 * thread / batches,
        batches=batches,
        seconds=elapsed,
    )


def synthetic(training: Training, *, seconds: float, warm_up: float) -> Figures:
    """Training on one batch that is on the device: the limit of every loader."""
    return measure(
        lambda: training.synthetic,
        training.step,
        seconds=seconds,
        warm_up=warm_up,
        wait=training.wait,
        waited=lambda: 0.0,
    )


def trained(training: Training, make: Callable[[], Any], *, seconds: float, warm_up: float) -> Figures:
    """Training on the batches of a new loader."""
    return _fed(make, lambda batch: training.step(training.moved(batch)), training.wait, seconds, warm_up)


def alone(make: Callable[[], Any], *, seconds: float, warm_up: float) -> Figures:
    """A new loader whose batches are dropped."""
    return _fed(make, lambda batch: None, lambda: None, seconds, warm_up)


def _fed(
    make: Callable[[], Any], use: Callable[[Batch], None], wait: Callable[[], None], seconds: float, warm_up: float
) -> Figures:
    feed = Feed(make)
    try:
        figures = measure(feed.next, use, seconds=seconds, warm_up=warm_up, wait=wait, waited=lambda: feed.waited)
        return replace(figures, first_batch=feed.first_batch)
    finally:
        feed.close()


def first_batch(make: Callable[[], Any]) -> float:
    """Seconds from creating a loader to its first batch."""
    feed = Feed(make)
    feed.close()
    return feed.first_batch
