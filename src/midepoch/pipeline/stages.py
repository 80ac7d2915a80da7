"""Stages: flows over a flow, which turn groups of outputs into others, pack them, or batch them by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.order import Shard
from midepoch.order.bijection import Bijection, derive
from midepoch.order.budget import TooLongError
from midepoch.order.intervals import Intervals
from midepoch.pipeline.chunk import Bunches, Chunk, Flow, Items, MixedRows, Puller, are_of, joined, materialize
from midepoch.pipeline.cursor import FlowAt, StageAt
from midepoch.pipeline.node import HIDDEN, Buckets, Local, Rebatch, Slice, StageSpec, Window
from midepoch.pipeline.planned import changed_lengths, too_long
from midepoch.transforms import Batch, RunContext, Step, run_steps
from midepoch.transforms.arrow_values import flat_numbers
from midepoch.transforms.batch import check_columns, with_ordinals
from midepoch.transforms.map import as_one_row
from midepoch.transforms.packing import Documents, PackSpec, best_fit, concatenated
from midepoch.transforms.provenance import DocumentTable, Int16Array, concatenated_pieces

Int64Array = npt.NDArray[np.int64]


def token_table(
    origins: tuple[tuple[Chunk, int, int], ...], ends: Int64Array, length: int, base: int, first_number: int
) -> Callable[[Int64Array, bool], Int64Array | None] | None:
    """Return the table of cursors of packed sequences, where the documents have one.

    ``first_number``: the number of the first sequence, or -1 without a schedule.
    """
    if any(chunk.table is None for chunk, _, _ in origins):
        return None

    def table(outputs: Int64Array, _: bool) -> Int64Array | None:
        tokens = outputs * length
        document = np.searchsorted(ends, tokens, side="right")
        into = tokens - np.where(document > 0, ends[np.maximum(document, 1) - 1], -base)
        over = tokens >= ends[-1]
        document[over], into[over] = len(ends), 0
        parts, left = [], document
        for number, (chunk, first, count) in enumerate(origins):
            last = number == len(origins) - 1
            mine = (left >= 0) & (left <= count if last else left < count)
            assert chunk.table is not None
            for before in (False, True):
                some = np.flatnonzero(mine & ((into > 0) == before))
                if len(some):
                    if (values := chunk.table(first + left[some], before)) is None:
                        return None
                    parts.append((some, values))
            left = np.where(mine, -1, left - count)
        width = parts[0][1].shape[1]
        if any(values.shape[1] != width for _, values in parts):  # a source that a resume has not drawn from has less
            return None
        found = np.zeros((len(outputs), width + 1 + (first_number >= 0)), np.int64)
        for some, values in parts:
            found[some, :width] = values
        found[:, width] = into
        if first_number >= 0:
            found[:, -1] = first_number + outputs
        return found

    return table


def at_document(
    origins: tuple[tuple[Chunk, int, int], ...], document: int, inner: FlowAt, *, before: bool = False
) -> FlowAt:
    """Return the cursor at a pending document, or right before it if it is to be resumed in the middle."""
    for number, (chunk, first, count) in enumerate(origins):
        if document < count or (document == count and number == len(origins) - 1):
            return chunk.before(first + document) if before else chunk.at(first + document)
        document -= count
    return inner


def bunches(items: Items, spec: Buckets, run: RunContext) -> Bunches:
    """Return the batches of a window of outputs."""
    if isinstance(items, MixedRows):
        lengths = np.zeros(len(items), np.int64)
        for number in np.unique(items.which).tolist():
            own = np.flatnonzero(items.which == number)
            lengths[own] = _lengths(items.batches[number].keep(items.places[own]), spec)
        rows: Batch | MixedRows = items
    else:
        rows = materialize(items)
        lengths = _lengths(rows, spec)
    if spec.column == HIDDEN:
        rows = rows.changed(_without) if isinstance(rows, MixedRows) else _without(rows)
    key = None
    if spec.shuffled:
        key = derive(run.seed, run.epoch, "batches", _number_of(materialize(rows.slice(0, 1))))
    try:
        made = spec.budget.split(lengths, key)
    except TooLongError as problem:
        what = f"row {int(rows.rows[problem.place])} of the dataset" if isinstance(rows, Batch) else "a row"
        raise too_long(problem.length, spec.budget, what) from None
    return Bunches(rows, made)


def _number_of(window: Batch) -> int:
    """Return a number of the first output of a window: there are no positions by which to know it."""
    ordinal = 0 if window.ordinals is None else int(window.ordinals[0])
    return (int(window.rows[0]) + ordinal * 0x9E3779B97F4A7C15) & (2**64 - 1)


def _without(batch: Batch) -> Batch:
    return batch.with_columns({name: values for name, values in batch.columns.items() if name != HIDDEN})


def _lengths(batch: Batch, spec: Buckets) -> Int64Array:
    check_columns([spec.column], list(batch.columns), "max_tokens", "length=… names the column of tokens.")
    column: Any = batch.columns[spec.column]
    if spec.given:
        if isinstance(column, pa.Array) and column.null_count:
            import pyarrow.compute as pc

            column = pc.fill_null(column, 0)
        numbers = np.asarray(flat_numbers(column) if isinstance(column, pa.Array) else column)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or (len(numbers) and numbers.min() < 0):
            raise ColumnError(f"loader(length=…): the function must return a number of tokens, got {column!r:.60}")
        return numbers.astype(np.int64)
    return lengths_in(spec.column, column)


def lengths_in(name: str, column: Any) -> Int64Array:
    """Return the length of each value of a column. Null has none."""
    if isinstance(column, pa.Array):
        import pyarrow.compute as pc

        kind = column.type
        if pa.types.is_fixed_size_list(kind):
            return np.where(flat_numbers(column.is_valid()), kind.list_size, 0).astype(np.int64)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return np.asarray(flat_numbers(pc.fill_null(pc.list_value_length(column), 0)), np.int64)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
            return np.asarray(flat_numbers(pc.fill_null(pc.binary_length(column), 0)), np.int64)
    elif isinstance(column, np.ndarray) and column.ndim > 1:
        return np.full(len(column), column.shape[1], np.int64)
    elif all(value is None or hasattr(value, "__len__") for value in column):
        return np.array([0 if value is None else len(value) for value in column], np.int64)
    raise ColumnError(f"max_tokens: column {name!r} has no lengths. Pass length= with the name of a column of lists.")


class Packing:
    """Counts of packed tokens and of the token slots of sequences, and of skipped outputs.

    ``skipped``: by functions after a stage, under ``on_error="skip"``. ``traced``: sequences name their documents.
    ``opened``: the passes over sources that were opened, as (number of the source, epoch, lane), if they are noted.
    """

    def __init__(self, *, traced: bool = False, noted: bool = False) -> None:
        self.tokens = self.places = self.skipped = 0
        self.traced = traced
        self.opened: list[tuple[int, int, Shard]] | None = [] if noted else None

    def note(self, tokens: int, places: int) -> None:
        self.tokens, self.places = self.tokens + tokens, self.places + places

    def skip(self, outputs: int) -> None:
        self.skipped += outputs


def stage(
    spec: StageSpec,
    source: Callable[[FlowAt], Flow],
    cursor: FlowAt,
    run: RunContext,
    packing: Packing,
    lane: Shard,
    gone: Sequence[Intervals] = (),
) -> Flow:
    """Return the flow of a stage over the flow before it, which is opened at the inner cursor.

    ``gone``: rows that a window still has, because they were excluded when it was in progress.
    """
    if isinstance(spec, Local) and spec.keeps_rows:
        return Same(source(cursor), spec.steps, run)
    assert isinstance(cursor, StageAt)
    inner, count = cursor.before, cursor.delivered
    flow = source(inner)
    if isinstance(spec, Slice):
        return Sliced(flow, inner, spec, count)
    if isinstance(spec, Buckets):
        return Bucketed(flow, cursor, spec, run, gone)
    if isinstance(spec, PackSpec) and spec.strategy == "concat":
        return Packed(flow, spec, cursor, packing, lane)
    if isinstance(spec, PackSpec):
        return Grouped(flow, inner, spec.window, lambda batch: _packed(batch, spec, packing), count)
    if isinstance(spec, Rebatch):
        partial = not spec.drop_last
        return Grouped(flow, inner, spec.size, lambda batch: as_one_row(batch), count, partial=partial)
    if isinstance(spec, Window):
        return Grouped(flow, inner, spec.size, lambda batch: _shuffled(batch, spec.seed, run.epoch), count)
    run = replace(run, skipped=packing.skip)
    if not spec.grouped:
        return Each(flow, inner, spec.steps, run, count)
    return Grouped(flow, inner, spec.size, lambda batch: run_steps(spec.steps, batch, run), count)


class Same:
    """Steps that make one output of each. It has no cursor of its own."""

    def __init__(self, source: Flow, steps: tuple[Step, ...], run: RunContext) -> None:
        self._source, self._steps, self._run = source, steps, run

    def pull(self) -> Chunk | None:
        chunk = self._source.pull()
        if chunk is None or not len(chunk.items):
            return chunk
        items = chunk.items
        if isinstance(items, MixedRows):
            made: Items = items.changed(lambda batch: run_steps(self._steps, batch, self._run))
        else:
            made = run_steps(self._steps, materialize(items), self._run)
        return Chunk(made, chunk.at, chunk.before)


class Each:
    """Steps that take one output at a time, and deliver its results."""

    _MOST = 64

    def __init__(self, source: Flow, inner: FlowAt, steps: tuple[Step, ...], run: RunContext, skip: int) -> None:
        self._intake, self._steps, self._run, self._skip = Puller(source, inner), steps, run, skip

    def pull(self) -> Chunk | None:
        taken = self._intake.take(self._MOST)
        if not taken.count:
            return None
        made, places = self._made(taken.items())
        first = self._skip
        skip, self._skip = min(first, int(np.searchsorted(places, 1))), 0  # of the first input only
        count = len(made) - skip

        def at(outputs: int) -> FlowAt:
            if outputs == count:
                return StageAt(taken.at(taken.count))
            if not outputs:
                return StageAt(taken.at(0), skip)
            done = skip + outputs
            begin, end = np.searchsorted(places, (places[done - 1], places[done - 1] + 1)).tolist()
            if done == end:
                return StageAt(taken.at(int(places[done - 1]) + 1))
            return StageAt(taken.before(int(places[done - 1])), done - begin)

        def before(outputs: int) -> FlowAt:
            if outputs == count:
                return at(outputs)
            place = int(places[skip + outputs])
            return StageAt(taken.before(place), skip + outputs - int(np.searchsorted(places, place)))

        return Chunk(made.slice(skip, len(made)) if skip else made, at, before)

    def _made(self, items: Items) -> tuple[Items, Int64Array]:
        """Return the results of the steps, and the index of the input of each. Sources are processed one by one."""
        if not isinstance(items, MixedRows):
            given = materialize(items)
            made = run_steps(self._steps, replace(given, places=np.arange(len(given))), self._run)
            return made, made.places
        parts = []
        for number in np.unique(items.which).tolist():
            own = np.flatnonzero(items.which == number)
            given = replace(items.batches[number].keep(items.places[own]), places=own)
            parts.append(run_steps(self._steps, given, self._run))
        places = np.concatenate([part.places for part in parts])
        order = np.argsort(places, kind="stable")
        return joined(parts).keep(order), places[order]


class Grouped:
    """Groups of ``size`` outputs, each turned into others. A last one that is smaller needs ``partial``."""

    def __init__(
        self,
        source: Flow,
        inner: FlowAt,
        size: int,
        apply: Callable[[Batch], Batch],
        skip: int,
        *,
        partial: bool = True,
    ) -> None:
        self._intake, self._size, self._apply = Puller(source, inner, groups=True), size, apply
        self._skip, self._partial = skip, partial

    def pull(self) -> Chunk | None:
        taken = self._intake.take(self._size)
        if not taken.count or (taken.count < self._size and not self._partial):
            return None
        made = self._apply(materialize(taken.items()))
        skip, self._skip = min(self._skip, len(made)), 0
        count = len(made) - skip

        def at(outputs: int) -> FlowAt:
            return StageAt(taken.at(taken.count)) if outputs == count else StageAt(taken.at(0), skip + outputs)

        return Chunk(made.slice(skip, len(made)) if skip else made, at)


class Bucketed:
    """Windows of outputs, each turned into batches by a budget of tokens.

    ``gone``: rows that take part in forming the batches, and are not delivered.
    """

    def __init__(
        self, source: Flow, cursor: StageAt, spec: Buckets, run: RunContext, gone: Sequence[Intervals] = ()
    ) -> None:
        self._intake, self._spec, self._run = Puller(source, cursor.before, groups=True), spec, run
        self._skip, self._checksum = cursor.delivered, cursor.key
        self._gone = gone

    def pull(self) -> Chunk | None:
        taken = self._intake.take(self._spec.budget.window)
        if not taken.count:
            return None
        made = bunches(taken.items(), self._spec, self._run)
        checksum, (skip, self._skip) = made.batches.checksum, (self._skip, 0)
        if skip and self._checksum != checksum:
            raise changed_lengths(self._spec.budget)
        count = len(made) - skip
        if self._gone:
            made = replace(made, batches=made.batches.without(are_of(materialize(made.rows), self._gone)))

        def at(outputs: int) -> FlowAt:
            if outputs == count:
                return StageAt(taken.at(taken.count), 0, 0)
            return StageAt(taken.at(0), skip + outputs, checksum if skip + outputs else 0)

        return Chunk(made.slice(skip, len(made)), at)


class Sliced:
    """Outputs ``start`` to ``stop``. The cursor has the number of the next one."""

    _MOST = 64

    def __init__(self, source: Flow, inner: FlowAt, spec: Slice, number: int) -> None:
        self._intake, self._spec, self._number = Puller(source, inner), spec, number

    def pull(self) -> Chunk | None:
        while self._number < self._spec.start:
            skipped = self._intake.take(min(self._spec.start - self._number, self._MOST)).count
            if not skipped:
                return None
            self._number += skipped
        left = self._MOST if self._spec.stop is None else self._spec.stop - self._number
        taken = self._intake.take(min(self._MOST, max(0, left)))
        if not taken.count:
            return None
        first, self._number = self._number, self._number + taken.count
        return Chunk(
            taken.items(),
            lambda outputs: StageAt(taken.at(outputs), first + outputs),
            lambda outputs: StageAt(taken.before(outputs), first + outputs),
        )


def _shuffled(batch: Batch, seed: int, epoch: int) -> Batch:
    """Shuffle a window of outputs. Its order depends on its first output, because there are no positions."""
    key = derive(seed, epoch, "outputs", _number_of(batch))
    return batch.keep(Bijection(len(batch), key)(np.arange(len(batch))))


def _packed(batch: Batch, spec: PackSpec, packing: Packing) -> Batch:
    columns, first, tokens, pieces = best_fit(Documents.of(batch.columns, spec, batch.rows), spec)
    packing.note(tokens, len(first) * spec.length)
    ordinals = np.arange(len(first), dtype=np.int64)
    table = DocumentTable.of(len(first), pieces, batch.rows, batch.leaves) if packing.traced else None
    return Batch(columns, batch.rows[first], batch.places[first], True, {}, ordinals, documents=table)


class Packed:
    """Documents one after the other, split into sequences.

    The cursor is that before the document in which the next sequence begins. The rest of a chunk is kept in memory
    while running, and read again on resume.
    """

    _FIRST, _TOKENS = 32, 1 << 22
    """Documents that are packed together: at first, and about how many tokens they have later. Fewer cost more calls,
    more cost memory: 16 MiB of int32 for each column.
    """

    def __init__(self, source: Flow, spec: PackSpec, cursor: StageAt, packing: Packing, lane: Shard) -> None:
        self._source, self._spec, self._packing = source, spec, packing
        self._number = cursor.key or 0
        self._phases = ((), ()) if spec.schedule is None else spec.schedule.lengths(lane)
        # The cursor of the first pending document, and its delivered tokens.
        self._inner, self._offset = cursor.before, cursor.delivered
        self._skip = cursor.delivered
        self._pending: list[Documents] = []
        self._total = 0  # tokens of the pending documents
        self._rows: Int64Array = np.zeros(0, np.int64)
        self._ordinals: Int64Array = np.zeros(0, np.int64)
        self._leaves: Int16Array = np.zeros(0, np.int16)
        self._origins: list[tuple[Chunk, int, int]] = []  # of the pending documents: chunk, first number, count
        self._intake: tuple[Chunk, int] | None = None  # a chunk, and the number of its outputs that were taken
        self._count = self._FIRST
        self._ended = False

    def pull(self) -> Chunk | None:
        length, most = self._next_length()
        while most != 0 and not self._ended and self._total < length:
            self._refill()
        packs = self._total // length
        if self._ended and not self._spec.drop_remainder:
            packs = -(-self._total // length)
        packs = packs if most is None else min(packs, most)
        if not packs:
            self._pending, self._total = [], 0
            return None
        self._packing.note(min(self._total, packs * length), packs * length)
        return self._chunk(packs, length)

    def _next_length(self) -> tuple[int, int | None]:
        """Return the length of the next sequences, and their number if a schedule limits it."""
        if self._spec.schedule is None:
            return self._spec.length, None
        ends, lengths = self._phases
        for end, length in zip(ends, lengths, strict=True):
            if self._number < end:
                return length, end - self._number
        return self._spec.length, 0

    def _refill(self) -> None:
        chunk, first = (self._source.pull(), 0) if self._intake is None else self._intake
        if chunk is None:
            self._ended = True
            return
        left = len(chunk.items) - first
        stop = first + -(-left // max(1, -(-left // self._count)))  # parts of equal sizes
        self._intake = (chunk, stop) if stop < len(chunk.items) else None
        if first == stop:
            return
        batch = materialize(chunk.items.slice(first, stop))
        documents = Documents.of(batch.columns, self._spec, batch.rows)
        if self._skip:
            documents, self._skip = documents.cut_first(self._skip), 0
        for pending in self._pending:
            pending.check_type(documents)
        ordinals = np.zeros(len(batch), np.int64) if batch.ordinals is None else batch.ordinals
        self._pending.append(documents)
        self._total += documents.tokens
        self._rows, self._ordinals = np.append(self._rows, batch.rows), np.append(self._ordinals, ordinals)
        if self._packing.traced:
            self._leaves = np.append(self._leaves, np.broadcast_to(np.asarray(batch.leaves, np.int16), len(batch)))
        self._origins.append((chunk, first, len(batch)))
        self._count = max(1, self._TOKENS * len(batch) // max(1, documents.tokens))

    def _chunk(self, packs: int, length: int) -> Chunk:
        base, inner, total = self._offset, self._inner, self._total
        first = self._number if self._spec.schedule is not None else -1
        origins = tuple(self._origins)
        ends = np.cumsum(np.concatenate([part.lengths for part in self._pending]))
        firsts = np.arange(packs + 1) * length
        documents = np.searchsorted(ends, firsts, side="right")
        into = firsts - np.where(documents > 0, ends[documents - 1], -base)

        def at(outputs: int) -> StageAt:
            number = None if first < 0 else first + outputs
            if not outputs:
                return StageAt(inner if base else at_document(origins, 0, inner), base, number)
            if outputs * length >= total:
                return StageAt(at_document(origins, len(ends), inner), 0, number)
            document, offset = int(documents[outputs]), int(into[outputs])
            return StageAt(at_document(origins, document, inner, before=offset > 0), offset, number)

        starts = documents[:packs]
        ordinals = with_ordinals(self._ordinals[starts], into[:packs])
        columns = concatenated(self._pending, self._spec, packs, length)
        table = None
        if self._packing.traced:
            pieces = partial(concatenated_pieces, ends, firsts, base)
            table = DocumentTable.of(packs, pieces, self._rows, self._leaves)
        made = Batch(columns, self._rows[starts], np.arange(packs, dtype=np.int64), True, {}, ordinals, documents=table)
        self._keep_rest(min(total, packs * length), at(packs))
        self._number += packs
        return Chunk(made, at, table=token_table(origins, ends, length, base, first))

    def _keep_rest(self, tokens: int, cursor: StageAt) -> None:
        """Drop delivered tokens. Documents after the last token are gone, too."""
        self._inner, self._offset = cursor.before, cursor.delivered
        self._total -= tokens
        gone, pending = 0, []
        for part in self._pending:
            dropped = len(part.lengths)
            if tokens < part.tokens:
                rest, dropped = part.without(tokens)
                pending.append(rest)
            gone, tokens = gone + dropped, max(0, tokens - part.tokens)
        self._pending = pending
        self._rows, self._ordinals, self._leaves = self._rows[gone:], self._ordinals[gone:], self._leaves[gone:]
        origins = []
        for chunk, first, count in self._origins:
            if gone < count:
                origins.append((chunk, first + gone, count - gone))
            gone = max(0, gone - count)
        self._origins = origins
