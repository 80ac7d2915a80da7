"""The columns of a dataset: choosing, renaming and converting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from midepoch.pipeline.node import Node
from midepoch.pipeline.stage_specs import StageSpec
from midepoch.transforms import Cast, RemoveColumns, RenameColumns, SelectColumns, Step
from midepoch.transforms.cast import inside, types_by_name
from midepoch.transforms.columns import check_columns

if TYPE_CHECKING:
    import pyarrow as pa

Self = TypeVar("Self", bound="ColumnSteps")


class ColumnSteps:
    """The methods of a dataset that change columns. Every call returns a new dataset."""

    def _with_step(self: Self, step: Step) -> Self:
        raise NotImplementedError

    def _with_stage(self: Self, stage: StageSpec) -> Self:
        raise NotImplementedError

    @property
    def _node(self) -> Node:
        raise NotImplementedError

    @property
    def _functions(self) -> int:
        """The number of functions so far, which separates their generators."""
        raise NotImplementedError

    @property
    def _input_format(self) -> str:
        raise NotImplementedError

    @property
    def _columns(self) -> tuple[str, ...] | None:
        """The columns, or None if they are known only after a map has run."""
        raise NotImplementedError

    @property
    def _lists(self) -> tuple[str, ...] | None:
        """The columns that contain lists, or None if they are known only after a map has run."""
        raise NotImplementedError

    @property
    def _tensors(self) -> bool:
        """True if functions get tensors of torch for arrays: in the torch format, and in none."""
        raise NotImplementedError

    @property
    def _skips(self) -> bool:
        """True if damaged rows of a source are skipped."""
        raise NotImplementedError

    def _feature(self, column: str) -> str | None:
        """Return the name of the Hugging Face feature of a column ("Image"), or None."""
        raise NotImplementedError

    def select_columns(self: Self, column_names: str | Sequence[str]) -> Self:
        """Keep only these columns. The others are not read."""
        return self._with_step(SelectColumns(names_of(column_names)))

    def remove_columns(self: Self, column_names: str | Sequence[str]) -> Self:
        """Remove these columns."""
        return self._with_step(RemoveColumns(names_of(column_names)))

    def rename_columns(self: Self, column_mapping: Mapping[str, str]) -> Self:
        """Rename columns."""
        if not isinstance(column_mapping, Mapping):
            raise TypeError(f"rename_columns takes {{old: new}}, got {column_mapping!r:.60}")
        return self._with_step(RenameColumns(tuple(column_mapping.items())))

    def rename_column(self: Self, original_column_name: str, new_column_name: str) -> Self:
        """Rename one column."""
        return self.rename_columns({original_column_name: new_column_name})

    def cast(self: Self, columns: Mapping[str, Any] | pa.Schema) -> Self:
        """Convert columns to these Arrow types: ``cast({"label": "int32", "ids": pa.list_(pa.int32())})``.

        The type of a number converts the items of a column of lists. Results of functions have the types of their
        values, which may differ between batches. A cast makes them equal.
        """
        types = types_by_name(columns)
        if self._columns is not None:
            check_columns([name for name, _ in types], self._columns, "cast")
        known = self._node.known
        if known.certain:
            types = tuple((name, inside(known.columns[name].kind, kind)) for name, kind in types)
        return self._with_step(Cast(types))

    def cast_column(self: Self, column: str, feature: Any) -> Self:
        """Convert one column to an Arrow type, or to that of a Hugging Face feature (``Value``, ``List``, …).

        A ``ClassLabel`` replaces the names of classes by their numbers.
        """
        if type(feature).__name__ == "ClassLabel" and getattr(feature, "names", None):
            return self._with_classes(column, tuple(feature.names))
        return self.cast({column: feature})

    def _with_classes(self: Self, column: str, names: tuple[str, ...]) -> Self:
        raise NotImplementedError


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)
