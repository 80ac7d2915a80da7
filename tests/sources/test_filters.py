"""Filters of files: pruning loses no row, and two filters are never taken for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.sources import lake as lake_module
from midepoch.sources.filters import parse_filter
from shard_files import write_litdata, write_mds
from tar_files import write_tar


def test_filters_differ_by_every_value_they_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet", row_group_size=500)
    some = np.arange(2000)
    other = some.copy()
    other[1000] = 9999
    for make in (lambda values: [("x", "in", values)], lambda values: pc.field("x").isin(values.tolist())):
        for values in (some, other):
            ds = midepoch.from_files(tmp_path, filters=make(values), cache_dir=tmp_path / "c")
            assert sorted(row["x"] for row in ds) == sorted(values.tolist())
    texts = {parse_filter([("s", "in", {"s1", "s2", "s3"})]).text, parse_filter([["s", "in", ["s1", "s2", "s3"]]]).text}  # type: ignore[union-attr]
    assert len(texts) == 1


def test_nan_is_not_pruned_away(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, float("nan"), 1.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    for expression in (pc.is_nan(pc.field("x")), pc.field("x") != 1.0, ~(pc.field("x") <= 1.0)):
        assert len(midepoch.from_files(tmp_path, filters=expression)) == table.filter(expression).num_rows == 1


def test_a_damaged_block_is_skipped_while_filtering(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"x": range(5000)}), path, row_group_size=500, write_page_checksum=True, use_dictionary=False
    )
    about = pq.read_metadata(path).row_group(3).column(0)
    data = bytearray(path.read_bytes())
    data[about.data_page_offset + about.total_compressed_size // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(midepoch.CorruptBlockError):
        midepoch.from_files(path, filters=[("x", ">", 5)])
    ds = midepoch.from_files(path, filters=[("x", ">", 5)], on_error="skip")
    assert [row["x"] for row in ds] == [i for i in range(6, 5000) if not 1500 <= i < 2000]


FLOATS = [[5.0, float("nan")], [1.0, 2.0], [8.0, float("nan")]]


@pytest.mark.parametrize(
    "expression",
    [
        (pc.field("x") > 3) == False,  # noqa: E712
        pc.field("s", "x") != 5.0,
        ~(pc.field("x") < 5),
        pc.field("x") != 5.0,
        pc.is_nan(pc.field("x")),
        pc.field("x") > 3,
        (pc.field("x") >= 2) & (pc.field("x") < 8),
        pc.if_else(pc.field("x") > 3, False, True),
        pc.xor(pc.field("x") > 3, pc.field("id") > 3),
    ],
    ids=str,
)
def test_filters_lose_no_row(expression: pc.Expression, tmp_path: Path) -> None:
    x = np.concatenate(FLOATS)
    table = pa.table({"id": np.arange(6), "x": x, "s": pa.StructArray.from_arrays([pa.array(x)], ["x"])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    ds = midepoch.from_files(tmp_path / "a.parquet", filters=expression)
    assert [row["id"] for row in ds] == table.filter(expression)["id"].to_pylist()


@pytest.mark.parametrize(
    "expression",
    [
        pc.field("finance") < 5,
        (pc.field("finance") < 5) & (pc.field("flag") == True),  # noqa: E712
        pc.field("finance").is_valid() & (pc.field("finance") <= 5) | (pc.field("finance") == 3.0),
    ],
    ids=str,
)
def test_statistics_answer_plain_comparisons(
    expression: pc.Expression, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"finance": np.arange(200.0), "flag": [True] * 200})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    counted: list[int] = []
    real = lake_module.decoded
    monkeypatch.setattr(lake_module, "decoded", lambda *given: counted.append(1) or real(*given))
    ds = midepoch.from_files(tmp_path / "a.parquet", filters=expression)
    assert [row["finance"] for row in ds] == table.filter(expression)["finance"].to_pylist()
    assert len(counted) == 1, "of 20 blocks"


def test_filters_of_one_text_and_two_types(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.parquet", tmp_path / "cache"
    x = np.array([0.1, 0.2, 0.05, 0.1], np.float32)
    table = pa.table({"id": np.arange(4), "x": x})
    pq.write_table(table, path, row_group_size=2)
    narrow, wide = pc.field("x") > pa.scalar(0.1, pa.float32()), pc.field("x") > 0.1
    assert str(narrow) == str(wide)
    expected = [table.filter(each)["id"].to_pylist() for each in (narrow, wide)]
    assert expected[0] != expected[1]
    for each, rows in zip((narrow, wide), expected, strict=True):
        ds = midepoch.from_files(path, filters=each, index_dir=tmp_path / "ix", cache_dir=cache)
        assert [row["id"] for row in ds] == rows


def write_arrow_files(folder: Path) -> None:
    for name, columns in (("a", {"id": [1], "text": ["x"]}), ("b", {"id": [2, 3]})):
        with (
            pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, pa.table(columns).schema) as w,
        ):
            w.write_table(pa.table(columns))


def write_tar_files(folder: Path) -> None:
    write_tar(folder / "a.tar", [("1.id", b"1"), ("1.text", b"x")])
    write_tar(folder / "b.tar", [("2.id", b"2"), ("3.id", b"3")])


def write_mds_folders(folder: Path) -> None:
    write_mds(folder / "a", {"id": "int", "text": "str"}, [{"id": 1, "text": "x"}])
    write_mds(folder / "b", {"id": "int"}, [{"id": 2}, {"id": 3}])


def write_litdata_folders(folder: Path) -> None:
    write_litdata(folder / "a", [{"id": 1, "text": "x"}])
    write_litdata(folder / "b", [{"id": 2}, {"id": 3}])


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_arrow_files, "*.arrow"),
        (write_tar_files, "*.tar"),
        (write_mds_folders, "*"),
        (write_litdata_folders, "*"),
    ],
)
def test_rows_of_files_that_lack_all_columns_are_counted(
    write: Callable[[Path], None], names: str, tmp_path: Path
) -> None:
    write(tmp_path)
    paths = sorted(tmp_path.glob(names))
    for columns in (["text"], ["id", "text"]):
        ds = midepoch.from_files(paths, columns=columns, filters=pc.field("text").is_null())
        assert [row["text"] for row in ds] == [None, None]
