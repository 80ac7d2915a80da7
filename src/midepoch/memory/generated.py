"""Rows that code of the user makes: ``from_generator`` and ``from_map_style``.

The rows of a generator are written once to the cache folder, and found again by the function. For any object with
``len`` and ``ds[i]``, only the numbers of rows are written: it gets order, shuffle, workers, ranks and exact resume.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import hinted, instead, is_array, is_loader, opener_of, remedy_for, warn_once
from midepoch._internal.progress import Progress
from midepoch._internal.values import loaded, one_of
from midepoch.dataset import Dataset, habits, parts
from midepoch.dataset.digest import UndigestibleError, digest_of
from midepoch.dataset.functions import names_of
from midepoch.dataset.parts import PartWriter
from midepoch.errors import DataNotFoundError, MapError, MidepochError
from midepoch.memory.tables import Schema, dataset_of, folder_for, rows_table, stored, types_of, with_types
from midepoch.pipeline.leaf import ON_ERROR
from midepoch.transforms.encode import ItemMap, Items
from midepoch.transforms.formats import ITEMS, own_copy
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
                raise DataNotFoundError(f"from_generator: {name} yields no rows. Check what it reads.")
            return rows

        return Generators().run("from_generator", ("functions", 0, 0), run, repeatable=False)

    root = folder_for("generated", cache_dir)
    _note_changes(root / digest, given)
    return dataset_of(stored(root, digest, "from_generator", write, expires=False))


def _note_changes(folder: Path, given: Mapping[str, Any]) -> None:
    """Warn if the rows are stored already, and a file that the function is given has changed since then."""
    with suppress(OSError, ValueError):
        if not (folder / parts.COMPLETE).exists():
            return
        stored_at = max(os.stat(folder / name).st_mtime for name in os.listdir(folder) if name != parts.COMPLETE)
        paths = [value for value in given.values() if isinstance(value, (str, os.PathLike)) and os.path.isfile(value)]
        if changed := [str(path) for path in paths if os.stat(path).st_mtime > stored_at]:
            warn_once(
                "from_generator: %s has changed since its rows were stored in %s, and these are used. For new ones, "
                "pass another key=.",
                changed[0],
                str(folder),
            )


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
        is_table = isinstance(value, (pa.Table, pa.RecordBatch))
        if not is_table and not isinstance(value, Mapping):
            raise MapError(
                f"from_generator: {name} must yield a dict for each row, or Arrow tables. It yielded "
                f"{type(value).__name__} as row {done + len(rows)}."
            )
        if rows and (is_table or len(rows) >= parts.ROWS):
            yield rows_table(rows, schema, "from_generator")
            done, rows = done + len(rows), []
        if is_table:
            table = pa.Table.from_batches([value]) if isinstance(value, pa.RecordBatch) else value
            yield with_types(table, schema, "from_generator")
            done += table.num_rows
        else:
            rows.append({column: own_copy(each) for column, each in value.items()})  # it may reuse them
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


_BLOCK = 1 << 16
_PLACEHOLDER = "row"


@hinted(habits.OPEN["from_map_style"])
def from_map_style(
    dataset: Any,
    *,
    fingerprint: str | None = None,
    columns: str | Sequence[str] | None = None,
    on_error: str = "raise",
    seed_globals: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset of the items ``dataset[i]`` for i below ``len(dataset)``, such as a torch ``Dataset`` or a list.

    Items may be of any type. ``ds[i]`` and ``collate_fn`` get them as they are, and batches are those of torch's
    ``default_collate``. Random numbers that ``dataset[i]`` draws from ``random``, ``numpy.random`` or torch depend only
    on the seed, the epoch and i. Workers call ``dataset[i]``, or ``dataset.__getitems__`` for several.

    - ``fingerprint``: a name for this version of the contents. A state is refused if it, the length, the class, or the
      indices of a ``Subset`` differ. Other changes of the contents are not detected
    - ``columns``: names for the parts of an item (a tuple, or a dict with these keys). Rows are then dicts as those of
      files, for all steps and formats
    - ``on_error="skip"``: items on which ``dataset[i]`` raises are left out
    - ``seed_globals=False``: do not seed random generators for each item, which saves 9 µs for each
    """
    length, _ = _length(dataset), one_of(on_error, ON_ERROR, "on_error")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(f"from_map_style(fingerprint=…) must be a str, got {fingerprint!r}")
    identity = f"{length} {described(dataset)} {fingerprint or ''}"
    name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def write(writer: PartWriter, report: Progress) -> int:
        field = pa.field(_PLACEHOLDER, pa.null())
        writer.schema = pa.schema([field], metadata={b"midepoch": name.encode()})
        # Rows without values, which take no room in a file: items are found by the numbers of rows.
        sizes = (min(_BLOCK, length - start) for start in range(0, length, _BLOCK))
        writer.finish([pa.table({_PLACEHOLDER: pa.nulls(size)}) for size in sizes], rows=_BLOCK)
        report(length, length)
        return length

    source = stored(folder_for("memory", cache_dir), name, "from_map_style", write, expires=True)
    ds = dataset_of(source)
    step = ItemMap(
        Items(dataset, None if columns is None else names_of(columns)),
        remove_columns=(_PLACEHOLDER,),
        on_error=on_error,
        seed_globals=seed_globals,
    )
    made = ds._with_step(step)
    return made if columns is not None else type(made)(replace(made.pipeline, format=ITEMS))


def _length(dataset: Any) -> int:
    """Return the number of items. Raise TypeError for an object that has no numbered items."""
    data = loaded("torch.utils.data")
    expected = "an object with len(ds) and ds[i]"
    if isinstance(dataset, (Dataset, type)):
        raise TypeError(instead("from_map_style", expected, dataset))
    if data is not None and isinstance(dataset, data.IterableDataset):
        raise TypeError(
            f"from_map_style takes {expected}, got the IterableDataset {type(dataset).__name__}, whose rows cannot be "
            "read by number. Store them once: midepoch.from_generator(function that yields its rows)."
        )
    other = None if is_array(dataset) or isinstance(dataset, (list, tuple)) else opener_of(dataset)
    if isinstance(dataset, (str, bytes, Mapping)) or not (other is None or "map_style" in other):
        raise TypeError(instead("from_map_style", expected, dataset))
    if is_loader(dataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        lacks = "len()" if hasattr(dataset, "__getitem__") else "ds[i]"
        raise TypeError(
            f"from_map_style takes {expected}, got {type(dataset).__name__} without {lacks}. {remedy_for(dataset)}"
        )
    length = len(dataset)
    if not length:
        raise DataNotFoundError(f"from_map_style: {type(dataset).__name__} is empty. Check what it was made from.")
    return length


def described(dataset: Any) -> str:
    """Return the class of a dataset, and of those inside it. A ``Subset`` includes a digest of its indices."""
    kind = type(dataset).__qualname__
    if not type(dataset).__module__.startswith("torch.utils.data"):
        return kind
    inner = getattr(dataset, "datasets", None)
    if isinstance(inner, dict):  # StackDataset(image=a, label=b)
        return f"{kind}({', '.join(f'{name}={len(each)} {described(each)}' for name, each in inner.items())})"
    if isinstance(inner, (list, tuple)):
        return f"{kind}({', '.join(f'{len(each)} {described(each)}' for each in inner)})"
    if (indices := getattr(dataset, "indices", None)) is None:
        return kind
    numbers = np.asarray(indices, dtype=np.int64)
    digest = hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
    return f"{kind}({len(dataset.dataset)} {described(dataset.dataset)}, {digest})"
