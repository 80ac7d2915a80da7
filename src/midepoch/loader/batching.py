"""Batching, from the arguments of ``Dataset.loader``: budgets of tokens, layouts, context parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch._internal.values import integer
from midepoch.errors import ColumnError
from midepoch.order import Selection
from midepoch.order.budget import GROUP, WINDOW, Budget, checked_balance
from midepoch.pipeline.node import HIDDEN, Buckets, Node
from midepoch.pipeline.planned import FilledLengths, GivenLengths, Lengths, Planning, too_long
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.lengths import lengths_of
from midepoch.sources.schemas import has_length
from midepoch.transforms import Map
from midepoch.transforms.arrow_values import flat_numbers, is_list
from midepoch.transforms.batch import check_columns
from midepoch.transforms.context import ContextSlice
from midepoch.transforms.encode import Tokenize
from midepoch.transforms.layout import LAYOUTS, Layout
from midepoch.transforms.packing import PackSpec

_log = logging.getLogger("midepoch")
_TOKENS = "input_ids"
ReadColumn = Callable[[str, str], pa.ChunkedArray]
"""Function that reads a column of all rows of the dataset. The second argument names the call, for errors."""


class Batched(NamedTuple):
    """The pipeline with what batches need, and the settings of batches."""

    spec: PipelineSpec
    planning: Planning | None = None
    bunches: Budget | None = None
    layout: Layout | None = None
    context: ContextSlice | None = None
    pads: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Batching:
    """The arguments, unchecked."""

    max_tokens: Any = None
    length: Any = None
    layout: Any = None
    pad_to_multiple_of: Any = None
    pad_values: Any = None
    bucket_window: Any = None
    balance: Any = None
    context_parallel: Any = None
    cp_layout: Any = None
    steps_per_epoch: Any = None

    def steps(self) -> int:
        """Return the number of steps of a pass, or 0 for all of an epoch."""
        return 0 if self.steps_per_epoch is None else integer(self.steps_per_epoch, "loader(steps_per_epoch=…)", 1)

    def context(self) -> ContextSlice | None:
        """Return the part of every sequence that this rank gets."""
        if self.context_parallel is None:
            if self.cp_layout is not None:
                raise ValueError("cp_layout is for context_parallel=(rank, size). Give both or neither.")
            return None
        return ContextSlice.of(self.context_parallel, self.cp_layout or "contiguous")

    def applied(
        self,
        spec: PipelineSpec,
        read_column: ReadColumn,
        context: ContextSlice | None,
        *,
        collated: bool,
        most_rows: int | None,
    ) -> Batched:
        """Return the pipeline and settings. ``collated``: a function of the user makes the batch."""
        self._check(context, collated)
        layout = self._layout(spec, collated, context)
        if self.max_tokens is None:
            return self._without_budget(spec, layout, context)
        budget = self._budget(spec, layout, context, most_rows)
        batched = Batched(spec, layout=layout)
        if layout is None and context is not None:  # the user's function makes the batch, and it is split after that
            batched = batched._replace(context=context, pads=self._pads())
        lengths = self._known_lengths(spec, read_column)
        if lengths is None:
            return self._at_run_time(batched, budget)
        known, mean, longest, by_source = lengths
        if longest > budget.tokens // budget.multiple * budget.multiple:
            longest, row = _longest(known, spec.base.order.selection, by_source)
            if longest > budget.tokens // budget.multiple * budget.multiple:
                raise too_long(longest, budget, f"row {row} of the dataset")
        return batched._replace(planning=Planning(budget, known, mean, by_source))

    def _without_budget(self, spec: PipelineSpec, layout: Layout | None, context: ContextSlice | None) -> Batched:
        if layout is not None or context is None:
            return Batched(spec, layout=layout)
        packs = [stage for stage in spec.node.stages if isinstance(stage, PackSpec)]
        if packs and context.layout != "per_document" and packs[-1].length % context.multiple():
            raise ValueError(
                f"pack({packs[-1].length}) and context_parallel: sequences are split into {context.multiple()} equal "
                "parts. Choose a length that is a multiple of it."
            )
        return Batched(spec, context=context, pads={**(packs[-1].pads if packs else {}), **self._pads()})

    def _check(self, context: ContextSlice | None, collated: bool) -> None:
        if self.max_tokens is None:
            for name, value in (("bucket_window", self.bucket_window), ("balance", self.balance)):
                if value is not None:
                    raise ValueError(f"{name} is for batches by tokens: add max_tokens, or omit it.")
            if self.length is not None and self.layout is None and context is None:
                raise ValueError("length is for batches by tokens and layouts: add max_tokens or layout, or omit it.")
        if collated and (self.layout is not None or (self.pad_values is not None and context is None)):
            raise ValueError("layout and pad_values arrange the batch themselves. Omit them, or collate_fn.")

    def _layout(self, spec: PipelineSpec, collated: bool, context: ContextSlice | None) -> Layout | None:
        kind = self.layout
        if kind is not None and kind not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {kind!r}")
        arrays = spec.format in (None, "numpy", "torch", "jax")
        if kind is None and not collated and arrays:
            wanted = (self.max_tokens, self.pad_to_multiple_of, self.pad_values if context is None else None)
            kind = "padded" if any(each is not None for each in wanted) else None
        is_packed = any(isinstance(stage, PackSpec) for stage in spec.node.stages)
        if kind is None:
            if arrays and not (collated or is_packed) and _ends_with_texts(spec.node):
                warn_once(
                    "the tokens of a batch are a list, as its texts have different lengths. For one array, pass "
                    "layout='padded' or max_tokens=…, or pack() the dataset."
                )
            return None
        if kind == "padded" and is_packed and self.layout is not None:
            _log.warning(
                'loader(layout="padded"): packed sequences have one length already, and the attention mask that it '
                "adds is 1 also for their padding. Omit layout."
            )
        if not arrays:
            raise ValueError(f"layout={kind!r} makes arrays, but the format is {spec.format!r}. Omit one of them.")
        pads = self._pads()
        if (known := spec.node.known_columns) is not None:
            check_columns(list(pads), known, "loader(pad_values=…)")
        other, column = tuple(name for name, value in pads.items() if value is None), self._token_column(spec)
        if column in other:
            raise ValueError(
                f"pad_values={{{column!r}: None}}: this is the column of tokens, which is always padded. Pass a "
                "number, such as tokenizer.eos_token_id, or omit it for 0."
            )
        given = tuple((name, value) for name, value in pads.items() if value is not None)
        return Layout(kind, column, self._multiple, given, context, other)

    def _pads(self) -> dict[str, Any]:
        values = {} if self.pad_values is None else self.pad_values
        if not isinstance(values, Mapping) or not all(
            each is None or (isinstance(each, (int, float, np.number)) and not isinstance(each, bool))
            for each in values.values()
        ):
            raise TypeError(f"pad_values takes a dict of columns and numbers, got {values!r:.60}")
        return dict(values)

    @property
    def _multiple(self) -> int:
        given = self.pad_to_multiple_of
        return 1 if given is None else integer(given, "loader(pad_to_multiple_of=…)", 1)

    def _token_column(self, spec: PipelineSpec) -> str:
        """Return the column whose lengths are those of the rows."""
        known, kind = spec.node.known.columns, None
        if isinstance(self.length, str):
            kind = known[self.length].kind if self.length in known else None
            if kind is None or is_list(kind):
                return self.length
        if known and _TOKENS not in known and spec.node.known.certain:
            lists = ", ".join(repr(name) for name, column in known.items() if is_list(column.kind))
            remedy = f"Pass length= with a column of lists ({lists})" if lists else "None has lists: tokenize() first"
            given = isinstance(self.length, str) and f"length={self.length!r} is a column of {kind}, without lists"
            default = f"length={_TOKENS!r} by default, but there are {', '.join(map(repr, known))}"
            raise ColumnError(
                f"max_tokens and layout need the column of tokens: {given or default}. {remedy}, or pass a collate_fn "
                "that makes the batch."
            )
        return _TOKENS

    def _budget(
        self, spec: PipelineSpec, layout: Layout | None, context: ContextSlice | None, most_rows: int | None
    ) -> Budget:
        tokens = integer(self.max_tokens, "loader(max_tokens=…)", 1)
        window = WINDOW if self.bucket_window is None else integer(self.bucket_window, "loader(bucket_window=…)", 1)
        padded = layout is None or layout.kind == "padded"
        multiple = lcm(self._multiple, 1 if context is None else context.multiple())
        if tokens < multiple:
            raise ValueError(f"max_tokens={tokens} is less than {multiple}, of which lengths are a multiple")
        if not padded:  # all rows together are padded, or each for itself
            by_document = context is not None and context.layout == "per_document"
            tokens, multiple = tokens // multiple * multiple, context.multiple() if context and by_document else 1
        return Budget(
            tokens,
            most_rows or 0,
            multiple,
            padded,
            window,
            checked_balance(self.balance),
            spec.lanes if spec.lanes_chosen and spec.lanes > 1 else GROUP,
            self._name(),
        )

    def _name(self) -> str:
        length = _TOKENS if self.length is None else self.length
        if isinstance(length, str):
            return length
        return f"function {getattr(length, '__qualname__', type(length).__name__)}" if callable(length) else "given"

    def _known_lengths(self, spec: PipelineSpec, read_column: ReadColumn) -> tuple[Lengths, float, int, bool] | None:
        """Return lengths that are known before anything runs, their mean and the longest. None if there are none."""
        length = _TOKENS if self.length is None else self.length
        if callable(length):
            return None
        if not isinstance(length, str):
            return _given(np.asarray(length), spec)
        name = None if spec.numbered is None else spec.base.stored_column(length)[0]
        if name is None:
            return None
        kind = spec.base.source.schema.field(name).type
        if _is_number(kind):
            return _given(_numbers(read_column, length), spec)
        if not has_length(kind):
            raise _no_length(length, kind)
        found = lengths_of(spec.base.source, name, skip_corrupt=spec.base.on_error == "skip")
        mean = found.total / max(1, len(found) - found.unreadable)
        known: Lengths = found if not found.unreadable else FilledLengths(found, max(1, round(mean)))
        return known, mean, found.longest, True

    def _at_run_time(self, batched: Batched, budget: Budget) -> Batched:
        """Return the pipeline with a stage that forms the batches, after the rows are made."""
        spec, length = batched.spec, _TOKENS if self.length is None else self.length
        if callable(length):
            node, kind = spec.node, spec.format or "python"
            step = _LengthMap(_Count(length), number=node.functions, input_format=kind, seed_globals=False)
            spec = replace(spec, node=node.with_step(step))
            stage = Buckets(budget, HIDDEN, given=True, shuffled=spec.node.shuffled)
        elif isinstance(length, str):
            known, columns = spec.node.known_columns, spec.node.known.columns
            if known is not None and length not in known:
                raise ColumnError(f"loader(length={length!r}): there is no such column. There are: {', '.join(known)}.")
            given = length in columns and _is_number(columns[length].kind)
            stage = Buckets(budget, length, given=given, shuffled=spec.node.shuffled)
        else:
            raise ValueError(
                "loader(length=…): a number for each row is for datasets whose rows have positions. Pass the name of a "
                "column, or a function of a row."
            )
        node = spec.node
        return batched._replace(spec=replace(spec, node=Node(node.base, (*node.stages, stage))), bunches=budget)


@dataclass(frozen=True)
class _Count:
    """The function of a row that puts its length, by a function of the user, into a hidden column."""

    function: Any

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, row: Any) -> dict[str, int]:
        found = self.function(row)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 0:
            raise TypeError(f"loader(length=…) must return a number of tokens, it returned {found!r:.60}")
        return {HIDDEN: int(found)}


@dataclass(frozen=True, eq=False)
class _LengthMap(Map):
    """The map that counts the lengths. Its errors name the argument of the user."""

    @property
    def call(self) -> str:
        return f"loader(length={self.name})"


def _longest(lengths: Lengths, selection: Selection, by_source: bool) -> tuple[int, int]:
    """Return the longest of the chosen rows, and its number in the dataset."""
    found = (0, 0)
    for first in range(0, len(selection), 1 << 20):
        rows = np.arange(first, min(len(selection), first + (1 << 20)), dtype=np.int64)
        here = lengths.of(selection.source_rows(rows) if by_source else rows)
        found = max(found, (int(here.max()), first + int(np.argmax(here))))
    return found


def _no_length(column: str, kind: pa.DataType) -> ColumnError:
    return ColumnError(
        f"loader(length={column!r}): the column contains {kind}, whose values have no length. Name a column of lists "
        "of tokens, or of integers that count them."
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind))


def _numbers(read_column: ReadColumn, name: str) -> npt.NDArray[Any]:
    """Return the numbers of a column, one for each row before the shuffle. Null is 0."""
    import pyarrow.compute as pc

    values = read_column(name, f"loader(length={name!r})")
    parts = [flat_numbers(chunk) for chunk in pc.fill_null(values, 0).chunks] if len(values) else []
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _given(numbers: npt.NDArray[Any], spec: PipelineSpec) -> tuple[Lengths, float, int, bool] | None:
    if spec.numbered is None:
        return None
    rows = len(spec.base.order.selection)
    if numbers.ndim != 1 or len(numbers) != rows or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise ValueError(
            f"loader(length=…) takes one integer for each of the {rows:,} rows of the dataset, before any shuffle, got "
            f"{numbers.dtype} of shape {numbers.shape}. It may also be the name of a column, or a function of a row."
        )
    if len(numbers) and numbers.min() < 0:
        raise ValueError(f"loader(length=…): the length of row {int(np.argmin(numbers))} is {numbers.min()}.")
    lengths = numbers.astype(np.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    return GivenLengths(lengths), float(lengths.mean()) if len(lengths) else 1.0, longest, False


def _ends_with_texts(node: Node) -> bool:
    """Return True if the last function is a tokenizer that does not pad."""
    steps = [step for part in (*node.leaves, *node.stages) for step in getattr(part, "steps", ())]
    functions = [step.function for step in steps if isinstance(step, Map)]
    last = functions[-1] if functions else None
    return isinstance(last, Tokenize) and not (last.options.get("padding") or last.pads)
