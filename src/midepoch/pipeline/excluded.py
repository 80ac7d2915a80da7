"""Rows that are not delivered in any epoch: by number, for each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node

Excluded = tuple[Intervals, ...]
"""For each source its rows before the shuffle, or nothing at all if there are none."""


def source_names(node: Node) -> tuple[str, ...]:
    """Return the names of the sources, if a mix of single sources gave them some."""
    base = node.base
    named = isinstance(base, Mix) and all(len(part.leaves) == 1 for part in base.parts)
    return base.names if isinstance(base, Mix) and named else ()


def rows_by_source(rows: Any, leaves: Sequence[Leaf], names: Sequence[str]) -> Excluded:
    """Return rows that the user gave. Raise TypeError or ValueError if there are no such rows."""
    if not isinstance(rows, Mapping):
        if len(leaves) > 1:
            raise TypeError(
                f"exclude(rows=…): with {len(leaves)} sources, pass a dict of rows by the name or number of the source "
                f"({', '.join(names) or f'0 to {len(leaves) - 1}'})."
            )
        rows = {0: rows}
    found = [EMPTY] * len(leaves)
    for source, given in rows.items():
        number = names.index(source) if source in names else source
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(leaves):
            known = ", ".join([*map(repr, names)] or [f"0 to {len(leaves) - 1}"])
            raise ValueError(f"exclude(rows=…): there is no source {source!r}. There are: {known}.")
        found[number] = found[number].union(_rows(given, len(leaves[number].order.selection)))
    return tuple(found)


def _rows(given: Any, count: int) -> Intervals:
    numbers = given if isinstance(given, range) else np.asarray(given if hasattr(given, "dtype") else list(given))
    if not isinstance(numbers, range) and (numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers))):
        raise TypeError(f"exclude(rows=…) takes numbers of rows, got {given!r:.60}")
    if len(numbers) and not 0 <= min(numbers) <= max(numbers) < count:
        bad = min(numbers) if min(numbers) < 0 else max(numbers)
        raise ValueError(f"exclude(rows=…): there is no row {bad}: the dataset has {count:,} rows.")
    return Intervals.from_positions(numbers)
