"""The engine: runs a pipeline at positions. It holds open files and caches, and is never saved."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import Timings
from midepoch.errors import CorruptBlockError
from midepoch.order import BlockUses, EpochOrder
from midepoch.pipeline.leaf import Leaf
from midepoch.read import MIN_RUN, Reader, ReadRows
from midepoch.read.columns import Located, is_plain
from midepoch.read.fetched import threads_here
from midepoch.sources.schemas import taken
from midepoch.transforms import (
    Batch,
    Decode,
    FilterExpression,
    RunContext,
    SelectColumns,
    finish,
    present,
    present_rows,
    run_steps,
)
from midepoch.transforms.batch import Encoded
from midepoch.transforms.encode import ItemMap
from midepoch.transforms.formats import Allocate, UnreadableError, readable
from midepoch.transforms.generators import Generators

Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger("midepoch")
_CHUNK_ROWS = 4096
_RUN_BYTES = 1 << 20
"""Bytes of consecutive rows in one piece: Python objects made of it in one call stay in the processor's cache."""


class Engine:
    """Runs a leaf: ``read`` and ``transform`` are the two halves of f(pipeline, position).

    One thread may run each at a time. ``shared``: other processes of this machine run the same pipeline. ``readers``:
    least number of decoding threads; without other processes there are more, by the cores of the machine.
    ``drawing``: in a worker thread, the functions that draw from torch's global generator.
    """

    def __init__(
        self,
        leaf: Leaf,
        *,
        shared: bool = False,
        readers: int = 0,
        timings: Timings | None = None,
        drawing: Iterable[Hashable] | None = None,
    ) -> None:
        self.leaf = leaf
        self.timings = Timings() if timings is None else timings
        self.skipped = 0
        """Rows skipped so far under ``on_error="skip"``."""
        self._sharers = max(leaf.shard.count, 2 if shared else 1)
        self._readers = max(readers, 0 if shared else threads_here(leaf.shard.count))
        self._reader: Reader | None = None
        self._inherited: Reader | None = None
        self._narrow: Engine | None = None
        self._process = os.getpid()
        self.generators = Generators(leaf.seed, leaf.global_seed or 0, leaf.path, drawing=drawing)
        self._epoch: tuple[int, EpochOrder] | None = None
        self._numbers = len(leaf.order.selection) if leaf.order.repeats else 0
        self._starts = leaf.source.layout.block_starts
        self._run_rows = self.chunk_rows(_RUN_BYTES)
        self._least_run = min(MIN_RUN, self._run_rows)  # of wide rows, few are worth a view: a copy costs more
        self._expects = leaf.source.fetched
        nullable = leaf.source.nullable
        self._nullable = {name: nullable[source_name] for name, source_name in leaf.head.items()}
        self._names = list(leaf.head)
        decoded = leaf.source.decoded if leaf.format != "arrow" or leaf.has_map else frozenset()
        self._decoded = [name for name, source_name in leaf.head.items() if source_name in decoded]
        first = takewhile(lambda step: isinstance(step, Decode), leaf.tail)
        self._not_by_datasets = {step.column for step in first if isinstance(step, Decode)}

    def chunk_rows(self, most_bytes: int) -> int:
        """Return the number of rows to read in one call: enough to spread its cost, within a number of bytes."""
        return int(max(1, min(_CHUNK_ROWS, most_bytes / max(1.0, self.leaf.source.bytes_per_row))))

    def order(self, epoch: int) -> EpochOrder:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.leaf.order.at(epoch, self.leaf.source.layout))
        return self._epoch[1]

    def chosen(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the row numbers, before shuffling, at positions of an epoch.

        If rows are drawn with replacement, they are ids of draws: row + position * rows. A row that is drawn twice is
        then read twice, and random functions draw other numbers for it.
        """
        rows = self.order(epoch).chosen(positions)
        return rows + positions * self._numbers if self._numbers else rows

    def draws(self, chosen: Int64Array) -> Int64Array | None:
        """Return numbers that distinguish draws of the same row, or None if a row comes only once an epoch."""
        return chosen // self._numbers if self._numbers else None

    def _source_rows(self, chosen: Int64Array) -> Int64Array:
        return self.leaf.order.selection.source_rows(self.row_numbers(chosen))

    def row_numbers(self, chosen: Int64Array) -> Int64Array:
        """Return the row numbers of what ``chosen`` returned."""
        return chosen % self._numbers if self._numbers else chosen

    def reached(self, epoch: int, position: int) -> None:
        """Note that rows from this position on are read next, so that the blocks that follow can be prefetched."""
        if self._expects:
            order = self.order(epoch)
            self._open_reader().expect(epoch, position, lambda: self._uses(order))

    def _uses(self, order: EpochOrder) -> tuple[BlockUses, BlockUses]:
        """Return the uses of blocks by this shard (by its own lanes, if it has any to itself), and by all shards."""
        uses, shard = order.uses(), self.leaf.shard
        if self.leaf.order.lanes % shard.count:
            return uses, uses
        own = (uses.lane % shard.count == shard.index) | (uses.lane < 0)
        return BlockUses(uses.blocks[own], uses.first[own], uses.last[own], uses.lane[own]), uses

    def passing(self, chosen: Int64Array) -> Int64Array | None:
        """Return the places of the rows that pass an expression that is the first function.

        Only the columns of the expression are read. Return None if rows may be missing, or are consecutive, so that
        nothing would be saved.
        """
        first = self.leaf.tail[0]
        together = int(chosen[-1]) - int(chosen[0]) == len(chosen) - 1
        if not isinstance(first, FilterExpression) or together or self.leaf.on_error == "skip" or self._decoded:
            return None
        if self._narrow is None:
            schema, head = self.leaf.source.schema, self.leaf.head
            needed = first.columns(pa.schema([schema.field(old).with_name(new) for new, old in head.items()]))
            before = self.leaf.steps[: len(self.leaf.steps) - len(self.leaf.tail)]
            narrow = replace(self.leaf, steps=(*before, SelectColumns(tuple(needed))))
            self._narrow = Engine(narrow, timings=self.timings)
        pieces: list[Batch] = []
        while (at := sum(map(len, pieces))) < len(chosen):
            pieces += [piece for piece, _ in self._narrow.read_pieces(chosen[at:])]
        return np.flatnonzero(first.mask(pieces))

    def read_pieces(self, chosen: Int64Array) -> list[tuple[Batch, int]]:
        """Read rows. Return pieces with their requested row counts: one piece, or views of blocks for consecutive rows.

        Pieces stop before a block that cannot be read, unless it is the first: the good rows before it are delivered
        first.
        """
        rows = self._source_rows(chosen)
        first, count = int(rows[0]), len(rows)
        if count < self._least_run or int(rows[-1]) - first != count - 1 or not (rows[1:] > rows[:-1]).all():
            return [(self.read(chosen), count)]
        low, high = self._starts.searchsorted((first, first + count), side="right").tolist()
        ends = [start - first for start in self._starts[low:high].tolist()]
        if not ends or ends[-1] != count:
            ends.append(count)
        if len(ends) * self._least_run > count:
            return [(self.read(chosen), count)]
        pieces: list[tuple[Batch, int]] = []
        at, reader = 0, self._open_reader()
        for end in ends:
            while at < end:
                size = min(end - at, self._run_rows)
                try:
                    rows_read = reader.read_run(first + at, size)
                except CorruptBlockError:
                    if pieces:
                        return pieces
                    raise
                pieces.append((self._batch(rows_read, chosen[at : at + size]), size))
                at += size
        return pieces

    def _open_reader(self) -> Reader:
        if self._reader is not None and self._process != os.getpid():
            # A fork has the reader's locks but not its threads. It is not freed either: that would wait for them.
            self._inherited, self._reader = self._reader, None
        if self._reader is None:
            self._process = os.getpid()
            wanted = list(self.leaf.head.values())
            skip = self.leaf.on_error == "skip"
            self._reader = Reader(
                self.leaf.source,
                wanted,
                skip_corrupt=skip,
                sharers=self._sharers,
                threads=self._readers,
                timings=self.timings,
            )
        return self._reader

    @property
    def plain(self) -> bool:
        """True if every column is text or of fixed-size values: then slices of batches equal batches of those rows."""
        schema = self.leaf.source.schema
        types = {name: schema.field(source_name).type for name, source_name in self.leaf.head.items()}
        lists_with_nulls = (pa.types.is_fixed_size_list(kind) and self._nullable[name] for name, kind in types.items())
        return not self._decoded and all(map(is_plain, types.values())) and not any(lists_with_nulls)

    def locate(self, chosen: Int64Array) -> dict[str, Located] | None:
        """Return the locations of rows in memory, or None unless all columns are plain numbers without nulls."""
        if self._decoded or any(self._nullable.values()):
            return None
        located = self._open_reader().locate(self._source_rows(chosen))
        return located and {name: located[source_name] for name, source_name in self.leaf.head.items()}

    def check(self, *, last: bool = False) -> None:
        """Raise DataChangedError if a mapped file was changed after rows were located.

        Most calls check nothing, except the ``last`` one of an epoch.
        """
        if self._reader is not None:
            self._reader.check(last=last)

    def read(self, chosen: Int64Array) -> Batch:
        """Read rows, before any step."""
        return self._batch(self._open_reader().read(self._source_rows(chosen)), chosen)

    def _batch(self, rows: ReadRows, chosen: Int64Array) -> Batch:
        leaf = self.leaf
        places = np.arange(len(chosen)) if rows.kept is None else np.flatnonzero(rows.kept)
        if leaf.on_error == "skip":
            rows, places = self._only_readable(rows, places)
        self.skipped += len(chosen) - len(places)
        columns: dict[str, Any] = dict(zip(self._names, rows.batch.columns, strict=True))
        columns.update(self._encoded(rows))
        kept = chosen if rows.kept is None else chosen[places]
        return Batch(columns, self.row_numbers(kept), places, rows.owned, self._nullable, self.draws(kept))

    def _encoded(self, found: ReadRows) -> dict[str, Encoded]:
        """Return the columns that ``datasets`` has to decode."""
        schema, head = self.leaf.source.schema, self.leaf.head
        return {n: Encoded(head[n], found.batch.column(self._names.index(n)), schema) for n in self._decoded}

    def _only_readable(self, rows: ReadRows, places: Int64Array) -> tuple[ReadRows, Int64Array]:
        """Drop rows whose text is not UTF-8 or that do not decode: a readable block may contain such bytes.

        Called only under on_error="skip", and row by row, because it decodes everything a second time.
        """
        encoded = [column for name, column in self._encoded(rows).items() if name not in self._not_by_datasets]
        text = [c for c in rows.batch.columns if pa.types.is_string(c.type) or pa.types.is_large_string(c.type)]
        if not encoded and all(map(readable, text)):
            return rows, places
        good = [
            i
            for i in range(rows.batch.num_rows)
            if all(readable(column.slice(i, 1)) for column in text) and all(column.decodes(i) for column in encoded)
        ]
        if len(good) == rows.batch.num_rows:
            return rows, places
        _log.warning("skipped %d rows that cannot be read or decoded", rows.batch.num_rows - len(good))
        kept = np.zeros(0, dtype=bool)  # not None: some rows are missing
        columns = [taken(column, np.array(good, dtype=np.int64)) for column in rows.batch.columns]
        return ReadRows(pa.RecordBatch.from_arrays(columns, schema=rows.batch.schema), True, kept), places[good]

    def transform(
        self, epoch: int, batch: Batch, *, after: int = 0, steps: int | None = None, collect: Allocate | None = None
    ) -> Batch:
        """Run the steps from the first function on, or only ``steps`` of them after the first ``after``.

        ``collect``: where the last function puts arrays of its rows.
        """
        if not self.leaf.tail:
            return batch
        began = perf_counter()
        leaf = self.leaf
        run = RunContext(
            leaf.seed,
            epoch,
            self._place,
            leaf.path,
            self.generators,
            skipped=self._skip,
            source_rows=leaf.order.selection.source_rows,
        )
        chosen = self.leaf.tail[after:] if steps is None else self.leaf.tail[after : after + steps]
        result = run_steps(chosen, batch, run, collect)
        self.timings.functions += perf_counter() - began
        return result

    def _skip(self, rows: int) -> None:
        self.skipped += rows

    def _place(self, row: int) -> str:
        source_row = self.leaf.order.selection.source_rows(np.array([row]))[0]
        if self.leaf.steps and isinstance(first := self.leaf.steps[0], ItemMap):
            return f"{first.name}[{source_row}]"
        return self.leaf.source.place(int(source_row))

    def rows(self, batch: Batch) -> list[Any]:
        """Return one object for each row, in the pipeline's format (default: Python dicts)."""
        try:
            return present_rows(batch, self.leaf.format or "python")
        except UnreadableError as problem:
            raise self.named(problem) from problem.__cause__

    def columns(self, batch: Batch) -> Any:
        """Return the batch as columns, in the pipeline's format."""
        kind = self.leaf.format or "python"
        return finish(self.presented(batch, kind), kind)

    def presented(self, batch: Batch, kind: str, allocate: Allocate | None = None) -> Any:
        """Call ``present``. Errors name the file of the row."""
        try:
            return present(batch, kind, allocate)
        except UnreadableError as problem:
            raise self.named(problem) from problem.__cause__

    def named(self, problem: UnreadableError) -> CorruptBlockError:
        """Return the error with the file of the row."""
        return problem if problem.row is None else CorruptBlockError(f"{self._place(problem.row)}: {problem}")
