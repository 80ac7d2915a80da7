"""Rows of a leaf whose batched functions get groups of rows at fixed positions of the epoch.

Positions are dealt into ``groups`` interleaved sequences: position p is number p // groups of sequence p % groups. Each
sequence is split into groups from its beginning. The input of a function therefore depends only on the number of
sequences, not on the batch size, the workers, or the position of a resume. There is one sequence for each process that
began the run, so that no process computes groups for others. A resume keeps the number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.pipeline.rows import Bundles, bundle_rows
from midepoch.transforms import Batch, join

Int64Array = npt.NDArray[np.int64]


class GroupedRows:
    """The outputs at positions of one epoch. Read in ascending order: one bundle of each sequence is kept."""

    def __init__(self, bundles: Bundles, epoch: int, groups: int) -> None:
        self._bundles, self._epoch, self._groups = bundles, epoch, groups
        leaf = bundles.engines[0].leaf
        self._rows, self._size = leaf.rows, bundle_rows(leaf) or 1
        self._kept: dict[int, tuple[int, int, Batch]] = {}  # by sequence: first row, the row after the last, outputs

    def read(self, positions: Int64Array) -> Batch:
        """Return the outputs at positions, in their order. ``places`` are indices into ``positions``."""
        sequences, numbers = positions % self._groups, positions // self._groups
        parts: list[Batch] = []
        for sequence in np.unique(sequences).tolist():
            places = np.flatnonzero(sequences == sequence)
            parts += self._of(Shard(sequence, self._groups), numbers[places], places)
        found = parts[0] if len(parts) == 1 else join(parts)
        order = np.argsort(found.places, kind="stable")
        return found if (order[1:] > order[:-1]).all() else found.keep(order)

    def _of(self, lane: Shard, numbers: Int64Array, places: Int64Array) -> list[Batch]:
        order = np.argsort(numbers, kind="stable")
        numbers, places = numbers[order], places[order]
        parts: list[Batch] = []
        done = 0
        while done < len(numbers):
            first, stop, made = self._covering(lane, int(numbers[done]))
            end = int(np.searchsorted(numbers, stop))
            wanted = numbers[done:end] - first
            at = np.searchsorted(made.places, wanted)
            there = at < len(made)
            there[there] = made.places[at[there]] == wanted[there]
            at, of = at[there], places[done:end][there]
            together = len(at) > 0 and int(at[-1]) - int(at[0]) == len(at) - 1 and bool((at[1:] > at[:-1]).all())
            chosen = made.slice(int(at[0]), int(at[-1]) + 1) if together else made.keep(at)
            parts.append(replace(chosen, places=of))
            done = end
        return parts

    def _covering(self, lane: Shard, number: int) -> tuple[int, int, Batch]:
        """Return the bundle that contains a row of a sequence. Bundles begin at fixed rows, unless one was shorter."""
        kept = self._kept.get(lane.index)
        while kept is None or not kept[0] <= number < kept[1]:
            follows = kept is not None and kept[1] <= number < kept[1] - kept[1] % self._size + self._size
            first = kept[1] if kept is not None and follows else number - number % self._size
            stop, made = self._bundles.take(0, self._epoch, lane, first, lane.before(self._rows))
            kept = self._kept[lane.index] = (first, stop, made)
        return kept
