"""Row ids in, record batches out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import Timings
from midepoch.errors import CorruptBlockError
from midepoch.order.epoch import BlockUses
from midepoch.read.blocks import Blocks
from midepoch.read.columns import Located, gatherer
from midepoch.read.fetched import FetchedBlocks
from midepoch.sources import Source
from midepoch.sources.schemas import plain_schema, taken

Int64Array = npt.NDArray[np.int64]
_log = logging.getLogger("midepoch")
_UNKNOWN, _BY_ADDRESS, _BY_TAKE, _BAD = 0, 1, 2, 3
MIN_RUN = 32
"""Average length of runs of consecutive rows from which slicing is cheaper than gathering row by row."""


@dataclass(frozen=True)
class ReadRows:
    """Rows as read. ``owned``: only this batch uses the memory, so that it may be delivered as writable.

    ``kept`` is the mask of the requested rows that are present, None for all. Rows of unreadable blocks are missing.
    """

    batch: pa.RecordBatch
    owned: bool
    kept: npt.NDArray[np.bool_] | None = None


class Reader:
    """Reader of chosen columns of a source. Not thread-safe, cheap to create, nothing to close."""

    def __init__(
        self,
        source: Source,
        columns: Sequence[str] | None = None,
        *,
        skip_corrupt: bool = False,
        sharers: int = 1,
        threads: int = 0,
        timings: Timings | None = None,
    ) -> None:
        schema = plain_schema(source.schema)
        names = schema.names if columns is None else list(columns)
        self._numbers = [schema.get_field_index(name) for name in names]
        self.schema = pa.schema([schema.field(i) for i in self._numbers], metadata=schema.metadata)
        self._source, self._skip_corrupt = source, skip_corrupt
        self._fetched = None if source.access is None else FetchedBlocks(source, names, sharers, threads, timings)
        self._blocks = self._fetched or Blocks(source)
        if self._fetched is not None:  # such blocks hold only the requested columns
            self._numbers = list(range(len(names)))
        self._starts = source.layout.block_starts
        count = len(self._starts) - 1
        sizes = np.diff(self._starts)
        self._block_rows = int(sizes[0]) if count and (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0] else 0
        """Rows of every block except the last, if equal, else 0: a division is 10 times faster than a search."""
        self._status = np.zeros(count, dtype=np.uint8)
        self._last: tuple[int, pa.RecordBatch] | None = None
        kinds = (field.type for field in self.schema)
        stored = (kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind for kind in kinds)
        self._gatherers = [gatherer(kind, count) for kind in stored]

    def read(self, rows: Int64Array) -> ReadRows:
        """Return the rows in the requested order. Raise CorruptBlockError unless ``skip_corrupt`` is set."""
        self._release()
        blocks = self._blocks_of(rows)
        kept = self._open(blocks)
        if kept is not None:
            rows, blocks = rows[kept], blocks[kept]
        if not len(rows):
            return ReadRows(_empty(self.schema), True, kept)
        breaks = np.flatnonzero((rows[1:] - rows[:-1] != 1) | (blocks[1:] != blocks[:-1])) + 1
        if (len(breaks) + 1) * MIN_RUN <= len(rows) or not len(breaks):
            return self._slices(rows, blocks, breaks, kept)
        inner = rows - self._starts[blocks]
        by_address = bool((self._status[blocks] == _BY_ADDRESS).all())
        memory = self._blocks.memory
        columns = [
            gather.gather(memory, blocks, inner) if gather is not None and by_address else None
            for gather in self._gatherers
        ]
        if any(column is None for column in columns):
            missing = [i for i, column in enumerate(columns) if column is None]
            for i, column in zip(missing, self._take(missing, blocks, inner), strict=True):
                columns[i] = column
        arrays = [_restored(c, field.type) for c, field in zip(columns, self.schema, strict=True)]
        return ReadRows(pa.RecordBatch.from_arrays(arrays, schema=self.schema), True, kept)

    def expect(self, epoch: int, position: int, uses: Callable[[], tuple[BlockUses, BlockUses]]) -> None:
        """Announce that rows from this position on are read next, so that their blocks can be prefetched."""
        if self._fetched is not None:
            self._fetched.expect(epoch, position, uses)

    def _release(self) -> None:
        """Forget the addresses of blocks that are no longer open."""
        self._blocks.check()
        dropped = self._blocks.trim()
        if dropped:
            status = self._status[dropped]
            self._status[dropped] = np.where(status == _BAD, _BAD, _UNKNOWN)
            if self._last is not None and self._last[0] in dropped:
                self._last = None

    def check(self, *, last: bool = False) -> None:
        """Raise DataChangedError if a mapped file was changed. Most calls check nothing, except the ``last`` one."""
        self._blocks.check(last=last)

    def _blocks_of(self, rows: Int64Array) -> Int64Array:
        if self._block_rows:
            return rows // self._block_rows
        return self._starts.searchsorted(rows, side="right") - 1

    def read_run(self, row: int, count: int) -> ReadRows:
        """Return consecutive rows of one block as a view. Like ``read``, at the cost of a look-up."""
        self._release()
        block = int(self._starts.searchsorted(row, side="right")) - 1
        if not self._status[block]:
            self._status[block] = self._open_one(block)
        if self._status[block] == _BAD:
            return ReadRows(_empty(self.schema), True, np.zeros(count, dtype=bool))
        return ReadRows(self._batch(block).slice(row - int(self._starts[block]), count), False)

    def locate(self, rows: Int64Array) -> dict[str, Located] | None:
        """Return the addresses of rows by column, or None unless all columns are numbers in blocks that can be
        gathered.

        Each batch made from the addresses costs one copy. The caller ensures that no column has nulls.
        """
        columns = [gather for gather in self._gatherers if gather is not None and gather.dtype is not None]
        if self._fetched is not None or len(columns) < len(self._gatherers):
            return None
        self._release()
        blocks = self._blocks_of(rows)
        if self._open(blocks) is not None or not (self._status[blocks] == _BY_ADDRESS).all():
            return None
        inner, memory = rows - self._starts[blocks], self._blocks.memory
        located = (gather.locate(memory, blocks, inner) for gather in columns)
        return dict(zip(self.schema.names, located, strict=True))

    def _open(self, blocks: Int64Array) -> npt.NDArray[np.bool_] | None:
        """Record the buffer addresses of new blocks. Return the mask of readable rows, None for all."""
        status = self._status[blocks]
        if not status.all():
            unknown = np.unique(blocks[status == _UNKNOWN]).tolist()
            if self._fetched is not None:
                self._fetched.need(unknown)
            for block in unknown:
                self._status[block] = self._open_one(block)
            status = self._status[blocks]
        bad = status == _BAD
        return ~bad if bad.any() else None

    def _open_one(self, block: int) -> int:
        try:
            batch, mapped = self._blocks.get(block)
            able = []
            for number, gather in zip(self._numbers, self._gatherers, strict=True):
                column = _stored(batch.column(number))
                checked = mapped and gather is not None and gather.open(block, column)
                if not checked:  # pyarrow trusts the offsets inside nested columns, and wrong ones crash the process
                    _validate(column)
                able.append(checked or (mapped and gather is None))
        except (CorruptBlockError, pa.ArrowInvalid) as problem:
            row, text = int(self._starts[block]), str(problem)
            if self._source.name(self._source.file_of(row)) not in text:  # the checks of buffers do not know it
                text = f"{self._source.place(row)}: block {block} cannot be read: {text}"
            if not self._skip_corrupt:
                raise CorruptBlockError(text) from None
            _log.warning("skipped %d rows: %s", self._starts[block + 1] - row, text)
            return _BAD
        return _BY_ADDRESS if all(able) else _BY_TAKE

    def _batch(self, block: int) -> pa.RecordBatch:
        last = self._last
        if last is None or last[0] != block:
            batch, _ = self._blocks.get(block)
            columns = [batch.column(i) for i in self._numbers]
            last = self._last = (block, pa.RecordBatch.from_arrays(columns, schema=self.schema))
        return last[1]

    def _slices(
        self, rows: Int64Array, blocks: Int64Array, breaks: Int64Array, kept: npt.NDArray[np.bool_] | None
    ) -> ReadRows:
        parts = []
        for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            block = int(blocks[start])
            parts.append(self._batch(block).slice(int(rows[start] - self._starts[block]), stop - start))
        return ReadRows(parts[0], False, kept) if len(parts) == 1 else ReadRows(pa.concat_batches(parts), True, kept)

    def _take(self, numbers: Sequence[int], blocks: Int64Array, inner: Int64Array) -> list[pa.Array]:
        """Return some columns by pyarrow: one take per block, concatenated, then sorted into the requested order."""
        order = np.lexsort((inner, blocks))
        cuts = np.flatnonzero(np.diff(blocks[order])) + 1
        parts: list[list[pa.Array]] = [[] for _ in numbers]
        for group in np.split(order, cuts):
            batch, _ = self._blocks.get(int(blocks[group[0]]))
            for part, number in zip(parts, numbers, strict=True):
                part.append(taken(_stored(batch.column(self._numbers[number])), inner[group]))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return [taken(pa.concat_arrays(part), back) for part in parts]


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _stored(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _restored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, column) if isinstance(kind, pa.BaseExtensionType) else column


def _validate(column: pa.Array) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowException as problem:
        raise CorruptBlockError(str(problem)) from None
