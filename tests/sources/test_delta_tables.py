"""Delta tables: the values of deltalake's own readers, for all types and for every feature that tables may use."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import traceback
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError, MidepochError
from s3 import KEY, SECRET, Server, storage_options
from table_files import deletion_vector, delta_field, delta_log, rows

deltalake = pytest.importorskip("deltalake")

UTC = dt.timezone.utc
VECTORS = {"features": ["deletionVectors"], "configuration": {"delta.enableDeletionVectors": "true"}}


def by_text(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=str)


def typed(day: int) -> pa.Table:
    moments = [dt.datetime(2024, 1, day, 1, 2, 3, 456789), None]
    return pa.table(
        {
            "string": pa.array(["é", None]),
            "long": pa.array([2**60, None]),
            "integer": pa.array([-(2**31), None], pa.int32()),
            "short": pa.array([1, None], pa.int16()),
            "byte": pa.array([-1, None], pa.int8()),
            "float": pa.array([1.5, None], pa.float32()),
            "double": pa.array([float("inf"), None]),
            "decimal": pa.array([Decimal("-1.20"), None], pa.decimal128(38, 2)),
            "boolean": pa.array([True, None]),
            "binary": pa.array([b"\x00\xff", None]),
            "date": pa.array([dt.date(1, 1, 1), None]),
            "timestamp": pa.array(moments, pa.timestamp("us", "UTC")),
            "timestamp_ntz": pa.array(moments, pa.timestamp("us")),
            "array": pa.array([[1, None], None], pa.list_(pa.int64())),
            "map": pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.string(), pa.int64())),
            "struct": pa.array([{"x": [{"y": 1}], "z": None}, None]),
            "p_date": pa.array([dt.date(2024, 1, day)] * 2),
            "p_text": pa.array(["a b/c=%25é", None]),
            "p_decimal": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
            "p_time": pa.array(moments, pa.timestamp("us", "UTC")),
            "p_bool": pa.array([True, False]),
        }
    )


def test_all_types_and_partitions_equal_those_of_its_own_reader_at_every_version(tmp_path: Path) -> None:
    partitions = [name for name in typed(1).schema.names if name.startswith("p_")]
    for day in (1, 2):
        deltalake.write_deltalake(tmp_path, typed(day), mode="append", partition_by=partitions)
    deltalake.write_deltalake(
        tmp_path, typed(3).append_column("added", pa.array([7, 8])), mode="append", schema_mode="merge"
    )
    deltalake.DeltaTable(tmp_path).delete("p_text is null and p_date = '2024-01-02'")
    for version in range(4):
        expected = deltalake.DeltaTable(tmp_path, version=version).to_pyarrow_table()
        ds = midepoch.from_delta(tmp_path, version=version)
        assert by_text(list(ds)) == by_text(expected.to_pylist())
        assert ds.schema.names == expected.schema.names
        assert len(ds) == len(expected)
    deltalake.DeltaTable(tmp_path).create_checkpoint()
    assert by_text(list(midepoch.from_delta(str(tmp_path) + "/", force_reindex=True))) == by_text(expected.to_pylist())


def test_a_time_selects_the_version_of_that_time(tmp_path: Path) -> None:
    for start in (0, 10):
        deltalake.write_deltalake(tmp_path, rows(start, start + 10), mode="append")
    for version, moment in ((0, 1_000), (1, 2_000)):
        os.utime(tmp_path / "_delta_log" / f"{version:020}.json", (moment, moment))
    times: list[tuple[Any, int]] = [(dt.datetime.fromtimestamp(1_500, UTC), 10), ("1970-01-01T00:40:00Z", 20)]
    for moment, count in times:
        table = deltalake.DeltaTable(tmp_path)
        table.load_as_version(moment)
        assert len(midepoch.from_delta(tmp_path, version=moment)) == count == table.to_pyarrow_table().num_rows
    with pytest.raises(MidepochError, match="no version at nonsense"):
        midepoch.from_delta(tmp_path, version="nonsense")
    with pytest.raises(DataNotFoundError, match="with its zone, as in 2026-01-31T00:00:00Z, or the number"):
        midepoch.from_delta(tmp_path, version="2026-01-31")


@pytest.mark.parametrize("mode", ["name", "id"])
def test_renamed_columns_deletion_vectors_and_partitions(tmp_path: Path, mode: str) -> None:
    def physical(start: int, **inner: Any) -> pa.Table:
        made = pa.table(
            {
                "col-1": pa.array(range(start, start + 40), pa.int64()),
                "col-2": pa.array([{"col-3": i, **inner} if i % 3 else None for i in range(40)]),
                "col-6": pa.array([[{"col-7": i}] if i % 4 else None for i in range(40)]),
            }
        )
        numbers = {"col-1": 1, "col-2": 2, "col-3": 3, "col-4": 4, "col-6": 6, "col-7": 7}
        fields = [_numbered(field, numbers) for field in made.schema] if mode == "id" else list(made.schema)
        return made.cast(pa.schema(fields))

    pq.write_table(physical(0), tmp_path / "a%20b.parquet", row_group_size=10)
    pq.write_table(physical(100, **{"col-4": "new"}), tmp_path / "b.parquet", row_group_size=10)
    struct = {
        "type": "struct",
        "fields": [delta_field("renamed", "string", 4, "col-4"), delta_field("x", "long", 3, "col-3")],
    }
    items = {"type": "struct", "fields": [delta_field("y", "long", 7, "col-7")]}
    fields = [
        delta_field("day", "date", 5, "col-5"),
        delta_field("s", struct, 2, "col-2"),
        delta_field("id", "long", 1, "col-1"),
        delta_field("later", "double", 8, "col-8"),
        delta_field("l", {"type": "array", "elementType": items, "containsNull": True}, 6, "col-6"),
    ]
    deleted = [0, 3, 9, *range(10, 20), 39]
    vector = deletion_vector(tmp_path, deleted)
    delta_log(
        tmp_path,
        0,
        fields=fields,
        partitions=["day"],
        features=["columnMapping", "deletionVectors"],
        configuration={
            "delta.columnMapping.mode": mode,
            "delta.columnMapping.maxColumnId": "8",
            "delta.enableDeletionVectors": "true",
        },
        adds=[
            {"path": "a%2520b.parquet", "partitionValues": {"col-5": "2024-01-05"}, "deletionVector": vector},
            {"path": "b.parquet", "partitionValues": {"col-5": None}},
        ],
    )
    expected = pa.table(deltalake.DeltaTable(tmp_path).scan()).to_pylist()
    ds = midepoch.from_delta(tmp_path)
    assert by_text(list(ds)) == by_text(expected)
    assert len(ds) == 80 - len(deleted) and ds[0]["id"] == 1 and ds[0]["day"] == dt.date(2024, 1, 5)
    batch = ds.with_format("numpy")[30:40]
    assert batch["id"].dtype == "int64"
    chosen = midepoch.from_delta(tmp_path, filters=[("id", "<", 30)], columns=["id", "day"])
    assert [row["id"] for row in chosen] == [i for i in range(30) if i not in deleted]


def _numbered(field: pa.Field, numbers: dict[str, int]) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_numbered(kind.field(i), numbers) for i in range(kind.num_fields)])
    elif pa.types.is_list(kind):
        kind = pa.list_(_numbered(kind.value_field, numbers))
    number = numbers.get(field.name)
    return pa.field(field.name, kind, metadata={"PARQUET:field_id": str(number)} if number else None)


def test_files_with_older_types_are_read_in_those_of_the_table(tmp_path: Path) -> None:
    old = pa.table(
        {
            "a": pa.array([1, None], pa.int32()),
            "b": pa.array([1.5, 2.5], pa.float32()),
            "c": pa.array([Decimal("1.5"), None], pa.decimal128(5, 1)),
            "d": pa.array([[1], [2, None]], pa.list_(pa.int16())),
        }
    )
    new = pa.table({"a": [2**40], "b": [1e300], "c": pa.array([Decimal("1.25")], pa.decimal128(20, 2)), "d": [[2**40]]})
    pq.write_table(old, tmp_path / "old.parquet")
    pq.write_table(new, tmp_path / "new.parquet")
    longs = {"type": "array", "elementType": "long", "containsNull": True}
    kinds = {"a": "long", "b": "double", "c": "decimal(20,2)", "d": longs}
    fields = [delta_field(name, kind) for name, kind in kinds.items()]
    adds = [{"path": "old.parquet"}, {"path": "new.parquet"}]
    delta_log(tmp_path, 0, fields=fields, adds=adds, features=["typeWidening"])
    ds = midepoch.from_delta(tmp_path)
    assert by_text(list(ds)) == by_text([*old.to_pylist(), *new.to_pylist()])
    assert ds.schema.types == [
        pa.int64(),
        pa.float64(),
        pa.decimal128(20, 2),
        pa.list_(pa.field("element", pa.int64())),
    ]


def test_timestamps_of_spark_have_the_range_of_the_table(tmp_path: Path) -> None:
    moments = [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999), None]
    table = pa.table({"t": pa.array(moments, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    delta_log(tmp_path, 0, fields=[delta_field("t", "timestamp")], adds=[{"path": "a.parquet"}])
    expected = [moment and moment.replace(tzinfo=UTC) for moment in moments]
    assert [row["t"] for row in midepoch.from_delta(tmp_path)] == expected


def simple(folder: Path, **about: Any) -> None:
    pq.write_table(pa.table({"id": pa.array(range(10), pa.int64())}), folder / "a.parquet")
    add = {"path": "a.parquet", **about.pop("add", {})}
    delta_log(folder, 0, **{"fields": [delta_field("id", "long")], "adds": [add], **about})


def test_what_is_not_supported_is_refused_by_its_name(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("uses variantType, which is not supported", {"features": ["variantType"]}),
        ("catalog", {"features": ["catalogManaged"]}),
        ("Feature 'unheardOf' is not supported", {"features": ["unheardOf"]}),
        ("variantType", {"fields": [delta_field("v", "variant")], "features": ["deletionVectors"]}),
    ]
    for number, (message, about) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        simple(folder, **about)
        with pytest.raises(FormatError, match=message):
            midepoch.from_delta(folder)


def test_a_deletion_vector_that_is_missing_or_damaged_is_an_error_and_no_row_returns(tmp_path: Path) -> None:
    vector = deletion_vector(tmp_path, [1, 2])
    simple(tmp_path, add={"deletionVector": vector}, **VECTORS)
    assert [row["id"] for row in midepoch.from_delta(tmp_path)] == [0, *range(3, 10)]
    file = next(tmp_path.glob("vector*"))
    whole = file.read_bytes()
    for damaged in (whole[:-6], whole[:20] + b"\xff\xff" + whole[22:], None):
        file.write_bytes(damaged) if damaged is not None else file.unlink()
        with pytest.raises(MidepochError):
            midepoch.from_delta(tmp_path, force_reindex=True)


def test_a_vector_with_rows_that_a_file_does_not_have_is_refused(tmp_path: Path) -> None:
    simple(
        tmp_path, add={"deletionVector": deletion_vector(tmp_path, [1, 99]), "stats": '{"numRecords": 1000}'}, **VECTORS
    )
    with pytest.raises(FormatError, match=r"a.parquet: row 99 is deleted by the table, but the file has 10 rows"):
        midepoch.from_delta(tmp_path)


def test_a_table_that_was_created_again_is_indexed_again(tmp_path: Path) -> None:
    simple(tmp_path)
    first = midepoch.from_delta(tmp_path)
    simple(tmp_path, add={"modificationTime": 5})
    pq.write_table(pa.table({"id": pa.array(range(5), pa.int64())}), tmp_path / "a.parquet")
    delta_log(tmp_path, 0, fields=[delta_field("id", "long")], adds=[{"path": "a.parquet"}])
    assert len(midepoch.from_delta(tmp_path, version=0)) == 5 and len(first) == 10


def test_a_path_that_deltalake_takes_for_another_one_is_refused(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "a b", pa.table({"id": [1]}))
    shutil.copytree(tmp_path / "a b", tmp_path / "a%20b")
    (tmp_path / "link").symlink_to(tmp_path / "a%20b")
    deltalake.write_deltalake(tmp_path / "a b", pa.table({"id": [2]}), mode="overwrite")
    with pytest.raises(FormatError, match="takes the % in its path"):
        midepoch.from_delta(tmp_path / "a%20b")
    assert [row["id"] for row in midepoch.from_delta(tmp_path / "link")] == [1]


def test_a_flipped_bit_is_reported_with_its_file_and_rows(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array(range(2000), pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, use_dictionary=False, row_group_size=1000)
    delta_log(tmp_path, 0, fields=[delta_field("id", "long")], adds=[{"path": "a.parquet"}])
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[200] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(CorruptBlockError, match=r"a\.parquet.* rows 0 to 999 of the data"):
        list(midepoch.from_delta(tmp_path, force_reindex=True))
    skipped = midepoch.from_delta(tmp_path, on_error="skip")
    assert [row["id"] for row in skipped] == list(range(1000, 2000))


@pytest.mark.parametrize("named", ["pyarrow", "deltalake", "address"])
def test_a_table_in_an_object_store_leaves_no_credentials(
    s3_server: Server, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    bucket = s3_server.folder / f"bucket-{named}"
    (bucket / "inner").mkdir(parents=True)
    for start in (0, 10):
        deltalake.write_deltalake(
            bucket / "inner" / "t", rows(start, start + 10), mode="append", partition_by=["maybe"]
        )
    deltalake.DeltaTable(bucket / "inner" / "t").delete("id = 3")
    address, options = f"s3://{bucket.name}/inner/t", storage_options(s3_server.endpoint)
    if named == "deltalake":
        options = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{s3_server.endpoint}",
            "AWS_ALLOW_HTTP": "true",
        }
    elif named == "address":
        address = f"s3://{KEY}:{SECRET}@{bucket.name}/inner/t"
        options = {name: value for name, value in options.items() if not name.endswith("_key")}
    make: Callable[..., midepoch.Dataset] = lambda **more: midepoch.from_delta(  # noqa: E731
        address, storage_options=options, index_dir=tmp_path, **more
    )
    ds = make()
    batches = [batch["id"].tolist() for batch in ds.shuffle(seed=1).loader(4, num_workers=2)]
    assert sorted(sum(batches, [])) == [i for i in range(20) if i != 3]
    saved = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in saved and KEY.encode() not in saved and SECRET not in str(ds.state_dict())
    assert len(make(version=0)) == 10
    for path in ("inner", "inner/t/maybe=1"):
        with pytest.raises(FormatError, match=f"from_delta..s3://{bucket.name}/inner/t"):
            midepoch.from_files(f"s3://{bucket.name}/{path}", storage_options=storage_options(s3_server.endpoint))
    for path in ("maybe=1", "maybe=1/*.parquet"):
        with pytest.raises(FormatError, match="is part of the Delta table"):
            midepoch.from_files(bucket / "inner" / "t" / path)
    wrong = {**storage_options(s3_server.endpoint), "secret_key": "WRONGSECRET"}
    with pytest.raises(MidepochError) as problem:
        midepoch.from_delta(f"s3://{bucket.name}/inner/t", storage_options=wrong, force_reindex=True)
    assert "WRONGSECRET" not in "".join(traceback.format_exception(problem.value))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simple(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(MidepochError, match=r"pip install midepoch\[delta\]"):
        midepoch.from_delta(tmp_path)
    with pytest.raises(DataNotFoundError, match="no version 7: its log has 0 to 0"):
        midepoch.from_delta(tmp_path, version=7)


def test_a_damaged_log_is_an_error_of_a_few_words(tmp_path: Path) -> None:
    simple(tmp_path)
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text('{"add": tru')
    with pytest.raises(FormatError, match=f"the Delta table {tmp_path} cannot be read: .*[Jj]son") as problem:
        midepoch.from_delta(tmp_path)
    assert "\n" not in str(problem.value)  # not the functions of deltalake
