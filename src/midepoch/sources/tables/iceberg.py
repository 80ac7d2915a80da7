"""Iceberg tables: the snapshot to read, its data files and deleted rows, and how files contain the columns of a table.

Metadata and manifests are read by the package ``pyiceberg``, which also opens catalogs. Rows are deleted by position,
by deletion vector, and by values (equality deletes). The latter are resolved once, when the index is built: their
columns of the data files are read and compared.
"""

from __future__ import annotations

import re
import struct
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from midepoch._internal.progress import Progress
from midepoch.errors import CorruptBlockError, DataNotFoundError, FetchError, FormatError, MidepochError
from midepoch.sources.formats.table_parquet import SnapshotFile, converted, described, find, has_ids, plain
from midepoch.sources.lake import Files
from midepoch.sources.schemas import children
from midepoch.sources.tables.opening import described_type, package, scanned_files
from midepoch.storage.address import Address, Secrets
from midepoch.storage.damage import expired, refusals
from midepoch.storage.stores import Entry, OpenFile, Store

_UNSUPPORTED = ("geometry", "geography", "variant")


def described_fields(table: str, fields: Sequence[Any], mapping: Iterable[Any] | None) -> list[pa.Field]:
    """Return the columns of a table. ``mapping``: names in files without field ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.schema import index_by_id
    from pyiceberg.types import StructType

    row_type, columns = StructType(*fields), {field.field_id: field for field in fields}
    for number, field in index_by_id(row_type).items():
        if field.initial_default is not None and number not in columns:
            raise FormatError(
                f"the Iceberg table {table} has a default for the field {field.name!r} inside of a column, which is "
                "not supported."
            )
        if str(field.field_type).startswith(_UNSUPPORTED):
            raise FormatError(
                f"the Iceberg table {table} has a field {field.name!r} of type {field.field_type}, which is not "
                "supported. Leave it out of the table."
            )
    names = dict(_mapped(mapping or ()))

    def described_field(field: pa.Field) -> pa.Field:
        number = int(field.metadata[b"PARQUET:field_id"])
        kind = described_type(field.type, described_field)
        return described(pa.field(field.name, kind), number=number, names=names.get(number, ()))

    return list(map(described_field, children(schema_to_pyarrow(row_type))))


def _mapped(mapping: Iterable[Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield the ids and the names of a name mapping, at any depth."""
    for each in mapping:
        yield each.field_id, list(each.names)
        yield from _mapped(each.fields)


def partition_values(table: Any, schema: Any, spec: int, partition: tuple[Any, ...]) -> dict[str, Any]:
    """Return values for columns that a data file lacks: of identity partitions, and defaults."""
    values = {field.name: _plain(field.initial_default) for field in schema.fields if field.initial_default is not None}
    names = {field.field_id: field.name for field in schema.fields}
    for field, value in zip(table.specs()[spec].fields, partition, strict=False):
        if str(field.transform) == "identity" and field.source_id in names:
            values[names[field.source_id]] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    return value.bytes if isinstance(value, uuid.UUID) else value


_ADDRESS = re.compile(r"[a-z][\w+.-]*:/")
_STATUS, _SEQUENCE, _FILE, _KEY = 0, 3, 2, 131
_IDS = {
    "content": 134,
    "path": 100,
    "format": 101,
    "size": 104,
    "partition": 102,
    "equality_ids": 135,
    "referenced": 143,
    "offset": 144,
    "length": 145,
}
"""Ids of the fields of a manifest."""
_REMOVED = 2
DATA, POSITIONS, EQUALITY = 0, 1, 2
"""Contents of a file."""


class ManifestFileEntry(NamedTuple):
    """A data file or a delete file of a snapshot."""

    content: int
    path: str
    format: str
    size: int
    partition: tuple[Any, ...]
    equality_ids: tuple[int, ...]
    referenced: str | None
    offset: int | None
    length: int | None
    sequence: int
    spec: int


@dataclass(frozen=True, eq=False)
class IcebergTableAt:
    """An Iceberg table at one snapshot. ``table``: that of ``pyiceberg``."""

    store: Store
    path: str
    table: Any
    snapshot: Any
    schema: Any

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the snapshot, and of the schema that it is read with."""
        metadata = self.table.metadata
        named = str(metadata.properties.get("schema.name-mapping.default", ""))
        parts = (metadata.table_uuid, self.snapshot.snapshot_id, self.schema.schema_id, named)
        return ("iceberg", self.path, *map(str, parts))

    def scan(self, progress: Progress) -> Files:
        """Scan the data files of this snapshot, oldest first."""
        with refusing(self.store.secrets, self.name):
            entries = list(self._entries())
            schema = pa.schema(described_fields(self.name, self.schema.fields, self.table.name_mapping()))
        data = sorted((each for each in entries if each.content == DATA), key=lambda each: (each.sequence, each.path))
        deletes = Deletes(self, [each for each in entries if each.content != DATA])
        files = []
        for each in data:
            values = partition_values(self.table, self.schema, each.spec, each.partition)
            contents = SnapshotFile(schema, values, deletes.rows_of(each), only_missing=True)
            files.append((Entry(self.place(each.path), each.size, 0), contents))
        snapshot = f"iceberg {self.snapshot.snapshot_id}"
        return scanned_files(self.store, self.name, snapshot, schema, files, progress)

    def _entries(self) -> Iterator[ManifestFileEntry]:
        for manifest in self.snapshot.manifests(self.table.io):
            for entry in _read_manifest(self.table.io, manifest):
                if entry.format != "PARQUET" and not (entry.format == "PUFFIN" and entry.content == POSITIONS):
                    raise FormatError(
                        f"the Iceberg table {self.name} has {entry.format} files ({entry.path}), which is not "
                        "supported. Rewrite them as Parquet."
                    )
                yield entry

    def place(self, location: str) -> str:
        """Return the path in the store of a location in metadata: an address, or a local path. Nothing is quoted."""
        scheme, mark, rest = location.partition(":") if _ADDRESS.match(location) else ("file", "", location)
        scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
        if scheme == "file" and self.store.local:
            return "/" + rest.lstrip("/") if mark else rest
        if self.store.scheme == f"{scheme}://":
            return rest.removeprefix("//")
        raise FormatError(
            f"the Iceberg table {self.name} has a file in another store ({location}): this is not supported."
        )


def _read_manifest(io: Any, manifest: Any) -> Iterator[ManifestFileEntry]:
    from pyiceberg.avro.file import AvroFile

    with AvroFile(io.new_input(manifest.manifest_path)) as reader:
        outer = {field.field_id: i for i, field in enumerate(reader.schema.fields)}
        inner_type = reader.schema.fields[outer[_FILE]].field_type
        inner = {field.field_id: i for i, field in enumerate(inner_type.fields)}
        for record in reader:
            if record[outer[_STATUS]] == _REMOVED:
                continue
            file = record[outer[_FILE]]
            found: dict[str, Any] = {
                name: file[inner[number]] if number in inner else None for name, number in _IDS.items()
            }
            if _KEY in inner and file[inner[_KEY]] is not None:
                raise FormatError(f"{found['path']} is encrypted, which is not supported.")
            sequence = record[outer[_SEQUENCE]] if _SEQUENCE in outer else 0
            sequence = manifest.sequence_number if sequence is None else sequence
            partition = found["partition"]
            found |= {
                "content": found["content"] or DATA,
                "format": str(found["format"]).upper(),
                "partition": tuple(partition[i] for i in range(len(partition))) if partition is not None else (),
                "equality_ids": tuple(found["equality_ids"] or ()),
            }
            yield ManifestFileEntry(**found, sequence=sequence or 0, spec=manifest.partition_spec_id)


def refusing(secrets: Secrets, name: str) -> AbstractContextManager[None]:
    """Return a context that converts errors of ``pyiceberg``."""

    def failure(problem: BaseException, text: str) -> MidepochError:
        if isinstance(problem, (FileNotFoundError, NotADirectoryError)) or "NoSuch" in type(problem).__name__:
            return DataNotFoundError(f"{name} cannot be opened: {text}. Check its name.")
        if isinstance(problem, OSError):
            return FetchError(f"the metadata of {name} could not be read: {text}")
        return FormatError(f"the Iceberg table {name} cannot be read: {type(problem).__name__}: {text}")

    return refusals(secrets.clean, failure)


def find_snapshot(table: Any, name: str, wanted: int | str | datetime | None) -> tuple[Any, Any]:
    """Return a snapshot of a table, and the schema to read it with: that of ``table.scan(snapshot_id=…)``."""
    metadata = table.metadata
    if isinstance(wanted, bool) or not isinstance(wanted, (int, str, datetime, type(None))):
        raise ValueError(f"snapshot_id must be a number, a tag, a time or None, got {wanted!r}")
    if wanted is None:
        snapshot = metadata.current_snapshot()
        if snapshot is None:
            raise DataNotFoundError(f"there are no rows in {name}: the table has no snapshot yet.")
        return snapshot, metadata.schema()
    if isinstance(wanted, int):
        snapshot = metadata.snapshot_by_id(wanted)
    elif isinstance(wanted, str):
        snapshot = metadata.snapshot_by_name(wanted)
    else:
        moment = wanted if wanted.tzinfo is not None else wanted.replace(tzinfo=timezone.utc)
        snapshot = table.snapshot_as_of_timestamp(int(moment.timestamp() * 1000))
    if snapshot is None:
        known = [str(each.snapshot_id) for each in metadata.snapshots]
        shown = ", ".join(known[-5:]) + (f" and {len(known) - 5} older ones" if len(known) > 5 else "")
        raise DataNotFoundError(
            f"{name} has no snapshot {wanted}: it has {shown or 'none'}. If it was expired, choose another one."
        )
    schemas = {schema.schema_id: schema for schema in metadata.schemas}
    return snapshot, schemas.get(snapshot.schema_id, metadata.schema())


def newest(table: Any) -> Any:
    """Return a table of ``pyiceberg`` with its newest snapshots, or unchanged if it is of a metadata file."""
    from pyiceberg.table import StaticTable

    if isinstance(table, StaticTable):
        return table
    with refusing(Secrets.of(dict(table.io.properties)), Address(table.location()).public):
        return table.catalog.load_table(table.name())


def load_table(given: str, catalog: Mapping[str, Any], properties: Mapping[str, str]) -> Any:
    """Return a table by its metadata file, its folder or its name in a catalog."""
    package("pyiceberg.table", "Iceberg", "pyiceberg", "iceberg")
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    secrets, name = Secrets.of(Address(given), dict(catalog), dict(properties)), Address(given).public
    if "/" in given or given.endswith(".metadata.json"):
        try:
            with refusing(secrets, name):
                return StaticTable.from_metadata(given, dict(properties))
        except DataNotFoundError:
            if given.endswith(".metadata.json"):
                raise
            raise DataNotFoundError(
                f"{name} is not the folder of an Iceberg table with a metadata/version-hint.text. Pass the "
                "path of its newest metadata file (metadata/*.metadata.json), or its name in a catalog."
            ) from None
    first, _, rest = given.partition(".")
    if "." not in rest:
        raise ValueError(
            f"expected 'catalog.namespace.table', or the path of a metadata file, got {given!r}. Add what is missing."
        )
    with refusing(secrets, name):
        try:
            opened = load_catalog(first, **{**properties, **catalog})
        except ValueError as problem:  # there is no such catalog, or its properties are wrong
            raise MidepochError(
                f"the catalog {first!r} of {name} cannot be opened: {secrets.clean(str(problem))}. Pass its properties "
                'as catalog_options={"uri": …}, or write them to .pyiceberg.yaml.'
            ) from None
        return opened.load_table(rest)


Int64Array = npt.NDArray[np.int64]
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"


class Deletes:
    """Delete files of a snapshot, and the rows of data files that they delete."""

    def __init__(self, table: IcebergTableAt, files: Sequence[ManifestFileEntry]) -> None:
        self._table = table
        self._vectors = {each.referenced: each for each in files if each.format == "PUFFIN"}
        if None in self._vectors:
            raise FormatError(f"a deletion vector of the Iceberg table {table.name} does not name its data file.")
        self._positions: dict[str, list[tuple[int, Int64Array]]] = defaultdict(list)
        for each in files:
            if each.content == POSITIONS and each.format == "PARQUET":
                self._add_positions(each)
        self._equality = [each for each in files if each.content == EQUALITY]
        self._values: dict[str, pa.Table] = {}

    def rows_of(self, data: ManifestFileEntry) -> Int64Array | None:
        """Return the deleted rows of a data file, ascending. None if it has none."""
        found: list[Int64Array] = []
        if data.path in self._vectors:  # it replaces all deletes by position
            found.append(self._vector(self._vectors[data.path]))
        else:
            found += [rows for sequence, rows in self._positions.get(data.path, ()) if sequence >= data.sequence]
        groups: dict[tuple[int, ...], list[ManifestFileEntry]] = defaultdict(list)
        for each in self._equality:
            # It applies to the files of one partition, or of the whole table.
            in_scope = not each.partition or (each.spec, each.partition) == (data.spec, data.partition)
            if each.sequence > data.sequence and in_scope:
                groups[tuple(sorted(each.equality_ids))].append(each)
        for ids, files in groups.items():
            found.append(self._equal_rows(data, ids, files))
        rows = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
        return rows if len(rows) else None

    def _add_positions(self, file: ManifestFileEntry) -> None:
        table = self._read(file, lambda parquet: parquet.read(columns=["file_path", "pos"]))
        paths = table.column("file_path").combine_chunks().dictionary_encode()
        paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
        codes, rows = _numbers(paths.indices), _numbers(table.column("pos").cast(pa.int64()).combine_chunks())
        for code, path in enumerate(paths.dictionary.to_pylist()):
            self._positions[path].append((file.sequence, rows[codes == code]))

    def _vector(self, file: ManifestFileEntry) -> Int64Array:
        from pyroaring import BitMap64

        name = self._table.store.name(self._table.place(file.path))
        offset, length = file.offset or 0, file.length or 0
        blob = self._fetched(file, lambda opened: opened.read_at(length, offset))
        size = int.from_bytes(blob[:4], "big")
        body = blob[4 : 4 + size]
        if len(blob) != length or length < 8 + size or body[:4] != _VECTOR_MAGIC:
            raise CorruptBlockError(f"{name}: the deletion vector at byte {offset} is damaged.")
        if struct.unpack(">I", blob[4 + size : 8 + size])[0] != zlib.crc32(body):
            raise CorruptBlockError(f"{name}: the deletion vector at byte {offset} has a wrong checksum.")
        return np.array(list(BitMap64.deserialize(body[4:])), dtype=np.int64)

    def _equal_rows(
        self, data: ManifestFileEntry, ids: tuple[int, ...], files: Sequence[ManifestFileEntry]
    ) -> Int64Array:
        """Return the rows of a data file with the values of a row of the delete files. Null equals null."""
        fields = self._fields(ids)
        for each in files:
            if each.path not in self._values:
                self._values[each.path] = self._columns(each, fields)
        deleted = pa.concat_tables([self._values[each.path] for each in files])
        held = self._columns(data, fields)
        keys = np.zeros(held.num_rows + deleted.num_rows, np.int64)
        for field in fields:
            both = [*held.column(field.name).chunks, *deleted.column(field.name).chunks]
            stored = [each.storage if isinstance(each, pa.ExtensionArray) else each for each in both]  # UUIDs
            codes = pa.chunked_array(stored).combine_chunks().dictionary_encode(null_encoding="encode")
            codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
            pairs = np.stack([keys, _numbers(codes.indices)], axis=1)
            _, keys = np.unique(pairs, axis=0, return_inverse=True)
            keys = keys.reshape(-1)
        return np.flatnonzero(np.isin(keys[: held.num_rows], keys[held.num_rows :])).astype(np.int64)

    def _fields(self, ids: tuple[int, ...]) -> list[pa.Field]:
        """Return the fields with these ids, from the newest schema that has them: a column may have been removed."""
        table = self._table.table
        known: dict[int, Any] = {}
        for schema in sorted(table.metadata.schemas, key=lambda each: each.schema_id):
            known |= {field.field_id: field for field in schema.fields}
        missing = [number for number in ids if number not in known]
        if missing:
            raise FormatError(
                f"the Iceberg table {self._table.name} has equality deletes by fields inside of structs (ids "
                f"{missing}), which is not supported. Compact the table, for example with rewrite_data_files."
            )
        fields = described_fields(self._table.name, [known[number] for number in ids], table.name_mapping())
        return [field.with_name(str(number)) for field, number in zip(fields, ids, strict=True)]

    def _columns(self, file: ManifestFileEntry, fields: Sequence[pa.Field]) -> pa.Table:
        """Return columns of a data or delete file, in the types of the table. A column that it lacks is null."""

        def read(parquet: pq.ParquetFile) -> pa.Table:
            own = parquet.schema_arrow
            by_id = has_ids(own)
            places = [find(field, list(own), by_id=by_id) for field in fields]
            names = [own.field(at).name for at in places if at is not None]
            table = parquet.read(columns=names) if names else None
            arrays = {}
            for field, at in zip(fields, places, strict=True):
                kind = plain(field).type
                if at is None or table is None:
                    arrays[field.name] = pa.chunked_array([pa.nulls(parquet.metadata.num_rows, kind)])
                else:
                    held = own.field(at)
                    arrays[field.name] = converted(table.column(held.name), held, field, kind, by_id=by_id)
            return pa.table(arrays)

        return self._read(file, read)

    def _read(self, file: ManifestFileEntry, action: Callable[[pq.ParquetFile], pa.Table]) -> pa.Table:
        def read(opened: OpenFile) -> pa.Table:
            with pq.ParquetFile(opened.arrow, coerce_int96_timestamp_unit="us") as parquet:
                return action(parquet)

        return self._fetched(file, read)

    def _fetched(self, file: ManifestFileEntry, read: Callable[[OpenFile], Any]) -> Any:
        """Return what ``read`` returns for the open file."""
        store, entry = self._table.store, Entry(self._table.place(file.path), file.size, 0)

        def attempt() -> Any:
            with store.open(entry) as opened:
                return read(opened)

        try:
            return store.persist(entry.path, "read", attempt)
        except DataNotFoundError:
            raise expired(store.name(entry.path)) from None


def _numbers(array: pa.Array) -> Int64Array:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)
