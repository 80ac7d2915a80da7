"""Calls of a user's function for rows or groups of rows: its arguments and its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from midepoch.errors import MapError, MidepochError
from midepoch.order.bijection import derive, derive_many
from midepoch.storage.damage import is_damage
from midepoch.transforms.batch import Batch, check_columns
from midepoch.transforms.formats import Allocate, can_repeat, finish, present, present_rows, unshared
from midepoch.transforms.generators import Generators, Seeds, torch_generator

T = TypeVar("T")
_log = logging.getLogger("midepoch")


_MANY = 16
"""Rows from which all keys are computed in one call."""


def _uncounted(rows: int) -> None:
    """Do not count skipped rows."""


def _same(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows


@dataclass(frozen=True)
class RunContext:
    """The run as a step sees it: enough to name a row and create its generator, nothing that depends on the topology.

    ``path`` distinguishes the parts of a combination, each of which numbers its functions from 0. It is 0 for a single
    pipeline. ``seeds``: seeds of the global generators for each call, None if they are not seeded.
    """

    seed: int
    epoch: int
    place: Callable[[int], str] = field(default=str)
    path: int = 0
    generators: Generators = field(default_factory=Generators)
    seeds: Seeds | None = None
    skipped: Callable[[int], None] = field(default=_uncounted)
    """Called with the number of rows that failed and were skipped."""
    source_rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] = field(default=_same)
    """Returns the numbers in the source of rows of the dataset."""
    collect: Allocate | None = None
    """For the last function: where to put arrays of its rows, which become one array each. None: they stay apart."""


@dataclass(frozen=True, eq=False)
class Function:
    """One call of ``map``, ``filter`` or ``flat_map``. ``number`` distinguishes them, for their generators."""

    function: Callable[..., Any]
    number: int = 0
    batched: bool = False
    batch_size: int | None = 1000
    with_indices: bool = False
    with_generator: bool | str = False
    """True or "numpy", or "torch": the kind of generator that the function gets."""
    input_columns: tuple[str, ...] | None = None
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    input_format: str = "python"
    on_error: str = "raise"
    seed_globals: bool = True

    kind: ClassVar[str] = "map"

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    @property
    def call(self) -> str:
        return f"{self.kind}({self.name})"

    def given(self, batch: Batch) -> Batch:
        """Return the columns for the function. They are not owned, so that its writes do not change the batch."""
        used = self.input_columns if self.input_columns is not None else tuple(batch.columns)
        check_columns(used, list(batch.columns), self.call)
        return replace(batch, columns={name: batch.columns[name] for name in used}, owned=False)

    def fresh(self, given: Batch) -> Batch:
        """Return the batch for one attempt: a copy if failures are skipped, since a second attempt needs the same
        values.
        """
        return unshared(given) if self.on_error == "skip" else given

    def seeded(self, given: Batch, run: RunContext, action: Callable[[RunContext], T]) -> T:
        """Return the result of ``action``, which calls the function for these rows with seeded global generators."""
        if not self.seed_globals:
            return action(run)
        return run.generators.run(
            self,
            ("functions", self.number, run.epoch),
            lambda seeds: action(run if seeds is None else replace(run, seeds=seeds)),
            repeatable=self.on_error != "skip" and can_repeat(given),  # skipped rows are counted once
        )

    def on_rows(self, given: Batch, run: RunContext, take: Callable[[Any], Any] | None = None) -> list[tuple[int, Any]]:
        """Return (place, result) of every row, without those that fail if failures are skipped.

        ``take`` gets every result immediately, and returns what is left of it; None if it has nothing to take.
        """
        rows = present_rows(self.fresh(given), self.input_format)
        results: list[tuple[int, Any]] = []
        seeds = [] if run.seeds is None else run.seeds.of(given.rows, given.ordinals)
        keys = self._keys(run, given.rows) if self.with_generator else []
        for i, row in enumerate(rows):
            number = int(given.rows[i])
            try:
                args = [row] if self.input_columns is None else [row[name] for name in self.input_columns]
                args += [number] if self.with_indices else []
                args += [self._generator(run, given, i, keys[i])] if self.with_generator else []
                if run.seeds is not None:
                    run.seeds.set(seeds[i])
                result = self.checked(self.function(*args, **self.fn_kwargs))
            except Exception as problem:
                self.failed(problem, run, [number])
                continue
            if take is not None:
                left = take(result)
                if left is None:
                    take = None
                else:
                    result = left
            results.append((i, result))
        return results

    def on_group(self, group: Batch, run: RunContext) -> Any:
        """Return the result of one call for all rows. Errors of the function are raised."""
        presented = finish(present(self.fresh(group), self.input_format), self.input_format)
        args = [presented] if self.input_columns is None else [presented[name] for name in self.input_columns]
        args += [[int(number) for number in group.rows]] if self.with_indices else []
        if self.with_generator:
            keys = self._keys(run, group.rows)
            args.append([self._generator(run, group, i, key) for i, key in enumerate(keys)])
        if run.seeds is not None:
            first = group.slice(0, 1)
            run.seeds.set(run.seeds.of(first.rows, first.ordinals)[0])
        return self.function(*args, **self.fn_kwargs)

    def checked(self, result: Any) -> Any:
        """Return the result of the function for a row. Raise MapError if it is not usable."""
        return result

    def _keys(self, run: RunContext, rows: npt.NDArray[np.int64]) -> Any:
        """Return the key of the generator of each row."""
        first = self.number << 48
        if len(rows) < _MANY:
            return [derive(run.seed, run.epoch, "map", first + int(row), words=2) for row in rows]
        return derive_many(run.seed, run.epoch, "map", rows.astype(np.uint64) + np.uint64(first))

    def _generator(self, run: RunContext, batch: Batch, i: int, key: Any) -> Any:
        ordinal = 0 if batch.ordinals is None else int(batch.ordinals[i])
        # Rows that were made of one row draw from one sequence, 2**192 numbers apart; parts of a combination, 2**128.
        counter = ((ordinal & (2**64 - 1)) << 192) + (run.path << 128)
        philox = np.random.Philox(key=key, counter=counter)
        return torch_generator(philox) if self.with_generator == "torch" else np.random.Generator(philox)

    def failed(self, problem: Exception, run: RunContext, rows: list[int]) -> None:
        failed(self.call, self.on_error, problem, run, rows)


def failed(call: str, on_error: str, problem: Exception, run: RunContext, rows: list[int]) -> None:
    """Count and log rows on which a step failed, if failures are skipped. Otherwise raise MapError, which names them.

    Errors of midepoch other than MapError are raised unchanged.
    """
    where = run.place(rows[0])
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} … {rows[-1]} (a group of {len(rows)})"
    text = f"{call} failed on {which} of the dataset ({where}): {type(problem).__name__}: {problem}"
    if on_error == "skip" and is_damage(problem, of_row=True):
        _log.warning("skipped: %s", text)
        run.skipped(len(rows))
        return
    if isinstance(problem, MidepochError) and not isinstance(problem, MapError):
        raise problem
    raise MapError(text) from problem
