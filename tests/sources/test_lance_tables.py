"""Lance tables: the values of lance's own reader, for all types and formats."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import shutil
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from midepoch.errors import CorruptBlockError, DataError, DataNotFoundError, MidepochError
from midepoch.sources.tables import lance as tables
from s3 import SECRET, Server, storage_options
from table_files import rows

lance = pytest.importorskip("lance")


def typed() -> pa.Table:
    moments = [dt.datetime(2024, 1, 1, 1, 2, 3, 456789), None, None]
    return pa.table(
        {
            "string": pa.array(["é", "", None]),
            "large": pa.array(["é", "", None], pa.large_string()),
            "long": pa.array([2**60, 0, None]),
            "int": pa.array([-(2**31), 0, 1], pa.int32()),
            "uint": pa.array([2**64 - 1, 0, None], pa.uint64()),
            "half": pa.array([np.float16(1.5), None, None], pa.float16()),
            "float": pa.array([1.5, 0.0, None], pa.float32()),
            "decimal": pa.array([Decimal("-1.20"), None, None], pa.decimal128(38, 2)),
            "boolean": pa.array([True, False, None]),
            "binary": pa.array([b"\x00\xff", b"", None]),
            "fixed": pa.array([b"abcd", b"efgh", b"ijkl"], pa.binary(4)),
            "date": pa.array([dt.date(1, 1, 1), dt.date(9999, 1, 1), None]),
            "time": pa.array([dt.time(1, 2, 3, 4), dt.time(0), None], pa.time64("us")),
            "zoned": pa.array(moments, pa.timestamp("us", "Europe/Berlin")),
            "seconds": pa.array([1, 2, None], pa.duration("s")),
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
            "maybe_vector": pa.array([[1.0, 2.0], None, [5.0, 6.0]], pa.list_(pa.float32(), 2)),
            "holey_vector": pa.array([[1.0, None], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
            "list": pa.array([[1, None], [], None], pa.list_(pa.int64())),
            "full_list": pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
            "struct": pa.array([{"x": 1, "z": "q"}, {"x": 2, "z": None}, {"x": 3, "z": ""}]),
            "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
        }
    )


def own_rows(folder: Path, **options: Any) -> pa.Table:
    return lance.dataset(folder, **options).scanner(blob_handling="all_binary").to_table()


@pytest.mark.parametrize("version", ["legacy", "2.0", "2.1", "2.2"])
def test_all_types_equal_those_of_its_own_reader(tmp_path: Path, version: str) -> None:
    data = typed() if version != "legacy" else typed().drop_columns(["holey_vector", "maybe_vector", "half"])
    lance.write_dataset(data, tmp_path, data_storage_version=version)
    lance.write_dataset(data.slice(0, 2), tmp_path, mode="append")
    ds = midepoch.from_lance(tmp_path)
    assert list(ds) == own_rows(tmp_path).to_pylist()
    nullable = {name for name, paths in ds.pipeline.source.nullable.items() if () in paths}
    found = own_rows(tmp_path)  # the oldest format has no nulls
    expected = {name for name in found.schema.names if found.column(name).null_count}
    texts = {"string", "large", "binary", "fixed", "dictionary"}
    assert nullable - texts == expected - texts
    batch = ds.with_format("numpy")[:3]
    assert batch["vector"].shape == (3, 2) and batch["int"].dtype == "int32"
    if version != "legacy":
        assert ("item",) in ds.pipeline.source.nullable["list"] and not ds.pipeline.source.nullable["full_list"]
        assert batch["long"].dtype == "float64"


def test_blobs_are_bytes_and_changed_columns_are_those_of_the_version(tmp_path: Path) -> None:
    field = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), field, pa.field("odd name.x", pa.int64())][:2])
    data = pa.table({"id": [1, 2, 3], "blob": [b"a" * 100_000, b"", None]}, schema)
    lance.write_dataset(data, tmp_path, data_storage_version="2.0")
    assert list(midepoch.from_lance(tmp_path)) == data.to_pylist()
    lance.dataset(tmp_path).add_columns({"Double-Id": "id * 2"})
    lance.dataset(tmp_path).add_columns(pa.schema([pa.field("later", pa.int64())]))
    lance.dataset(tmp_path).alter_columns({"path": "id", "name": "Number"})
    lance.dataset(tmp_path).delete("Number = 2")
    for version in range(1, 6):
        ds = midepoch.from_lance(tmp_path, version=version)
        expected = own_rows(tmp_path, version=version)
        assert list(ds) == expected.to_pylist() and ds.schema.names == expected.schema.names
    assert ds.with_format("numpy")[:2]["Double-Id"].dtype == "int64"
    lance.dataset(tmp_path).tags.create("gold", 1)
    assert len(midepoch.from_lance(tmp_path, version="gold")) == 3
    with pytest.raises(DataNotFoundError, match="has no tag 'silver': it has 'gold'"):
        midepoch.from_lance(tmp_path, version="silver")


def test_blocks_are_ranges_of_fragments_without_deleted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_ROWS", 7)
    lance.write_dataset(rows(0, 60), tmp_path, max_rows_per_file=25)
    lance.dataset(tmp_path).delete("id % 3 = 1 or (id >= 50 and id < 58)")
    ds = midepoch.from_lance(tmp_path)
    kept = [i for i in range(60) if i % 3 != 1 and not 50 <= i < 58]
    assert [row["id"] for row in ds] == kept
    assert np.diff(ds.pipeline.source.layout.block_starts).max() == 7
    assert [ds[i]["id"] for i in (-1, 20, 3)] == [kept[i] for i in (-1, 20, 3)]
    lance.dataset(tmp_path).optimize.compact_files()
    assert [row["id"] for row in midepoch.from_lance(tmp_path)] == kept
    lance.dataset(tmp_path).delete("true")
    with pytest.raises(DataNotFoundError, match="there are no rows in"):
        midepoch.from_lance(tmp_path)


def test_a_shallow_clone_is_read(tmp_path: Path) -> None:
    made = lance.write_dataset(rows(0, 20), tmp_path / "a", max_rows_per_file=10)
    made.shallow_clone(str(tmp_path / "b"), 1)
    lance.write_dataset(rows(20, 25), tmp_path / "b", mode="append")
    assert [row["id"] for row in midepoch.from_lance(tmp_path / "b")] == list(range(25))


def test_a_table_that_was_replaced_is_detected(tmp_path: Path) -> None:
    lance.write_dataset(rows(0, 20), tmp_path)
    old = midepoch.from_lance(tmp_path)
    assert len(list(old)) == 20
    shutil.rmtree(tmp_path)
    lance.write_dataset(rows(100, 110), tmp_path)
    assert [row["id"] for row in midepoch.from_lance(tmp_path)] == list(range(100, 110))
    with pytest.raises(DataError):
        list(old)


def test_damage_is_reported_with_the_fragment(tmp_path: Path) -> None:
    lance.write_dataset(rows(0, 3000), tmp_path)
    ds = midepoch.from_lance(tmp_path)
    file = next((tmp_path / "data").iterdir())
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[:8000] = os.urandom(8000)
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptBlockError, match=r"fragment 0 of .* These are rows 0 to 2999 of the data"):
        list(ds)


def _in_child(ds: midepoch.Dataset, queue: Any) -> None:
    try:
        queue.put(ds[0]["id"])
    except MidepochError as problem:
        queue.put(str(problem))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
def test_a_forked_process_is_refused_instead_of_waiting_forever(tmp_path: Path) -> None:
    lance.write_dataset(rows(0, 20), tmp_path)
    ds = midepoch.from_lance(tmp_path)
    assert ds[0]["id"] == 0
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(ds, queue))
    child.start()
    child.join(60)
    assert "a Lance table cannot be read in a forked process" in queue.get()


def test_a_table_in_an_object_store(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    folder = s3_server.folder / "lance-tables" / "t.lance"
    lance.write_dataset(rows(0, 30), folder, max_rows_per_file=10)
    lance.dataset(folder).delete("id = 3")
    options = {"storage_options": storage_options(s3_server.endpoint), "index_dir": tmp_path}
    ds = midepoch.from_lance("s3://lance-tables/t.lance", **options)
    batches = [batch["id"].tolist() for batch in ds.shuffle(seed=1).loader(4, num_workers=2)]
    assert sorted(sum(batches, [])) == [i for i in range(30) if i != 3]
    assert len(midepoch.from_lance("s3://lance-tables/t.lance", version=1, **options)) == 30
    local = midepoch.from_lance(folder).shuffle(seed=1)
    local.load_state_dict(ds.shuffle(seed=1).state_dict())  # the same table, elsewhere
    saved = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in saved + str(ds.state_dict()).encode()
    wrong = {**storage_options(s3_server.endpoint), "secret_key": "WRONGSECRET"}
    with pytest.raises(MidepochError) as problem:
        midepoch.from_lance("s3://lance-tables/t.lance", storage_options=wrong)
    shown = "".join(traceback.format_exception(problem.value))
    assert "WRONGSECRET" not in shown


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lance.write_dataset(rows(0, 20), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "lance", None)
    with pytest.raises(MidepochError, match=r"pip install midepoch\[lance\]"):
        midepoch.from_lance(tmp_path)
