"""Calls of a user's function for rows or groups of rows: its arguments and its errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from midepoch.errors import MapError, MidepochError
from midepoch.order.bijection import derive, derive_many
from midepoch.storage.damage import is_damage
from midepoch.transforms.batch import Batch, check_columns
from midepoch.transforms.formats import ITEM, Allocate, can_repeat, finish, own_copy, present, present_rows, unshared
from midepoch.transforms.generators import Generators, Seeds, torch_generator

_log = logging.getLogger("midepoch")


_MANY = 16
"""Rows from which all keys are computed in one call."""


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return getattr(function, "__name__", None) or type(function).__name__


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
    skipped: Callable[[int], None] = field(default=lambda _: None)
    """Called with the number of rows that failed and were skipped."""
    source_rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] = field(default=lambda rows: rows)
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
        return name_of(self.function)

    @property
    def call(self) -> str:
        return f"{getattr(self.function, 'method', self.kind)}({self.name})"

    @property
    def gets_lists(self) -> bool:
        """True if the function gets a list of each column."""
        return self.batched or getattr(self.function, "gets_lists", False)

    def computed(self, batch: Batch, run: RunContext) -> Any:
        """Return what ``_rows`` or ``_groups`` make of a batch, while the global generators are seeded.

        They get the columns for the function. These are not owned, so that its writes do not change the batch.
        """
        used = self.input_columns if self.input_columns is not None else tuple(batch.columns)
        check_columns(used, list(batch.columns), self.call)
        given = replace(batch, columns={name: batch.columns[name] for name in used}, owned=False)
        action = self._groups if self.batched else self._rows
        if not self.seed_globals:
            return action(given, run)
        return run.generators.run(
            self,
            ("functions", self.number, run.epoch),
            lambda seeds: action(given, run if seeds is None else replace(run, seeds=seeds)),
            repeatable=self.on_error != "skip" and can_repeat(given),  # skipped rows are counted once
        )

    def _rows(self, given: Batch, run: RunContext) -> Any:
        """Return the results of calls for each row."""
        return self.on_rows(given, run)

    def _groups(self, given: Batch, run: RunContext) -> Any:
        """Return the results of calls for groups of rows."""
        return self.on_groups(given, run)

    def fresh(self, given: Batch) -> Batch:
        """Return the batch for one attempt: a copy if failures are skipped, since a second attempt needs the same
        values.
        """
        return unshared(given) if self.on_error == "skip" else given

    def on_rows(
        self, given: Batch, run: RunContext, take: Callable[[Any], Any] | None = None, rows: list[Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Return (place, result) of every row, without those that fail if failures are skipped.

        ``take`` gets every result immediately, and returns what is left of it; None if it has nothing to take.
        ``rows``: the argument for each row; default: the row in the format of the function.
        """
        rows = present_rows(self.fresh(given), self.input_format) if rows is None else rows
        results: list[tuple[Any, ...]] = []
        seeds = [] if run.seeds is None else run.seeds.of(given.rows, given.ordinals)
        generators = list(self._generators(given, run)) if self.with_generator else []
        copies = _Copies()
        for i, row in enumerate(rows):
            number = int(given.rows[i])
            try:
                args = [row] if self.input_columns is None else [row[name] for name in self.input_columns]
                args += [number] if self.with_indices else []
                args += [generators[i]] if self.with_generator else []
                if run.seeds is not None:
                    run.seeds.set(seeds[i])
                result = self.checked(self.function(*args, **self.fn_kwargs))
            except Exception as problem:
                self.failed(problem, run, [number], row)
                continue
            if take is not None:
                left = take(result)
                if left is None:
                    take = None
                else:
                    result = left
            if copies.needed or len(results) < 2 <= len(given):
                result = copies.of(result, results)
            results.append((i, result))
        return results

    def on_groups(self, given: Batch, run: RunContext) -> list[tuple[Any, ...]]:
        """Return (start, stop, result) of every group of ``batch_size`` rows.

        If failures are skipped, the function is called for each row alone of a group that fails.
        """
        size = self.batch_size or len(given)
        results: list[tuple[Any, ...]] = []
        copies = _Copies()
        for start in range(0, len(given), size):
            for first, stop, result in self._on_group(given.slice(start, start + size), start, run):
                results.append((first, stop, copies.of(result, results) if len(given) > size else result))
        return results

    def _on_group(self, group: Batch, start: int, run: RunContext) -> list[tuple[int, int, Any]]:
        try:
            return [(start, start + len(group), self.checked_group(self._call(group, run), len(group)))]
        except Exception as problem:
            if self.on_error == "raise" or len(group) == 1:
                self.failed(problem, run, group.rows.tolist())
                return []
        alone = (self._on_group(group.slice(i, i + 1), start + i, run) for i in range(len(group)))
        return [each for results in alone for each in results]

    def _call(self, group: Batch, run: RunContext) -> Any:
        """Return the result of one call for all rows."""
        presented = finish(present(self.fresh(group), self.input_format), self.input_format)
        args = [presented] if self.input_columns is None else [presented[name] for name in self.input_columns]
        args += [group.rows.tolist()] if self.with_indices else []
        args += [list(self._generators(group, run))] if self.with_generator else []
        if run.seeds is not None:
            first = group.slice(0, 1)
            run.seeds.set(run.seeds.of(first.rows, first.ordinals)[0])
        return self.function(*args, **self.fn_kwargs)

    def checked(self, result: Any) -> Any:
        """Return the result of the function for a row. Raise MapError if it is not usable."""
        return result

    def checked_group(self, result: Any, rows: int) -> Any:  # noqa: ARG002
        """Return the result of the function for a group of rows. Raise MapError if it is not usable."""
        return result

    def _generators(self, batch: Batch, run: RunContext) -> Iterator[Any]:
        """Yield the generator of each row."""
        indices = batch.rows.astype(np.uint64) + np.uint64(self.number << 48)
        if len(indices) < _MANY:
            keys: Any = [derive(run.seed, run.epoch, "map", int(index), words=2) for index in indices]
        else:
            keys = derive_many(run.seed, run.epoch, "map", indices)
        for i, key in enumerate(keys):
            ordinal = 0 if batch.ordinals is None else int(batch.ordinals[i])
            # Rows that were made of one row draw from one sequence, 2**192 numbers apart; parts of a mix, 2**128.
            counter = ((ordinal & (2**64 - 1)) << 192) + (run.path << 128)
            philox = np.random.Philox(key=key, counter=counter)
            yield torch_generator(philox) if self.with_generator == "torch" else np.random.Generator(philox)

    def failed(self, problem: Exception, run: RunContext, rows: list[int], given: Any = None) -> None:
        """Count and log rows on which the function failed, or raise MapError, which names them.

        ``given``: the row that the function was called with.
        """
        which = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} … {rows[-1]} (a group of {len(rows)})"
        what = f"{self.call} failed on {which} of the dataset ({run.place(rows[0])})"
        failed(what, self.on_error, problem, run, len(rows), _remedy(problem, given, self))


class _Copies:
    """Copies of results, if a function returns an object that it has returned before: it may fill it again.

    Only the first two results are compared, so that others cost nothing.
    """

    def __init__(self) -> None:
        self.needed = False
        self._first: dict[str, Any] = {}
        self._copy: Any = None

    def of(self, result: Any, before: list[tuple[Any, ...]]) -> Any:
        """Return the result, or a copy. ``before``: places and results so far, of which the first may be replaced."""
        if not before:
            values = result if type(result) is dict else {"": result}
            self._first = {name: value for name, value in values.items() if _can_refill(value)}
            copies = own_copy(self._first)
            self._copy = {**result, **copies} if type(result) is dict else copies.get("", result)
        elif len(before) == 1:
            values = result if type(result) is dict else {"": result}
            same = result is before[0][-1] or any(values.get(name) is value for name, value in self._first.items())
            if same and _can_refill(result):
                self.needed, before[0] = True, (*before[0][:-1], self._copy)
        return own_copy(result) if self.needed else result


def _can_refill(value: Any) -> bool:
    """Return True for a list, a dict, an array or a tensor."""
    return isinstance(value, (list, dict, np.ndarray)) or hasattr(value, "clone")


def _remedy(problem: Exception, row: Any, call: Function) -> str:
    """Return what to do about common mistakes in functions of a row, of a batch, or of some columns."""
    batched, columns, text = call.batched, call.input_columns, str(problem)
    of_type, of_value = isinstance(problem, TypeError), isinstance(problem, (TypeError, AttributeError))
    named = row if isinstance(row, Mapping) else {}
    if columns is not None and of_type and re.search("not subscriptable|indices must be integers", text):
        if columns == (ITEM,):
            return ". A row is an item here, without columns. Name its parts: from_map_style(…, columns=['x', 'y'])."
        return f". It is called with the values of {', '.join(columns)}: omit input_columns for a function of the row."
    if of_value and "'list'" in text and call.gets_lists:
        instead = "omit batched=True" if batched else "use map"
        return f". It is called with a list of each column: {instead} for a function of one row."
    if columns is None and re.search("(text input|TextEncodeInput) must be", text):
        return ". A tokenizer takes texts, and a row is a dict: use ds.tokenize(tokenizer), or input_columns='text'."
    if call.input_format == "arrow" and of_value and "pyarrow.lib" in text:
        return ". After with_format('arrow') a function gets tables: use pyarrow.compute, or call with_format after it."
    if call.with_generator and "numpy.random" in text and "torch" in text:
        return '. For a generator of torch, pass with_generator="torch".'
    if (call.with_indices or call.with_generator) and _EXTRA_FIRST.search(text):
        return ". The row is the first argument; its number or its generator is the second."
    empty = [name for name, value in named.items() if value is None]
    if empty and of_value and not batched and "NoneType" in text:
        return f". {', '.join(map(repr, empty))} is None in the row: test for it, or filter such rows out before."
    held = [name for name, value in named.items() if isinstance(value, bytes)]
    if held and of_type and not batched and "bytes-like object" in text:
        return f". {held[0]!r} holds bytes: for text, row[{held[0]!r}].decode()."
    if of_type and not batched and re.search("not (iterable|subscriptable)|no len", text):
        return ". It is called with one row: pass batched=True for a function of lists."
    if isinstance(problem, KeyError) and isinstance(row, Mapping) and problem.args and problem.args[0] not in row:
        return f". The row has: {', '.join(map(str, row))}. If it is a key of another dict, use .get()."
    if isinstance(problem, AttributeError) and isinstance(row, Mapping):
        return _of_attribute(problem, row)
    if of_type and re.search("positional argument|unexpected keyword", text):
        return (
            ". It is called with the row or the values of input_columns; with_indices=True adds its number, "
            "with_generator=True a generator, and fn_kwargs arguments by name."
        )
    return ""


_EXTRA_FIRST = re.compile(
    "'(int|.*Generator)' object is not subscriptable|"
    "'dict' object has no attribute '(random|integers|normal|uniform|choice)'"
)


def _of_attribute(problem: AttributeError, row: Mapping[str, Any]) -> str:
    """Return where the attribute of a row, or of the value of a column, is found."""
    name, kind = problem.name, str(problem).partition("'")[2].partition("'")[0]
    columns = [column for column, value in row.items() if type(value).__name__ == kind]
    if kind == "dict" and (name in row or not columns):
        return f". A row is a dict: row[{name!r}]."
    if kind == "dict":
        files = [one for one in columns if row[one].keys() == {"bytes", "path"}]
        column = next((one for one in (*columns, *files) if name in row[one]), (files or columns)[0])
        if column in files:
            return f". Column {column!r} holds the bytes of a file: call decode({column!r}) before."
        return f". Column {column!r} is a dict of {', '.join(map(repr, row[column]))}: row[{column!r}][…]."
    if kind == "list" and columns:
        return f". Column {columns[0]!r} is a list here: use its values one by one, or call unbatch() before."
    if kind in ("Tensor", "ndarray") and columns:
        return f". Column {columns[0]!r} is a {kind} here, also an image after decode(). Without decode it is a file."
    return ""


def failed(what: str, on_error: str, problem: Exception, run: RunContext, rows: int, remedy: str = "") -> None:
    """Count and log rows on which a step failed, if failures are skipped. Otherwise raise MapError.

    Errors of midepoch other than MapError are raised unchanged.
    """
    text = f"{what}: {type(problem).__name__}: {problem}{remedy}"
    if on_error == "skip" and is_damage(problem, of_row=True):
        _log.warning("skipped: %s", text)
        run.skipped(rows)
        return
    if isinstance(problem, MidepochError) and not isinstance(problem, MapError):
        raise problem
    raise MapError(text) from problem
