"""Wrong, lost and repeated rows of which nothing was heard: each was shown once, and is compared with plain pyarrow here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import midepoch
from conftest import write_arrow
from midepoch.sources import lake as lake_module


def ids(batches: Any, name: str = "id") -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_an_archive(workers: int, tmp_path: Path) -> None:
    """They are parts of one file, with one position for all who read at the same time, in forks as well."""
    fsspec = pytest.importorskip("fsspec")
    rows, names = 20_000, [f"{number}.parquet" for number in range(3)]
    for number, name in enumerate(names):
        first = np.arange(number * rows, (number + 1) * rows)
        table = pa.table({"id": first, "seven": 7 * first})
        pq.write_table(table, tmp_path / name, row_group_size=1000, compression="none", use_dictionary=False)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name in names:
            archive.add(tmp_path / name, f"d/{name}")
    with pytest.raises(midepoch.DataNotFoundError, match="gone.tar.*does not exist"):
        midepoch.from_files(f"tar://d::{tmp_path / 'gone.tar'}")
    filesystem = fsspec.filesystem("tar", fo=str(tmp_path / "all.tar"))
    ds = midepoch.from_files("d", filesystem=filesystem, index_dir=tmp_path / "ix").with_format("numpy")
    seen: list[int] = []
    for batch in ds.shuffle(seed=1, window=3).map(dict, batched=True).loader(500, num_workers=workers):
        assert (batch["seven"] == 7 * batch["id"]).all()
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(3 * rows))


@pytest.mark.parametrize("chain", ["zip", "simplecache", "handler"])
def test_other_ways_to_files_in_memory(chain: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    rows, memory, name = 20_000, fsspec.filesystem("memory"), f"silent{os.getpid()}"
    table = pa.table({"id": np.arange(rows), "seven": 7 * np.arange(rows)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=500, compression="none", use_dictionary=False)
    memory.pipe(f"/{name}/a.parquet", sink.getvalue().to_pybytes())
    with memory.open(f"/{name}/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.parquet", sink.getvalue().to_pybytes())
    options: dict[str, Any] = {"index_dir": tmp_path / "ix"}
    where = f"/{name}/a.parquet"
    if chain == "handler":
        options["filesystem"] = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(memory))
    else:
        where = (
            f"zip://a.parquet::memory://{name}/all.zip" if chain == "zip" else f"simplecache::memory://{name}/a.parquet"
        )
    ds = midepoch.from_files(where, **options).with_format("numpy").shuffle(seed=1, window=3)
    for workers in (0, 0, 2) if chain == "zip" else (0, 0):
        seen: list[int] = []
        for batch in ds.map(dict, batched=True).loader(500, num_workers=workers):
            assert (batch["seven"] == 7 * batch["id"]).all()
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(rows))


def test_rows_asked_for_by_several_threads(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(20_000)}), tmp_path / "a.parquet", row_group_size=1000)
    ds = midepoch.from_files(tmp_path / "a.parquet", cache_bytes=20_000)  # of which a few blocks are kept at a time
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 20_000, 8).tolist() for _ in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert [found["id"] for found in pool.map(ds.__getitem__, asked)] == asked

        def asks(row: dict[str, Any]) -> dict[str, Any]:  # another thread, and waits for it
            return {"next": pool.submit(ds.__getitem__, row["id"] + 1).result(60)["id"]}

        assert ds.map(asks)[7]["next"] == 8


def test_a_shard_is_the_same_rows_for_all(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(12)}), tmp_path / "a.parquet", row_group_size=3)
    for shuffled in (False, True):
        ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy")
        ds = ds.shuffle(seed=1) if shuffled else ds
        for index in range(3):
            shard = ds.shard(3, index, mode="example")
            rows = [int(row["id"]) for row in shard]
            assert shard[:]["id"].tolist() == rows
            assert ids(shard.loader(2, last_batch="uneven")) == rows


JAX = """
import sys, numpy as np, jax, pyarrow as pa, pyarrow.parquet as pq, midepoch
pq.write_table(pa.table({"id": np.arange(4), "large": np.arange(4) + 2**40}), sys.argv[1])
ds = midepoch.from_files(sys.argv[1]).with_format("jax")
assert next(iter(ds.select_columns("id").loader(4)))["id"].tolist() == [0, 1, 2, 3]
try:
    next(iter(ds.loader(4)))
except midepoch.MidepochError as problem:
    print(problem)
jax.config.update("jax_enable_x64", True)
assert next(iter(ds.loader(4)))["large"].tolist() == [2**40, 2**40 + 1, 2**40 + 2, 2**40 + 3]
"""


def test_jax_cuts_no_number(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    command = [sys.executable, "-c", JAX, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "jax_enable_x64" in done.stdout and done.returncode == 0, done.stderr


def test_a_mapped_file_that_was_replaced(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"id": range(40)}), 10)
    ds = midepoch.from_files(path).with_format("numpy")
    other = write_arrow(tmp_path / "b.arrow", pa.table({"id": range(7000, 7040)}), 10)
    assert other.stat().st_size == path.stat().st_size
    os.utime(other, ns=(1, 1))
    os.replace(other, path)
    with pytest.raises(midepoch.DataChangedError, match="its contents differ"):
        list(ds.loader(4))
    write_arrow(path, pa.table({"id": range(40)}), 10)
    os.utime(path, ns=(2, 2))  # copied, or touched: the same data
    assert ids(ds.loader(4)) == list(range(40))


def test_an_index_that_was_left_over_decides_nothing(tmp_path: Path) -> None:
    """The folder once held Parquet: what is mapped without that index is mapped with it, and in the same order."""
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"id": range(12)}), folder / "a.parquet")
    midepoch.from_files(folder, index_dir=tmp_path / "old")
    (folder / "a.parquet").unlink()
    write_arrow(folder / "a.arrow", pa.table({"id": range(12)}), 3)
    found = [
        ids(midepoch.from_files(folder, index_dir=tmp_path / name).shuffle(seed=1).loader(2, rank=0, world_size=2))
        for name in ("old", "new")
    ]
    assert found[0] == found[1]
    assert len(midepoch.from_files(folder, index_dir=tmp_path / "old", validate=False)) == 12


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
def test_statistics_still_answer_plain_comparisons(
    expression: pc.Expression, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"finance": np.arange(200.0), "flag": [True] * 200})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    counted: list[int] = []
    real = lake_module.decoder
    monkeypatch.setattr(lake_module, "decoder", lambda *given: counted.append(1) or real(*given))
    ds = midepoch.from_files(tmp_path / "a.parquet", filters=expression)
    assert [row["finance"] for row in ds] == table.filter(expression)["finance"].to_pylist()
    assert len(counted) == 1, "of 20 blocks"


def test_filters_of_one_text(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.tsv", "a\tb\n\t\n\t\n"),
        ("b.csv", "a,b\n , \n"),
        ("b.csv", "a\n \n  \n"),
        ("b.csv", "a,b\n1,2\n\n\n"),
        ("b.csv", "a\n1\n \n"),
    ],
)
def test_rows_of_nothing_but_blanks(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    delimiter = "\t" if name.endswith("tsv") else ","
    expected = pcsv.read_csv(tmp_path / name, parse_options=pcsv.ParseOptions(delimiter=delimiter)).num_rows
    assert expected and len(midepoch.from_files(tmp_path / name)) == expected


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_empty_list_of_lists_has_nothing_in_it(kind: str, tmp_path: Path) -> None:
    values = [[], [[1, 2]], [[]], None, [[3], []]]
    pq.write_table(pa.table({"x": pa.array(values, pa.list_(pa.list_(pa.int64())))}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").with_format(kind)
    found = [None if row["x"] is None else [list(map(int, inner)) for inner in row["x"]] for row in ds]
    assert found == values


def test_a_field_that_a_block_lacks_is_null_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.sources.formats.lines.BLOCK_BYTES", 400)
    monkeypatch.setattr("midepoch.sources.formats.lines._READ", 100)
    rows = [{"id": i, **({"y": i, "s": {"a": i}} if i >= 60 else {})} for i in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = midepoch.from_files(tmp_path / "a.jsonl")
    batches = list(ds.with_format("numpy").loader(10))
    assert len({batch["y"].dtype for batch in batches}) == 1
    assert [row["s"] for row in ds][:60] == [None] * 60
    assert batches[0]["s"] is not None and np.isnan(batches[0]["y"]).all()


def test_what_a_map_writes_into_its_input_shows_nowhere(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(12)}), tmp_path / "a.parquet")

    def made(batch: Any) -> Any:
        return {"y": batch["x"] * 10}

    def writes(batch: Any) -> Any:
        batch["y"] += 1
        if (batch["y"] >= 100).any():
            raise ValueError("too large")
        return {"z": batch["y"].copy()}

    ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy").map(made, batched=True)
    for size in (4, 6, 12):
        mapped = ds.map(writes, batched=True, on_error="skip", batch_size=size)
        batches = list(mapped.loader(size))
        assert ids(batches, "z") == [10 * i + 1 for i in range(10)], size
        assert ids(batches, "y") == [10 * i for i in range(10)], size

    def appends(row: Any) -> bool:
        row["words"].append(0)
        if row["x"] == 11:
            raise ValueError("the last one")
        return len(row["words"]) == 2

    rows = midepoch.from_files(tmp_path / "a.parquet").with_format("python").map(lambda row: {"words": [row["x"]]})
    kept = rows.filter(appends, on_error="skip")
    assert [(row["x"], row["words"]) for row in kept] == [(i, [i]) for i in range(11)]


def test_empty_lists_of_a_map_are_arrays(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(4)}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").map(lambda row: {"y": [1.5] * (row["x"] % 3)})
    assert [value.tolist() for value in next(iter(ds.loader(4)))["y"]] == [[], [1.5], [1.5, 1.5], []]
    assert ds.with_format("numpy")[0]["y"].shape == (0,)


def test_whole_numbers_that_no_array_holds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(2)}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy").map(lambda row: {"y": [2**63 + 1, -1]})
    assert [list(row["y"]) for row in ds] == [[2**63 + 1, -1]] * 2


def test_a_glob_inside_of_a_partition(tmp_path: Path) -> None:
    for year in (2001, 2002, 1999):
        folder = tmp_path / f"year={year}" / "m=1"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [year]}), folder / "a.parquet")
    ds = midepoch.from_files(f"{tmp_path}/year=20*/*/*.parquet", partitioning="hive")
    assert [(row["id"], row["year"]) for row in ds] == [(2001, 2001), (2002, 2002)]
