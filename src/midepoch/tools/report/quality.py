"""Quality of the shuffle of an order, beside a true permutation of as many rows: picture, serial correlation, batches.

Batches are judged by classes: the values of a label, else the files of the rows, else tenths of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.order import EpochOrder, Order, Shuffle, SourceLayout

Int64Array = npt.NDArray[np.int64]
_CELLS = 48
_PICTURE = 48 * 48 * 8
_RUNS, _RUN = 8, 4096
_LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BATCHES = 120
_TENTHS = 10


def quality(
    order: Order, layout: SourceLayout, epoch: int, *, batch: int, labels: Callable[[Int64Array], Any] | None = None
) -> dict[str, Any]:
    """Return the quality of one epoch's order, and of a true permutation with the same seed.

    ``labels``: the classes of rows, if known.
    """
    seed = order.shuffle.seed if order.shuffle is not None else 0
    true = replace(order, shuffle=Shuffle(seed, "rows"), lanes=1)
    of_row, name = _classes(order, layout, labels)
    shuffle = order.shuffle
    return {
        "scope": shuffle.scope if shuffle else "none",
        "window": shuffle.window if isinstance(shuffle, Shuffle) and shuffle.scope == "window" else None,
        "seed": shuffle.seed if shuffle else None,
        "lanes": order.lanes,
        "epoch": epoch,
        "batch": batch,
        "classes": name,
        "cells": _CELLS,
        "mine": _judged(order.at(epoch, layout), len(order), batch, of_row),
        "true": _judged(true.at(epoch, layout), len(order), batch, of_row),
        "noise": 2 / float(np.sqrt(max(1, min(len(order), _RUNS * _RUN)))),
        "spans": None if len(order) <= _RUN else [min(_RUNS, len(order) - _RUN + 1), _RUN],
    }


def _judged(order: EpochOrder, rows: int, batch: int, of_row: Callable[[Int64Array], Int64Array]) -> dict[str, Any]:
    return {
        "picture": _picture(order, rows),
        "serial": _serial(order, rows),
        "imbalance": _imbalance(order, rows, batch, of_row),
    }


def _picture(order: EpochOrder, rows: int) -> list[int]:
    """Return counts by cell: position from left to right, row of the data from top to bottom."""
    positions = np.unique(np.linspace(0, rows - 1, min(rows, _PICTURE)).astype(np.int64))
    x, y = positions * _CELLS // rows, order.chosen(positions) * _CELLS // rows
    return [int(count) for count in np.bincount(y * _CELLS + x, minlength=_CELLS * _CELLS)]


def _serial(order: EpochOrder, rows: int) -> list[list[float]]:
    """Return (distance, correlation, pairs): Pearson's coefficient of the row numbers at positions p and p + distance.

    Of small data all such pairs are taken, of large data those within a few spans of positions. 1 is file order; 0
    means that the rows are unrelated.
    """
    length = min(rows, _RUN)
    starts = np.unique(np.linspace(0, rows - length, _RUNS).astype(np.int64))
    runs = [order.chosen(np.arange(start, start + length)).astype(np.float64) for start in starts]
    correlations = []
    for lag in _LAGS:
        if lag >= length // 2:
            break
        first, second = (np.concatenate([run[part] for run in runs]) for part in (slice(None, -lag), slice(lag, None)))
        first, second = first - first.mean(), second - second.mean()
        spread = float(np.sqrt((first @ first) * (second @ second)))
        if spread > 0:
            correlation = float(np.clip((first @ second) / spread, -1.0, 1.0))
            correlations.append([lag, correlation, len(first)])
    return correlations


def _imbalance(order: EpochOrder, rows: int, batch: int, of_row: Callable[[Int64Array], Int64Array]) -> dict[str, Any]:
    """Return the difference between the classes of some batches and of the data: 0 is equal, 1 nothing in common."""
    batch = max(1, min(batch, rows))
    whole = max(1, rows // batch)
    starts = np.unique(np.linspace(0, whole - 1, min(whole, _BATCHES)).astype(np.int64)) * batch
    positions = (starts[:, None] + np.arange(batch)).ravel()
    classes = of_row(order.chosen(positions)).reshape(len(starts), batch)
    # Drawn, not every n-th: labels may alternate.
    sample = of_row(np.arange(rows) if rows <= 4 * _RUN else np.random.default_rng(0).integers(0, rows, 4 * _RUN))
    count = int(max(classes.max(), sample.max())) + 1
    everywhere = np.bincount(sample, minlength=count) / len(sample)
    shares = np.stack([np.bincount(one, minlength=count) / batch for one in classes])
    off = np.abs(shares - everywhere).sum(axis=1) / 2
    return {"positions": starts.tolist(), "values": [round(float(one), 4) for one in off], "mean": float(off.mean())}


def _classes(
    order: Order, layout: SourceLayout, labels: Callable[[Int64Array], Any] | None
) -> tuple[Callable[[Int64Array], Int64Array], str]:
    """Return a function from row numbers (of the dataset) to classes from 0 on, and the names of the classes."""
    if labels is not None:
        known: dict[Any, int] = {}

        def by_label(rows: Int64Array) -> Int64Array:
            return np.array([known.setdefault(value, len(known)) for value in labels(rows)], dtype=np.int64)

        return by_label, "label"
    if len(layout.file_starts) > 2:
        files = layout.file_starts

        def by_file(rows: Int64Array) -> Int64Array:
            return files.searchsorted(order.selection.source_rows(rows), side="right") - 1

        return by_file, "file"
    total = len(order)
    return lambda rows: rows * _TENTHS // max(1, total), "tenth of the data"
