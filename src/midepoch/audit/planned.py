"""Batches by a budget of tokens in the ledger, whose positions count batches: the rows of each of them.

The lengths of the rows are stored beside the ledger, so that neither the data nor the program is needed to name them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midepoch.audit.orders import KnownOrder, order_name
from midepoch.audit.records import Shape
from midepoch.errors import StateError
from midepoch.order.budget import Budget
from midepoch.pipeline.cursor import PlannedAt
from midepoch.pipeline.planned import GivenLengths, PlannedEpoch, Planning
from midepoch.pipeline.spec import PipelineSpec

Int64Array = npt.NDArray[np.int64]

MOST_ROWS = 4_000_000
"""Rows up to which lengths are stored, and batches of an epoch counted when a pass begins: about a second."""


def _path(folder: Path, order: str, length: str) -> Path:
    return folder / f"{order}-{hashlib.blake2b(length.encode(), digest_size=4).hexdigest()}.lengths"


def save_lengths(folder: Path, spec: PipelineSpec, planning: Planning) -> None:
    """Store the lengths of the rows of a pipeline, unless they are stored or too many."""
    path = _path(folder, order_name(spec), planning.budget.length)
    selection = spec.base.order.selection
    if len(selection) > MOST_ROWS or (path.exists() and path.stat().st_size):
        return
    rows = np.arange(len(selection), dtype=np.int64)
    lengths = planning.lengths.of(selection.source_rows(rows) if planning.by_source else rows)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        np.savez_compressed(file, lengths=lengths.astype(np.uint32))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # by all ranks, equal


class KnownBatches:
    """The batches of one pass, planned again."""

    def __init__(self, folder: Path, order: KnownOrder, shape: Shape) -> None:
        length = json.loads(shape.batches)[-1]
        budget = Budget(1, length=length).earlier(shape.batches)
        if budget is None:
            raise StateError(
                "the rows of batches that were balanced by a function cannot be named: the function is not recorded."
            )
        path = _path(folder, order.name, length)
        try:
            with np.load(path, allow_pickle=False) as stored:
                self.lengths = stored["lengths"].astype(np.int64)
        except (OSError, ValueError, KeyError, EOFError) as problem:
            raise StateError(
                f"the rows of batches by tokens cannot be named: their lengths are not beside the ledger ({problem}). "
                f"They are stored for up to {MOST_ROWS:,} rows."
            ) from None
        source = order.source
        planning = Planning(budget, GivenLengths(self.lengths), 1.0, by_source=False)
        start, legs = json.loads(shape.planned) if shape.planned else (0, [])
        at = PlannedAt(start, tuple((text, done, checksum) for text, done, checksum in legs))
        self.budget = budget
        self.plan = PlannedEpoch(source.order, source.layout, planning, shape.epoch, shape.start, at)

    def positions(self, batches: Int64Array) -> list[Int64Array]:
        """Return the positions of the rows of some batches."""
        return [self.plan.positions(int(batch)) for batch in batches]

    def batch_of(self, position: int) -> int | None:
        """Return the batch of a position, or None if it came before this pass."""
        return self.plan.batch_of(position)
