"""map: a user's function over rows or groups of rows, one row out for each row in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from midepoch.errors import MapError, MidepochError
from midepoch.order.keys import derive
from midepoch.transforms.batch import Batch
from midepoch.transforms.columns import check_columns
from midepoch.transforms.formats import finish, present, present_rows

_log = logging.getLogger("midepoch")


@dataclass(frozen=True)
class RunContext:
    """What a map may know of the run: enough to name a row and make its generator, nothing that varies by topology."""

    seed: int
    epoch: int
    place: Callable[[int], str] = field(default=str)


@dataclass(frozen=True, eq=False)
class Map:
    """One call of ``Dataset.map``. ``number`` tells the maps of a pipeline apart, for their generators."""

    function: Callable[..., Any]
    number: int = 0
    batched: bool = False
    batch_size: int | None = 1000
    with_indices: bool = False
    with_generator: bool = False
    input_columns: tuple[str, ...] | None = None
    remove_columns: tuple[str, ...] = ()
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_format: str = "python"
    on_error: str = "raise"

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        """The batch with the function's columns put in. Rows that fail are dropped where ``on_error`` is "skip"."""
        if not len(batch):
            return batch
        used = self.input_columns if self.input_columns is not None else tuple(batch.columns)
        check_columns(used, list(batch.columns), f"map({self.name})")
        check_columns(self.remove_columns, list(batch.columns), f"map({self.name}, remove_columns=…)")
        # Not owned: what a function writes into its input must not show in the batch.
        given = replace(batch, columns={name: batch.columns[name] for name in used}, owned=False)
        kept, made = self._groups(given, run) if self.batched else self._rows(given, run)
        if len(kept) < len(batch):
            batch = batch.keep(np.array(kept, dtype=np.int64))
        columns = {name: column for name, column in batch.columns.items() if name not in self.remove_columns}
        nullable = {name: paths for name, paths in batch.nullable.items() if name not in made}
        return batch.with_columns({**columns, **made}, nullable)

    def _rows(self, given: Batch, run: RunContext) -> tuple[list[int], dict[str, Any]]:
        rows = present_rows(given, self.input_format)
        kept: list[int] = []
        results: list[Mapping[str, Any]] = []
        for i, row in enumerate(rows):
            number = int(given.rows[i])
            try:
                args = [row] if self.input_columns is None else [row[name] for name in self.input_columns]
                args += [number] if self.with_indices else []
                args += [self._generator(run, number)] if self.with_generator else []
                result = self._mapping(self.function(*args, **self.fn_kwargs))
            except Exception as problem:
                self._failed(problem, run, [number])
                continue
            self._same_columns(result, results, number)
            results.append(result)
            kept.append(i)
        names = list(results[0]) if results else []
        return kept, {name: [result[name] for result in results] for name in names}

    def _mapping(self, result: Any) -> Mapping[str, Any]:
        if result is None:
            return {}
        if not isinstance(result, Mapping):
            raise MapError(f"the function must return a dict of columns or None, it returned {type(result).__name__}")
        return result

    def _same_columns(self, result: Mapping[str, Any], before: Sequence[Mapping[str, Any]], row: int) -> None:
        """Never skipped: which of two kinds of rows is the wrong one would depend on which came first."""
        if before and result.keys() != before[0].keys():
            raise MapError(
                f"map({self.name}) returned columns {sorted(result)} for row {row} of the dataset but "
                f"{sorted(before[0])} for a row before: every row must have the same columns"
            )

    def _groups(self, given: Batch, run: RunContext) -> tuple[list[int], dict[str, Any]]:
        size = self.batch_size or len(given)
        parts: list[Mapping[str, Any]] = []
        kept: list[int] = []
        for start in range(0, len(given), size):
            stop = min(start + size, len(given))
            for a, b, result in self._group(given.slice(start, stop), run):
                self._same_columns(result, parts, int(given.rows[start + a]))
                parts.append(result)
                kept += range(start + a, start + b)
        names = list(parts[0]) if parts else []
        return kept, {name: _join([part[name] for part in parts]) for name in names}

    def _group(self, group: Batch, run: RunContext) -> list[tuple[int, int, Mapping[str, Any]]]:
        """(start, stop, result) of the group; of each row alone, where the group fails and failures are skipped."""
        numbers = [int(number) for number in group.rows]
        try:
            presented = finish(present(group, self.input_format), self.input_format)
            args = [presented] if self.input_columns is None else [presented[name] for name in self.input_columns]
            args += [numbers] if self.with_indices else []
            args += [[self._generator(run, number) for number in numbers]] if self.with_generator else []
            result = self._mapping(self.function(*args, **self.fn_kwargs))
            for name, column in result.items():
                _check_length(name, column, len(group))
            return [(0, len(group), result)]
        except Exception as problem:
            if self.on_error == "raise" or len(group) == 1:
                self._failed(problem, run, numbers)
                return []
            alone = [(i, part) for i in range(len(group)) for part in self._group(group.slice(i, i + 1), run)]
            return [(i, i + 1, result) for i, (_, _, result) in alone]

    def _generator(self, run: RunContext, row: int) -> np.random.Generator:
        key = derive(run.seed, run.epoch, "map", (self.number << 48) + row, words=2)
        return np.random.Generator(np.random.Philox(key=key))

    def _failed(self, problem: Exception, run: RunContext, rows: list[int]) -> None:
        where = run.place(rows[0])
        which = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} … {rows[-1]} (a group of {len(rows)})"
        text = f"map({self.name}) failed on {which} of the dataset ({where}): {type(problem).__name__}: {problem}"
        if self.on_error == "skip":
            _log.warning("skipped: %s", text)
            return
        if isinstance(problem, MidepochError) and not isinstance(problem, MapError):
            raise problem
        raise MapError(text) from problem


def _check_length(name: str, column: Any, rows: int) -> None:
    """A column has one value for each row; a struct is a dict of such columns."""
    if isinstance(column, Mapping):
        for key, inner in column.items():
            _check_length(f"{name}.{key}", inner, rows)
        return
    if not hasattr(column, "__len__") or isinstance(column, (str, bytes)):
        raise MapError(f"column {name!r} must be a sequence of {rows} values, got {column!r:.60}")
    if len(column) != rows:
        raise MapError(
            f"column {name!r} has {len(column)} values for {rows} rows. A map must return one row for each row; "
            "maps that change the number of rows are not supported yet"
        )


def _join(parts: list[Any]) -> Any:
    """Columns of consecutive groups as one column."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Mapping):
        return {key: _join([part[key] for part in parts]) for key in parts[0]}
    if all(isinstance(part, np.ndarray) and part.shape[1:] == parts[0].shape[1:] for part in parts):
        return np.concatenate(parts)
    return [value for part in parts for value in part]
