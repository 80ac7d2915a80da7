"""The leaf of a pipeline: one source, its order, and the steps over rows or groups of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from midepoch.order import Order, Shard
from midepoch.sources import Source
from midepoch.transforms import (
    Cast,
    ColumnStep,
    Decode,
    FilterExpression,
    FilterRows,
    FlatMap,
    Function,
    Map,
    RemoveColumns,
    RenameColumns,
    SelectColumns,
    Step,
    Unbatch,
)
from midepoch.transforms.arguments import arguments_of
from midepoch.transforms.encode import ItemMap

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True, eq=False)
class Leaf:
    """The definition of the row of one source at each position. Immutable, and small when pickled.

    ``seed_drawn``: the seed was not given by the user, so a resume adopts that of the state. ``seed_agreed``: all ranks
    have the same drawn seed. ``shard``, ``format``, ``global_seed`` and ``path`` are set when it is run:
    ``global_seed`` seeds the global random generators while functions run, ``path`` is explained in ``RunContext``.
    """

    source: Source
    order: Order
    steps: tuple[Step, ...] = ()
    on_error: str = "raise"
    seed_drawn: bool = False
    seed_agreed: bool = False
    defaults: frozenset[str] = frozenset()
    """The settings of the shuffle ("scope", "window") that the user did not give: a resume adopts those of the state.
    """
    shard: Shard = field(default_factory=Shard)
    format: str | None = None
    global_seed: int | None = None
    path: int = 0

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")

    @property
    def seed_alone(self) -> bool:
        """True if the seed was drawn by this process alone."""
        return self.seed_drawn and not self.seed_agreed

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all shards."""
        return len(self.order)

    @property
    def row_bytes(self) -> float:
        """Approximate bytes of a row as read. Infinite for items of a map-style dataset, which may be large."""
        return inf if self.steps and isinstance(self.steps[0], ItemMap) else self.source.bytes_per_row

    @property
    def seed(self) -> int:
        """The seed of the generators of its functions."""
        return self.order.shuffle.seed if self.order.shuffle else 0

    @cached_property
    def head(self) -> dict[str, str]:
        """The columns left by the steps before the first function: name -> name in the source. No other is read."""
        kept = {name: name for name in self.source.schema.names}
        for step in self.steps[: self._first]:
            assert isinstance(step, ColumnStep)
            kept = {new: kept[old] for old, new in step.renamed(list(kept)).items()}
        return kept

    @property
    def _first(self) -> int:
        return next((i for i, step in enumerate(self.steps) if not isinstance(step, ColumnStep)), len(self.steps))

    @cached_property
    def tail(self) -> tuple[Step, ...]:
        """The steps from the first function on."""
        return self.steps[self._first :]

    def stored_column(self, column: str) -> tuple[str | None, Step | None]:
        """Return the name of a column in the source, and None. None and a step if that step makes or removes it."""
        name = column
        for step in reversed(self.tail):
            old = {new: old for old, new in step.mapping}.get(name) if isinstance(step, RenameColumns) else None
            if old is not None:
                name = old
            elif not _keeps(step, name):
                return None, step
        return self.head.get(name), None

    @cached_property
    def known_columns(self) -> tuple[str, ...] | None:
        """The columns after all steps, or None if they are known only after a map has run."""
        return columns_after(self.tail, tuple(self.head))

    @cached_property
    def group(self) -> int | None:
        """The number of rows in a group of the first batched function that depends on its groups, or None."""
        return group_of(self.steps)

    @property
    def has_fixed_groups(self) -> bool:
        """True if batched functions get the same groups whichever multiple of a group is made in one call.

        Not where one gets what is left of the rows after a step that drops or adds some, nor where group sizes differ.
        """
        sizes, changed = set(), self.on_error == "skip"
        for step in self.steps:
            if isinstance(step, Function) and step.batched and not _rowwise(step):
                if changed:
                    return False
                sizes.add(step.batch_size)
            changed |= not is_one_to_one(step) or getattr(step, "on_error", "raise") == "skip"
        return len(sizes) <= 1

    @property
    def can_skip(self) -> bool:
        """True if rows may be skipped, so that shards that deliver rows one by one drift apart."""
        return self.on_error == "skip" or any(getattr(step, "on_error", "raise") == "skip" for step in self.steps)

    @property
    def may_drop_rows(self) -> bool:
        """True if it is known that some rows yield no output, as after a filter. False if groups become other rows."""
        grouped = any(isinstance(step, Map) and not (step.one_to_one and not step.drop_last) for step in self.steps)
        return not grouped and any(
            isinstance(step, (FilterExpression, FilterRows, FlatMap, Unbatch)) for step in self.steps
        )

    @property
    def only_filters(self) -> bool:
        """True if every row becomes one row or none: there are as many outputs as rows that yield one."""
        kinds = (FilterExpression, FilterRows)
        return all(is_one_to_one(step) or isinstance(step, kinds) for step in self.steps)

    @property
    def one_to_one(self) -> bool:
        """True if each row yields one output (or none if it fails)."""
        return all(is_one_to_one(step) for step in self.steps)

    @property
    def has_map(self) -> bool:
        return bool(self.tail)

    @property
    def has_functions(self) -> bool:
        """True if functions of the user run, which may draw from global generators."""
        return any(isinstance(step, Function) for step in self.tail)

    @cached_property
    def text(self) -> str:
        """The steps in words, as far as a state depends on them: the kind of each step, not its code."""
        return text_of(self.steps) or "none"

    @cached_property
    def arguments(self) -> str:
        """The arguments of the steps, as far as they have a stable text. Empty without steps."""
        return arguments_text(self.steps)


def columns_after(steps: tuple[Step, ...], names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the columns after steps, or None if they are known only after a map has run."""
    for step in steps:
        if isinstance(step, ColumnStep):
            names = step.columns(names)
        elif isinstance(step, Map) and (made := step.outputs) is not None:
            names = tuple(dict.fromkeys([*(name for name in names if name not in step.remove_columns), *made]))
        elif isinstance(step, (Map, FlatMap)):
            return None
    return names


def columns_before(steps: tuple[Step, ...], names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the columns from which steps make these, or None if they may use any column."""
    for step in reversed(steps):
        if isinstance(step, SelectColumns):
            names = step.names
        elif isinstance(step, FilterRows) and step.input_columns is not None:
            names = (*names, *step.input_columns)
        elif isinstance(step, Map) and step.input_columns is not None and (made := step.outputs) is not None:
            names = (*(name for name in names if name not in made), *step.input_columns, *step.remove_columns)
        else:
            return None
    return tuple(dict.fromkeys(names))


def _keeps(step: Step, column: str) -> bool:
    """Return True if a step certainly leaves the values of a column as they are."""
    if isinstance(step, SelectColumns):
        return column in step.names
    if isinstance(step, RemoveColumns):
        return column not in step.names
    if isinstance(step, RenameColumns):
        return column not in dict(step.mapping)
    if isinstance(step, Cast):
        return column not in dict(step.types)
    if isinstance(step, Decode):
        return column != step.column
    if not isinstance(step, Map) or step.outputs is None:
        return False
    return column not in (*step.outputs, *step.remove_columns)


def group_of(steps: tuple[Step, ...]) -> int | None:
    """Return the number of rows in a group of the first batched function that depends on its groups."""
    return next(
        (step.batch_size for step in steps if isinstance(step, Function) and step.batched and not _rowwise(step)), None
    )


def _rowwise(step: Function) -> bool:
    return isinstance(step, Map) and step.rowwise


def is_one_to_one(step: Step) -> bool:
    if isinstance(step, (ColumnStep, Cast, Decode)):
        return True
    return isinstance(step, Map) and step.one_to_one and not step.drop_last


def text_of(steps: tuple[Step, ...]) -> str:
    return ",".join(_name(step) for step in steps if not isinstance(step, ColumnStep))


def arguments_text(steps: tuple[Step, ...]) -> str:
    return ",".join(arguments_of(step) for step in steps if not isinstance(step, ColumnStep))


def _name(step: Step) -> str:
    if isinstance(step, Unbatch):
        return f"unbatch[{' '.join(step.names)}]" if step.given else "unbatch"
    if isinstance(step, (Cast, Decode)):
        return step.text
    if not isinstance(step, Map):
        if isinstance(step, FlatMap):
            return "flat_map"
        return f"filter[batched {step.batch_size}]" if isinstance(step, FilterRows) and step.batched else "filter"
    if not step.one_to_one or step.drop_last:
        return f"map[batched {step.batch_size}{' drop' * step.drop_last}{' to any' * (not step.one_to_one)}]"
    return "map[batched]" if step.batched else "map"
