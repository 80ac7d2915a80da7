"""Where flows begin: the rows of a lane of a source, in bundles, through all steps that look at a bundle at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from midepoch._internal.timings import Timings
from midepoch.errors import DataChangedError, FetchError
from midepoch.order import Shard
from midepoch.pipeline.chunk import Chunk, Int64Array, RowRefs
from midepoch.pipeline.cursor import At, RowAt
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms import Batch, FilterExpression, FilterRows, join
from midepoch.transforms.map import DifferentColumnsError

_FIRST = 32
_BUNDLE_BYTES = 1 << 20
_MADE_BYTES = 4 << 20
"""Of the outputs of a bundle: functions may make much of little."""
_QUICK, _SLOW = 0.06, 0.3
"""Seconds: bundles that take less than the one are made larger, those that take more than the other smaller."""
_REFS = 4096
_FIRST_FILTERED, _FILTERED = 1 << 13, 1 << 17
_NOT_OF_A_ROW = (FetchError, DataChangedError, DifferentColumnsError, OSError, MemoryError, ImportError)
"""Errors that fewer rows would not avoid, and that may take long to come again."""


class Bundle(NamedTuple):
    """Rows ``row`` to ``stop`` of a lane of a source, in one epoch."""

    leaf: int
    epoch: int
    lane: Shard
    row: int
    stop: int


class Made(NamedTuple):
    """The outputs of a bundle up to a row, and how many of its rows were left out under ``on_error="skip"``."""

    stop: int
    batch: Batch
    skipped: int


@dataclass
class FirstPass:
    """The first pass over a lane of a leaf: its epoch, and the rows that became something in it, once it has ended."""

    epoch: int
    kept: int = -1


class Bundles(Protocol):
    """Makes the bundles of lanes. ``engines``: one for every leaf, of this process. ``skipped``: rows left out so far
    under ``on_error="skip"``, of the bundles that were taken.
    """

    skipped: int
    first_passes: dict[tuple[int, int], FirstPass]
    """By leaf and lane."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    def take(self, leaf: int, epoch: int, lane: Shard, row: int, total: int) -> tuple[int, Batch]:
        """The outputs of the bundle that begins at a row of a lane with so many, and the row behind its last."""


class Sizes:
    """The sizes of bundles, for each leaf: as large as is quick to make, and a multiple of its unit."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._units = [bundle_unit(leaf) for leaf in leaves]
        self._is_fixed = [not leaf.has_one_group_size for leaf in leaves]
        self._now = [_FIRST_FILTERED if _by_expression(leaf) else _FIRST for leaf in leaves]

    def now(self, leaf: int) -> int:
        unit = self._units[leaf]
        return unit if self._is_fixed[leaf] else unit * max(1, self._now[leaf] // unit)

    def took(self, leaf: int, most: int, rows: int, seconds: float) -> None:
        """Rows of a bundle were made in so many seconds; ``most`` rows are a bundle's size at most."""
        now = self._now[leaf] = min(self._now[leaf], max(most, 1))
        if seconds < _QUICK and rows >= self.now(leaf):
            self._now[leaf] = min(2 * now, most)
        elif seconds > _SLOW and rows <= self.now(leaf):
            self._now[leaf] = max(1, now // 2)


def bundle_unit(leaf: Leaf) -> int:
    """Return the rows that a bundle must be a multiple of, so that functions get the same groups whatever its size.

    Where functions get groups of different sizes, those of all but the first begin with every bundle: then bundles are
    all of this size, about a thousand rows.
    """
    group = leaf.group or 1
    return group if leaf.has_one_group_size else group * max(1, 1024 // group)


def make(engine: Engine, bundle: Bundle) -> Batch:
    """The outputs of a bundle, made here and now. ``places`` are the rows they came of, counted from its first."""
    began, functions = time.perf_counter(), engine.spent.functions
    made = _make(engine, bundle)
    engine.spent.read += time.perf_counter() - began - (engine.spent.functions - functions)
    return made


def make_good(engine: Engine, bundle: Bundle) -> Made:
    """The outputs of a bundle; of fewer rows, where one cannot be made: the good rows before it come first.

    Raises only where the first row (or group of rows) is the one that fails.
    """
    unit, before = engine.leaf.group or 1, engine.skipped
    while True:
        try:
            return Made(bundle.stop, make(engine, bundle), engine.skipped - before)
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
    if not _filters_first(engine.leaf):
        return engine.transform(bundle.epoch, engine.read(chosen))
    if (kept := engine.passing(chosen)) is not None and 4 * len(kept) < len(chosen):
        # Few are left of rows that lie apart: all columns are read of those only.
        left = replace(engine.read(chosen[kept]), places=kept)
        return engine.transform(bundle.epoch, left, after=1)
    # Rows that lie side by side are looked at where they lie, and only those that are left are copied.
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


def _filters_first(pipeline: Leaf) -> bool:
    first = pipeline.tail[0] if pipeline.tail else None
    return isinstance(first, FilterExpression) or (isinstance(first, FilterRows) and not first.batched)


def most_rows(engine: Engine, rows: int, made: Batch) -> int:
    """Rows of a bundle at most, by what came of one. Those that an expression leaves out cost next to nothing."""
    few = _by_expression(engine.leaf) and 4 * len(made) < rows
    most = _FILTERED if few else engine.chunk_rows(_BUNDLE_BYTES)
    return int(max(1, min(most, rows * _MADE_BYTES / max(1, made.nbytes))))


def _by_expression(pipeline: Leaf) -> bool:
    return bool(pipeline.tail) and isinstance(pipeline.tail[0], FilterExpression)


class BundlesHere:
    """Bundles made by the caller itself."""

    def __init__(self, leaves: Sequence[Leaf], *, shared: bool = False, spent: Timings | None = None) -> None:
        self.engines = [Engine(leaf, shared=shared, spent=spent) for leaf in leaves]
        self._sizes = Sizes(leaves)
        self.skipped = 0
        self.first_passes: dict[tuple[int, int], FirstPass] = {}

    def begin(self) -> None:
        """Begin a pass."""
        self.first_passes = {}

    def close(self) -> None:
        """There is nothing to end."""

    def take(self, leaf: int, epoch: int, lane: Shard, row: int, total: int) -> tuple[int, Batch]:
        engine, started = self.engines[leaf], time.perf_counter()
        stop, made, skipped = make_good(engine, Bundle(leaf, epoch, lane, row, min(row + self._sizes.now(leaf), total)))
        self.skipped += skipped
        most = most_rows(engine, stop - row, made)
        self._sizes.took(leaf, most, stop - row, time.perf_counter() - started)
        return stop, made


class Rows:
    """A lane of a leaf. Cursor: [row, outputs delivered of what is made from that row on]."""

    def __init__(self, bundles: Bundles, leaf: int, epoch: int, lane: Shard, cursor: At) -> None:
        self._bundles, self._leaf, self._epoch, self._lane = bundles, leaf, epoch, lane
        self._row, self._skip = cursor
        spec = bundles.engines[leaf].leaf
        self._total = lane.before(spec.rows)
        self._by_row = spec.group is None  # each row for itself: a resume can begin at any
        self._alone = spec.only_filters  # each row becomes one, or none
        self._kept = 0 if spec.may_drop_rows else None  # rows that became something, so far
        self._first = bundles.first_passes.setdefault((leaf, lane.index), FirstPass(epoch))

    def pull(self) -> Chunk | None:
        if self._row >= self._total:
            return None
        first, skip, by_row, kept = self._row, self._skip, self._by_row, self._kept
        stop, made = self._bundles.take(self._leaf, self._epoch, self._lane, first, self._total)
        self._row, self._skip = stop, max(0, skip - len(made))
        left = self._skip  # of what was delivered before: made of rows of the next bundles
        count = max(0, len(made) - skip)
        in_first = self._first.kept if self._first.epoch != self._epoch else -1
        places, alone, total = made.places, self._alone, len(made)
        if kept is not None:
            self._kept = kept + _distinct(places, total, alone)
            if stop >= self._total and self._first.epoch == self._epoch:
                self._first.kept = self._kept

        def counted(cursor: At, outputs: int) -> At:
            return cursor if kept is None else RowAt(cursor, kept + _distinct(places, outputs, alone), in_first)

        def at(outputs: int) -> At:
            if outputs == count:
                return counted([stop, left], total)
            if not by_row or not outputs:
                return counted([first, skip + outputs], 0 if not outputs else skip + outputs)
            if alone:
                return counted([first + int(places[skip + outputs - 1]) + 1, 0], skip + outputs)
            return counted(_after(places, first, skip + outputs), skip + outputs)

        def before(outputs: int) -> At:
            if not by_row or outputs == count:
                return at(outputs)
            row = int(places[skip + outputs])
            begin = skip + outputs if alone else int(np.searchsorted(places, row))
            return counted([first + row, skip + outputs - begin], skip + outputs)

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
        return Chunk(made.slice(skip, len(made)) if skip else made, at, before, fast)


def _distinct(places: Int64Array, outputs: int, alone: bool) -> int:
    """Return how many rows the first outputs came from. ``alone``: each has one of its own."""
    return outputs if alone or not outputs else int(np.count_nonzero(np.diff(places[:outputs]))) + 1


def _after(places: Int64Array, first: int, outputs: int) -> At:
    """Return the cursor after so many outputs, by the row that the last of them came from."""
    row = int(places[outputs - 1])
    begin, end = np.searchsorted(places, (row, row + 1)).tolist()
    return [first + row + 1, 0] if outputs == end else [first + row, outputs - begin]


class LazyRows:
    """A lane of a pipeline without functions: its rows are only named, and read when it is known which are wanted."""

    def __init__(self, bundles: Bundles, leaf: int, epoch: int, lane: Shard, cursor: At) -> None:
        self._bundles, self._leaf, self._epoch, self._lane = bundles, leaf, epoch, lane
        self._row = cursor[0] + cursor[1]
        self._total = lane.before(bundles.engines[leaf].leaf.rows)
        self._size = _FIRST

    def pull(self) -> Chunk | None:
        if self._row >= self._total:
            return None
        first, stop = self._row, min(self._row + self._size, self._total)
        self._row, self._size = stop, min(2 * self._size, _REFS)
        engine = self._bundles.engines[self._leaf]
        positions = self._lane.locals(first, stop)
        engine.reached(self._epoch, int(positions[0]))
        chosen = engine.chosen(self._epoch, positions)
        leaves = np.full(len(chosen), self._leaf)
        refs = RowRefs(self._bundles.engines, leaves, chosen, engine.locate(chosen))

        def table(outputs: Int64Array, _: bool) -> Int64Array:
            return np.stack([first + outputs, np.zeros(len(outputs), np.int64)], axis=1)

        return Chunk(refs, lambda outputs: [first + outputs, 0], table=table)
