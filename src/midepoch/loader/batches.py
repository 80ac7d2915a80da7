"""Making the batches of a plan: rows are read in chunks, transformed and presented."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, takewhile
from operator import sub
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import Timings
from midepoch.loader.collation import added, arranged, collated, completed, marked, named
from midepoch.loader.options import PADDING, Options
from midepoch.loader.plans import MadeBatch
from midepoch.loader.provenance import DocumentIds
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.plans import StepPlan
from midepoch.read.columns import Located, number_dtype
from midepoch.transforms import Batch
from midepoch.transforms.formats import Allocate
from midepoch.transforms.provenance import DOCUMENTS, DocumentTable

Int64Array = npt.NDArray[np.int64]
_CHUNK_BYTES = 1 << 20
_AHEAD_ROWS = 8192


class Read(NamedTuple):
    """One batch that is read but not transformed: its rows or, if no step follows, its final columns or their location.

    ``genuine``: number of the requested rows that are not padding, or None if all are genuine.
    """

    step: int
    asked: int
    batch: Batch | None = None
    columns: Any = None
    located: tuple[dict[str, Located], int, int] | None = None
    genuine: int | None = None
    first: int = 0
    """The index of its first row among those read together. ``genuine`` counts from the same beginning."""
    traced: DocumentTable | None = None
    """The provenance of rows that are only located or already presented."""

    def touch(self) -> None:
        """Touch rows that are only located, so that they are read from disk."""
        if self.located is not None:
            columns, start, stop = self.located
            for column in columns.values():
                column.touch(start, stop)


def only_numbers(leaf: Leaf) -> bool:
    """Return True if all columns that are read contain numbers, or lists of numbers."""
    schema = leaf.source.schema
    for name in leaf.head.values():
        kind = schema.field(name).type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if number_dtype(kind) is None and not pa.types.is_boolean(kind):
            return False
    return not leaf.source.decoded.intersection(leaf.head.values())


class BatchMaker:
    """Reads the steps of a plan in growing chunks, and makes batches of them."""

    def __init__(
        self,
        leaf: Leaf,
        options: Options,
        timings: Timings | None = None,
        *,
        drawing: Iterable[Hashable] | None = None,
    ) -> None:
        self.timings = Timings() if timings is None else timings
        plain = options.collate_fn is None or options.collate_columns
        self.format = leaf.format or ("torch" if plain else "python")
        stacked = options.collate_fn is None and options.layout is None and self.format in ("numpy", "torch", "jax")
        as_read = not leaf.tail and stacked
        self.decodes_only = as_read and leaf.source.fetched and only_numbers(leaf)
        """True if blocks are decoded and nothing else is done: threads do that without the interpreter lock."""
        shared = options.num_workers > 1 and not self.decodes_only
        self._engine = Engine(
            leaf,
            shared=shared,
            readers=options.num_workers if self.decodes_only else 0,
            timings=self.timings,
            drawing=drawing,
        )
        self._options = options
        self._stacks = stacked
        self._later = False  # documents are made when they are looked at
        self._last: int | None = None  # the last step that is made here, once it is read
        # Without a map, a chunk is presented in one call and sliced, which saves most of the work for each batch.
        self._whole = as_read and self._engine.plain

    @property
    def direct(self) -> bool:
        """True if rows are only copied from mapped files, judging by three of them."""
        rows = len(self._engine.leaf.order.selection)
        sample = np.unique(np.array([0, rows // 2, rows - 1]))
        return self._whole and rows > 0 and self._engine.locate(sample) is not None

    @property
    def engine(self) -> Engine:
        return self._engine

    def read(self, plan: StepPlan, first: int, stride: int, *, delivered: bool = False) -> Iterator[list[Read]]:
        """Yield chunks of batches, of steps first, first + stride, … ``delivered``: by this thread, not sent to one."""
        shard = self._engine.leaf.shard
        rows = plan.batch_rows(shard)
        most = max(1, self._engine.chunk_rows(_CHUNK_BYTES) // rows)  # steps per read
        ahead = max(most, _AHEAD_ROWS // rows)  # steps whose order is computed in one call
        self._last = None
        size, block, step = 1, 1, first  # grows from one, so that the first batch comes soon
        locates = self._whole
        self._later = delivered and self.format == "torch"
        while plan.has(step):
            steps = list(takewhile(plan.has, range(step, step + block * stride, stride)))
            if plan.count_known() and not plan.has(steps[-1] + stride):
                self._last = steps[-1]
            positions, ends, genuine, rows_there = plan.ask(steps, shard)
            chosen = self._engine.chosen(plan.epoch, positions) if rows_there is None else rows_there
            if locates and (located := self._engine.locate(chosen)) is not None:  # takes no memory: one chunk
                table = self._table(chosen)
                yield [
                    Read(
                        each,
                        b - a,
                        located=(located, a, b),
                        genuine=None if genuine is None else genuine - a,
                        traced=None if table is None else table.slice(a, b),
                    )
                    for each, (a, b) in zip(steps, pairwise(ends), strict=True)
                ]
            else:
                locates = False
                for i in range(0, len(steps), size):
                    j = min(i + size, len(steps))
                    own = [end - ends[i] for end in ends[i : j + 1]]
                    self._engine.reached(plan.epoch, plan.first_position(steps[i]))
                    left = None if genuine is None else genuine - ends[i]
                    yield self._read(steps[i:j], own, chosen[ends[i] : ends[j]], left)
            step = steps[-1] + stride
            size, block = min(2 * size, most), min(4 * block, ahead)

    def _table(self, chosen: Int64Array) -> DocumentTable | None:
        """Return the provenance of rows, if batches have it."""
        return DocumentTable.of_rows(self._engine.row_numbers(chosen), 0) if self._options.provenance else None

    def _added(self, traced: DocumentTable | None) -> Mapping[str, Any] | None:
        """Return the documents of a batch, if they are traced."""
        return added(traced, self._options, later=self._later)

    def _read(self, steps: list[int], ends: list[int], chosen: Int64Array, genuine: int | None) -> list[Read]:
        """Read several batches in one call. ``ends``: their bounds among the requested rows."""
        began = perf_counter()
        chunk = self._engine.read(chosen)
        whole = len(chunk) == len(chosen)
        cuts = ends if whole else np.searchsorted(chunk.places, ends).tolist()
        shown = self._engine.presented(_marked(chunk, genuine), self.format) if self._whole else None
        self.timings.read += perf_counter() - began
        reads = []
        for step, first, asked, a, b in zip(steps, ends, map(sub, ends[1:], ends), cuts, cuts[1:], strict=False):
            if shown is not None and b > a:
                columns = {name: column[a:b] for name, column in shown.items()}
                of_step = chunk.traced.slice(a, b) if self._options.provenance else None
                reads.append(Read(step, asked, None, columns, None, genuine, first, of_step))
            else:
                reads.append(Read(step, asked, chunk.slice(a, b), genuine=genuine, first=first))
        return reads

    def _other_padding(self, plan: StepPlan, read: Read) -> Batch:
        """Return padding from later in the epoch, if all rows it should be made of are skipped."""
        batch = Batch({}, np.zeros(0, np.int64), np.zeros(0, np.int64), True)
        for start in range(0, plan.rows, max(1, read.asked)):
            positions = np.arange(start, min(start + max(1, read.asked), plan.rows))
            batch = self._engine.read(self._engine.chosen(plan.epoch, positions))
            batch = self._engine.transform(plan.epoch, batch)
            if len(batch):
                break
        return replace(batch, places=batch.places + max(0, read.genuine or 0))  # all of them after the genuine ones

    def make(self, plan: StepPlan, read: Read, allocate: Allocate | None = None) -> MadeBatch:
        """Transform and present one batch. The main process only has to ``finish`` it.

        ``allocate``: where to assemble the columns that functions return.
        """
        self._engine.check()  # rows may be views of mapped files; 0.5 µs
        made = self._made(plan, read, allocate)
        if read.step == self._last:  # there is no later check that could notice a change
            self._engine.check(last=True)
        return made

    def _made(self, plan: StepPlan, read: Read, allocate: Allocate | None) -> MadeBatch:
        if read.located is not None:
            located, start, stop = read.located
            columns: Any = {name: column.array(start, stop) for name, column in located.items()}
            if read.genuine is not None:
                columns[PADDING] = np.arange(stop - start) >= read.genuine
            if self._later and read.traced is not None and self._options.context is None:
                columns[DOCUMENTS] = DocumentIds(read.traced)  # the names of columns were compared with it before
            elif read.traced is not None or self._options.context is not None:
                columns = completed(columns, self.format, self._options, self._added(read.traced))
            return MadeBatch(columns, read.step, read.asked, 0, not read.asked)
        if read.batch is None:
            length = next((len(column) for column in read.columns.values()), read.asked)
            missing = read.asked - length
            if missing and read.genuine is not None:
                genuine = min(max(0, read.genuine - read.first), read.asked)
                missing = genuine - int((~np.asarray(read.columns[PADDING])).sum())
            value = completed(read.columns, self.format, self._options, self._added(read.traced))
            return MadeBatch(value, read.step, length, missing)
        collect = (allocate or _nowhere) if self._stacks else None
        batch = self._engine.transform(plan.epoch, read.batch, collect=collect)
        return self.present(plan, read, batch, allocate)

    def present(self, plan: StepPlan, read: Read, batch: Batch, allocate: Allocate | None = None) -> MadeBatch:
        """Present a batch after all steps."""
        skipped = _skipped(read, batch)
        if not len(batch) and read.genuine is not None and not skipped:
            batch = self._other_padding(plan, read)
        if not len(batch):
            return MadeBatch(None, read.step, 0, skipped, empty=True)
        began = perf_counter()
        value = self._presented(plan, read, _marked(batch, read.genuine), allocate)
        self.timings.present += perf_counter() - began
        return MadeBatch(value, read.step, len(batch), skipped)

    def _presented(self, plan: StepPlan, read: Read, batch: Batch, allocate: Allocate | None) -> Any:
        kind, options = self.format, self._options
        documents = self._added(batch.traced) if options.provenance else None
        if options.layout is not None:
            return completed(arranged(batch, kind, options, allocate), kind, options, documents)
        if options.collate_fn is None:
            columns = self._engine.presented(named(batch, kind, options), kind, allocate)
            return completed(columns, kind, options, documents)
        where = f" ({plan.place(read.step)} of epoch {plan.epoch})"
        return collated(batch, self.format, self._options, self._engine.generators, plan.epoch, where)


def _nowhere(_shape: tuple[int, ...], _dtype: np.dtype[Any]) -> None:
    """Allocate nothing: the batch is not sent."""


def _skipped(read: Read, batch: Batch) -> int:
    """Return the number of genuine rows that are missing from a batch."""
    if read.genuine is None:
        return read.asked - len(batch)
    genuine = min(max(0, read.genuine - read.first), read.asked)
    return genuine - int((batch.places < read.genuine).sum())


def _marked(batch: Batch, genuine: int | None) -> Batch:
    """Add a column that is true for padding: for all rows after the genuine ones."""
    return batch if genuine is None else marked(batch, batch.places >= genuine)
