"""Deleted rows of an Iceberg snapshot: by position, by deletion vector, and by values (equality deletes).

Equality deletes are resolved once, when the index is built: their columns of the data files are read and compared.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError
from midepoch.sources.formats.table_parquet import converted, find, has_ids, plain
from midepoch.sources.table_folders import expired
from midepoch.sources.tables.iceberg import described_fields
from midepoch.storage.stores import Entry

if TYPE_CHECKING:
    from midepoch.sources.tables.iceberg import IcebergTableAt, ManifestFileEntry

Int64Array = npt.NDArray[np.int64]
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"


class Deletes:
    """Delete files of a snapshot, and the rows of data files that they delete."""

    def __init__(self, table: IcebergTableAt, files: Sequence[ManifestFileEntry]) -> None:
        from midepoch.sources.tables.iceberg import EQUALITY, POSITIONS

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
            if each.sequence > data.sequence and self._in_scope(each, data):
                groups[tuple(sorted(each.equality_ids))].append(each)
        for ids, files in groups.items():
            found.append(self._equal_rows(data, ids, files))
        rows = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
        return rows if len(rows) else None

    def _in_scope(self, delete: ManifestFileEntry, data: ManifestFileEntry) -> bool:
        """Return True if a delete by values applies to a data file: of the same partition, or of the whole table."""
        if not delete.partition:
            return True
        return delete.spec == data.spec and delete.partition == data.partition

    def _add_positions(self, file: ManifestFileEntry) -> None:
        table = self._read(file, lambda parquet: parquet.read(columns=["file_path", "pos"]))
        paths = table.column("file_path").combine_chunks().dictionary_encode()
        paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
        codes, rows = _numbers(paths.indices), _numbers(table.column("pos").cast(pa.int64()).combine_chunks())
        for code, path in enumerate(paths.dictionary.to_pylist()):
            self._positions[path].append((file.sequence, rows[codes == code]))

    def _vector(self, file: ManifestFileEntry) -> Int64Array:
        from pyroaring import BitMap64

        store, name = self._table.store, self._table.store.name(self._table.place(file.path))
        entry = Entry(self._table.place(file.path), file.size, 0)
        offset, length = file.offset or 0, file.length or 0

        def read() -> bytes:
            with store.open(entry) as opened:
                return opened.read_at(length, offset)

        blob = self._fetched(entry, read)
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
        deleted = pa.concat_tables([self._deleted_values(each, fields) for each in files])
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

    def _deleted_values(self, file: ManifestFileEntry, fields: Sequence[pa.Field]) -> pa.Table:
        if file.path not in self._values:
            self._values[file.path] = self._columns(file, fields)
        return self._values[file.path]

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

    def _read(self, file: ManifestFileEntry, action: Any) -> pa.Table:
        store, entry = self._table.store, Entry(self._table.place(file.path), file.size, 0)

        def read() -> pa.Table:
            with store.open(entry) as opened, pq.ParquetFile(opened.arrow, coerce_int96_timestamp_unit="us") as parquet:
                return action(parquet)

        return self._fetched(entry, read)

    def _fetched(self, entry: Entry, action: Any) -> Any:
        store = self._table.store
        try:
            return store.persist(entry.path, "read", action)
        except DataNotFoundError:
            raise expired(store.name(entry.path)) from None


def _numbers(array: pa.Array) -> Int64Array:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)
