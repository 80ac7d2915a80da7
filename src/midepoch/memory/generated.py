"""from_generator: the rows of a function, written once to the cache folder and found again by the function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from midepoch._internal.hints import hinted, instead
from midepoch._internal.progress import Progress
from midepoch.dataset import Dataset, habits, parts
from midepoch.dataset.digest import UndigestibleError, digest_of
from midepoch.dataset.parts import PartWriter
from midepoch.errors import DataNotFoundError, MapError, MidepochError
from midepoch.memory.stored import dataset_of, folder_for, stored
from midepoch.memory.tables import Schema, rows_table, types_of, with_types
from midepoch.transforms.formats import own_copy
from midepoch.transforms.generators import Generators, Seeds

_VERSION = 1


@hinted(habits.OPEN["from_generator"])
def from_generator(
    function: Callable[..., Any],
    *,
    gen_kwargs: Mapping[str, Any] | None = None,
    schema: Schema = None,
    key: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset of the rows that a function yields: dicts, or Arrow tables of many rows.

    The function runs once. Its rows are written to ``cache_dir`` (default: ``$MIDEPOCH_CACHE/generated``) and
    reused as long as its code, what it uses and ``gen_kwargs`` are the same. Other processes wait for the first one.
    If that is killed, the next run starts again. Global random generators are seeded while the function runs, so that
    every machine gets the same rows.

    ``schema``: types of some or all columns. ``key``: a name for this version of the rows, to find them by instead of
    by the function and its arguments.
    """
    name = _checked(function)
    if gen_kwargs is not None and not isinstance(gen_kwargs, Mapping):
        raise TypeError(f"from_generator(gen_kwargs=…) must be a dict of arguments by name, got {gen_kwargs!r:.60}")
    given = dict(gen_kwargs or {})
    kinds = tuple(types_of(schema, "from_generator").items())
    if key is not None and not isinstance(key, str):
        raise TypeError(f"from_generator(key=…) must be a str, got {key!r}")
    try:
        digest = digest_of((_VERSION, key, kinds) if key is not None else (_VERSION, function, given, kinds))
    except UndigestibleError as problem:
        raise MidepochError(
            f"from_generator: changes of {name} cannot be detected, because it uses {problem}. Pass a name for this "
            "version of its rows, and change it when they change: from_generator(function, key='v1')."
        ) from None

    def write(writer: PartWriter, report: Progress) -> int:
        def run(seeds: Seeds | None) -> int:
            assert seeds is not None
            seeds.set(0)
            rows = writer.write_all(map(writer.fitted, _tables(name, function, given, schema)), report)
            if not rows:  # not stored: it may yield some next time
                raise DataNotFoundError(f"from_generator: {name} yields no rows.")
            return rows

        return Generators().run("from_generator", ("functions", 0, 0), run, repeatable=False)

    return dataset_of(stored(folder_for("generated", cache_dir), digest, "from_generator", write, expires=False))


def _checked(function: Any) -> str:
    """Return the name of the function. Raise TypeError for anything else."""
    if inspect.isgenerator(function) or inspect.isasyncgen(function) or hasattr(function, "__next__"):
        raise TypeError(
            f"from_generator takes a function, got {type(function).__name__}, which cannot be started again. "
            "Pass the function itself, without calling it: from_generator(rows, gen_kwargs={…})."
        )
    if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError("from_generator takes a function that yields rows, got an async one. Use def and yield.")
    if not callable(function):
        raise TypeError(instead("from_generator", "a function that yields rows", function))
    return getattr(function, "__name__", None) or type(function).__name__


def _tables(name: str, function: Callable[..., Any], given: Mapping[str, Any], schema: Schema) -> Iterator[pa.Table]:
    """Yield the rows in tables. Errors name the row."""
    rows: list[Mapping[str, Any]] = []
    done = 0
    for value in _values(name, function, given):
        if isinstance(value, (pa.Table, pa.RecordBatch)):
            if rows:
                yield rows_table(rows, schema, "from_generator")
            table = pa.Table.from_batches([value]) if isinstance(value, pa.RecordBatch) else value
            yield with_types(table, schema, "from_generator")
            done, rows = done + len(rows) + table.num_rows, []
            continue
        if not isinstance(value, Mapping):
            raise MapError(
                f"from_generator: {name} must yield a dict for each row, or Arrow tables. It yielded "
                f"{type(value).__name__} as row {done + len(rows)}."
            )
        rows.append({column: own_copy(each) for column, each in value.items()})  # it may reuse them
        if len(rows) >= parts.ROWS:
            yield rows_table(rows, schema, "from_generator")
            done, rows = done + len(rows), []
    if rows:
        yield rows_table(rows, schema, "from_generator")


def _values(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Any]:
    number = 0
    try:
        values = function(**given)
        if not isinstance(values, Iterable):
            raise TypeError(f"it must yield rows, but returned {type(values).__name__}")
        for value in values:
            yield value
            number += 1
    except Exception as problem:
        needs = isinstance(problem, TypeError) and "required positional argument" in str(problem)
        remedy = ". Pass arguments as gen_kwargs={…}." if needs else ""
        raise MapError(
            f"from_generator: {name} failed after it had yielded {number}: {type(problem).__name__}: {problem}{remedy}"
        ) from problem
