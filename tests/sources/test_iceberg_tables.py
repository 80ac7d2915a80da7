"""Iceberg tables: the values of pyiceberg's own reader, and deletes that it cannot read."""

from __future__ import annotations

import datetime as dt
import re
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError, MidepochError
from s3 import KEY, SECRET, Server, storage_options
from table_files import data_files, delete_by_vectors, delete_positions, delete_values, iceberg_table, rows

pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")


def by_text(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=str)


def ids(ds: midepoch.Dataset) -> list[int]:
    return [row["id"] for row in ds]


def typed() -> pa.Table:
    moments = [dt.datetime(1, 1, 1, 1, 2, 3, 456789), dt.datetime(9999, 12, 31), None]
    return pa.table(
        {
            "string": pa.array(["é", "", None]),
            "long": pa.array([2**60, 0, None]),
            "int": pa.array([-(2**31), 0, None], pa.int32()),
            "float": pa.array([1.5, 0.0, None], pa.float32()),
            "double": pa.array([float("inf"), 0.0, None]),
            "decimal": pa.array([Decimal("-1.20"), Decimal("0.00"), None], pa.decimal128(38, 2)),
            "boolean": pa.array([True, False, None]),
            "binary": pa.array([b"\x00\xff", b"", None]),
            "fixed": pa.array([b"abcd", b"efgh", None], pa.binary(4)),
            "uuid": pa.array([b"0123456789abcdef", b"fedcba9876543210", None], pa.uuid()),
            "date": pa.array([dt.date(1, 1, 1), dt.date(9999, 1, 1), None]),
            "time": pa.array([dt.time(1, 2, 3, 4), dt.time(0), None], pa.time64("us")),
            "timestamptz": pa.array(moments, pa.timestamp("us", "UTC")),
            "timestamp": pa.array(moments, pa.timestamp("us")),
            "list": pa.array([[1, None], [], None], pa.list_(pa.int64())),
            "map": pa.array([[("a", 1), ("b", None)], [], None], pa.map_(pa.string(), pa.int64())),
            "struct": pa.array([{"x": [{"y": 1}], "z": "q"}, {"x": [], "z": None}, None]),
        }
    )


def test_all_types_and_a_changed_schema_equal_those_of_its_own_reader(tmp_path: Path) -> None:
    from pyiceberg.types import DoubleType, LongType, StringType

    table = iceberg_table(tmp_path, typed().schema)
    table.append(typed())
    first = table.current_snapshot().snapshot_id
    with table.update_schema() as update:
        update.rename_column("string", "text")
        update.update_column("int", LongType())
        update.update_column("float", DoubleType())
        update.rename_column(("struct", "z"), "renamed")
        update.add_column(("struct", "x", "later"), StringType())
        update.add_column("later", LongType())
        update.delete_column("binary")
        update.move_first("uuid")
    with table.update_schema() as update:
        update.add_column("binary", StringType())  # the name of a column that was removed
    unchanged = midepoch.from_iceberg(table)
    assert by_text(list(unchanged)) == by_text(table.scan().to_arrow().to_pylist())
    table.append(table.scan().to_arrow().slice(0, 2))
    for given in (None, first, table.current_snapshot().snapshot_id):
        expected = table.scan(snapshot_id=given).to_arrow()
        ds = midepoch.from_iceberg(table, snapshot_id=given)
        assert by_text(list(ds)) == by_text(expected.to_pylist())
        assert ds.schema.names == expected.schema.names
    state = unchanged.state_dict()
    midepoch.from_iceberg(table, snapshot_id=first).load_state_dict(state)  # the same rows, in another schema


def partitioned(tmp_path: Path, data: pa.Table, *names: str) -> Any:
    table = iceberg_table(tmp_path, data.schema)
    with table.update_spec() as update:
        for name in names:
            update.add_identity(name)
    table.append(data)
    return table


def test_partitions_and_files_without_ids_or_partition_columns(tmp_path: Path) -> None:
    data = pa.table(
        {
            "id": pa.array(range(6), pa.int64()),
            "day": pa.array([dt.date(2024, 1, 1 + i % 3) for i in range(6)]),
            "name": pa.array(["a b", None] * 3),
        }
    )
    table = partitioned(tmp_path, data, "day", "name")
    assert by_text(list(midepoch.from_iceberg(table))) == by_text(data.to_pylist())
    outside = tmp_path / "outside.parquet"  # as a file of Hive is added: no ids, and no partition columns
    pq.write_table(data.slice(0, 1), outside)
    table.add_files([outside.as_uri()])
    size = outside.stat().st_size
    inside = data.slice(0, 1).select(["id"])
    pq.write_table(inside, outside, store_schema=False)
    for pad in range(size - outside.stat().st_size - 40, size):
        with pq.ParquetWriter(outside, inside.schema, store_schema=False) as writer:
            writer.write_table(inside)
            writer.add_key_value_metadata({"pad": "x" * pad})
        if outside.stat().st_size == size:
            break
    assert pq.read_schema(outside).names == ["id"] and outside.stat().st_size == size
    assert by_text(list(midepoch.from_iceberg(table))) == by_text([*data.to_pylist(), data.to_pylist()[0]])


def test_positional_deletes_equal_those_of_its_own_reader(tmp_path: Path) -> None:
    table = iceberg_table(tmp_path, rows(0, 1).schema, properties={"write.parquet.row-group-limit": "4"})
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    first, second = data_files(table)
    delete_positions(table, {first: [0, 9, 3], second: list(range(10))})
    delete_positions(table, {first: [3, 4]})
    assert ids(midepoch.from_iceberg(table)) == sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2, 5, 6, 7, 8]
    table.append(rows(10, 12))
    assert ids(midepoch.from_iceberg(table)) == [1, 2, 5, 6, 7, 8, 10, 11]


def test_deletion_vectors_of_the_snapshot_alone_are_used(tmp_path: Path) -> None:
    table = iceberg_table(tmp_path, rows(0, 1).schema)
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    first, second = data_files(table)
    delete_positions(table, {first: [8]})  # replaced by the vector
    delete_by_vectors(table, {first.file_path: [0, 9]}, stale={second.file_path: [1, 2]})
    assert ids(midepoch.from_iceberg(table)) == [*range(1, 9), *range(10, 20)]
    puffin = next(tmp_path.rglob("*.puffin"))
    whole = puffin.read_bytes()
    data = bytearray(whole)
    for magic in re.finditer(b"\xd1\xd3\x39\x64", whole):
        data[magic.start() - 1] += 4  # the last byte of its size: its checksum would be after its end
    puffin.write_bytes(data)
    with pytest.raises(CorruptBlockError, match="deletion vector at byte .* is damaged"):
        midepoch.from_iceberg(table, force_reindex=True)
    data = bytearray(whole)
    data[-len(data) // 3] ^= 255
    for place in range(60, 110):
        data[place] ^= 255
    puffin.write_bytes(data)
    with pytest.raises(CorruptBlockError, match="deletion vector at byte"):
        midepoch.from_iceberg(table, force_reindex=True)


def test_equality_deletes_apply_to_older_rows_of_the_same_values(tmp_path: Path) -> None:
    from pyiceberg.types import LongType

    schema = pa.schema([("id", pa.int32()), ("key", pa.string())])

    def pairs(*given: tuple[int, str | None]) -> pa.Table:
        return pa.table({"id": pa.array([i for i, _ in given], pa.int32()), "key": [key for _, key in given]}, schema)

    table = iceberg_table(tmp_path, schema)
    table.append(pairs((1, "a"), (2, None), (3, "c"), (4, "a"), (5, None)))
    delete_values(table, pairs((4, "a"), (5, None), (3, "x")), [1, 2])  # both columns
    assert ids(midepoch.from_iceberg(table)) == [1, 2, 3]
    table.append(pairs((4, "a"), (6, "b")))  # written after the delete: it stays
    assert ids(midepoch.from_iceberg(table)) == [1, 2, 3, 4, 6]
    delete_values(table, pairs((0, None)).select(["key"]), [2])  # null equals null
    assert ids(midepoch.from_iceberg(table)) == [1, 3, 4, 6]
    with table.update_schema() as update:
        update.update_column("id", LongType())
        update.rename_column("id", "number")
        update.delete_column("key")
    delete_values(table, pa.table({"id": pa.array([6], pa.int64())}), [1])  # renamed and widened since the rows
    found = [row["number"] for row in midepoch.from_iceberg(table)]
    assert found == [1, 3, 4]


def test_equality_deletes_by_uuids(tmp_path: Path) -> None:
    keys = pa.array([b"0123456789abcdef", b"fedcba9876543210", None], pa.uuid())
    data = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "key": keys})
    table = iceberg_table(tmp_path, data.schema)
    table.append(data)
    delete_values(table, data.slice(0, 1).select(["key"]), [2])
    assert ids(midepoch.from_iceberg(table)) == [2, 3]
    delete_values(table, data.slice(2, 1).select(["key"]), [2])
    assert ids(midepoch.from_iceberg(table)) == [2]


def test_equality_deletes_of_a_partition_leave_the_others_alone(tmp_path: Path) -> None:
    from pyiceberg.typedef import Record

    data = pa.table({"id": pa.array([1, 2, 1, 2], pa.int64()), "part": ["x", "x", "y", "y"]})
    table = partitioned(tmp_path, data, "part")
    delete_values(table, pa.table({"id": pa.array([1], pa.int64())}), [1], partition=Record("x"))
    found = [(row["id"], row["part"]) for row in midepoch.from_iceberg(table)]
    assert sorted(found) == [(1, "y"), (2, "x"), (2, "y")]


def test_a_table_is_found_by_file_by_name_by_tag_and_by_time(tmp_path: Path) -> None:
    table = iceberg_table(tmp_path, rows(0, 1).schema)
    table.append(rows(0, 3))
    first = table.current_snapshot()
    table.manage_snapshots().create_tag(first.snapshot_id, "gold").commit()
    table.append(rows(3, 6))
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    assert ids(midepoch.from_iceberg("tests.space.table0", catalog_options=catalog)) == list(range(6))
    assert ids(midepoch.from_iceberg(table.metadata_location)) == list(range(6))
    assert ids(midepoch.from_iceberg(table, snapshot_id="gold")) == [0, 1, 2]
    moment = dt.datetime.fromtimestamp(first.timestamp_ms / 1000, dt.timezone.utc)
    assert ids(midepoch.from_iceberg(table, snapshot_id=moment)) == [0, 1, 2]
    folder = Path(table.location().removeprefix("file://"))
    with pytest.raises(DataNotFoundError, match=r"version-hint\.text\. Pass the path of its newest metadata file"):
        midepoch.from_iceberg(folder)
    with pytest.raises(DataNotFoundError, match="is not the folder of an Iceberg table"):
        midepoch.from_iceberg(tmp_path / "catalog.db")
    hint = table.metadata_location.rpartition("/")[2]
    (folder / "metadata" / "version-hint.text").write_text(hint)
    assert ids(midepoch.from_iceberg(folder)) == list(range(6))
    with pytest.raises(DataNotFoundError, match="Table does not exist"):
        midepoch.from_iceberg("tests.space.none", catalog_options=catalog)
    with pytest.raises(ValueError, match=r"expected 'catalog\.namespace\.table'"):
        midepoch.from_iceberg("space.table0")
    with pytest.raises(
        MidepochError, match=r"catalog 'none' of none\.space\.table0 .* Pass its properties as catalog_opt"
    ):
        midepoch.from_iceberg("none.space.table0")
    with pytest.raises(TypeError, match="a table of pyiceberg, got int"):
        midepoch.from_iceberg(3)
    with pytest.raises(FormatError, match=rf"from_iceberg\('{folder}/metadata/00003-.*\.metadata\.json'\)"):
        midepoch.from_files(folder)


def test_what_is_not_supported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = iceberg_table(tmp_path, rows(0, 1).schema)
    with pytest.raises(DataNotFoundError, match="the table has no snapshot yet"):
        midepoch.from_iceberg(empty)
    empty.append(rows(0, 4))
    delete_positions(empty, {data_files(empty)[0]: [0, 1, 2, 3]})
    with pytest.raises(DataNotFoundError, match="there are no rows in"):
        midepoch.from_iceberg(empty)
    struct = iceberg_table(tmp_path, pa.schema([("s", pa.struct([("x", pa.int64())]))]))
    struct.append(pa.table({"s": [{"x": 1}]}))
    delete_values(struct, pa.table({"x": pa.array([1], pa.int64())}), [2])
    with pytest.raises(FormatError, match="equality deletes by fields inside of structs"):
        midepoch.from_iceberg(struct)
    monkeypatch.setitem(__import__("sys").modules, "pyiceberg.table", None)
    with pytest.raises(MidepochError, match=r"pip install midepoch\[iceberg\]"):
        midepoch.from_iceberg("a.b.c")


def test_a_table_in_an_object_store(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.table import StaticTable

    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    (s3_server.folder / "iceberg-tables").mkdir()
    stored = {"py-io-impl": "table_files.StoredFiles", "folder": str(s3_server.folder)}
    table = iceberg_table(tmp_path, rows(0, 1).schema, location="s3://iceberg-tables/t", catalog=stored)
    table.append(rows(0, 10))
    delete_positions(table, {data_files(table)[0]: [1, 2]})
    index = tmp_path / "index"
    options = {"storage_options": storage_options(s3_server.endpoint), "index_dir": index}
    ds = midepoch.from_iceberg(table.metadata_location, **options)
    batches = [batch["id"].tolist() for batch in ds.loader(4, num_workers=2)]
    given = {"s3.endpoint": f"http://{s3_server.endpoint}", "s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
    static = StaticTable.from_metadata(table.metadata_location, {**given, "s3.region": "us-east-1"})
    assert sum(batches, []) == [0, *range(3, 10)] == ids(midepoch.from_iceberg(static, index_dir=index))
    saved = b"".join(path.read_bytes() for path in index.rglob("*") if path.is_file())
    assert SECRET.encode() not in saved + str(ds.state_dict()).encode()
    wrong = {**storage_options(s3_server.endpoint), "secret_key": "WRONGSECRET"}
    with pytest.raises(MidepochError) as problem:
        midepoch.from_iceberg(table.metadata_location, storage_options=wrong)
    assert "WRONGSECRET" not in "".join(traceback.format_exception(problem.value))
