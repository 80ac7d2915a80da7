"""Context parallelism: the part of every sequence for one of several ranks, and the way back.

========================  ==========================================================================
``contiguous``            rank r of n has the r-th of n equal parts
``head_tail``             the sequence is cut into 2n chunks, rank r has chunks r and 2n-1-r: with causal
                          attention, every rank has the same work
``per_document``          every document is padded to a multiple of 2n tokens and cut like ``head_tail``, so that
                          every rank has an equal part of each document
========================  ==========================================================================

``position_ids`` and ``segment_ids`` are those of the whole sequence. Bounds of documents come in up to three columns:

- ``cu_seqlens``: of the local part, with an entry for each document of the whole sequence. It may have no token here.
- ``cu_seqlens_global``: of the whole sequence, without padding of documents.
- ``cu_seqlens_padded``: of the whole sequence with the padding of ``per_document``.

A model that shifts labels inside its own part would miss the token after the end of that part. Therefore
``shift_labels`` is made from ``labels`` before the sequence is cut: it has the label of the *next* token, and -100 at
the end of every row or document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.values import loaded
from midepoch.distributed.world import context_rank
from midepoch.errors import ColumnError, MapError
from midepoch.transforms.arrow_values import stacked
from midepoch.transforms.formats import Allocate, room
from midepoch.transforms.packing import IGNORED, LABELS

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

CP_LAYOUTS = ("contiguous", "head_tail", "per_document")
SHIFTED = "shift_labels"
BOUNDS = ("cu_seqlens", "cu_seqlens_global", "cu_seqlens_padded", "max_seqlen", "max_seqlen_global")


def pad_for(name: str, dtype: np.dtype[Any], pads: Mapping[str, int | float]) -> int | float:
    """Return the value for padding of a column: as given, -100 for labels, otherwise 0. Shifted labels are labels."""
    value = pads.get(name, 0)
    if name in (LABELS, SHIFTED):
        value = pads.get(name, pads.get(LABELS, IGNORED))
    fits = dtype.kind not in "iu" or (np.iinfo(dtype).min <= value <= np.iinfo(dtype).max and float(value).is_integer())
    if not fits:
        raise ColumnError(
            f"padding of {value} does not fit into column {name!r}, which is {dtype}. Map the column to a wider type, "
            "or give another value for its padding."
        )
    return value


def round_up(number: Any, multiple: int) -> Any:
    """Return a number, or an array of numbers, rounded up to multiples."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class ContextSlice:
    """Part of every sequence that rank ``rank`` of ``size`` gets."""

    rank: int
    size: int
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        if self.layout not in CP_LAYOUTS:
            raise ValueError(f"cp_layout must be one of {', '.join(map(repr, CP_LAYOUTS))}, got {self.layout!r}")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"context_parallel=(rank, size) needs a rank from 0 to size - 1, got ({self.rank}, {self.size})."
            )

    @staticmethod
    def of(given: Any, layout: str = "contiguous") -> ContextSlice:
        """Return the part of this process. ``given``: (rank, size), a process group, or a mesh of one dimension."""
        return ContextSlice(*context_rank(given), layout)

    def multiple(self) -> int:
        """Return the number of which the length of every sequence must be a multiple."""
        return self.size if self.layout == "contiguous" else 2 * self.size

    def cut(
        self,
        columns: Mapping[str, Any],
        *,
        tokens: Sequence[str] | None = None,
        pads: Mapping[str, int | float] | None = None,
        multiple: int = 1,
        allocate: Allocate | None = None,
    ) -> dict[str, Any]:
        """Return the columns with this rank's part of every sequence. Columns without tokens are unchanged.

        - ``columns``: arrays of shape [rows, tokens], or of shape [tokens] with ``cu_seqlens`` and ``segment_ids``.
        - ``tokens``: columns with a value for each token, by default those whose shape is that of the sequences.
        - ``pads``: values for the padding of ``per_document``, by default -100 for labels and 0 otherwise.
        - ``multiple``: sequences that ``per_document`` has padded get a length that is a multiple of this.
        """
        names = _token_columns(columns, tokens)
        varlen = np.ndim(columns[names[0]]) == 1
        uncut = {name: np.atleast_2d(np.asarray(columns[name])) for name in names}
        rows, length = uncut[names[0]].shape
        if LABELS in uncut and SHIFTED not in uncut:
            ignored = pad_for(SHIFTED, uncut[LABELS].dtype, pads or {})
            uncut[SHIFTED] = shifted(uncut[LABELS], uncut.get("segment_ids"), ignored)
        if "position_ids" not in uncut:
            uncut["position_ids"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        by_document = self.layout == "per_document"
        bounds = _bounds(columns, uncut, varlen, by_segments=by_document)
        if by_document and bounds is not None:
            found = [self._places(ends) for ends in bounds]
        else:
            if length % self.multiple():
                raise ValueError(
                    f"context parallelism over {self.size} ranks with the layout {self.layout!r} needs sequences of a "
                    f"multiple of {self.multiple()} tokens, got {length}. Pack or pad them to such a length."
                )
            found = [self._places(np.array([0, length]))] * rows
        width = round_up(max(map(len, found), default=0) * self.size, lcm(multiple, self.multiple())) // self.size
        places = np.full((rows, width), -1, np.int64)
        for row, each in enumerate(found):
            places[row, : len(each)] = np.where(each < 0, -1, each + row * length)
        missing = places < 0
        out = {name: column for name, column in columns.items() if name not in BOUNDS or bounds is None}
        for name, values in uncut.items():
            out[name] = part = room((width,) if varlen else (rows, width), values.dtype, allocate)
            np.take(values.reshape(-1), places, out=part.reshape(rows, width), mode="clip")
            if missing.any():
                part.reshape(rows, width)[missing] = pad_for(name, values.dtype, pads or {})
        if bounds is None:
            return out
        added = {"cu_seqlens_global": bounds}
        if by_document:
            sizes = (round_up(np.diff(ends), self.multiple()) for ends in bounds)
            added["cu_seqlens_padded"] = [np.append(0, np.cumsum(each)) for each in sizes]
            added["cu_seqlens"] = [ends // self.size for ends in added["cu_seqlens_padded"]]
        else:
            added["cu_seqlens"] = [np.searchsorted(each, ends) for each, ends in zip(found, bounds, strict=True)]
        for name, rows_bounds in added.items():
            small = [ends.astype(np.int32) for ends in rows_bounds]
            out[name] = small[0] if varlen else stacked(small)
        if "max_seqlen" in columns:
            out["max_seqlen"] = _longest(added["cu_seqlens"])
            out["max_seqlen_global"] = _longest(added.get("cu_seqlens_padded", bounds))
        return out

    def _places(self, bounds: Int64Array) -> Int64Array:
        """Return the tokens of a sequence that this rank has, with -1 for padding, in ascending order.

        ``bounds``: of its documents, each of which is cut into equal chunks. This rank has one or two of them.
        """
        sizes = np.diff(bounds)
        steps = -(-sizes // self.multiple())
        counts = steps if self.layout == "contiguous" else 2 * steps
        document = np.repeat(np.arange(len(counts)), counts)
        local = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        step = steps[document]
        position = local + step * np.where(local < step, self.rank, 2 * self.size - 2 - self.rank)
        return np.where(position < sizes[document], bounds[document] + position, -1)


def whole(
    parts: Sequence[Any],
    columns: Mapping[str, Any],
    layout: str,
    *,
    length: int | None = None,
    pad: int | float = 0,
) -> Any:
    """Return an array with a value for each token of the whole sequences from the parts of all ranks.

    - ``parts``: numpy arrays or torch tensors in the order of the ranks, of shape [rows, tokens, …] or [tokens, …].
    - ``columns``: the batch of any of the ranks, for the bounds of its documents.
    - ``layout``: the layout with which the sequences were cut.
    - ``length``: tokens of the result in every row. By default, padding of ``per_document`` is dropped, other padding
      is kept.
    - ``pad``: value for tokens that are in no part.
    """
    slices = [ContextSlice(rank, len(parts), layout) for rank in range(len(parts))]
    varlen = columns["position_ids"].ndim == 1
    if any(tuple(part.shape) != tuple(parts[0].shape) for part in parts):
        raise ValueError(f"the parts must have one shape, got {[tuple(part.shape) for part in parts]}")
    tables = [part[None] if varlen else part for part in parts]
    rows, local, *rest = tables[0].shape
    if layout == "per_document" and "cu_seqlens_padded" in columns:
        given = columns["cu_seqlens_global"]
        bounds = [np.asarray(ends.cpu() if hasattr(ends, "cpu") else ends) for ends in ([given] if varlen else given)]
    else:
        bounds = [np.array([0, local * len(parts)])] * rows
    length = max((int(ends[-1]) for ends in bounds), default=0) if length is None else length
    torch = loaded("torch")
    is_tensor = torch is not None and isinstance(parts[0], torch.Tensor)
    shape = (rows, length, *rest)
    out = parts[0].new_full(shape, pad) if is_tensor else np.full(shape, pad, parts[0].dtype)
    for own, table in zip(slices, tables, strict=True):
        for row, ends in enumerate(bounds):
            places = own._places(ends)
            kept = np.flatnonzero((places >= 0) & (places < length))
            targets = places[kept]
            if is_tensor:
                kept, targets = torch.from_numpy(kept), torch.from_numpy(targets)
            out[row, targets] = table[row, kept]
    return out[0] if varlen else out


def shifted(labels: Values, segments: Values | None, ignored: int | float = IGNORED) -> Values:
    """Return the label of the next token for each token, ``ignored`` at the end of a row or segment and at padding."""
    out = np.full(labels.shape, ignored, labels.dtype)
    if segments is None:
        out[:, :-1] = labels[:, 1:]
    else:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        np.copyto(out[:, :-1], labels[:, 1:], where=same)
    return out


def _token_columns(columns: Mapping[str, Any], tokens: Sequence[str] | None) -> list[str]:
    """Return the names of the columns with a value for each token, and check that they have one shape."""
    if tokens is None:
        arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        shapes = {n: c.shape for n, c in arrays.items() if n not in BOUNDS and c.dtype.kind in "biuf"}
        segments: Any = columns.get("segment_ids")
        if np.ndim(segments) == 1 and len(segments) == len(columns["cu_seqlens"]) - 1:
            raise ValueError(f"every one of the {len(segments)} documents has one token: pass tokens= to cut().")
        if np.ndim(segments) == 1:
            tokens = [name for name, shape in shapes.items() if shape == segments.shape]
        else:
            tokens = [name for name, shape in shapes.items() if len(shape) == 2]
    if not tokens and any(isinstance(column, list) for column in columns.values()):
        raise ColumnError(
            'context parallelism: the rows of a batch have different lengths. Pass loader(layout="padded") or '
            'loader(layout="varlen"), or pack sequences.'
        )
    if not tokens:
        raise ColumnError(f"context parallelism: no column of sequences. There are: {', '.join(columns)}.")
    shapes = {name: np.shape(columns[name]) for name in tokens}
    if len(set(shapes.values())) > 1:
        text = ", ".join(f"{name!r} {list(shape)}" for name, shape in shapes.items())
        raise ColumnError(
            f"context parallelism: sequences of one batch have one length, got {text}. Remove or rename the others."
        )
    return list(tokens)


def _bounds(
    columns: Mapping[str, Any], uncut: Mapping[str, Values], varlen: bool, by_segments: bool
) -> list[Int64Array] | None:
    """Return the bounds of the documents in each row, from 0 to the end of the last one. None: unknown."""
    if "cu_seqlens" in columns:
        given = [columns["cu_seqlens"]] if varlen else columns["cu_seqlens"]
        return [np.asarray(ends, np.int64) for ends in given]
    if not by_segments or "segment_ids" not in uncut:
        return None
    found = []
    for row, segments in enumerate(uncut["segment_ids"]):
        sizes = np.bincount(np.maximum(segments, 0))[1:]
        expected = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        if not np.array_equal(segments[: len(expected)], expected) or segments[len(expected) :].any():
            raise MapError(
                f"segment_ids of row {row} of the batch must be 1, 2, … in ascending order, with 0 for padding at the "
                "end, for the layout 'per_document'."
            )
        found.append(np.append(0, np.cumsum(sizes)))
    return found


def _longest(bounds: list[Int64Array]) -> int:
    return max((int(np.diff(ends).max()) for ends in bounds if len(ends) > 1), default=0)
