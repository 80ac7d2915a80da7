"""cache(): the rows of a pipeline, written once to Arrow files, and shared by all processes of a machine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midepoch._internal.digest import UndigestibleError, digest_of
from midepoch._internal.progress import Progress, shown
from midepoch.errors import ColumnError, DataNotFoundError, MidepochError, StateError
from midepoch.order import Order, Selection
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.pipeline.stage_specs import Slice
from midepoch.sources import Source
from midepoch.sources.index import default_index_dir, open_index
from midepoch.sources.locks import LockFile
from midepoch.sources.storage import atomic_write, make_private, sweep, temporary_path
from midepoch.transforms.cast import common_type, converted
from midepoch.transforms.function import Function
from midepoch.transforms.tokenize import Tokenize

if TYPE_CHECKING:
    from midepoch.dataset.dataset import Dataset

_log = logging.getLogger("midepoch")

VERSION = 2
"""Number of the layout of a folder, and of everything else that is not part of the pipeline."""
_ROWS = 1000
"""Rows of a record batch."""
_PART_BYTES = 64 << 20
_COMPLETE = "complete.json"


def cached(ds: Dataset, directory: str | os.PathLike[str] | None, num_workers: int, key: str | None) -> PipelineSpec:
    """Write the rows of a dataset unless they are there, and return the pipeline that reads them."""
    _check(ds)
    if directory is not None and not os.fspath(directory):
        raise ValueError("cache(directory): the name of the folder is empty.")
    root = default_index_dir() / "cached" if directory is None else Path(os.path.expanduser(directory)).absolute()
    folder = root / _key(ds.pipeline, key)
    if not (folder / _COMPLETE).exists():
        with _said(folder):
            make_private(folder)
        with closing(LockFile(folder / "lock")) as lock, _held(lock, folder):
            if not (folder / _COMPLETE).exists():  # by another process, meanwhile
                with shown("caching", "rows") as report:
                    _Writer(ds, folder, num_workers).write(report)
    try:
        parts = json.loads((folder / _COMPLETE).read_bytes())["parts"]
    except (OSError, ValueError, KeyError) as problem:
        raise MidepochError(f"the cache {folder} cannot be read ({problem}). Delete this folder.") from None
    if not parts:
        raise DataNotFoundError("cache: there are no rows to cache. Check that the filters keep some.")
    index = open_index([folder / _part(number) for number in range(parts)], index_dir=folder)
    source = Source((index,))
    leaf = Leaf(source, Order(Selection.of_ranges([(0, source.rows)])))
    return replace(PipelineSpec.of(leaf), format=ds.pipeline.format)


def _part(number: int) -> str:
    return f"part-{number:05}.arrow"


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """Say what to do if the folder cannot be written."""
    try:
        yield
    except OSError as problem:
        raise MidepochError(
            f"the cache {folder} cannot be written: {problem}. What was written is kept: make room, or choose another "
            "folder with cache(directory)."
        ) from problem


@contextmanager
def _held(lock: LockFile, folder: Path) -> Iterator[None]:
    lock.acquire(0, f"writing the cache {folder}", wait=True)
    try:
        with lock.signs_of_life(0):
            yield
    finally:
        lock.release(0)


def _check(ds: Dataset) -> None:
    spec = ds.pipeline
    if spec.shard.count > 1:
        raise ValueError("cache() before shard(): all shards share the cached rows.")
    if spec.node.shuffled:
        raise ValueError(
            "cache() before shuffle(): cached rows have one order, and a shuffle after it has another one every epoch."
        )
    if _is_endless(spec.node):
        raise ValueError('cache() of a mix with stop="never" would have no end. Use stop="all", or take(n).')
    if ds._iteration.start.begun:
        raise ValueError("a state was loaded into this dataset. Call cache() first, then load the state.")


def _is_endless(node: Node) -> bool:
    if isinstance(node.base, Leaf):
        return False
    if isinstance(node.base, Mix) and node.base.stop == "never":
        return not any(isinstance(stage, Slice) and stage.stop is not None for stage in node.stages)
    return any(map(_is_endless, node.base.parts))


def _key(spec: PipelineSpec, key: str | None) -> str:
    """Return the name of the folder: a digest of the data and of every step with its function."""
    if key is not None and not isinstance(key, str):
        raise TypeError(f"cache(key=…) must be a text, got {key!r}")
    data = [_data_of(leaf.source) for leaf in spec.node.leaves]
    lanes = spec.lanes if spec.lanes_chosen else 1
    try:
        return digest_of((VERSION, data, spec.node, spec.format, lanes, key), _special if key is None else _named)
    except UndigestibleError as problem:
        raise MidepochError(
            f"cache: it cannot be seen whether a function has changed, since it uses {problem}. Pass a name for this "
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


@dataclass
class _Writer:
    """Writes the rows in parts, each with the state after it: an interrupted run continues after its last part."""

    ds: Dataset
    folder: Path
    num_workers: int
    schema: pa.Schema | None = None
    rows: int = 0
    part_rows: int = 0  # the same for all parts, whichever process writes them
    _schemas: list[pa.Schema] = field(default_factory=list)

    def write(self, report: Progress) -> None:
        sweep(self.folder, ".*.tmp")
        spec = replace(self.ds.pipeline, format="arrow", global_seed=0)  # the same draws in every run
        ds = type(self.ds)(spec)
        total = len(ds) if spec.has_positions else 0
        with ds.loader(_ROWS, self.num_workers, rank=0, world_size=1, last_batch="uneven") as loader:
            self._resume(loader)
            if self.rows:
                _log.info("the cache %s is continued at row %d", self.folder, self.rows)
            report(self.rows, total)
            part: list[pa.Table] = []
            rows = 0
            loader.set_epoch(0)  # a state after the last row must not continue with another epoch
            for table in loader:
                part.append(_copied(self._fitted(table)))
                rows += table.num_rows
                self.part_rows = self.part_rows or _part_rows(part[0])
                report(self.rows + rows, total)
                if rows >= self.part_rows:
                    self._finish(part, rows, loader.state_dict())
                    part, rows = [], 0
            if part:
                self._finish(part, rows, loader.state_dict())
        self._unify()
        self._note(_COMPLETE, {"version": VERSION, "parts": len(self._schemas), "rows": self.rows})

    def _note(self, name: str, content: dict[str, Any]) -> None:
        with _said(self.folder):
            atomic_write(self.folder / name, json.dumps(content).encode())

    def _resume(self, loader: Any) -> None:
        """Continue after the last part that was finished."""
        state: Any = None
        while (note := self.folder / f"{_part(len(self._schemas))}.json").exists():
            try:
                about = json.loads(note.read_bytes())
                self.schema = pa.ipc.open_file(pa.memory_map(str(note.with_suffix("")))).schema
            except (OSError, ValueError):
                break
            self._schemas.append(self.schema)
            self.rows, state = self.rows + about["rows"], about["state"]
            self.part_rows = about["part_rows"]
        if state is not None:
            try:
                loader.load_state_dict(state)
            except StateError as problem:  # of another version: begin again
                _log.warning("the cache %s is written again: %s", self.folder, problem)
                self.schema, self.rows, self.part_rows, self._schemas = None, 0, 0, []

    def _fitted(self, table: pa.Table) -> pa.Table:
        """Return a table with the types so far, which become wider if necessary."""
        if self.schema is None:
            self.schema = self._with_features(table.schema)
        new = [name for name in table.column_names if name not in self.schema.names]
        if new:
            raise ColumnError(f"cache: some rows have a column {new[0]!r}, others not. Return the same for every row.")
        kinds = {}
        for column in self.schema:
            if column.name not in table.column_names:
                raise ColumnError(f"cache: some rows have no column {column.name!r}. Return the same for every row.")
            found = table.schema.field(column.name).type
            both = common_type(column.type, found)
            if both is None:
                raise ColumnError(
                    f"cache: column {column.name!r} is {column.type} in some rows and {found} in others. Convert it "
                    f"first: cast({{{column.name!r}: …}})."
                )
            kinds[column.name] = both
        wide = pa.schema(list(kinds.items()), metadata=self.schema.metadata)
        self.schema = self.schema if wide.equals(self.schema) else wide
        return _as(table, self.schema)

    def _with_features(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema with the Hugging Face features of its columns, if there are any."""
        plain = schema.remove_metadata()
        if any(leaf.source.features for leaf in self.ds.pipeline.node.leaves) or self.ds._classes():
            with suppress(MidepochError, ImportError):
                return plain.with_metadata(self.ds._features_of(plain).arrow_schema.metadata)
        return plain

    def _finish(self, tables: list[pa.Table], rows: int, state: Any) -> None:
        """Write a part, then the state after it."""
        assert self.schema is not None
        name = _part(len(self._schemas))
        self._write(name, [_as(table, self.schema) for table in tables], self.schema)
        self._note(f"{name}.json", {"rows": rows, "part_rows": self.part_rows, "state": state})
        self.rows += rows
        self._schemas.append(self.schema)

    def _write(self, name: str, tables: list[pa.Table], schema: pa.Schema) -> None:
        path = self.folder / name
        temporary = temporary_path(path)
        try:
            with _said(self.folder):
                with temporary.open("wb") as file:
                    with pa.ipc.new_file(file, schema) as writer:
                        for table in tables:
                            writer.write_table(_copied(table), max_chunksize=_ROWS)
                    file.flush()
                    os.fsync(file.fileno())  # the note after it must not outlive the part
                os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _unify(self) -> None:
        """Write parts again whose types are narrower than those of later ones."""
        for number, schema in enumerate(self._schemas):
            if self.schema is not None and not schema.equals(self.schema):
                with pa.memory_map(str(self.folder / _part(number))) as file:
                    table = _as(pa.ipc.open_file(file).read_all(), self.schema)
                    self._write(_part(number), [table], self.schema)


def _part_rows(table: pa.Table) -> int:
    """Return the rows of a part: a power of two of batches, so that it hardly depends on the first one."""
    batches = max(1, int(_PART_BYTES // max(1, table.nbytes * _ROWS // max(1, table.num_rows))))
    return _ROWS * (1 << (batches.bit_length() - 1))


def _copied(table: pa.Table) -> pa.Table:
    """Return a table in new memory: the bytes of a file must not depend on how its rows were made, nor by whom."""
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
