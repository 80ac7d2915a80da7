"""Beginnings of flows: the rows of a lane of a source, in bundles, after all steps that take one bundle at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from midepoch._internal.progress import Timings
from midepoch.errors import DataChangedError, FetchError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.chunk import Chunk, RowRefs
from midepoch.pipeline.cursor import RowAt
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms import Batch, FilterExpression, FilterRows, join
from midepoch.transforms.map import DifferentColumnsError

Int64Array = npt.NDArray[np.int64]


class GroupedRows:
    """The outputs at positions of one epoch. Read in ascending order: one bundle of each sequence is kept."""

    def __init__(self, bundles: Bundles, epoch: int, groups: int) -> None:
        self._bundles, self._epoch, self._groups = bundles, epoch, groups
        leaf = bundles.engines[0].leaf
        self._rows, self._size = leaf.rows, bundle_unit(leaf)
        self._kept: dict[int, tuple[int, int, Batch]] = {}  # by sequence: first row, the row after the last, outputs

    def read(self, positions: Int64Array) -> Batch:
        """Return the outputs at positions, in their order. ``places`` are indices into ``positions``."""
        sequences, numbers = positions % self._groups, positions // self._groups
        parts: list[Batch] = []
        for sequence in np.unique(sequences).tolist():
            places = np.flatnonzero(sequences == sequence)
            parts += self._of(Shard(sequence, self._groups), numbers[places], places)
        outputs = parts[0] if len(parts) == 1 else join(parts)
        order = np.argsort(outputs.places, kind="stable")
        return outputs if (order[1:] > order[:-1]).all() else outputs.keep(order)

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


_FIRST = 32
_BUNDLE_BYTES = 1 << 20

_MADE_BYTES = 4 << 20
"""Maximum bytes of the outputs of a bundle: functions may turn a few rows into much data."""

_QUICK, _SLOW = 0.06, 0.3
"""Seconds: bundles that take less than the first grow, those that take more than the second shrink."""

_REFS = 4096
_FILTERED = 1 << 17

_NOT_OF_A_ROW = (FetchError, DataChangedError, DifferentColumnsError, OSError, MemoryError, ImportError)
"""Errors that a smaller bundle would not avoid, and that may take long to occur again."""


class Bundle(NamedTuple):
    """Rows ``row`` to ``stop`` of a lane of a source, in one epoch. ``excluded``: those of them that yield nothing."""

    leaf: int
    epoch: int
    lane: Shard
    row: int
    stop: int
    excluded: Intervals = EMPTY


class MadeRows(NamedTuple):
    """The outputs of a bundle up to a row, and the number of its rows skipped under ``on_error="skip"``."""

    stop: int
    batch: Batch
    skipped: int


@dataclass
class FirstPass:
    """The first pass over a lane of a leaf: its epoch, and the rows that yielded outputs, once it has ended."""

    epoch: int
    kept: int = -1


class Bundles(Protocol):
    """Maker of the bundles of lanes.

    ``engines``: one for every leaf, in this process. ``skipped``: rows skipped so far under ``on_error="skip"``, of the
    bundles that were taken.
    """

    skipped: int
    first_passes: dict[tuple[int, int], FirstPass]
    """By leaf and lane."""
    excluded: Sequence[Intervals]
    """By leaf, its rows before the shuffle that yield nothing; empty if there are none at all."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    def take(
        self, leaf: int, epoch: int, lane: Shard, row: int, total: int, excluded: Intervals = EMPTY
    ) -> tuple[int, Batch]:
        """Return the outputs of the bundle that begins at ``row`` of a lane of ``total`` rows, and its end."""


class Sizes:
    """Sizes of the bundles of each leaf: as large as can be made quickly, and a multiple of its unit."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._units = [bundle_unit(leaf) for leaf in leaves]
        self._is_fixed = [not leaf.has_fixed_groups for leaf in leaves]
        self._now = [_FIRST for _ in leaves]

    def now(self, leaf: int) -> int:
        unit = self._units[leaf]
        return unit if self._is_fixed[leaf] else unit * max(1, self._now[leaf] // unit)

    def took(self, leaf: int, most: int, rows: int, seconds: float) -> None:
        """Note the seconds that rows of a bundle took. ``most``: maximum rows of a bundle."""
        now = self._now[leaf] = min(self._now[leaf], max(most, 1))
        if seconds < _QUICK and rows >= self.now(leaf):
            self._now[leaf] = min((8 if seconds < _QUICK / 16 else 2) * now, most)
        elif seconds > _SLOW and rows <= self.now(leaf):
            self._now[leaf] = max(1, now // 2)


def bundle_unit(leaf: Leaf) -> int:
    """Return the number of rows of which every bundle is a multiple, so that functions get the same groups.

    If functions get groups of different sizes, those of all but the first begin with every bundle: then all bundles
    have this size, about a thousand rows.
    """
    group = leaf.group or 1
    return group if leaf.has_fixed_groups else group * max(1, 1024 // group)


def make(engine: Engine, bundle: Bundle) -> Batch:
    """Return the outputs of a bundle. ``places`` are the rows they were made from, counted from its first."""
    began, functions = time.perf_counter(), engine.timings.functions
    made = _make(engine, bundle)
    engine.timings.read += time.perf_counter() - began - (engine.timings.functions - functions)
    return made


def make_good(engine: Engine, bundle: Bundle) -> MadeRows:
    """Return the outputs of a bundle, or of the good rows before one that fails, which are delivered first.

    Raise only if the first row (or group of rows) fails.
    """
    unit, before = engine.leaf.group or 1, engine.skipped
    while True:
        try:
            return MadeRows(bundle.stop, make(engine, bundle), engine.skipped - before)
        except _NOT_OF_A_ROW:
            raise
        except Exception:
            units = -(-(bundle.stop - bundle.row) // unit)
            if units <= 1:
                raise
            engine.skipped = before
            bundle = bundle._replace(stop=bundle.row + units // 2 * unit)


def _make(engine: Engine, bundle: Bundle) -> Batch:
    positions = bundle.lane.locals(bundle.row, bundle.stop)
    engine.reached(bundle.epoch, int(positions[0]))
    chosen = engine.chosen(bundle.epoch, positions)
    if bundle.excluded:
        places = np.flatnonzero(~bundle.excluded.contains(np.arange(bundle.row, bundle.stop)))
        return _make_some(engine, bundle.epoch, chosen, places)
    if not _filters_first(engine.leaf):
        return engine.transform(bundle.epoch, engine.read(chosen))
    if (kept := engine.passing(chosen)) is not None and 4 * len(kept) < len(chosen):
        # Few scattered rows are left: all columns are read for those only.
        left = replace(engine.read(chosen[kept]), places=kept)
        return engine.transform(bundle.epoch, left, after=1)
    # Consecutive rows are filtered in place, and only those that are left are copied.
    pieces: list[Batch] = []
    at = 0
    while at < len(chosen):
        for piece, count in engine.read_pieces(chosen[at:]):
            pieces.append(replace(piece, places=piece.places + at))
            at += count
    first = engine.leaf.tail[0]
    if isinstance(first, FilterExpression):
        mask = first.mask(pieces)
        kept = np.flatnonzero(mask)
        few = 4 * len(kept) < len(chosen) == len(mask)
        left = replace(engine.read(chosen[kept]), places=kept) if few else first.apply_to(pieces, mask)
    else:
        left = join([engine.transform(bundle.epoch, piece, steps=1) for piece in pieces])
    return engine.transform(bundle.epoch, left, after=1)


def _make_some(engine: Engine, epoch: int, chosen: Int64Array, places: Int64Array) -> Batch:
    """Return the outputs of the rows of a bundle at some places. Batched functions get what is left of their groups."""
    size = engine.leaf.group if engine.leaf.group is not None and engine.leaf.has_fixed_groups else len(chosen)
    made = []
    for first in range(0, len(chosen), size):
        own = places[(places >= first) & (places < first + size)]
        batch = engine.read(chosen[own])
        made.append(engine.transform(epoch, replace(batch, places=own[batch.places])))
    return made[0] if len(made) == 1 else join([batch for batch in made if len(batch)] or made[:1])


def excluded_rows(engine: Engine, rows: Intervals, epoch: int, lane: Shard) -> Intervals:
    """Return the numbers in a lane of rows before the shuffle."""
    positions = engine.order(epoch).positions_of_rows(rows.positions())
    return Intervals.from_positions(positions[positions % lane.count == lane.index] // lane.count)


def _filters_first(pipeline: Leaf) -> bool:
    first = pipeline.tail[0] if pipeline.tail else None
    return isinstance(first, FilterExpression) or (isinstance(first, FilterRows) and not first.batched)


def most_rows(engine: Engine, rows: int, made: Batch) -> int:
    """Return the maximum rows of a bundle, by the outputs of one. Rows dropped by an expression cost almost nothing."""
    few = _by_expression(engine.leaf) and 4 * len(made) < rows
    most = _FILTERED if few else engine.chunk_rows(_BUNDLE_BYTES)
    return int(max(1, min(most, rows * _MADE_BYTES / max(1, made.nbytes))))


def _by_expression(pipeline: Leaf) -> bool:
    return bool(pipeline.tail) and isinstance(pipeline.tail[0], FilterExpression)


class BundlesHere:
    """Bundles made in this process."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        excluded: Sequence[Intervals] = (),
        *,
        shared: bool = False,
        timings: Timings | None = None,
    ) -> None:
        self.engines = [Engine(leaf, shared=shared, timings=timings) for leaf in leaves]
        self.excluded = excluded
        self._sizes = Sizes(leaves)
        self.skipped = 0
        self.first_passes: dict[tuple[int, int], FirstPass] = {}

    def begin(self, excluded: Sequence[Intervals]) -> None:
        """Begin a pass."""
        self.first_passes, self.excluded = {}, excluded

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def take(
        self, leaf: int, epoch: int, lane: Shard, row: int, total: int, excluded: Intervals = EMPTY
    ) -> tuple[int, Batch]:
        engine, started = self.engines[leaf], time.perf_counter()
        last = min(row + self._sizes.now(leaf), total)
        bundle = Bundle(leaf, epoch, lane, row, last, excluded.from_(row).before_(last))
        stop, made, skipped = make_good(engine, bundle)
        self.skipped += skipped
        most = most_rows(engine, stop - row, made)
        self._sizes.took(leaf, most, stop - row, time.perf_counter() - started)
        return stop, made


class LeafRows:
    """A lane of a leaf. ``spared``: rows that are not excluded yet."""

    def __init__(
        self, bundles: Bundles, leaf: int, epoch: int, lane: Shard, cursor: RowAt, spared: Intervals = EMPTY
    ) -> None:
        self._bundles, self._leaf, self._epoch, self._lane = bundles, leaf, epoch, lane
        self._row, self._skip = cursor.row, cursor.outputs
        self._excluded = EMPTY
        if bundles.excluded and bundles.excluded[leaf]:
            self._excluded = excluded_rows(bundles.engines[leaf], bundles.excluded[leaf], epoch, lane).minus(spared)
        spec = bundles.engines[leaf].leaf
        self._total = lane.before(spec.rows)
        self._by_row = spec.group is None  # rows are independent: a resume can begin at any
        self._alone = spec.only_filters  # each row yields one output, or none
        self._kept = 0 if spec.may_drop_rows else None  # rows that have yielded outputs so far
        self._first = bundles.first_passes.setdefault((leaf, lane.index), FirstPass(epoch))

    def pull(self) -> Chunk | None:
        if self._row >= self._total:
            return None
        first, skip, by_row, kept = self._row, self._skip, self._by_row, self._kept
        stop, made = self._bundles.take(self._leaf, self._epoch, self._lane, first, self._total, self._excluded)
        made = replace(made, leaves=self._leaf) if self._leaf else made
        self._row, self._skip = stop, max(0, skip - len(made))
        left = self._skip  # outputs delivered before, made from rows of the next bundles
        count = max(0, len(made) - skip)
        in_first = self._first.kept if self._first.epoch != self._epoch else -1
        places, alone, total = made.places, self._alone, len(made)
        if kept is not None:
            self._kept = kept + _distinct(places, total, alone)
            if stop >= self._total and self._first.epoch == self._epoch:
                self._first.kept = self._kept

        def row_at(row: int, delivered: int, outputs: int) -> RowAt:
            if kept is None:
                return RowAt(row, delivered)
            return RowAt(row, delivered, kept + _distinct(places, outputs, alone), in_first)

        def at(outputs: int) -> RowAt:
            if outputs == count:
                return row_at(stop, left, total)
            if not by_row or not outputs:
                return row_at(first, skip + outputs, 0 if not outputs else skip + outputs)
            if alone:
                return row_at(first + int(places[skip + outputs - 1]) + 1, 0, skip + outputs)
            return row_at(*_after(places, first, skip + outputs), skip + outputs)

        def before(outputs: int) -> RowAt:
            if not by_row or outputs == count:
                return at(outputs)
            row = int(places[skip + outputs])
            begin = skip + outputs if alone else int(np.searchsorted(places, row))
            return row_at(first + row, skip + outputs - begin, skip + outputs)

        def table(outputs: Int64Array, is_before: bool) -> Int64Array:
            done = skip + outputs
            if is_before:
                rows = np.append(places, stop - first)[done] + first
            else:
                rows = np.where(done > 0, places[np.maximum(done, 1) - 1] + 1, 0) + first
                rows[outputs == count] = stop
            found = np.zeros((len(outputs), 2 if kept is None else 4), np.int64)
            found[:, 0] = rows
            if kept is not None:
                found[:, 2], found[:, 3] = kept + done, in_first
            return found

        fast = table if alone and by_row and count and not left else None
        return Chunk(made.slice(min(skip, total), total) if skip else made, at, before, fast)


def _distinct(places: Int64Array, outputs: int, alone: bool) -> int:
    """Return the number of rows that the first outputs were made from. ``alone``: each has one of its own."""
    return outputs if alone or not outputs else int(np.count_nonzero(np.diff(places[:outputs]))) + 1


def _after(places: Int64Array, first: int, outputs: int) -> tuple[int, int]:
    """Return the row after ``outputs`` outputs, by that of the last of them, and the delivered outputs of it."""
    row = int(places[outputs - 1])
    begin, end = np.searchsorted(places, (row, row + 1)).tolist()
    return (first + row + 1, 0) if outputs == end else (first + row, outputs - begin)


class LazyRows:
    """A lane of a pipeline without functions: rows are referenced, and read once it is known which are needed."""

    def __init__(self, bundles: Bundles, leaf: int, epoch: int, lane: Shard, cursor: RowAt) -> None:
        self._bundles, self._leaf, self._epoch, self._lane = bundles, leaf, epoch, lane
        self._row = cursor.row + cursor.outputs
        self._total = lane.before(bundles.engines[leaf].leaf.rows)
        self._size = _FIRST

    def pull(self) -> Chunk | None:
        if self._row >= self._total:
            return None
        first, stop = self._row, min(self._row + self._size, self._total)
        self._row, self._size = stop, min(8 * self._size, _REFS)  # a reference costs 50 ns
        engine = self._bundles.engines[self._leaf]
        positions = self._lane.locals(first, stop)
        engine.reached(self._epoch, int(positions[0]))
        chosen = engine.chosen(self._epoch, positions)
        leaves, draws = np.full(len(chosen), self._leaf, np.int16), engine.draws(chosen)
        refs = RowRefs(self._bundles.engines, leaves, chosen, engine.locate(chosen), draws, draws=draws is not None)

        def table(outputs: Int64Array, _: bool) -> Int64Array:
            found = np.zeros((len(outputs), 2), np.int64)
            found[:, 0] = first + outputs
            return found

        return Chunk(refs, lambda outputs: RowAt(first + outputs), table=table)
