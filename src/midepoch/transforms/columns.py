"""Steps that select, remove and rename columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midepoch.errors import ColumnError
from midepoch.transforms.batch import Batch


def check_columns(wanted: Sequence[str], present: Sequence[str], what: str) -> None:
    """Raise ColumnError with the missing and the existing columns."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ColumnError(f"{what}: no column {', '.join(map(repr, missing))}. There are: {', '.join(present)}.")


@dataclass(frozen=True)
class SelectColumns:
    """Selection of these columns, in this order."""

    names: tuple[str, ...]

    def columns(self, before: Sequence[str]) -> tuple[str, ...]:
        check_columns(self.names, before, "select_columns")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ColumnError(f"select_columns: {', '.join(map(repr, twice))} named twice.")
        return self.names

    def apply(self, batch: Batch) -> Batch:
        check_columns(self.names, list(batch.columns), "select_columns")
        return batch.with_columns({name: batch.columns[name] for name in self.names})


@dataclass(frozen=True)
class RemoveColumns:
    """Removal of these columns."""

    names: tuple[str, ...]

    def columns(self, before: Sequence[str]) -> tuple[str, ...]:
        check_columns(self.names, before, "remove_columns")
        return tuple(name for name in before if name not in self.names)

    def apply(self, batch: Batch) -> Batch:
        kept = self.columns(list(batch.columns))
        return batch.with_columns({name: batch.columns[name] for name in kept})


@dataclass(frozen=True)
class RenameColumns:
    """New names for some columns. The others keep theirs."""

    mapping: tuple[tuple[str, str], ...]

    def columns(self, before: Sequence[str]) -> tuple[str, ...]:
        names = dict(self.mapping)
        check_columns(list(names), before, "rename_columns")
        after = [names.get(name, name) for name in before]
        twice = sorted({name for name in after if after.count(name) > 1})
        if twice:
            raise ColumnError(f"rename_columns: two columns would be named {', '.join(map(repr, twice))}.")
        return tuple(after)

    def apply(self, batch: Batch) -> Batch:
        names = self.columns(list(batch.columns))
        pairs = zip(batch.columns, names, strict=True)
        nullable = {new: batch.nullable[old] for old, new in pairs if old in batch.nullable}
        return batch.with_columns(dict(zip(names, batch.columns.values(), strict=True)), nullable)
