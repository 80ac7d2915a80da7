"""Tables for tests: small Delta, Iceberg and Lance tables with the same rows, and logs written by hand."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

import midepoch

DELETED = (3, 10, 17)


def rows(start: int, stop: int) -> pa.Table:
    ids = list(range(start, stop))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([None if i % 5 == 0 else f"row {i}" for i in ids], pa.string()),
            "maybe": pa.array([None if i % 4 == 0 else i for i in ids], pa.int64()),
            "vector": pa.array([[i + 0.5, -1.0] for i in ids], pa.list_(pa.float32())),
        }
    )


@dataclass(frozen=True)
class Table:
    """A table of 30 rows in three files without those in ``DELETED``. ``version``: that of its latest snapshot."""

    kind: str
    path: str
    open: Callable[..., midepoch.Dataset]
    append: Callable[[], None]
    version: Callable[[], int]
    argument: str = "version"

    @property
    def ids(self) -> list[int]:
        return [i for i in range(30) if i not in DELETED]


def delta(folder: Path) -> Table:
    from deltalake import DeltaTable, write_deltalake

    for start in (0, 10, 20):
        write_deltalake(folder, rows(start, start + 10), mode="append")
    DeltaTable(folder).delete(f"id in {DELETED}")
    return Table(
        "delta",
        str(folder),
        lambda **options: midepoch.from_delta(folder, **options),
        lambda: write_deltalake(folder, rows(30, 40), mode="append"),
        lambda: DeltaTable(folder).version(),
    )


def lance(folder: Path) -> Table:
    import lance as package

    package.write_dataset(rows(0, 30), folder, max_rows_per_file=10)
    package.dataset(folder).delete(f"id in {DELETED}")
    return Table(
        "lance",
        str(folder),
        lambda **options: midepoch.from_lance(folder, **options),
        lambda: package.write_dataset(rows(30, 40), folder, mode="append") and None,
        lambda: int(package.dataset(folder).version),
    )


def iceberg(folder: Path) -> Table:
    table = iceberg_table(folder, rows(0, 1).schema)
    for start in (0, 10, 20):
        table.append(rows(start, start + 10))
    first, second, _ = data_files(table)
    delete_positions(table, {first: [3], second: [0, 7]})
    return Table(
        "iceberg",
        folder.as_posix(),
        lambda **options: midepoch.from_iceberg(table.refresh(), **options),
        lambda: table.append(rows(30, 40)),
        lambda: table.refresh().current_snapshot().snapshot_id,
        "snapshot_id",
    )


TABLES: dict[str, tuple[str, Callable[[Path], Table]]] = {
    "delta": ("deltalake", delta),
    "iceberg": ("pyiceberg", iceberg),
    "lance": ("lance", lance),
}
"""The package of each kind of table, and the function that writes one."""


# Delta: logs written by hand, with features that deltalake reads and does not write


def delta_field(name: str, kind: Any, number: int = 0, physical: str = "") -> dict[str, Any]:
    about = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical} if physical else {}
    return {"name": name, "type": kind, "nullable": True, "metadata": about}


def delta_log(
    folder: Path,
    version: int,
    *,
    fields: Sequence[Mapping[str, Any]] | None = None,
    adds: Sequence[Mapping[str, Any]] = (),
    features: Sequence[str] = (),
    partitions: Sequence[str] = (),
    configuration: Mapping[str, str] | None = None,
) -> None:
    """Write one commit: the files it adds and, if ``fields`` are given, the schema."""
    actions: list[dict[str, Any]] = []
    if fields is not None:
        schema = json.dumps({"type": "struct", "fields": list(fields)})
        named = {"readerFeatures": list(features), "writerFeatures": list(features)} if features else {}
        reader, writer = (3, 7) if features else (1, 2)
        about = {"id": "0", "format": {"provider": "parquet", "options": {}}, "schemaString": schema, "createdTime": 1}
        about |= {"partitionColumns": list(partitions), "configuration": dict(configuration or {})}
        actions += [{"protocol": {"minReaderVersion": reader, "minWriterVersion": writer, **named}}]
        actions += [{"metaData": about}]
    for add in adds:
        path = folder / unquote(add["path"])
        size, records = os.path.getsize(path), json.dumps({"numRecords": pq.read_metadata(path).num_rows})
        whole = {"partitionValues": {}, "size": size, "modificationTime": version, "dataChange": True, "stats": records}
        actions.append({"add": {**whole, **add}})
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def bitmap(deleted: Sequence[int]) -> bytes:
    """Return rows as a 64-bit roaring bitmap, after the magic number that Delta and Iceberg share."""
    from pyroaring import BitMap64

    return struct.pack("<I", 1681511377) + BitMap64(deleted).serialize()


def deletion_vector(folder: Path, deleted: Sequence[int]) -> dict[str, Any]:
    """Write a deletion vector beside the data, and return its description."""
    body = bitmap(deleted)
    path = folder / f"vector-{len(list(folder.iterdir()))}.bin"
    path.write_bytes(b"\x01" + struct.pack(">i", len(body)) + body + struct.pack(">I", zlib.crc32(body)))
    where = {"storageType": "p", "pathOrInlineDv": path.absolute().as_uri(), "offset": 1}
    return {**where, "sizeInBytes": len(body), "cardinality": len(deleted)}


# Iceberg: deletes, which pyiceberg reads and does not write


def iceberg_table(folder: Path, schema: Any, *, catalog: Mapping[str, str] | None = None, **options: Any) -> Any:
    from pyiceberg.catalog import load_catalog

    folder.mkdir(parents=True, exist_ok=True)
    given = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": folder.as_uri(), **(catalog or {})}
    opened = load_catalog("tests", **given)
    opened.create_namespace_if_not_exists("space")
    return opened.create_table(f"space.table{len(opened.list_tables('space'))}", schema=schema, **options)


def __getattr__(name: str) -> Any:
    """Return the class ``StoredFiles``: files of a table at ``s3://`` that are in the folder of the server.

    rclone does not take the uploads of pyarrow.
    """
    if name != "StoredFiles":
        raise AttributeError(name)
    from pyiceberg.io.pyarrow import PyArrowFileIO

    class StoredFiles(PyArrowFileIO):
        def new_input(self, location: str) -> Any:
            return self._named(super().new_input(self._path(location)), location)

        def new_output(self, location: str) -> Any:
            return self._named(super().new_output(self._path(location)), location)

        def _path(self, location: str) -> str:
            return location.replace("s3:/", str(self.properties["folder"]))

        def _named(self, file: Any, location: str) -> Any:
            file._location = location
            return file

    return StoredFiles


def data_files(table: Any) -> list[Any]:
    """Return the data files of a table, oldest first."""
    tasks = [entry for manifest in table.current_snapshot().manifests(table.io)
             for entry in manifest.fetch_manifest_entry(table.io) if entry.data_file.content == 0]  # fmt: skip
    return [entry.data_file for entry in sorted(tasks, key=lambda entry: entry.sequence_number)]


def delete_positions(table: Any, deleted: Mapping[Any, Sequence[int]]) -> None:
    """Commit a file of deletes by position: rows of data files."""
    pairs = [(file.file_path, row) for file, numbers in deleted.items() for row in numbers]
    content = pa.table(
        {"file_path": [path for path, _ in pairs], "pos": pa.array([row for _, row in pairs], pa.int64())}
    )
    _commit_deletes(table, content, content_kind=1)


def delete_values(table: Any, values: pa.Table, ids: Sequence[int], partition: Any = None) -> None:
    """Commit a file of deletes by values, whose columns have these field ids."""
    fields = [field.with_metadata({"PARQUET:field_id": str(i)}) for field, i in zip(values.schema, ids, strict=True)]
    _commit_deletes(table, values.cast(pa.schema(fields)), content_kind=2, equality_ids=list(ids), partition=partition)


def delete_by_vectors(table: Any, blobs: Mapping[str, Sequence[int]], stale: Mapping[str, Sequence[int]]) -> None:
    """Commit a Puffin file of deletion vectors, by data file. ``stale``: vectors in it that the snapshot does not use."""
    body, about, footer = b"PFA1", [], []
    for path, numbers in [*stale.items(), *blobs.items()]:
        inner = bitmap(numbers)
        blob = struct.pack(">I", len(inner)) + inner + struct.pack(">I", zlib.crc32(inner))
        footer.append(
            {"type": "deletion-vector-v1", "fields": [], "snapshot-id": -1, "sequence-number": -1, "offset": len(body),
             "length": len(blob), "properties": {"referenced-data-file": path, "cardinality": str(len(numbers))}}
        )  # fmt: skip
        about.append((path, len(body), len(blob)))
        body += blob
    payload = json.dumps({"blobs": footer, "properties": {}}).encode()
    body += b"PFA1" + payload + struct.pack("<I", len(payload)) + bytes(4) + b"PFA1"
    path = f"{table.location()}/data/vectors-{table.current_snapshot().snapshot_id}.puffin"
    with table.io.new_output(path).create() as file:
        file.write(body)
    _commit(table, [_vector_entry(path, len(body), *each) for each in about[len(stale) :]])


def _commit_deletes(table: Any, content: pa.Table, *, content_kind: int, partition: Any = None, **more: Any) -> None:
    path = f"{table.location()}/data/deletes-{table.current_snapshot().snapshot_id}.parquet"
    with table.io.new_output(path).create() as file:
        pq.write_table(content, file)
    size = len(table.io.new_input(path))
    about = {"content": content_kind, "file_path": path, "file_format": "PARQUET", "record_count": content.num_rows}
    _commit(table, [{**about, "file_size_in_bytes": size, "partition": partition, **more}])


def _vector_entry(path: str, size: int, referenced: str, offset: int, length: int) -> dict[str, Any]:
    about = {"content": 1, "file_path": path, "file_format": "PUFFIN", "record_count": 1, "file_size_in_bytes": size}
    return {**about, "referenced_data_file": referenced, "content_offset": offset, "content_size_in_bytes": length}


def _commit(table: Any, files: Sequence[Mapping[str, Any]]) -> None:
    """Commit a snapshot that adds delete files to the current one."""
    from pyiceberg.avro.file import AvroOutputFile
    from pyiceberg.manifest import (
        ManifestContent,
        ManifestEntryStatus,
        ManifestFile,
        data_file_with_partition,
        manifest_entry_schema_with_data_file,
        write_manifest_list,
    )
    from pyiceberg.table.snapshots import Operation, Snapshot, Summary
    from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
    from pyiceberg.typedef import Record
    from pyiceberg.types import LongType, NestedField, StringType, StructType

    table.refresh()
    metadata, parent, spec = table.metadata, table.current_snapshot(), table.spec()
    snapshot, sequence = metadata.new_snapshot_id(), metadata.next_sequence_number()
    more = [(143, "referenced_data_file", StringType()), (144, "content_offset", LongType())]
    more += [(145, "content_size_in_bytes", LongType())]
    plain = data_file_with_partition(format_version=2, partition_type=spec.partition_type(table.schema()))
    added = [NestedField(number, name, kind, required=False) for number, name, kind in more]
    entry = manifest_entry_schema_with_data_file(format_version=2, data_file=StructType(*plain.fields, *added))
    inner = entry.find_field(2).field_type
    nothing = {"column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds"}
    records = []
    for file in files:
        values = {**dict.fromkeys(nothing), **file, "partition": file.get("partition") or Record()}
        data = Record(*(values.get(field.name) for field in inner.fields))
        status = {"status": ManifestEntryStatus.ADDED, "snapshot_id": snapshot, "data_file": data}
        records.append(Record(*(status.get(field.name) for field in entry.fields)))
    output = table.io.new_output(f"{table.location()}/metadata/{snapshot}-deletes.avro")
    about = {"schema": table.schema().model_dump_json(), "partition-spec": "[]", "partition-spec-id": str(spec.spec_id)}
    about |= {"format-version": "2", "content": "deletes"}
    with AvroOutputFile(output, entry, "manifest_entry", metadata=about) as writer:
        writer.write_block(records)
    counts = dict.fromkeys(
        ("existing_files_count", "deleted_files_count", "existing_rows_count", "deleted_rows_count"), 0
    )
    manifest = ManifestFile.from_args(
        manifest_path=output.location, manifest_length=len(output), partition_spec_id=spec.spec_id,
        content=ManifestContent.DELETES, sequence_number=sequence, min_sequence_number=sequence,
        added_snapshot_id=snapshot, added_files_count=len(files), added_rows_count=1, partitions=None, **counts,
    )  # fmt: skip
    listed = table.io.new_output(f"{table.location()}/metadata/snap-{snapshot}.avro")
    with write_manifest_list(2, listed, snapshot, parent.snapshot_id, sequence, "null") as writer:
        writer.add_manifests([*parent.manifests(table.io), manifest])
    made = Snapshot(
        snapshot_id=snapshot, parent_snapshot_id=parent.snapshot_id, sequence_number=sequence,
        timestamp_ms=metadata.last_updated_ms + 1, manifest_list=listed.location,
        summary=Summary(Operation.DELETE), schema_id=metadata.current_schema_id,
    )  # fmt: skip
    moved = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot)
    table.catalog.commit_table(table, (), (AddSnapshotUpdate(snapshot=made), moved))
    table.refresh()
