"""Tables in memory as datasets: written once to the cache folder, found again by their contents, and mapped.

A folder of rows in the cache is written by one process, is complete or absent, and is removed when unused for long.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import hinted, instead
from midepoch._internal.progress import Progress, shown
from midepoch._internal.values import loaded
from midepoch.dataset import Dataset, habits, parts
from midepoch.dataset.parts import PartWriter
from midepoch.errors import ColumnError, DataNotFoundError, MidepochError
from midepoch.order import Order, Selection
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources import Source
from midepoch.sources.schemas import plain_array, plain_schema, taken, without_views
from midepoch.storage.cache_files import LockFile, default_index_dir, make_private, named_folder, sweep, temporary_path
from midepoch.transforms.arrow_values import plain_values
from midepoch.transforms.columns import types_by_name

_BATCH_BYTES = 256 << 20
_SPOOL_BYTES = 256 << 20
_COPIED_BATCHES = 64
"""Batches that are copied in one call, which takes a fifth of the time of a call for each."""
_FEATURES = b"huggingface"

Schema: TypeAlias = "pa.Schema | Mapping[str, Any] | None"


_SPLITS = frozenset(("train", "test", "validation", "valid", "val", "dev", "eval"))


@hinted(habits.OPEN["from_dict"])
def from_dict(
    data: Mapping[str, Any], *, schema: Schema = None, cache_dir: str | os.PathLike[str] | None = None
) -> Dataset:
    """Return a dataset of columns: lists, numpy arrays, tensors or Arrow arrays of one length.

    The rows are written once to ``cache_dir`` (default: ``$MIDEPOCH_CACHE/memory``), under a name made of their
    contents, and mapped. The same contents are written only once, also by other processes. ``schema``: types of some or
    all columns; others are inferred.
    """
    if not isinstance(data, Mapping):
        raise TypeError(instead("from_dict", "a dict of columns", data))
    splits = _SPLITS.issuperset(data) and all(
        isinstance(each, list) and each and isinstance(each[0], Mapping) for each in data.values()
    )
    if len(data) > 1 and splits:
        raise TypeError(
            f"from_dict takes columns, and {', '.join(map(repr, data))} look like splits of rows. Open one of them: "
            f"midepoch.from_list(data[{next(iter(data))!r}])."
        )
    return table_dataset(table_of(data, schema, "from_dict"), "from_dict", cache_dir)


@hinted(habits.OPEN["from_list"])
def from_list(
    rows: Sequence[Mapping[str, Any]], *, schema: Schema = None, cache_dir: str | os.PathLike[str] | None = None
) -> Dataset:
    """Return a dataset of rows, each a dict. A key that a row lacks is null in it. See ``from_dict``."""
    listed = list(rows) if isinstance(rows, (list, tuple)) else None
    if listed is None or not all(isinstance(row, Mapping) for row in listed):
        raise TypeError(instead("from_list", "a list of dicts, one for each row", rows))
    return table_dataset(rows_table(listed, schema, "from_list"), "from_list", cache_dir)


@hinted(habits.OPEN["from_arrow"])
def from_arrow(data: Any, *, cache_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Return a dataset of an Arrow table, a record batch, a list of them, a reader, or any object with
    ``__arrow_c_stream__`` (polars, pandas, DuckDB, …). See ``from_dict``.
    """
    return table_dataset(_arrow_table(data), "from_arrow", cache_dir)


@hinted(habits.OPEN["from_pandas"])
def from_pandas(
    frame: Any,
    *,
    preserve_index: bool | None = None,
    schema: Schema = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset of a pandas or polars ``DataFrame``. See ``from_dict``.

    ``preserve_index``, of pandas: True makes the index a column, False drops it; by default, as in pyarrow, it becomes
    a column unless it only numbers the rows.
    """
    package = type(frame).__module__.partition(".")[0]
    if package == "polars" and type(frame).__name__ == "LazyFrame":
        raise TypeError("from_pandas: a LazyFrame has no rows yet. Call frame.collect() first.")
    if package not in ("pandas", "polars") or type(frame).__name__ not in ("DataFrame", "GeoDataFrame"):
        raise TypeError(instead("from_pandas", "a DataFrame of pandas or polars", frame))
    if package == "polars":
        if preserve_index:
            raise ValueError("from_pandas(preserve_index=True): a frame of polars has no index. Omit it.")
        table = _of_polars(frame, "from_pandas")
    else:
        _check_names(list(map(str, frame.columns)), "from_pandas")
        try:
            table = pa.Table.from_pandas(frame, preserve_index=preserve_index)
        except (pa.ArrowException, TypeError, ValueError) as problem:
            raise ColumnError(
                f"from_pandas: {'. '.join(map(str, problem.args))}. Convert the column first: frame[name] = "
                "frame[name].astype(…)."
            ) from None
    return table_dataset(with_types(table, schema, "from_pandas"), "from_pandas", cache_dir)


def table_of(data: Mapping[str, Any], schema: Schema, what: str) -> pa.Table:
    """Return columns as a table."""
    kinds = types_of(schema, what)
    for name in kinds:
        if name not in data:
            raise ColumnError(f"{what}: the schema has a column {name!r}, the data has {', '.join(map(repr, data))}.")
    _check_names(list(map(str, data)), what)
    columns = {str(name): _array(str(name), values, kinds.get(name), what) for name, values in data.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ColumnError(f"{what}: the columns have different lengths: {lengths}. Give each a value for every row.")
    return pa.table(columns)


def rows_table(rows: Sequence[Mapping[str, Any]], schema: Schema, what: str) -> pa.Table:
    """Return rows as a table with the columns of all of them."""
    names = dict.fromkeys([*(name for row in rows for name in row), *types_of(schema, what)])
    return table_of({name: [row.get(name) for row in rows] for name in names}, schema, what)


def types_of(schema: Schema, what: str) -> dict[str, pa.DataType]:
    """Return the types that the user gave, by column."""
    if schema is None:
        return {}
    if type(schema).__module__.partition(".")[0] == "datasets":
        raise TypeError(
            f"{what}(schema=…) takes Arrow types. For features use "
            f"midepoch.from_hf(datasets.Dataset.{what}(data, features=…))."
        )
    return dict(types_by_name(schema))


def _array(name: str, values: Any, kind: pa.DataType | None, what: str) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if kind is None else _cast(name, values, kind, what)
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        order = " A set has no order: pass sorted(…)." if isinstance(values, Set) else ""
        raise TypeError(f"{what}: column {name!r} must have a value for each row, got {values!r:.60}.{order}")
    try:
        if (whole := _fixed_lists(values)) is not None:
            return whole if kind is None else _cast(name, whole, kind, what)
        return pa.array(plain_values(values), kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise ColumnError(
            f"{what}: column {name!r} cannot become an Arrow column: {problem}. Convert its values to one type of "
            f"Arrow, such as float32, or pass schema={{{name!r}: …}}. For images and other objects, use "
            "midepoch.from_map_style(rows)."
        ) from None


def _fixed_lists(values: Any) -> pa.Array | None:
    """Return an array of more than one dimension as lists of a fixed size, without a copy. None for anything else."""
    torch = loaded("torch")
    if torch is not None and isinstance(values, torch.Tensor) and values.dtype != torch.bfloat16:
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray) or values.ndim < 2 or not values.size or values.dtype.kind not in "biuf":
        return None
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def with_types(table: pa.Table, schema: Schema, what: str) -> pa.Table:
    """Return a table with the types that the user gave."""
    for name, kind in types_of(schema, what).items():
        place = table.schema.get_field_index(name)
        if place < 0:
            raise ColumnError(f"{what}: there is no column {name!r}, only {', '.join(table.column_names)}.")
        table = table.set_column(place, name, _cast(name, table.column(name), kind, what))
    return table


def _cast(name: str, column: Any, kind: pa.DataType, what: str) -> Any:
    try:
        return column.cast(kind)
    except pa.ArrowException as problem:
        raise ColumnError(f"{what}: column {name!r} cannot become {kind}: {problem}. Choose another type.") from None


def _of_polars(frame: Any, what: str) -> pa.Table:
    """Return a polars frame as a table. Raise ColumnError for Python objects: Arrow would get their addresses."""
    objects = [name for name, kind in frame.schema.items() if str(kind) == "Object"] if hasattr(frame, "schema") else []
    if objects:
        raise ColumnError(
            f"{what}: column {objects[0]!r} contains Python objects, which Arrow cannot store. Drop it, or use "
            "midepoch.from_map_style(frame.to_dicts())."
        )
    return frame.to_arrow()


def _arrow_table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.RecordBatchReader):
        return _spooled(data)
    if isinstance(data, (list, tuple)) and data and all(isinstance(one, (pa.Table, pa.RecordBatch)) for one in data):
        try:
            return pa.concat_tables(map(_arrow_table, data))
        except pa.ArrowException as problem:
            raise ColumnError(f"from_arrow: the tables do not have one schema: {problem}. Cast them first.") from None
    package = type(data).__module__.partition(".")[0]
    is_column = isinstance(data, pa.ChunkedArray) or type(data).__name__ == "Series"
    if hasattr(data, "__arrow_c_stream__") and not is_column and package not in ("datasets", "midepoch"):
        return (
            _of_polars(data, "from_arrow") if package == "polars" else _spooled(pa.RecordBatchReader.from_stream(data))
        )
    raise TypeError(instead("from_arrow", "an Arrow table, record batches, or an object with __arrow_c_stream__", data))


def _spooled(reader: pa.RecordBatchReader) -> pa.Table:
    """Return the rows of a reader, which may be more than the memory holds: those after the first 256 MB in a file."""
    first: list[pa.RecordBatch] = []
    size = 0
    for batch in reader:
        first.append(batch)
        size += batch.nbytes
        if size > _SPOOL_BYTES:
            break
    else:
        return pa.Table.from_batches(first, reader.schema)
    with tempfile.TemporaryFile() as file:
        with pa.ipc.new_file(file, reader.schema) as writer:
            for batch in (*first, *reader):
                writer.write_batch(batch)
        file.flush()
        return pa.ipc.open_file(pa.memory_map(f"/dev/fd/{file.fileno()}")).read_all()


def table_dataset(table: pa.Table, what: str, cache_dir: str | os.PathLike[str] | None) -> Dataset:
    """Return the rows of a table, written to the cache folder unless they are there."""
    if not table.num_columns:
        raise DataNotFoundError(f"{what}: there are no columns. Pass at least one.")
    if not table.num_rows:
        raise DataNotFoundError(f"{what}: there are no rows. Pass at least one.")
    _check_names(table.column_names, what)
    features = (table.schema.metadata or {}).get(_FEATURES)
    plain = [field.with_type(without_views(field.type)) for field in plain_schema(table.schema)]  # no dictionaries
    schema = pa.schema(plain, metadata={_FEATURES: features} if features else None)
    digest = hashlib.blake2b(schema.serialize(), digest_size=16)
    for batch in _batches(table, schema):
        digest.update(batch.serialize())
    name = digest.hexdigest()
    # The fingerprint of a file covers its schema and a sample of its values: with the digest, it covers all of them.
    named = schema.with_metadata({**(schema.metadata or {}), b"midepoch": name.encode()})

    def write(writer: PartWriter, report: Progress) -> int:
        writer.schema = named
        batches = (pa.Table.from_batches([batch]) for batch in _batches(table, schema))
        return writer.write_all(batches, report, table.num_rows)

    return dataset_of(stored(folder_for("memory", cache_dir), name, what, write, expires=True))


def _check_names(names: Sequence[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ColumnError(f"{what}: several columns are named {twice[0]!r}. Rename them.")


def _batches(table: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches whose bytes depend only on their values, not on chunks, slices or unused memory."""
    step = _COPIED_BATCHES * parts.ROWS
    for start in range(0, table.num_rows, step):
        for piece in _pieces(table.slice(start, step)):
            columns = [_canonical(column, field.type) for column, field in zip(piece.columns, schema, strict=True)]
            copied = pa.RecordBatch.from_arrays(columns, schema=schema)
            # A batch begins at a multiple of 8 rows, so that its bitmaps begin at a byte.
            yield from (copied.slice(first, parts.ROWS) for first in range(0, copied.num_rows, parts.ROWS))


def _pieces(table: pa.Table) -> list[pa.Table]:
    """Return a table in halves of halves, until each is small enough for the offsets of text."""
    if table.nbytes <= _BATCH_BYTES or table.num_rows == 1:
        return [table]
    half = table.num_rows // 2
    return [*_pieces(table.slice(0, half)), *_pieces(table.slice(half))]


def _canonical(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    chunks = [plain_array(chunk) for chunk in column.chunks]
    array = pa.concat_arrays([chunk if chunk.type == kind else chunk.cast(kind) for chunk in chunks])
    return taken(array, np.arange(len(array), dtype=np.int64))


KEPT_SECONDS = 60 * 24 * 3600.0
"""Time after which rows of memory that nobody has opened are removed. A generator's rows are kept."""
_ROOM = "Make room, or choose another folder with cache_dir=… or the variable MIDEPOCH_CACHE."

Write = Callable[[PartWriter, Progress], int]
"""Writes all parts and returns the number of rows."""


def folder_for(kind: str, given: str | os.PathLike[str] | None) -> Path:
    """Return the folder for rows of a kind: that of the user, or one in the cache."""
    return default_index_dir() / kind if given is None else named_folder(given, "cache_dir").absolute()


def stored(root: Path, name: str, what: str, write: Write, *, expires: bool) -> Source:
    """Return the rows of the folder ``name``, which ``write`` writes unless it is there.

    ``name`` is a digest in hexadecimal. ``what``: the function of the user, for messages.
    """
    folder = root / name
    if (folder / parts.COMPLETE).exists():
        try:
            return _opened_parts(folder)
        except MidepochError as problem:  # damaged, or another process has just removed it
            if not expires:  # what a function computed for hours is the user's to delete
                raise MidepochError(
                    f"{what}: {str(problem).rstrip('.')}. To compute it again, delete {folder}."
                ) from None
            _remove(folder)
    _written(root, name, what, write)
    if expires:
        _remove_unused(root, folder)
    return _opened_parts(folder)


def _opened_parts(folder: Path) -> Source:
    with suppress(OSError):
        os.utime(folder / parts.COMPLETE)  # files of data keep their times, by which changes are detected
    source = parts.open_parts(folder)
    if source is None:
        raise MidepochError(f"the cache {folder} has no rows. Delete this folder.")
    with suppress(OSError):  # while this process uses the rows, nobody removes them
        file = os.open(folder / parts.COMPLETE, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(source, os.close, file).atexit = False
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return source


def dataset_of(source: Source) -> Dataset:
    """Return all rows of a source."""
    return Dataset(PipelineSpec.of(Leaf(source, Order(Selection.of_ranges([(0, source.rows)])))))


def _written(root: Path, name: str, what: str, write: Write) -> None:
    folder, temporary = root / name, temporary_path(root / name)
    writer = PartWriter(temporary, what, _ROOM)
    with writer.writing():
        make_private(root)
        sweep(root, ".*.tmp")
        lock = LockFile(root / "lock")
    with closing(lock), lock.held(f"writing {folder}", int(name[:12], 16)):
        if (folder / parts.COMPLETE).exists():  # by another process, meanwhile
            return
        try:
            with writer.writing():
                temporary.mkdir(mode=0o700)
            with shown(what, "rows") as report:
                rows = write(writer, report)
            writer.complete({"rows": rows})
            with writer.writing():
                try:
                    os.rename(temporary, folder)
                except OSError:  # another process may have been faster, without the lock
                    if not (folder / parts.COMPLETE).exists():
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_unused(root: Path, kept: Path) -> None:
    """Remove folders that were not opened for long, and that no process of this machine has open."""
    for folder in root.iterdir():
        with suppress(OSError), open(folder / parts.COMPLETE, "rb") as file:
            if folder != kept and time.time() - os.fstat(file.fileno()).st_mtime > KEPT_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is in use
                _remove(folder)


def _remove(folder: Path) -> None:
    """Rename a folder, so that nobody opens it any more, and remove it."""
    hidden = temporary_path(folder)
    with suppress(OSError):
        os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
