"""Iceberg tables: the snapshot to read, its data files, and how they contain the columns of the table.

Metadata and manifests are read by the package ``pyiceberg``, which also opens catalogs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import pyarrow as pa

from midepoch._internal.progress import Progress
from midepoch.errors import DataNotFoundError, FetchError, FormatError, MidepochError
from midepoch.sources.formats.table_parquet import SnapshotFile, described
from midepoch.sources.lake import Files
from midepoch.sources.table_folders import refusals
from midepoch.sources.tables.opening import TableFile, scanned_files
from midepoch.storage.address import Address, Secrets
from midepoch.storage.stores import Store

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", "UTC"),
    "string": pa.string(),
    "uuid": pa.uuid(),
    "binary": pa.binary(),
    "unknown": pa.null(),
}


def described_fields(table: str, fields: Sequence[Any], mapping: Iterable[Any] | None) -> list[pa.Field]:
    """Return the columns of a table. ``mapping``: names in files without field ids."""
    names = {each.field_id: each for each in mapping or ()}
    found = []
    for field in fields:
        mapped = names.get(field.field_id)
        kind = _type(table, field.name, field.field_type, mapped)
        inner = list(mapped.names) if mapped is not None else []
        found.append(described(pa.field(field.name, kind), number=field.field_id, names=inner))
    return found


def _type(table: str, column: str, kind: Any, mapped: Any) -> pa.DataType:
    inside = list(mapped.fields) if mapped is not None else None
    if kind.is_struct:
        for field in kind.fields:
            if field.initial_default is not None:
                raise FormatError(
                    f"the Iceberg table {table} has a default for the field {field.name!r} inside of {column!r}, which "
                    "is not supported."
                )
        return pa.struct(described_fields(table, kind.fields, inside))
    if hasattr(kind, "element_type"):
        return pa.list_(pa.field("element", _type(table, column, kind.element_type, _inner(inside, kind.element_id))))
    if hasattr(kind, "key_type"):
        key = _type(table, column, kind.key_type, _inner(inside, kind.key_id))
        return pa.map_(key, _type(table, column, kind.value_type, _inner(inside, kind.value_id)))
    text = str(kind)
    if match := re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", text):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"fixed\[(\d+)\]", text):
        return pa.binary(int(match[1]))
    if text not in _TYPES:
        raise FormatError(
            f"the Iceberg table {table} has a column {column!r} of type {text}, which is not supported. "
            "Leave it out of the table."
        )
    return _TYPES[text]


def _inner(mapped: Sequence[Any] | None, number: int) -> Any:
    return next((each for each in mapped or () if each.field_id == number), None)


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
_STATUS, _SEQUENCE, _FILE = 0, 3, 2
_CONTENT, _PATH, _FORMAT, _PARTITION, _SIZE = 134, 100, 101, 102, 104
_KEY, _EQUALITY, _REFERENCED, _OFFSET, _LENGTH = 131, 135, 143, 144, 145
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
    sequence: int
    spec: int
    partition: tuple[Any, ...]
    equality_ids: tuple[int, ...] = ()
    referenced: str | None = None
    offset: int | None = None
    length: int | None = None


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
        from midepoch.sources.tables.iceberg_deletes import Deletes

        with refusing(self.store.secrets, self.name):
            entries = list(self._entries())
            schema = pa.schema(described_fields(self.name, self.schema.fields, self.table.name_mapping()))
        data = sorted((each for each in entries if each.content == DATA), key=lambda each: (each.sequence, each.path))
        deletes = Deletes(self, [each for each in entries if each.content != DATA])
        files = []
        for each in data:
            values = partition_values(self.table, self.schema, each.spec, each.partition)
            contents = SnapshotFile(schema, values, deletes.rows_of(each), only_missing=True)
            files.append(TableFile(self.place(each.path), each.size, contents))
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
        """Return the path in the store of a file of the table."""
        return place_of(self.store, location, self.name)


def place_of(store: Store, location: str, name: str) -> str:
    """Return the path in a store of a location in metadata: an address or a local path, in which nothing is quoted."""
    scheme, mark, rest = location.partition(":") if _ADDRESS.match(location) else ("file", "", location)
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    if scheme == "file" and store.local:
        return "/" + rest.lstrip("/") if mark else rest
    if store.scheme == f"{scheme}://":
        return rest.removeprefix("//")
    raise FormatError(f"the Iceberg table {name} has a file in another store ({location}): this is not supported.")


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

            def get(number: int, file: Any = file) -> Any:
                return file[inner[number]] if number in inner else None

            if get(_KEY) is not None:
                raise FormatError(f"{get(_PATH)} is encrypted, which is not supported.")
            sequence = record[outer[_SEQUENCE]] if _SEQUENCE in outer else 0
            sequence = manifest.sequence_number if sequence is None else sequence
            partition = get(_PARTITION)
            yield ManifestFileEntry(
                get(_CONTENT) or DATA,
                get(_PATH),
                str(get(_FORMAT)).upper(),
                get(_SIZE),
                sequence or 0,
                manifest.partition_spec_id,
                tuple(partition[i] for i in range(len(partition))) if partition is not None else (),
                tuple(get(_EQUALITY) or ()),
                get(_REFERENCED),
                get(_OFFSET),
                get(_LENGTH),
            )


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


def package() -> Any:
    """Return ``pyiceberg``. Raise MidepochError if it is not installed."""
    try:
        import pyiceberg.table
    except ImportError:
        raise MidepochError(
            "Iceberg tables are read with the package pyiceberg: `pip install midepoch[iceberg]`."
        ) from None
    return pyiceberg


def load_table(given: str, catalog: Mapping[str, Any], properties: Mapping[str, str]) -> Any:
    """Return a table by its metadata file, its folder or its name in a catalog."""
    package()
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
