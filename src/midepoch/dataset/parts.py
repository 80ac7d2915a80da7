"""Rows that are written once, as Arrow files in parts, and ``cache()``, which writes those of a pipeline.

Types become wider as later rows require it. The processes of a machine share what is written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.ipc import get_record_batch_size

from midepoch._internal.hints import warn_once
from midepoch._internal.progress import Progress, shown
from midepoch.dataset.digest import UndigestibleError, digest_of
from midepoch.dataset.reading import classes_of, features_of
from midepoch.errors import ColumnError, DataNotFoundError, MidepochError, StateError
from midepoch.order import Order, Selection
from midepoch.pipeline.lanes import is_endless
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources import Source
from midepoch.sources.lake import open_index
from midepoch.storage.cache_files import (
    LockFile,
    atomic_file,
    atomic_write,
    default_index_dir,
    make_private,
    named_folder,
    sweep,
)
from midepoch.transforms.columns import common_type, converted
from midepoch.transforms.encode import NAME_COLUMNS, Tokenize
from midepoch.transforms.formats import ITEMS
from midepoch.transforms.function import Function

if TYPE_CHECKING:
    from midepoch.dataset.dataset import Dataset

ROWS = 1000
"""Rows of a record batch."""
PART_BYTES = 64 << 20
COMPLETE = "complete.json"


def part_name(number: int) -> str:
    return f"part-{number:05}.arrow"


def open_parts(folder: Path) -> Source | None:
    """Return the rows of a folder that is complete, or None if it has no rows."""
    try:
        parts = json.loads((folder / COMPLETE).read_bytes())["parts"]
    except (OSError, ValueError, KeyError) as problem:
        raise MidepochError(f"the cache {folder} cannot be read ({problem}). Delete this folder.") from None
    if not parts:
        return None
    return Source(open_index([folder / part_name(number) for number in range(parts)], index_dir=folder))


@dataclass
class PartWriter:
    """Writes tables as parts. ``what`` names the function of the user in messages, ``room`` says what to do if the
    folder cannot be written.
    """

    folder: Path
    what: str
    room: str
    schema: pa.Schema | None = None
    schemas: list[pa.Schema] = field(default_factory=list)
    """Schemas of the parts that are finished."""

    def fitted(self, table: pa.Table) -> pa.Table:
        """Return a table with the types so far, which become wider if necessary."""
        if self.schema is None:
            self.schema = table.schema
        uneven = sorted(set(self.schema.names) ^ set(table.column_names))
        if uneven:
            raise ColumnError(
                f"{self.what}: some rows have a column {uneven[0]!r}, others do not. Return the same for every row, "
                "None for a missing value."
            )
        kinds = {}
        for column in self.schema:
            found = table.schema.field(column.name).type
            both = common_type(column.type, found)
            if both is None:
                raise ColumnError(
                    f"{self.what}: column {column.name!r} is {column.type} in some rows and {found} in others. Convert "
                    f"it first: cast({{{column.name!r}: …}})."
                )
            kinds[column.name] = both
        wide = pa.schema(list(kinds.items()), metadata=self.schema.metadata)
        self.schema = self.schema if wide.equals(self.schema) else wide
        return _as(table, self.schema)

    def finish(self, tables: Sequence[pa.Table], *, rows: int | None = None) -> str:
        """Write a part in batches of ``rows`` rows, and return the name of its file."""
        name = part_name(len(self.schemas))
        self._write(name, tables, rows)
        self.schemas.append(self.schema)
        return name

    def write_all(
        self,
        tables: Iterable[pa.Table],
        report: Progress,
        total: int = 0,
        done: int = 0,
        finished: Callable[[str, int], None] | None = None,
    ) -> int:
        """Write tables in parts of ``PART_BYTES``, and return the number of rows with those that were ``done``.

        ``total``: all rows, if known. ``finished``: called with the name and the rows of each part. Where a part ends
        depends only on the values of its rows.
        """
        part: list[pa.Table] = []
        rows = size = 0
        report(done, total)
        for table in chain(tables, [None]):
            if table is not None:
                part.append(table)
                rows, size = rows + table.num_rows, size + sum(map(get_record_batch_size, table.to_batches()))
                report(done + rows, total)
            if part and (table is None or size >= PART_BYTES):
                name = self.finish(part)
                if finished is not None:
                    finished(name, rows)
                done, part, rows, size = done + rows, [], 0, 0
        return done

    def complete(self, about: dict[str, Any]) -> None:
        """Write parts again whose types are narrower than those of later ones, then the note that all are written."""
        for number, schema in enumerate(self.schemas):
            if self.schema is not None and not schema.equals(self.schema):
                with pa.memory_map(str(self.folder / part_name(number))) as file:
                    self._write(part_name(number), [pa.ipc.open_file(file).read_all()])
        self.note(COMPLETE, {"parts": len(self.schemas), **about})

    def note(self, name: str, content: dict[str, Any]) -> None:
        with self.writing():
            atomic_write(self.folder / name, json.dumps(content).encode())

    def _write(self, name: str, tables: Sequence[pa.Table], rows: int | None = None) -> None:
        schema = self.schema
        assert schema is not None
        # The file is on disk when this returns: the note after it must not outlive the part.
        with self.writing(), atomic_file(self.folder / name) as file, pa.ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(copied(_as(table, schema)), max_chunksize=rows or ROWS)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what to do if the folder cannot be written."""
        try:
            yield
        except OSError as problem:
            raise MidepochError(f"the cache {self.folder} cannot be written: {problem}. {self.room}") from problem


def copied(table: pa.Table) -> pa.Table:
    """Return a table in new memory: the bytes of a file must not depend on how or where its rows were made."""
    columns = [pa.concat_arrays(column.chunks) if column.num_chunks else column for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        pa.chunked_array(
            [converted(each.name, chunk, each.type) for chunk in table.column(each.name).chunks], each.type
        )
        for each in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


_log = logging.getLogger("midepoch")

VERSION = 3
"""Number of the layout of a folder, and of everything else that is not part of the pipeline."""
_ROOM = "What was written is kept: make room, or choose another folder with cache(directory)."


def cached(ds: Dataset, directory: str | os.PathLike[str] | None, num_workers: int, key: str | None) -> PipelineSpec:
    """Write the rows of a dataset unless they are there, and return the pipeline that reads them."""
    _check(ds)
    chosen = default_index_dir() / "cached" if directory is None else named_folder(directory, "cache(directory)")
    root = chosen.absolute()
    folder = root / _key(ds.pipeline, key)
    if not (folder / COMPLETE).exists():
        writer = PartWriter(folder, "cache", _ROOM)
        with writer.writing():
            make_private(folder)
        with closing(LockFile(folder / "lock")) as lock, lock.held(f"writing the cache {folder}"):
            if not (folder / COMPLETE).exists():  # by another process, meanwhile
                with shown("caching", "rows") as report:
                    _write(ds, writer, num_workers, report)
    source = open_parts(folder)
    if source is None:
        raise DataNotFoundError("cache: there are no rows to cache. Check that the filters keep some.")
    leaf = Leaf(source, Order(Selection.of_ranges([(0, source.rows)])))
    return replace(PipelineSpec.of(leaf), format=ds.pipeline.format)


def _check(ds: Dataset) -> None:
    spec = ds.pipeline
    if spec.shard.count > 1:
        raise ValueError("cache() before shard(): all shards share the cached rows.")
    if spec.node.shuffled:
        raise ValueError(
            "cache() before shuffle(): cached rows have one order, and a shuffle after it has another one every epoch."
        )
    if is_endless(spec.node):
        raise ValueError('cache() of a mix with stop="never" would have no end. Use stop="all", or take(n).')
    steps = [step for part in (*spec.node.leaves, *spec.node.stages) for step in getattr(part, "steps", ())]
    if drawing := next((step for step in steps if isinstance(step, Function) and step.with_generator), None):
        warn_once(
            "cache(): the random numbers of %s are stored once, for all epochs. Call it after cache().", drawing.call
        )
    if spec.format == ITEMS:
        raise ValueError(f"cache(): a row is an item here, without columns. {NAME_COLUMNS}")
    if ds._iteration.start.begun:
        raise ValueError("a state was loaded into this dataset. Call cache() first, then load the state.")


def _key(spec: PipelineSpec, key: str | None) -> str:
    """Return the name of the folder: a digest of the data and of every step with its function."""
    if key is not None and not isinstance(key, str):
        raise TypeError(f"cache(key=…) must be a str, got {key!r}")
    data = [_data_of(leaf.source) for leaf in spec.node.leaves]
    lanes = spec.lanes if spec.lanes_chosen else 1
    try:
        return digest_of((VERSION, data, spec.node, spec.format, lanes, key), _special if key is None else _named)
    except UndigestibleError as problem:
        raise MidepochError(
            f"cache: changes of a function cannot be detected, because it uses {problem}. Pass a name for this "
            "version of the pipeline, and change it when the functions change: cache(key='v1')."
        ) from None


def _special(value: Any) -> str | None:
    if isinstance(value, Source):
        return value.fingerprint
    return value.text if isinstance(value, Selection) else None


def _named(value: Any) -> str | None:
    """Like ``_special``, but functions are known by the name that the user gave to this version of them."""
    if not isinstance(value, Function):
        return _special(value)
    settings = [(each.name, getattr(value, each.name)) for each in fields(value) if each.name not in _CODE]
    given = value.function
    options = (given.output, dict(given.options)) if isinstance(given, Tokenize) else None
    return digest_of((type(value), value.name, settings, options))


_CODE = ("function", "fn_kwargs")


def _data_of(source: Source) -> list[Any]:
    """Return what changes if a file is written to. The fingerprint may be that of other values."""
    return [source.fingerprint, *((file.path, file.size, file.mtime_ns, file.etag) for file in source.files)]


def _write(ds: Dataset, writer: PartWriter, num_workers: int, report: Progress) -> None:
    """Write the rows in parts, each with the state after it: an interrupted run continues after its last part."""
    sweep(writer.folder, ".*.tmp")
    spec = replace(ds.pipeline, format="arrow", global_seed=0)  # the same draws in every run
    with type(ds)(spec).loader(ROWS, num_workers, rank=0, world_size=1, last_batch="uneven") as loader:
        done = _resume(writer, loader)
        loader.set_epoch(0)  # a state after the last row must not continue with another epoch

        def tables() -> Iterator[pa.Table]:
            for table in loader:
                if writer.schema is None:
                    writer.schema = _with_features(ds, table.schema.remove_metadata())
                yield copied(writer.fitted(table))

        def note(name: str, rows: int) -> None:
            writer.note(f"{name}.json", {"rows": rows, "state": loader.state_dict()})

        rows = writer.write_all(tables(), report, spec.shard.before(spec.numbered or 0), done, note)
    writer.complete({"version": VERSION, "rows": rows})


def _resume(writer: PartWriter, loader: Any) -> int:
    """Continue after the last part that was finished. Return the number of rows before."""
    rows, state = 0, None
    while (note := writer.folder / f"{part_name(len(writer.schemas))}.json").exists():
        try:
            about = json.loads(note.read_bytes())
            writer.schema = pa.ipc.open_file(pa.memory_map(str(note.with_suffix("")))).schema
        except (OSError, ValueError):
            break
        writer.schemas.append(writer.schema)
        rows, state = rows + about["rows"], about["state"]
    if state is None:
        return 0
    try:
        loader.load_state_dict(state)
    except StateError as problem:  # of another version: begin again
        _log.warning("the cache %s is written again: %s", writer.folder, problem)
        writer.schema, writer.schemas = None, []
        return 0
    _log.info("the cache %s is continued at row %d", writer.folder, rows)
    return rows


def _with_features(ds: Dataset, schema: pa.Schema) -> pa.Schema:
    """Return the schema with the Hugging Face features of its columns, if there are any."""
    if any(leaf.source.features for leaf in ds.pipeline.node.leaves) or classes_of(ds):
        with suppress(MidepochError, ImportError):
            return schema.with_metadata(features_of(ds, schema).arrow_schema.metadata)
    return schema
