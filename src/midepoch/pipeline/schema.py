"""The schema of a flow, as far as it is known before anything runs, and the common schema of the parts of a mix.

Types are known up to the first function; its results are known only after it has run. A mix or a concatenation has the
types of the parts that are known, and results of functions of the other parts are converted to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from midepoch.errors import ColumnError
from midepoch.pipeline.leaf import Leaf
from midepoch.sources.schemas import plain_schema
from midepoch.transforms import Batch, ColumnStep, FilterExpression, FilterRows, Step, Unbatch
from midepoch.transforms.arrow_values import Paths, is_list, type_without_extension
from midepoch.transforms.columns import Cast, common_type, converted, renamed_paths, same_type
from midepoch.transforms.packing import PackSpec

if TYPE_CHECKING:
    from midepoch.pipeline.node import Node


@dataclass(frozen=True)
class ReadColumn:
    """A column as read: its type and the paths of its nulls. ``encoded``: a Hugging Face feature decodes it."""

    kind: pa.DataType
    nulls: Paths = frozenset()
    encoded: bool = False


@dataclass(frozen=True)
class Known:
    """The columns of a flow before anything runs. ``certain``: without functions, these are exact."""

    columns: Mapping[str, ReadColumn]
    certain: bool = True
    sequences: tuple[str, ...] | None = None
    """The columns that contain lists, if known although their types are not."""

    @property
    def lists(self) -> tuple[str, ...] | None:
        """The columns that contain lists, or None if they are known only after a function has run."""
        if not self.certain:
            return self.sequences
        plain = ((name, column) for name, column in self.columns.items() if not column.encoded)
        return tuple(name for name, column in plain if is_list(type_without_extension(column.kind)))

    def listed(self) -> Known:
        """Return the columns of groups of rows as one row each."""
        if not self.certain or any(column.encoded for column in self.columns.values()):
            return NOTHING
        return Known({name: _list_of(column) for name, column in self.columns.items()})

    def packed(self, spec: PackSpec) -> Known:
        """Return the columns of packed sequences: all of them are lists."""
        return Known({}, certain=False, sequences=spec.columns)

    def after(self, steps: Iterable[Step]) -> Known:
        """Return the columns after these steps."""
        known = self
        for step in steps:
            if isinstance(step, Cast):
                known = known._cast(step)
            elif isinstance(step, ColumnStep) and known.certain:
                names = step.renamed(list(known.columns))
                known = Known({new: known.columns[old] for old, new in names.items()})
            elif isinstance(step, Unbatch) and known.certain:
                inner = {name: _item_of(known.columns[name]) for name in step.names if name in known.columns}
                known = Known({**known.columns, **inner})
            elif not isinstance(step, (FilterRows, FilterExpression)):
                known = Known(known.columns, certain=False)
        return known

    def _cast(self, step: Cast) -> Known:
        columns = dict(self.columns)
        for name, kind in step.types:
            before = columns.get(name)
            nulls = renamed_paths(before.nulls, before.kind, kind) if before is not None else frozenset()
            columns[name] = ReadColumn(kind, nulls, before is not None and before.encoded)
        return Known(columns, self.certain)


NOTHING = Known({}, certain=False)
_REMEDY = "Give them the same columns first (select_columns, rename_columns, map)"


def _list_of(column: ReadColumn) -> ReadColumn:
    return ReadColumn(pa.large_list(column.kind), frozenset(("item", *path) for path in column.nulls))


def _item_of(column: ReadColumn) -> ReadColumn:
    """Return the column of the items of lists. Null lists become no rows, so only nulls inside of lists count."""
    kind = type_without_extension(column.kind)
    inner = getattr(kind, "value_type", pa.null())
    return ReadColumn(inner, frozenset(path[1:] for path in column.nulls if path))


def known_of(pipeline: Leaf) -> Known:
    """Return the columns of one source after all its steps."""
    source = pipeline.source
    schema, nulls, encoded = plain_schema(source.schema), source.nullable, source.decoded
    columns = {
        new: ReadColumn(schema.field(old).type, nulls[old], old in encoded) for new, old in pipeline.head.items()
    }
    return Known(columns).after(pipeline.tail)


@dataclass(frozen=True)
class Schema:
    """The common schema of several parts. ``fixed``: exactly these columns and types, in this order.

    If no part is certain, ``fixed`` is empty, and columns that are Arrow arrays get the types of ``likely``.
    ``problem``: the reason for which the parts cannot be combined with all their columns. Then ``fixed`` has those in
    which they agree.
    """

    what: str
    fixed: Mapping[str, ReadColumn] = field(default_factory=dict)
    likely: Mapping[str, ReadColumn] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    problem: str | None = None

    def check(self) -> None:
        """Raise ColumnError if the parts do not agree."""
        if self.problem is not None:
            raise ColumnError(self.problem)

    def conform(self, batch: Batch) -> Batch:
        """Return the rows with the columns and types of the schema. Raises ColumnError."""
        if not len(batch):
            return batch
        if not self.fixed:
            return self._likely(batch)
        if batch.columns.keys() - self.fixed.keys() or self.fixed.keys() - batch.columns.keys() - self.filled:
            raise ColumnError(
                f"{self.what}: one source has the columns {', '.join(self.fixed)}, another has "
                f"{', '.join(batch.columns)}. {_REMEDY}."
            )
        columns = {}
        for name, column in self.fixed.items():
            if name not in batch.columns:
                columns[name] = pa.nulls(len(batch), column.kind)
            elif column.encoded:
                columns[name] = batch.columns[name]
            else:
                columns[name] = converted(name, batch.columns[name], column.kind)
        return batch.with_columns(columns, {name: column.nulls for name, column in self.fixed.items()})

    def _likely(self, batch: Batch) -> Batch:
        columns, nullable = dict(batch.columns), dict(batch.nullable)
        for name, column in batch.columns.items():
            wanted = self.likely.get(name)
            if wanted is not None and isinstance(column, pa.Array) and not wanted.encoded:
                columns[name], nullable[name] = converted(name, column, wanted.kind), wanted.nulls
        return batch.with_columns(columns, nullable)

    def leaves_as_read(self, known: Known) -> bool:
        """Return True if rows of a part have this schema as stored in the file: the same types, and no nulls."""
        if not self.fixed or self.fixed.keys() != known.columns.keys():
            return False
        return all(
            not column.encoded and not column.nulls and same_type(column.kind, known.columns[name].kind)
            for name, column in self.fixed.items()
        )


def schema_of(parts: Sequence[Node], what: str, *, fill: bool = False) -> Schema:
    """Return the common schema of the parts of a mix or concatenation.

    ``fill``: columns that a part lacks are null in it. A step after the combination may keep only columns in which the
    parts agree, so the reason for which others cannot be combined is returned, not raised.
    """
    known = [part.known for part in parts]
    columns = [] if fill else [part.known_columns for part in parts]
    certain = [(number, each) for number, each in enumerate(known) if each.certain]
    if not certain:
        return Schema(what, likely=_likely(known), problem=_other_columns(columns, what))
    names = dict.fromkeys(name for _, each in certain for name in each.columns)
    filled = frozenset(name for name in names if any(name not in each.columns for _, each in certain))
    fixed, other_type = {}, None
    for name in names:
        if name in filled and not fill:
            continue
        having = [(number, each.columns[name]) for number, each in certain if name in each.columns]
        joint = _joint(name, having, what)
        if isinstance(joint, str):
            other_type = other_type or joint
            continue
        if name in filled:
            joint = ReadColumn(joint.kind, joint.nulls | {()}, joint.encoded)
        fixed[name] = joint
    problem = _other_columns(columns, what, fixed) or other_type
    return Schema(what, fixed, filled=filled if fill else frozenset(), problem=problem)


def _other_columns(
    columns: Sequence[Sequence[str] | None], what: str, joint: Mapping[str, ReadColumn] | None = None
) -> str | None:
    """Return the difference between the columns of two parts in words, or None if all known columns are the same.

    ``joint``: the columns with a type in common, if types are known.
    """
    first, *others = [(number, names) for number, names in enumerate(columns) if names is not None] or [(0, ())]
    for number, names in others:
        if set(names) != set(first[1]):
            shared = [name for name in first[1] if name in (names if joint is None else joint)]
            keep = f", or keep those of both: {what}(…).select_columns({shared})" if shared else ""
            return (
                f"{what}: source {first[0]} has the columns {', '.join(first[1])}, source {number} has "
                f"{', '.join(names)}. {_REMEDY}{keep}."
            )
    return None


def _joint(name: str, having: Sequence[tuple[int, ReadColumn]], what: str) -> ReadColumn | str:
    """Return the common column, or the reason for which there is none."""
    first, column = having[0]
    kind = column.kind
    for number, other in having[1:]:
        both = common_type(kind, other.kind)
        if both is None or other.encoded != column.encoded:
            return (
                f"{what}: column {name!r} is {kind} in source {first} and {other.kind} in source {number}, which have "
                f"no type in common. Convert one of them with cast({{{name!r}: …}})."
            )
        kind = both
    nulls = frozenset().union(*(renamed_paths(each.nulls, each.kind, kind) for _, each in having))
    return ReadColumn(kind, nulls, column.encoded)


def _likely(known: Sequence[Known]) -> dict[str, ReadColumn]:
    found: dict[str, ReadColumn] = {}
    for each in known:
        for name, column in each.columns.items():
            before = found.get(name)
            both = column.kind if before is None else common_type(before.kind, column.kind)
            if both is None or (before is not None and before.encoded != column.encoded):
                continue  # a function may return another type
            nulls = renamed_paths(column.nulls, column.kind, both)
            if before is not None:
                nulls |= renamed_paths(before.nulls, before.kind, both)
            found[name] = ReadColumn(both, nulls, column.encoded)
    return found
