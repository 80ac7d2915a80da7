"""Rows requested by number, from any number of threads."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from midepoch.order import Selection
from midepoch.pipeline.groups import GroupedRows
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import BundlesHere
from midepoch.transforms import Batch


class RandomAccess:
    """Random access to an epoch: ``get`` returns the same as ``list(ds)[key]``."""

    def __init__(self, leaf: Leaf, groups: int) -> None:
        self._bundles, self._groups = BundlesHere([leaf]), groups
        self._shard, self._engine = leaf.shard, self._bundles.engines[0]
        self._turn = (os.getpid(), threading.RLock())

    def get(self, key: Any, epoch: int, count: int) -> Any:
        """Return a row of ``count``, or the columns of several."""
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if not -count <= key < count:
                raise IndexError(f"row {key} is out of range: there are {count} rows")
            found = self._engine.rows(self._at(epoch, np.array([key % count])))
            if not found:
                raise IndexError(f"row {key} is skipped under on_error='skip'")
            return found[0]
        if isinstance(key, slice):
            return self._engine.columns(self._at(epoch, np.arange(*key.indices(count), dtype=np.int64)))
        if not isinstance(key, (list, tuple, range, np.ndarray)) or np.ndim(key) != 1:
            raise TypeError(f"rows are indexed by an integer, a slice or a list of integers, got {key!r}")
        rows = Selection.of_ranges([(0, count)]).select(np.asarray(key))
        return self._engine.columns(self._at(epoch, rows.source_rows(np.arange(len(rows)))))

    def first(self, epoch: int, count: int) -> Batch:
        """Return the first rows, after all functions."""
        return self._at(epoch, np.arange(count))

    def _at(self, epoch: int, places: Any) -> Batch:
        if self._turn[0] != os.getpid():  # a fork: a thread that does not exist here may hold it
            self._turn = (os.getpid(), threading.RLock())
        engine, positions = self._engine, places * self._shard.count + self._shard.index
        if engine.leaf.group is not None and len(positions):
            with self._turn[1]:
                return GroupedRows(self._bundles, epoch, self._groups).read(positions)
        with self._turn[1]:  # not while functions of the user run, which may wait for other threads
            read = engine.read(engine.chosen(epoch, positions))
        return engine.transform(epoch, read)
