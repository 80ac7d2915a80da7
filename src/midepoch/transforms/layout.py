"""Layout of a batch of rows of different lengths: padded to one length, or one after the other (varlen).

Every column of lists of numbers has a value for each token, as the column whose lengths count. It is laid out in the
same way. Columns named in ``other``, and those of other types, are as ``present`` gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

from midepoch._native import copy_ranges, fill_ranges, number_ranges
from midepoch.errors import ColumnError, MapError
from midepoch.transforms.batch import Batch, check_columns
from midepoch.transforms.context import ContextSlice, pad_for, round_up
from midepoch.transforms.formats import Allocate, present, room
from midepoch.transforms.packing import NumberLists, nested

LAYOUTS = ("padded", "varlen")
MASK = "attention_mask"
_ADDED = ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen")
_ADVICE = "Map it to one type, or leave it as it is with pad_values={column: None}."
_ADDED_BY_CONTEXT = ("cu_seqlens_global", "cu_seqlens_padded", "max_seqlen_global")


@dataclass(frozen=True)
class Layout:
    """Arrangement of the rows of a batch.

    - ``kind``: "padded" to arrays of shape [rows, longest], "varlen" to arrays of shape [total]
    - ``column``: the column whose lengths count, such as ``input_ids``
    - ``multiple``: the longest row (padded) or the total (varlen) is rounded up to a multiple of this
    - ``pads``: values for padding by column, by default -100 for labels and 0 otherwise
    - ``context``: the part of every sequence that this process gets
    - ``other``: columns of lists that have no value for each token
    """

    kind: str
    column: str
    multiple: int = 1
    pads: tuple[tuple[str, int | float], ...] = ()
    context: ContextSlice | None = None
    other: tuple[str, ...] = ()

    def arrange(self, batch: Batch, allocate: Allocate | None = None, kind: str = "torch") -> dict[str, Any]:
        """Return the columns as numpy arrays, for ``finish``. ``kind``: the format of columns that stay as they are.

        With "numpy", "torch" or "jax" those are as ``present`` gives them.
        """
        tokens = self._tokens(batch)
        rest = {name: column for name, column in batch.columns.items() if name not in tokens}
        shown: Any = present(batch.with_columns(rest), kind, allocate)
        inner = None if self.context is not None else allocate
        added = self._padded(tokens, inner) if self.kind == "padded" else self._varlen(tokens, inner)
        columns = {name: added.pop(name) if name in tokens else shown[name] for name in batch.columns} | added
        if self.context is None:
            return columns
        names = [*tokens, *(name for name in (MASK, "position_ids", "segment_ids") if name in added)]
        pads = dict(self.pads)
        return self.context.cut(columns, tokens=names, pads=pads, multiple=self.multiple, allocate=allocate)

    def _tokens(self, batch: Batch) -> dict[str, NumberLists]:
        """Return the columns with a value for each token."""
        named = [self.column, *self.other, *(name for name, _ in self.pads)]
        check_columns(list(dict.fromkeys(named)), list(batch.columns), f"{self.kind} layout")
        added = (*_ADDED * (self.kind == "varlen"), *_ADDED_BY_CONTEXT * (self.context is not None))
        if taken := [name for name in added if name in batch.columns]:
            raise ColumnError(
                f"{self.kind} layout: it adds {', '.join(map(repr, taken))}, which the batch already has. Remove or "
                "rename that column."
            )
        columns = {name: column for name, column in batch.columns.items() if name not in self.other}
        found = {name: NumberLists.of(name, column, batch.rows, _ADVICE) for name, column in columns.items()}
        first = found[self.column]
        if first is None:
            text = f"{self.kind} layout: column {self.column!r} does not contain lists of numbers."
            raise ColumnError(f"{text} {nested(columns[self.column])}".rstrip())
        tokens = {}
        for name, each in found.items():
            if each is None:
                continue
            # Lists without a type can be those of tokens if all are empty, as the others are.
            matches = each.typed or (len(batch) > 0 and np.array_equal(each.lengths, first.lengths))
            if name != self.column and not matches:
                continue
            if different := np.flatnonzero(each.lengths != first.lengths).tolist():
                bad = different[0]
                raise MapError(
                    f"{self.kind} layout: column {name!r} has {each.lengths[bad]} numbers in row {batch.rows[bad]} of "
                    f"the dataset, but {self.column!r} has {first.lengths[bad]}. Lists of numbers need one for each "
                    f"token. Remove the column, or leave it as it is with pad_values={{{name!r}: None}}."
                )
            tokens[name] = each
        if unused := [name for name, _ in self.pads if name not in tokens]:
            raise ColumnError(
                f"{self.kind} layout: a padding value is given for {', '.join(map(repr, unused))}, which is not laid "
                "out: it is in other, or does not contain lists of numbers."
            )
        return tokens

    def _room(self, length: int) -> int:
        context = 1 if self.context is None else self.context.multiple()
        return int(round_up(length, lcm(self.multiple, context)))

    def _padded(self, tokens: dict[str, NumberLists], allocate: Allocate | None) -> dict[str, Any]:
        lengths = tokens[self.column].lengths
        width = self._room(int(lengths.max(initial=0)))
        starts, sources = np.arange(len(lengths)) * width, np.cumsum(lengths) - lengths
        columns: dict[str, Any] = {}
        for name, each in tokens.items():
            columns[name] = out = room((len(lengths), width), each.values.dtype, allocate)
            flat = out.reshape(-1)
            copy_ranges(each.values, sources, lengths, flat, starts)
            fill_ranges(flat, pad_for(name, out.dtype, dict(self.pads)), starts + lengths, width - lengths)
        if MASK not in tokens:
            columns[MASK] = out = room((len(lengths), width), np.dtype(np.int64), allocate)
            fill_ranges(out.reshape(-1), 1, starts, lengths)
            fill_ranges(out.reshape(-1), 0, starts + lengths, width - lengths)
        return columns

    def _varlen(self, tokens: dict[str, NumberLists], allocate: Allocate | None) -> dict[str, Any]:
        lengths = tokens[self.column].lengths
        bounds = np.append(0, np.cumsum(lengths))
        total = int(bounds[-1])
        # Documents that the context parallel layout pads themselves are padded there, and the total after them.
        by_document = self.context is not None and self.context.layout == "per_document"
        size = total if by_document else self._room(total)
        columns: dict[str, Any] = {}
        for name, each in tokens.items():
            columns[name] = out = room((size,), each.values.dtype, allocate)
            copy_ranges(each.values, bounds[:-1], lengths, out, bounds[:-1])
            out[total:] = pad_for(name, out.dtype, dict(self.pads))
        ids = [room((size,), np.dtype(np.int32), allocate) for _ in range(2)]
        number_ranges(ids[0], ids[1], bounds[:-1], lengths, np.arange(1, len(lengths) + 1))
        for out in ids:
            out[total:] = 0
        longest = int(lengths.max(initial=0))
        return {**columns, **dict(zip(_ADDED, (*ids, bounds.astype(np.int32), longest), strict=True))}
