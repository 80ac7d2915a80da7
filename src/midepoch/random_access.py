"""Rows asked for by number, by any number of threads."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from midepoch.engine import Engine
from midepoch.order import Selection
from midepoch.pipeline import Pipeline


class RandomAccess:
    """``get`` gives what ``list(ds)[key]`` would, of an epoch."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._cut, self._engine = pipeline.cut, Engine(pipeline)
        self._turn = (os.getpid(), threading.RLock())

    def get(self, key: Any, epoch: int, count: int) -> Any:
        """A row, or the columns of several, of ``count``."""
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if not -count <= key < count:
                raise IndexError(f"row {key} is out of range: there are {count} rows")
            found = self._engine.rows(self._at(epoch, np.array([key % count])))
            if not found:
                raise IndexError(f"row {key} is one of those that are skipped")
            return found[0]
        if isinstance(key, slice):
            return self._engine.columns(self._at(epoch, np.arange(*key.indices(count), dtype=np.int64)))
        if isinstance(key, str):
            raise TypeError(f"ds[{key!r}] would read a whole column: use ds.select_columns({key!r}) and iterate")
        if not isinstance(key, (list, tuple, range, np.ndarray)) or np.ndim(key) != 1:
            raise TypeError(f"rows are asked for by a whole number, a slice or a list of numbers, not {key!r}")
        rows = Selection.of_ranges([(0, count)]).select(np.asarray(key))
        return self._engine.columns(self._at(epoch, rows.source_rows(np.arange(len(rows)))))

    def columns(self, epoch: int, count: int) -> list[str]:
        """Which columns the first rows have, when all functions have run."""
        return list(self._at(epoch, np.arange(count)).columns)

    def _at(self, epoch: int, places: Any) -> Any:
        if self._turn[0] != os.getpid():  # a fork: a thread that is not here may hold it
            self._turn = (os.getpid(), threading.RLock())
        engine, cut = self._engine, self._cut
        with self._turn[1]:  # not while functions of the user run, which may wait for other threads
            read = engine.read(engine.chosen(epoch, places * cut.count + cut.index))
        return engine.transform(epoch, read)
