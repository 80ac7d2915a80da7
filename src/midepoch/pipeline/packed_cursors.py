"""Cursors of packed sequences: in a document, by the chunks that the documents are of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from midepoch.pipeline.chunk import Chunk
from midepoch.pipeline.cursor import At
from midepoch.transforms.packing import NUMBER_BITS

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
        found = np.zeros((len(outputs), parts[0][1].shape[1] + 1), np.int64)
        for some, values in parts:
            found[some, :-1] = values
        found[:, -1] = into if first_number < 0 else into + ((first_number + outputs) << NUMBER_BITS)
        return found

    return table


def at_document(origins: tuple[tuple[Chunk, int, int], ...], document: int, inner: At, *, before: bool = False) -> At:
    """Return the cursor at a pending document, or right before it if it is to be resumed in the middle."""
    for number, (chunk, first, count) in enumerate(origins):
        if document < count or (document == count and number == len(origins) - 1):
            return chunk.before(first + document) if before else chunk.at(first + document)
        document -= count
    return inner
