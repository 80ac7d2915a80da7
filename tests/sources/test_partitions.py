"""Hive partitions: values and roots."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

import midepoch


def test_values_are_parsed_below_the_root_only(tmp_path: Path) -> None:
    root = tmp_path / "exp=7" / "lake"
    for value in ("²", "--1", "5"):
        (root / f"k={value}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [1]}), root / f"k={value}" / "a.parquet")
    ds = midepoch.from_files(root, partitioning="hive")
    assert ds.schema.names == ["x", "k"]
    assert sorted(row["k"] for row in ds) == ["--1", "5", "²"]


def test_a_glob_inside_a_partition(tmp_path: Path) -> None:
    for year in (2001, 2002, 1999):
        folder = tmp_path / f"year={year}" / "m=1"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [year]}), folder / "a.parquet")
    ds = midepoch.from_files(f"{tmp_path}/year=20*/*/*.parquet", partitioning="hive")
    assert [(row["id"], row["year"]) for row in ds] == [(2001, 2001), (2002, 2002)]
