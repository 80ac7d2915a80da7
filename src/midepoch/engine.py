"""The Engine: runs a pipeline at positions. Open files and caches live here; disposable, never saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.order import EpochOrder
from midepoch.pipeline import Pipeline
from midepoch.read import Reader, Rows
from midepoch.transforms import Batch, Map, finish, present, present_rows
from midepoch.transforms.features import Encoded
from midepoch.transforms.formats import readable
from midepoch.transforms.map import RunContext

Int64Array = npt.NDArray[np.int64]

_log = logging.getLogger("midepoch")

_CHUNK_ROWS = 4096
_CHUNK_BYTES = 4 << 20


class Engine:
    """``read`` and ``transform`` are the two halves of f(pipeline, position); one thread may run each at a time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._reader: Reader | None = None
        self._epoch: tuple[int, EpochOrder] | None = None
        nullable = pipeline.source.nullable
        self._nullable = {name: nullable[source_name] for name, source_name in pipeline.head.items()}
        self._decoded = pipeline.source.decoded if pipeline.format != "arrow" or pipeline.has_map else frozenset()

    @property
    def chunk_rows(self) -> int:
        """How many rows to read at once: enough to spread the cost of a call, at most about 4 MB."""
        return int(max(1, min(_CHUNK_ROWS, _CHUNK_BYTES / max(1.0, self.pipeline.source.bytes_per_row))))

    def order(self, epoch: int) -> EpochOrder:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.pipeline.order.at(epoch, self.pipeline.source.layout))
        return self._epoch[1]

    def read(self, epoch: int, positions: Int64Array) -> Batch:
        """Rows as they lie, before any step."""
        pipeline = self.pipeline
        if self._reader is None:
            wanted = list(dict.fromkeys(pipeline.head.values()))
            self._reader = Reader(pipeline.source, wanted, skip_corrupt=pipeline.on_error == "skip")
        chosen = self.order(epoch).chosen(positions)
        found = self._reader.read(pipeline.order.selection.source_rows(chosen))
        places = np.arange(len(positions)) if found.kept is None else np.flatnonzero(found.kept)
        if pipeline.on_error == "skip":
            found, places = _only_readable(found, places)
        columns: dict[str, Any] = {}
        for name, source_name in pipeline.head.items():
            column = found.batch.column(source_name)
            columns[name] = Encoded(source_name, column, pipeline.source.schema) if source_name in self._decoded else column
        return Batch(columns, chosen[places], places, found.owned, self._nullable)

    def read_many(self, epoch: int, parts: Sequence[Int64Array]) -> list[Batch]:
        """Several batches in one read."""
        if len(parts) == 1:
            return [self.read(epoch, parts[0])]
        whole = self.read(epoch, np.concatenate(parts))
        ends = np.cumsum([0, *map(len, parts)])
        cuts = np.searchsorted(whole.places, ends).tolist()
        batches = []
        for start, a, b in zip(ends.tolist(), cuts, cuts[1:], strict=False):
            part = whole.slice(a, b)
            batches.append(Batch(part.columns, part.rows, part.places - start, part.owned, part.nullable))
        return batches

    def transform(self, epoch: int, batch: Batch) -> Batch:
        """All steps in turn."""
        if not self.pipeline.tail:
            return batch
        shuffle = self.pipeline.order.shuffle
        run = RunContext(shuffle.seed if shuffle else 0, epoch, self._place)
        for step in self.pipeline.tail:
            batch = step.apply(batch, run) if isinstance(step, Map) else step.apply(batch)
        return batch

    def _place(self, row: int) -> str:
        source_row = self.pipeline.order.selection.source_rows(np.array([row]))[0]
        return self.pipeline.source.place(int(source_row))

    def rows(self, batch: Batch) -> list[Any]:
        """One object a row, in the pipeline's format (Python dicts unless another was chosen)."""
        return present_rows(batch, self.pipeline.format or "python")

    def columns(self, batch: Batch) -> Any:
        """The batch as columns, in the pipeline's format."""
        kind = self.pipeline.format or "python"
        return finish(present(batch, kind), kind)


def _only_readable(found: Rows, places: Int64Array) -> tuple[Rows, Int64Array]:
    """Without rows whose text is not UTF-8: a block that opens can still hold such bytes."""
    text = [c for c in found.batch.columns if pa.types.is_string(c.type) or pa.types.is_large_string(c.type)]
    if all(map(readable, text)):
        return found, places
    good = [i for i in range(found.batch.num_rows) if all(readable(column.slice(i, 1)) for column in text)]
    _log.warning("skipped %d rows whose text is not UTF-8", found.batch.num_rows - len(good))
    return Rows(found.batch.take(pa.array(good, pa.int64())), True), places[good]
