"""The tree of a pipeline: a leaf or a combination of nodes, and the stages after it. Frozen values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from midepoch.order import Weighted
from midepoch.order.budget import Budget
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.order.schedule import Schedule
from midepoch.order.turns import spans
from midepoch.pipeline.leaf import (
    Leaf,
    arguments_text,
    columns_after,
    columns_before,
    group_of,
    is_one_to_one,
    text_of,
)
from midepoch.pipeline.schema import Known, Schema, known_of, schema_of
from midepoch.transforms import Cast, ColumnStep, Decode, Function, Map, SelectColumns, Step
from midepoch.transforms.packing import PackSpec


@dataclass(frozen=True, eq=False)
class Local:
    """Steps after a stage, over groups of its outputs."""

    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """The number of outputs in a group."""
        return group_of(self.steps) or 1

    @property
    def grouped(self) -> bool:
        """True if the result depends on which outputs are in a group."""
        return group_of(self.steps) is not None

    @property
    def keeps_rows(self) -> bool:
        """True if every output becomes exactly one, independently of others: then the stage needs no cursor."""
        return not self.grouped and all(is_one_to_one(step) and not skips(step) for step in self.steps)

    @property
    def text(self) -> str:
        return text_of(self.steps)


@dataclass(frozen=True)
class Rebatch:
    """Groups of outputs as one row each."""

    size: int
    drop_last: bool = False

    @property
    def text(self) -> str:
        return f"batch[{self.size}{' drop' * self.drop_last}]"


@dataclass(frozen=True)
class Window:
    """Outputs shuffled within windows of ``size``."""

    size: int
    seed: int

    @property
    def text(self) -> str:
        return f"shuffle[{self.size} seed={self.seed}]"


@dataclass(frozen=True)
class Slice:
    """Outputs number ``start`` to ``stop`` of every epoch, or to its end if ``stop`` is None: take or skip."""

    start: int = 0
    stop: int | None = None

    def count_of(self, outputs: float | None) -> int:
        """Return the number of outputs left of ``outputs``, or of an unlimited number if that is None."""
        if outputs is None or (self.stop is not None and self.stop < outputs):
            assert self.stop is not None
            outputs = self.stop
        return max(0, round(outputs) - self.start)

    @property
    def text(self) -> str:
        return f"skip[{self.start}]" if self.stop is None else f"take[{self.stop}]"


HIDDEN = "__midepoch_length__"
"""The column with the result of a function of the user that counts tokens. It is removed with the stage."""


@dataclass(frozen=True)
class Buckets:
    """Batches by a budget of tokens, of the outputs in a window. Only a loader adds it, as the last stage.

    ``column``: its lengths count, or its numbers if they are ``given``.
    ``shuffled``: batches of a window are shuffled, else the longest rows come first.
    """

    budget: Budget
    column: str
    given: bool = False
    shuffled: bool = True

    @property
    def size(self) -> int:
        """The number of outputs in a group."""
        return self.budget.window

    @property
    def text(self) -> str:
        return ""  # the budget may change between windows: a state has it beside the cursor


StageSpec = Local | Rebatch | Window | Slice | PackSpec | Buckets


def skips(step: Step) -> bool:
    """Return True if a step drops rows on which it fails."""
    return getattr(step, "on_error", "raise") == "skip"


Excluded = tuple[Intervals, ...]
"""For each source its rows before the shuffle, or nothing at all if there are none."""


def _joins_rows(steps: Any) -> bool:
    """Return True if a function of a source or a stage makes rows of groups of rows."""
    return any(isinstance(step, Map) and not step.one_to_one for step in getattr(steps, "steps", ()))


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
            raise ValueError(f"exclude(…): there is no source {source!r}. There are: {known}.")
        owner = "the dataset" if len(leaves) == 1 else f"source {(names[number] if names else number)!r}"
        found[number] = found[number].union(_rows(given, len(leaves[number].order.selection), owner))
    return tuple(found)


def _rows(given: Any, count: int, owner: str) -> Intervals:
    given = [given] if isinstance(given, int) else given
    numbers = given if isinstance(given, range) else np.asarray(given if hasattr(given, "dtype") else list(given))
    if not isinstance(numbers, range) and (numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers))):
        mask = " For a mask, pass np.flatnonzero(mask)." if getattr(numbers, "dtype", None) == np.bool_ else ""
        raise TypeError(f"exclude(rows=…) takes numbers of rows, got {given!r:.60}.{mask}")
    if len(numbers) and not 0 <= min(numbers) <= max(numbers) < count:
        bad = min(numbers) if min(numbers) < 0 else max(numbers)
        raise ValueError(f"exclude(…): there is no row {bad}: {owner} has {count:,} rows.")
    return Intervals.from_positions(numbers)


STOPS = ("first", "all", "never")


class Learned(NamedTuple):
    """Weights that were set during the run. With a schedule, they apply in one phase of one epoch."""

    epoch: int
    phase: int
    weights: tuple[float, ...]

    def applies(self, epoch: int, phase: int) -> bool:
        """Return True for the phase of a schedule in which they apply."""
        return (epoch, phase) == (self.epoch, self.phase)


@dataclass(frozen=True, eq=False)
class Mix:
    """Outputs of several flows, interleaved by their weights.

    ``schedule``: weights by position; then ``weights`` are those of the first phase. ``tokens``: the column whose
    tokens the schedule counts, and the tokens that are added to each row. ``learned``: weights that were set during
    the run.
    """

    parts: tuple[Node, ...]
    weights: tuple[float, ...]
    seed: int
    stop: str = "first"
    names: tuple[str, ...] = ()
    schedule: Schedule | None = None
    tokens: tuple[str, int] | None = None
    learned: Learned | None = None

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise ValueError(f"stop must be one of {', '.join(map(repr, STOPS))}, got {self.stop!r}")
        _ = self.counts if self.schedule is None else None  # refuses weights that are too small

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The count of each part in a span of positions, without a schedule."""
        return spans(self.current)

    @property
    def current(self) -> tuple[float, ...]:
        """The weights, or those that were set during the run."""
        return self.weights if self.learned is None else self.learned.weights

    def most_passes(self, number: int) -> int | None:
        """Return the most passes over a part, or None if a schedule does not limit them."""
        return None if self.schedule is None else self.schedule.max_passes.get(self.names[number])

    @cached_property
    def tags(self) -> tuple[int, ...]:
        """A number for each part that identifies its rows anywhere in the mix: from its name, or else its digest."""
        return tags_of(self.names or [part.digest for part in self.parts])

    @cached_property
    def schema(self) -> Schema:
        """The schema to which the rows of all parts are converted."""
        return schema_of(self.parts, "mix")

    @property
    def text(self) -> str:
        kind = self.stop if self.schedule is None else f"schedule {self.schedule.unit}"
        return f"mix[{kind} seed={self.seed}]"


@dataclass(frozen=True, eq=False)
class Concat:
    """One flow after the other."""

    parts: tuple[Node, ...]

    @cached_property
    def tags(self) -> tuple[int, ...]:
        """Numbers of the parts, as in a mix."""
        return tags_of([part.digest for part in self.parts])

    @cached_property
    def schema(self) -> Schema:
        """The common schema, as in a mix. Columns that a part lacks are null in it."""
        return schema_of(self.parts, "concat", fill=True)

    @property
    def text(self) -> str:
        return "concat"


@dataclass(frozen=True, eq=False)
class Zip:
    """Flows side by side until the shortest ends: the columns of all in one row."""

    parts: tuple[Node, ...]

    @property
    def tags(self) -> tuple[int, ...]:
        """Numbers of the parts, as in a mix, from their order."""
        return tags_of([str(number) for number in range(len(self.parts))])

    @property
    def text(self) -> str:
        return "zip"


Combination = Mix | Concat | Zip


def tags_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for each name, different for names that repeat."""
    texts = [f"{name} {names[:i].count(name)}" for i, name in enumerate(names)]
    return tuple(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") for text in texts)


def path_below(path: int, tag: int) -> int:
    """Return the path of a part of a combination: 64 bits, not 0."""
    digest = hashlib.blake2b(f"{path} {tag}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def _of_a_row(step: Step) -> bool:
    """Return True if a step makes one row of each row, independently of the other rows and of its position."""
    if isinstance(step, (ColumnStep, Cast, Decode)):
        return not skips(step)
    if not isinstance(step, Map) or not step.one_to_one or skips(step):
        return False
    return (not step.batched or step.rowwise) and not step.with_generator and not step.with_indices


@dataclass(frozen=True, eq=False)
class Node:
    """The definition of the outputs of a flow from a cursor on, except for the lanes."""

    base: Leaf | Combination
    stages: tuple[StageSpec, ...] = ()

    @property
    def remembering(self) -> tuple[StageSpec, ...]:
        """The stages that have a level in the cursor."""
        return tuple(stage for stage in self.stages if not (isinstance(stage, Local) and stage.keeps_rows))

    @property
    def before(self) -> Node:
        """The node without its last stage."""
        return Node(self.base, self.stages[:-1])

    @property
    def cuts_alike(self) -> bool:
        """True if the lanes together have the same outputs for any number of lanes.

        False for a slice, and for zipped parts that are split at different rows.
        """
        if any(isinstance(stage, Slice) for stage in self.stages):
            return False
        if isinstance(self.base, Leaf):
            return True
        if isinstance(self.base, Zip):
            parts = self.base.parts
            rows = {part.leaves[0].rows for part in parts}
            return len(rows) == 1 and all(part.is_rows for part in parts)
        return all(part.cuts_alike for part in self.base.parts)

    @property
    def has_positions(self) -> bool:
        """True if positions can be computed: each row of the one source yields one output (or none if it fails)."""
        return isinstance(self.base, Leaf) and not self.stages and self.base.one_to_one

    @property
    def shuffled(self) -> bool:
        """True if the order differs between epochs."""
        return self.stages_shuffle or any(leaf.order.shuffle is not None for leaf in self.leaves)

    @property
    def stages_shuffle(self) -> bool:
        """True if outputs are shuffled after they are made."""
        return any(isinstance(stage, Window) for stage in self.stages)

    @property
    def budget(self) -> Budget | None:
        """The budget of batches by tokens, if they are made here."""
        last = self.stages[-1] if self.stages else None
        return last.budget if isinstance(last, Buckets) else None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the mix that outputs are made from, if it has one."""
        return self.base.schedule if isinstance(self.base, Mix) else None

    @property
    def follows_schedule(self) -> bool:
        """True if each row that a schedule counts is one output, or each of its sequences."""
        follows = (
            isinstance(stage, Window)
            or (isinstance(stage, Local) and stage.keeps_rows)
            or (isinstance(stage, PackSpec) and stage.schedule is not None)
            for stage in self.stages
        )
        return self.schedule is not None and all(follows)

    @property
    def is_rows(self) -> bool:
        """True if outputs are the rows of one source, one to one."""
        keeps = all(isinstance(stage, Local) and stage.keeps_rows for stage in self.stages)
        return isinstance(self.base, Leaf) and self.base.one_to_one and not self.base.can_skip and keeps

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves, from left to right."""
        if isinstance(self.base, Leaf):
            return (self.base,)
        return tuple(chain.from_iterable(part.leaves for part in self.base.parts))

    @property
    def has_functions(self) -> bool:
        """True if functions of the user run, which may draw from global generators."""
        return self.has_later_functions or any(leaf.has_functions for leaf in self.leaves)

    @property
    def has_later_functions(self) -> bool:
        """True if functions run after the steps of the leaves, as those do that follow a pack."""
        steps = (step for stage in self.stages if isinstance(stage, Local) for step in stage.steps)
        parts = () if isinstance(self.base, Leaf) else self.base.parts
        return any(isinstance(step, Function) for step in steps) or any(part.has_later_functions for part in parts)

    def paths(self, path: int = 0) -> tuple[int, ...]:
        """Return a number for each leaf that separates the generators of its functions from those of all others."""
        if isinstance(self.base, Leaf):
            return (path,)
        parts = zip(self.base.parts, self.base.tags, strict=True)
        return tuple(chain.from_iterable(part.paths(path_below(path, tag)) for part, tag in parts))

    def with_step(self, step: Step) -> Node:
        """Return the node with one more step.

        A step that treats each row of a mix independently is moved into its parts, where workers run it.
        """
        node = self.using(step) if isinstance(step, SelectColumns) and self.stages else self
        base, stages = node.base, node.stages
        if isinstance(step, Map) and step.drop_last and not self._has_whole_groups:
            return Node(base, (*stages, Local((self._numbered(step),))))
        if stages and isinstance(stages[-1], Local):
            return Node(base, (*stages[:-1], Local((*stages[-1].steps, self._numbered(step)))))
        if isinstance(base, Leaf) and not stages:
            return Node(replace(base, steps=(*base.steps, self._numbered(step))))
        if isinstance(base, (Mix, Concat)) and not stages and _of_a_row(step):
            return Node(replace(base, parts=tuple(part.with_step(step) for part in base.parts)))
        return Node(base, (*stages, Local((self._numbered(step),))))

    def using(self, step: SelectColumns) -> Node:
        """Return the node for a stage or step that uses only some columns: combined parts have no others."""
        needed: tuple[str, ...] | None = step.names
        for stage in reversed(self.stages):
            if needed is not None and not isinstance(stage, (Window, Slice)):
                needed = columns_before(stage.steps, needed) if isinstance(stage, Local) else None
        if needed is None or isinstance(self.base, (Leaf, Zip)):
            return self
        if isinstance(self.base, Mix) and self.base.tokens is not None:
            needed = tuple(dict.fromkeys([*needed, self.base.tokens[0]]))
        if isinstance(self.base, Concat) and any(
            not set(needed) <= set(part.known_columns or ()) for part in self.base.parts
        ):
            return self  # columns that a part lacks are null
        step = replace(step, names=needed)
        return Node(replace(self.base, parts=tuple(part.with_step(step) for part in self.base.parts)), self.stages)

    @property
    def joins_rows(self) -> bool:
        """True if an output may be made of several rows. Provenance names only the first of them."""
        base, joins = self.base, any(isinstance(stage, Rebatch) or _joins_rows(stage) for stage in self.stages)
        if isinstance(base, Leaf):
            return joins or _joins_rows(base)
        return joins or isinstance(base, Zip) or any(part.joins_rows for part in base.parts)

    @property
    def _has_whole_groups(self) -> bool:
        """True if a batched function would get full groups except for the last: rows as read, not grouped before."""
        base = self.base
        rows = isinstance(base, Leaf) and base.one_to_one and not base.can_skip and base.group is None
        return rows and not self.stages

    def _numbered(self, step: Step) -> Step:
        """Return a function with the number of functions before it, which separates their generators."""
        return replace(step, number=self.functions) if isinstance(step, Function) else step

    @property
    def functions(self) -> int:
        """The number of functions, except for those of the parts of a combination."""
        steps = chain(
            self.base.steps if isinstance(self.base, Leaf) else (),
            chain.from_iterable(stage.steps for stage in self.stages if isinstance(stage, Local)),
        )
        return sum(isinstance(step, Function) for step in steps)

    @property
    def seed(self) -> int:
        """The seed of the generators of functions after a stage."""
        if isinstance(self.base, Leaf):
            return self.base.seed
        return self.base.seed if isinstance(self.base, Mix) else self.base.parts[0].seed

    @property
    def plain(self) -> bool:
        """True if outputs are unchanged rows of sources: then they can be located in memory without reading them."""
        if self.stages or isinstance(self.base, Zip):
            return False
        if isinstance(self.base, Leaf):
            return not self.base.tail and not self.base.can_skip
        return all(part.plain for part in self.base.parts)

    @cached_property
    def known(self) -> Known:
        """The columns and types of outputs, as far as they are known before anything runs."""
        if isinstance(self.base, Leaf):
            known = known_of(self.base)
        elif isinstance(self.base, Zip):
            parts = [part.known for part in self.base.parts]
            columns = {name: column for part in parts for name, column in part.columns.items()}
            known = Known(columns, all(part.certain for part in parts))
        else:
            schema = self.base.schema
            known = Known(schema.fixed or schema.likely, certain=bool(schema.fixed))
        for stage in self.stages:
            if isinstance(stage, Local):
                known = known.after(stage.steps)
            elif isinstance(stage, Rebatch):
                known = known.listed()
            elif isinstance(stage, PackSpec):
                known = known.packed(stage)
        return known

    def check(self) -> None:
        """Raise ColumnError if parts that are combined do not agree in their columns."""
        if not isinstance(self.base, Leaf):
            for part in self.base.parts:
                part.check()
        if isinstance(self.base, (Mix, Concat)):
            self.base.schema.check()

    @property
    def known_columns(self) -> tuple[str, ...] | None:
        """The columns of an output, or None if they are known only after a function has run."""
        if isinstance(self.base, Leaf):
            names = self.base.known_columns
        else:
            parts = [part.known_columns for part in self.base.parts]
            names = parts[0]
            if isinstance(self.base, (Mix, Concat)) and self.base.schema.fixed:
                names = tuple(self.base.schema.fixed)
            elif isinstance(self.base, Mix) and names is not None:
                names = tuple(name for name in names if all(each is None or name in each for each in parts))
            elif isinstance(self.base, Zip):
                names = None if None in parts else tuple(chain.from_iterable(part or () for part in parts))
        for stage in self.stages:
            if isinstance(stage, PackSpec):
                names = stage.columns
            elif isinstance(stage, Local) and names is not None:
                names = columns_after(stage.steps, names)
        return names

    @cached_property
    def text(self) -> str:
        """The pipeline in words, as far as a state depends on it."""
        stages = [stage.text for stage in self.stages]
        if isinstance(self.base, Leaf):
            return ",".join(text for text in (self.base.text, *stages) if text and text != "none") or "none"
        return ",".join(text for text in (self.base.text, *stages) if text)

    @cached_property
    def arguments(self) -> str:
        """The arguments of the steps, except for those of the parts of a combination."""
        steps = [arguments_text(stage.steps) for stage in self.stages if isinstance(stage, Local)]
        first = self.base.arguments if isinstance(self.base, Leaf) else ""
        return ",".join(text for text in (first, *steps) if text)

    @cached_property
    def digest(self) -> str:
        """A name of the pipeline by which a mix recognizes its parts."""
        what = [self.text]
        if isinstance(self.base, Leaf):
            shuffle = self.base.order.shuffle
            seed = None if shuffle is None or self.base.seed_drawn else shuffle.seed
            what += [self.base.source.fingerprint, self.base.order.selection.text]
            if isinstance(shuffle, Weighted):
                what += [shuffle.scope, shuffle.digest, str(shuffle.samples), str(seed)]
            elif shuffle is not None:
                # Default windows depend on the size of the cache, not on the data.
                window = self.base.source.window if "window" in self.base.defaults else shuffle.window
                what += [shuffle.scope, str(window), str(seed)]
        else:
            what += [part.digest for part in self.base.parts]
        return hashlib.blake2b("\n".join(what).encode(), digest_size=6).hexdigest()
