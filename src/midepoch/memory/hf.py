"""from_hf: a ``datasets.Dataset`` that is open already. Its Arrow files are mapped in place, with its indices."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import hinted, instead
from midepoch._internal.progress import shown
from midepoch.dataset import Dataset, habits
from midepoch.dataset.rows import with_selection
from midepoch.errors import DataNotFoundError, DifferentSchemasError, MidepochError
from midepoch.memory.tables import dataset_of, table_dataset
from midepoch.order import Selection
from midepoch.sources import Source
from midepoch.sources.index import Index
from midepoch.sources.lake import open_index
from midepoch.sources.splits import expand_all, parse_split
from midepoch.transforms.columns import same_type
from midepoch.transforms.formats import FORMATS

_log = logging.getLogger("midepoch")


@hinted(habits.OPEN["from_hf"])
def from_hf(
    dataset: Any,
    split: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    index_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return the rows of a ``datasets.Dataset``, or of a split of a ``DatasetDict``: ``split="train[:90%]"``.

    Its Arrow files are mapped in place. Rows that were selected, shuffled, sharded or concatenated, and columns that
    were renamed or removed, stay so. Rows that are in no file (in memory, in columns that were added, or of another
    type than in the file) are written once, as by ``from_arrow``. The format is kept: ``set_format`` becomes
    ``with_format``, and ``set_transform`` becomes ``with_transform``.
    """
    ds = _chosen(dataset, split)
    if not len(ds):
        raise DataNotFoundError(f"from_hf: {'the dataset' if split is None else f'split={split!r}'} has no rows.")
    given = ds.format
    found = _in_files(ds, index_dir)
    if found is None:
        _log.info("from_hf: rows that are not in files of datasets' cache are written to the cache folder once")
        metadata = ds.features.arrow_schema.metadata
        opened = table_dataset(ds.data.table.replace_schema_metadata(metadata), "from_hf", cache_dir)
        rows = Selection.of_ranges([(0, ds.data.num_rows)])
    else:
        source, columns, rows = found
        opened = dataset_of(source)
        if list(columns.values()) != source.schema.names:
            opened = opened.select_columns(list(columns.values()))
        if changed := {old: new for new, old in columns.items() if new != old}:
            opened = opened.rename_columns(changed)
    if ds._indices is not None:
        numbers = ds._indices.column(0).to_numpy().astype(np.int64)
        follow = len(numbers) > 0 and bool((np.diff(numbers) == 1).all())
        rows = rows.slice(int(numbers[0]), int(numbers[-1]) + 1) if follow else rows.select(numbers)
    return _formatted(with_selection(opened, rows), given)


def _chosen(dataset: Any, split: str | None) -> Any:
    """Return one Dataset of datasets, with the rows of the split."""
    kind, names = type(dataset).__name__, {each.__name__ for each in type(dataset).__mro__}
    is_own = type(dataset).__module__.partition(".")[0] == "midepoch"
    if not is_own and names & {"IterableDataset", "IterableDatasetDict"}:
        raise TypeError(
            f"from_hf takes a datasets.Dataset, got {kind}, whose rows cannot be read by number. Load it without "
            "streaming=True, or read the files in place: midepoch.from_files('hf://datasets/…')."
        )
    is_single = "Dataset" in names and hasattr(dataset, "_indices") and hasattr(dataset, "data")
    if is_own or not (is_single or "DatasetDict" in names):
        raise TypeError(instead("from_hf", "a datasets.Dataset or DatasetDict", dataset))
    if split is None and is_single:
        return dataset
    if split is None:
        raise ValueError(f"the DatasetDict contains the splits {', '.join(dataset)}. Choose one with split=…")
    splits = {part.split: dataset for part in parse_split(split)} if is_single else dict(dataset)
    if is_single and len(splits) > 1:
        raise DataNotFoundError(
            f"from_hf: split={split!r} names several splits, but this is one dataset. Pass its DatasetDict."
        )
    cut = []
    for part in expand_all(parse_split(split), splits, "the DatasetDict"):
        whole = splits[part.split]
        start, stop = part.rows(len(whole))
        chosen = range(start, stop) if start < stop else []  # datasets refuses an empty range at the end
        cut.append(whole if (start, stop) == (0, len(whole)) else whole.select(chosen))
    if len(cut) == 1:
        return cut[0]
    from datasets import concatenate_datasets

    return concatenate_datasets(cut)


def _formatted(ds: Dataset, given: Mapping[str, Any]) -> Dataset:
    """Return the dataset in the format that was set."""
    kind, options = given["type"], dict(given["format_kwargs"])
    columns = given["columns"] if not given["output_all_columns"] else None
    if columns is not None and set(columns) != set(ds.column_names):  # all of them: datasets may have sorted the names
        ds = ds.select_columns(list(columns))
    if kind == "custom" and callable(transform := options.get("transform")):
        return ds.with_transform(transform)
    if kind is None and not options:
        return ds
    if kind not in FORMATS or options:
        arguments = f" with {', '.join(options)}" if options else ""
        raise MidepochError(
            f"from_hf: the format {kind!r}{arguments} cannot be kept. Call ds.with_format(None) first, and convert "
            "rows with map or cast."
        )
    return ds.with_format(kind)


def _in_files(ds: Any, index_dir: str | os.PathLike[str] | None) -> tuple[Source, dict[str, str], Selection] | None:
    """Return the files that contain all rows of the table, its columns (new name -> name in the file), and its rows.

    Return None if some rows or values are in no file.
    """
    blocks = getattr(ds.data, "blocks", None)
    tables = [ds.data] if blocks is None else [table for row in blocks for table in row]
    if blocks is not None and any(len(row) != 1 for row in blocks):  # with columns from elsewhere
        return None
    if not all(hasattr(table, "path") and hasattr(table, "replays") for table in tables):
        return None
    paths = [os.path.abspath(table.path) for table in tables]
    files = list(dict.fromkeys(paths))
    folder = None if index_dir is None else Path(os.path.expanduser(index_dir))
    try:
        with shown("indexing", "files") as report:
            index = open_index(files, index_dir=folder, progress=report)
    except (DifferentSchemasError, DataNotFoundError):  # the files were removed, but are still mapped
        return None
    ends = np.cumsum([file.rows for file in index.files]).tolist()
    bounds = dict(zip(files, zip([0, *ends], ends, strict=False), strict=True))
    schema, unchanged = index.schema, {name: name for name in index.schema.names}
    columns: dict[str, str] = {}
    ranges = []
    for path, table in zip(paths, tables, strict=True):
        first, stop = bounds[path]
        if not table.replays and table.table.num_rows == stop - first and table.table.schema.equals(schema):
            part: tuple[dict[str, str], int, int] | None = (unchanged, 0, stop - first)
        else:
            part = _part_of(table, schema, stop - first)
        if part is None or (columns and part[0] != columns):
            return None
        columns = part[0]
        ranges.append((first + part[1], first + part[2]))
    return Source(_with_features(index, ds.features, columns)), columns, Selection.of_ranges(ranges)


def _part_of(table: Any, stored: pa.Schema, rows: int) -> tuple[dict[str, str], int, int] | None:
    """Return the columns (new name -> name in the file) and the rows of a mapped table. None if it was computed."""
    names = [(name, name) for name in stored.names]
    start, stop = 0, rows
    for change, args, kwargs in table.replays:
        known, given = dict(names), args[0] if args else None
        if change == "slice":
            offset, length = (*args, None)[:2] if args else (kwargs.get("offset", 0), kwargs.get("length"))
            start = min(start + offset, stop)
            stop = stop if length is None else min(start + length, stop)
        elif change in ("replace_schema_metadata", "combine_chunks"):
            continue
        elif change == "rename_columns" and given is not None and len(given) == len(names):
            names = [(new, old) for new, (_, old) in zip(given, names, strict=True)]
        elif change == "drop" and given is not None:
            names = [(new, old) for new, old in names if new not in given]
        elif change == "select" and given is not None:
            names = [names[each] if isinstance(each, int) else (each, known[each]) for each in given]
        elif change == "cast" and given is not None and set(given.names) == known.keys():  # types are compared below
            names = [(name, known[name]) for name in given.names]
        else:
            return None
    schema = table.table.schema
    if [new for new, _ in names] != schema.names or stop - start != table.table.num_rows:
        return None
    types = ((schema.field(new).type, stored.field(old).type) for new, old in names)
    return (dict(names), start, stop) if all(same_type(a, b) for a, b in types) else None


def _with_features(index: Index, features: Any, columns: Mapping[str, str]) -> Index:
    """Return the index with the features of the dataset, which ``cast_column`` changes without writing a file."""
    wanted = {old: features[new] for new, old in columns.items()}
    stored = type(features).from_arrow_schema(index.schema)
    if all(stored[old] == feature for old, feature in wanted.items()):
        return index
    metadata = type(features)(wanted).arrow_schema.metadata
    return replace(index, schema_bytes=index.schema.with_metadata(metadata).serialize().to_pybytes(), path=None)
