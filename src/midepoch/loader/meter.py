"""Measurements of a running loader: two clock readings for each batch, all else at most a few times a second.

The clock of a pass starts with its first batch, so that the start of workers does not count as waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from time import perf_counter
from typing import Any

from midepoch._internal.processes import cores
from midepoch._internal.progress import Timings
from midepoch.audit.records import Figures
from midepoch.stats import Hook, Stats

_WORK = {"functions": "running your functions", "present": "assembling batches", "read": "reading"}

_WITH_WORKERS = {
    "functions": "map(…, batched=True) processes many rows in one call; or run them once, before training.",
    "present": "a collate_fn that takes columns (collate_columns=True) has less to do, and so do numbers instead of "
    "objects.",
    "read": "select_columns() reads less, and shuffle(scope='window') reads in larger pieces.",
}

_MISSED = 0.9


def remedy(stats: Stats, workers: int) -> str:
    """Return the advice for a loader with ``workers`` workers."""
    most = max(stats.stages, key=lambda name: stats.stages[name])
    hits, spare = stats.cache_hits, cores() - 1
    if most == "read" and hits is not None and hits < _MISSED:
        advice = (
            f"{100 * (1 - hits):.0f} % of the blocks had to be fetched or decoded when they were needed: increase "
            "cache_bytes, or use shuffle(scope='window') with fewer blocks per window."
        )
    elif workers < max(1, spare):
        advice = f"Most of the work is {_WORK[most]}: use num_workers={max(1, spare)} instead of {workers}."
    else:
        advice = f"Most of the work is {_WORK[most]}: {_WITH_WORKERS[most]}"
    return f"{advice} See loader.stats() for the numbers; `midepoch bench` measures other settings."


_COLUMNS = ("input_ids", "tokens", "token_ids")
_MASK = "attention_mask"

_SAMPLE = 8
"""Rows of a mask that are summed: 64 rows of 2,048 places would take 60 µs."""


def token_counts(batch: Any) -> tuple[float, float | None] | None:
    """Return the places for tokens in a batch, and the tokens without padding, or None for what is not known.

    Padding is known from an attention mask in the memory of the CPU. Lists of different lengths have none.
    """
    if not isinstance(batch, Mapping):
        return None
    column = next((batch[name] for name in _COLUMNS if name in batch), None)
    shape = getattr(column, "shape", None)
    if shape is not None and len(shape) == 2:
        slots = float(shape[0] * shape[1])
        share = _share(batch.get(_MASK), tuple(shape)) if _MASK in batch else None
        return slots, None if share is None else slots * share
    if shape is not None and len(shape) == 1 and "cu_seqlens" in batch:  # one row after the other
        ends = batch["cu_seqlens"]
        return float(shape[0]), float(ends[-1]) if len(ends) and _is_here(ends) else None
    if isinstance(column, (list, tuple)) and column and all(_is_row(row) for row in column[:_SAMPLE]):
        sample = column[:: max(1, len(column) // _SAMPLE)]
        slots = sum(map(len, sample)) * len(column) / len(sample)
        return slots, slots
    return None


def _is_row(row: Any) -> bool:
    return isinstance(row, Sized) and not isinstance(row, (str, bytes, Mapping)) and getattr(row, "ndim", 1) == 1


def _share(mask: Any, shape: tuple[int, ...]) -> float | None:
    """Return the share of a mask that is set. None if it is elsewhere: reading it would wait for the device."""
    if tuple(getattr(mask, "shape", ())) != shape or not all(shape) or not _is_here(mask):
        return None
    sample = mask[:: max(1, shape[0] // _SAMPLE)]
    return float((sample != 0).sum()) / (len(sample) * shape[1])


def _is_here(array: Any) -> bool:
    device = getattr(array, "device", None)
    return device is None or str(getattr(device, "type", device)) == "cpu"


_log = logging.getLogger("midepoch")
_LOOK_SECONDS = 0.25

_PATIENCE = 20.0
"""Seconds of a run before a warning that the model waits."""

_TOO_LONG = 0.2
"""Share of the time: a model that waits longer gets a warning."""

_NO_MODEL = 0.05
"""Share of the time: a loop that takes less between two batches does not train."""


class Meter:
    """Measurements of a loader with ``workers`` workers."""

    def __init__(self, workers: int, *, by_batch: bool = False) -> None:
        self.timings = Timings()
        self._workers, self._warned = workers, False
        self.restarted = False
        """True if it was said that a pass that was left is not continued."""
        self._hooks: list[tuple[Hook, float, float]] = []
        self.due = False
        """True if a hook is to be called before the next batch."""
        self.by_batch = by_batch
        """True if batches have about the same number of tokens, and rows have not."""
        self._total = 0  # batches since the beginning, whatever was reset
        self._figures_before, self._waited_before = Figures(), 0.0  # the same for what the ledger records
        self._clear()

    def _clear(self) -> None:
        self.batches = self.rows = self._passes = 0
        self.waited = self._seconds = self._first = 0.0
        self._weighed = self._weighed_rows = 0
        self._counted, self._slots, self._tokens = 0, 0.0, 0.0  # rows (or batches) whose tokens are counted, and these
        self._of_one: tuple[float | None, float | None] = (None, None)
        """Places for tokens of a row (or a batch), and tokens, in the last batch that was looked at."""
        self._last: float | None = None
        self._look = 0.0

    def begin(self) -> None:
        """Begin a pass, with the next batch."""
        self._last = None

    def delivered(self, asked: float, rows: int, batch: Any) -> None:
        """Note that a batch that was requested at ``asked`` is delivered now."""
        now = perf_counter()
        last, self._last = self._last, now
        if last is None:
            self._first = now - asked
            self._passes += 1
        else:
            self.waited += now - asked
            self._seconds += now - last
        self.batches += 1
        self.rows += rows
        if now >= self._look:
            self._look_closer(now, rows, batch)

    def _look_closer(self, now: float, rows: int, batch: Any) -> None:
        self._look = now + _LOOK_SECONDS
        self._weighed += weight(batch)
        self._weighed_rows += rows
        self._count_tokens(rows, batch)
        if not self._warned and self._seconds > _PATIENCE and self.waited > _TOO_LONG * self._seconds:
            self._warn()
        self.due = any(now >= due for _, _, due in self._hooks)

    def _count_tokens(self, rows: int, batch: Any) -> None:
        """Count the tokens of all rows since the last look, as many for each as in this batch.

        Batches by tokens have about as many each, with any number of rows: those are counted by batch.
        """
        counts = token_counts(batch) if rows else None
        if counts is not None:
            slots, tokens = counts
            count = 1 if self.by_batch else rows
            self._of_one = (slots / count, None if tokens is None else tokens / count)
        self._slots, self._tokens = self._token_sums()
        self._counted = self._units

    @property
    def _units(self) -> int:
        return self.batches if self.by_batch else self.rows

    def _token_sums(self) -> tuple[float, float]:
        more, (slots, tokens) = self._units - self._counted, self._of_one
        return self._slots + more * (slots or 0.0), self._tokens + more * (tokens or 0.0)

    @property
    def all_waited(self) -> float:
        """Seconds that the model has waited for data since the loader was created, whatever was reset."""
        return self._waited_before + self.waited

    @property
    def last_delivery(self) -> float | None:
        """Time of the last delivery of a batch in the pass, if there was one."""
        return self._last

    def figures(self) -> Figures:
        """Return the sums since the loader was created, whatever was reset."""
        timings, (slots, tokens), packs = self.timings, self._token_sums(), self.timings.places > 0
        has_slots, has_tokens = (value is not None for value in self._of_one)
        if packs and has_slots:  # packed sequences have no mask, but their padding was counted
            tokens, has_tokens = slots * timings.packed / timings.places, True
        return self._figures_before.plus(
            Figures(
                rows=self.rows,
                tokens=round(tokens) if has_tokens else None,
                slots=round(slots) if has_slots else None,
                read=round(1000 * timings.read) if timings.read else None,  # else it is not measured apart
                map=round(1000 * timings.functions) if timings.functions else None,
                combine=round(1000 * timings.combine) if timings.combine else None,
                collate=round(1000 * timings.present) if timings.present else None,
                transport=round(1000 * timings.transport) if timings.transport else None,
                blocks=timings.blocks or None,
                ready=timings.blocks_there if timings.blocks else None,
                packed=timings.packed if packs else None,
                places=timings.places if packs else None,
            )
        )

    def _warn(self) -> None:
        if self._seconds - self.waited < _NO_MODEL * self._seconds:
            return
        self._warned = True
        stats = self.stats()
        _log.warning(
            "the model waits for data %d %% of the time (%s rows/s). %s",
            100 * stats.waited_share, f"{stats.rows_per_second:,.0f}", remedy(stats, self._workers),
        )  # fmt: skip

    def call_hooks(self) -> None:
        """Call the hooks that are due. Not during a delivery: their errors must not lose the batch."""
        self.due, now = False, perf_counter()
        for number, (hook, every, due) in enumerate(self._hooks):
            if now >= due:
                self._hooks[number] = (hook, every, now + every)
                hook(self.stats(), self._total + self.batches)

    def on_stats(self, hook: Hook, every: float) -> None:
        self._hooks.append((hook, every, perf_counter() + every))

    def stats(self, *, reset: bool = False) -> Stats:
        timings = self.timings
        stages = {"read": timings.read, "functions": timings.functions, "present": timings.present}
        if not any(stages.values()):  # rows are only copied, when they are requested
            stages["read"] = self.waited
        figures = self.figures().minus(self._figures_before)
        stats = Stats(
            batches=self.batches,
            rows=self.rows,
            bytes=round(self.rows * self._weighed / self._weighed_rows) if self._weighed_rows else 0,
            seconds=self._seconds,
            waited=self.waited,
            first_batch=self._first,
            passes=self._passes,
            stages=stages,
            blocks=timings.blocks,
            blocks_there=timings.blocks_there,
            transport=timings.transport,
            tokens=figures.tokens,
            token_slots=figures.slots,
        )
        if reset:
            self._figures_before, self._waited_before = self.figures(), self.all_waited
            self._total += self.batches
            last = self._last
            timings.taken()
            self._clear()
            self._last = last
        return stats


def weight(batch: Any) -> int:
    """Return the approximate bytes of a batch: of arrays, tensors and tables, and of text in lists."""
    try:
        size = getattr(batch, "nbytes", None)
    except RuntimeError:  # of a sparse tensor
        return 0
    if isinstance(size, int):
        return size
    if isinstance(batch, dict):
        return sum(map(weight, batch.values()))
    if isinstance(batch, (list, tuple)):
        sample = batch[:: max(1, len(batch) // 32)]
        return int(sum(map(weight, sample)) * len(batch) / len(sample)) if sample else 0
    return len(batch) if isinstance(batch, (str, bytes)) else 8 if isinstance(batch, (int, float)) else 0
