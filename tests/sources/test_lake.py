"""Structured files in place: every format gives the rows that were written, and resumes exactly."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as po
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_arrow
from midepoch.errors import ColumnError, DataChangedError, FormatError
from midepoch.sources.formats import lines, parquet
from midepoch.testing import assert_resumes_exactly

COLUMNS = ["id", "text", "half", "maybe"]


def rows(start: int, stop: int) -> pa.Table:
    ids = list(range(start, stop))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": [f'row "{i}", né\nsecond line' for i in ids],
            "half": [i + 0.5 for i in ids],
            "maybe": pa.array([None if i % 3 == 0 else i for i in ids], pa.int64()),
        }
    )


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=7)


def write_orc(path: Path, table: pa.Table) -> None:
    po.write_table(table, path, stripe_size=1, batch_size=8)


def write_csv(path: Path, table: pa.Table, opener: Callable[..., Any] = open) -> None:
    with opener(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        writer.writerows(["" if v is None else v for v in row.values()] for row in table.to_pylist())


def write_jsonl(path: Path, table: pa.Table, opener: Callable[..., Any] = open) -> None:
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    "parquet": write_parquet,
    "orc": write_orc,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "csv.gz": lambda path, table: write_csv(path, table, gzip.open),
    "jsonl.gz": lambda path, table: write_jsonl(path, table, gzip.open),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 300)
    monkeypatch.setattr(lines, "_READ", 100)


@pytest.fixture(params=list(WRITERS))
def lake(request: pytest.FixtureRequest, tmp_path: Path, small_blocks: None) -> Path:
    return written(tmp_path, request.param)


def written(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    for i, (start, stop) in enumerate([(0, 25), (25, 26), (26, 50)]):
        WRITERS[kind](folder / f"part-{i}.{kind}", rows(start, stop))
    (folder / "_SUCCESS").write_text("")
    (folder / ".part-0.crc").write_text("x")
    return folder


def test_rows_are_what_was_written(lake: Path) -> None:
    ds = midepoch.from_files(lake)
    assert list(ds) == rows(0, 50).to_pylist()
    assert ds[3] == rows(3, 4).to_pylist()[0]
    assert ds.schema.names == COLUMNS
    assert len(ds) == 50


def test_batches_are_the_same_with_any_number_of_workers(lake: Path) -> None:
    ds = midepoch.from_files(lake).shuffle(seed=4, window=2)
    found = [[batch["id"].tolist() for batch in ds.loader(8, num_workers=workers)] for workers in (0, 1, 2)]
    assert found[0] == found[1] == found[2]
    assert sorted(sum(found[0], [])) == list(range(50))


def test_nulls_have_one_dtype_in_every_batch(lake: Path) -> None:
    batches = list(midepoch.from_files(lake).with_format("numpy").loader(5))
    assert {batch["maybe"].dtype for batch in batches} == {np.dtype("float64")}
    assert {batch["id"].dtype for batch in batches} == {np.dtype("int64")}


# Around the ends of blocks, files and epochs, the moments behind StopIteration included; None is every moment there is.
SOME = [0, 1, 7, 25, 26, 45, 50, 51, 52, 77, 101, 102]
MOMENTS = [SOME, pytest.param(None, marks=pytest.mark.slow)]


def resumes_exactly(lake: Path, scope: str, moments: list[int] | None) -> None:
    def make() -> midepoch.Dataset:
        return midepoch.from_files(lake, columns=["id", "maybe"]).shuffle(seed=2, scope=scope, window=2)

    # What follows from the end of one epoch to that of the next is the business of tests/test_conformance.py.
    assert_resumes_exactly(make, steps=moments, tail=moments and 8)
    pipeline = make().pipeline  # opened once for all loaders, and again for each iteration above
    assert_resumes_exactly(
        lambda: midepoch.Dataset(pipeline).loader(7),
        steps=moments and [0, 1, 4, 7, 8, 9, 15, 16, 17],
        tail=moments and 3,
    )


def nested() -> pa.Table:
    """Nulls at every level, late, and next to values that have none."""
    pair = pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.int64())])
    outer = pa.struct([pa.field("n", pa.int64()), pa.field("whole", pa.int64()), pa.field("in", pair)])
    values = [{"n": i, "whole": i, "in": {"a": i, "b": i}} for i in range(6)]
    values[4] = {"n": None, "whole": 4, "in": None}
    pairs = [{"a": i, "b": None if i == 5 else i} for i in range(6)]
    lists = [[i, i + 1] if i != 3 else [3, None] for i in range(6)]
    return pa.table(
        {
            "outer": pa.array(values, outer),
            "pair": pa.array(pairs, pair),
            "none": pa.array([None if i == 5 else {"a": i, "b": i} for i in range(6)], pair),
            "list": pa.array(lists, pa.list_(pa.int64())),
            "empty": pa.array([[i] * (i % 3) for i in range(6)], pa.list_(pa.int64())),
        }
    )


def parquet_footer(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def required(table: pa.Table) -> pa.Table:
    """With columns that promise to hold no null themselves, where they hold none."""
    fields = [field.with_nullable(table[field.name].null_count > 0) for field in table.schema]
    return table.cast(pa.schema(fields))


def opened(path: Path, table: pa.Table, form: str) -> midepoch.Dataset:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif form == "orc":
        po.write_table(table, path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        write_arrow(path, table, 2)
    return midepoch.from_files(path)


@pytest.mark.parametrize("promise", [False, True])
@pytest.mark.parametrize("form", ["parquet", "orc", "jsonl", "arrow"])
def test_nulls_inside_of_columns_have_one_dtype_in_every_batch(tmp_path: Path, form: str, promise: bool) -> None:
    table = required(nested()) if promise else nested()
    ds = opened(tmp_path / f"a.{form}", table, form)
    nullable = ds.pipeline.source.nullable
    assert nullable["outer"] == {("n",), ("in",)} | (nullable["outer"] & {("in", "a"), ("in", "b")})
    assert nullable["pair"] == {("b",)}
    assert () in nullable["none"]
    assert nullable["list"] == {(nested().schema.field("list").type.field(0).name if form != "parquet" else "element",)}
    assert not nullable["empty"]
    batches = list(ds.with_format("numpy").loader(1))
    assert {batch["outer"]["n"].dtype.name for batch in batches} == {"float64"}
    assert {batch["outer"]["whole"].dtype.name for batch in batches} == {"int64"}
    assert [batch["outer"]["in"][0] for batch in batches] == [row["outer"]["in"] for row in ds]
    assert {(batch["pair"]["a"].dtype.name, batch["pair"]["b"].dtype.name) for batch in batches} == {
        ("int64", "float64")
    }
    assert [batch["none"][0] for batch in batches] == [row["none"] for row in ds] == table["none"].to_pylist()
    assert {batch["list"].dtype.name for batch in batches} == {"float64"}
    assert {batch["empty"].dtype.name for batch in batches} == {"int64"}


@pytest.mark.parametrize("statistics", [True, False])
def test_parquet_without_levels_takes_a_null_for_possible(tmp_path: Path, statistics: bool) -> None:
    """Statistics of older writers count the nulls of a value and of the structs around it together."""
    path = tmp_path / "a.parquet"
    pq.write_table(required(nested()).select(["outer", "pair", "none"]), path, row_group_size=2)
    footer, chunks = parquet_footer(path), []
    leaves = parquet.leaves(pq.read_schema(path))
    for group in parquet.column_chunks(footer):
        without = [chunk._replace(metadata=None, nulls=chunk.nulls if statistics else None) for chunk in group]
        chunks.append(list(zip(leaves, without, strict=True)))
    found = parquet.null_paths(footer, chunks)
    surely = {("outer", "n"), ("outer", "in"), ("pair", "b"), ("none",)}
    assert surely <= found
    assert ("outer",) not in found  # it promises to have none
    assert (("outer", "whole") in found, ("pair", "a") in found) == (not statistics, not statistics)


@pytest.mark.parametrize("moments", MOMENTS, ids=["some", "all"])
def test_resumes_exactly(lake: Path, moments: list[int] | None) -> None:
    resumes_exactly(lake, "window", moments)


@pytest.mark.parametrize("scope", ["rows", "files"])
def test_resumes_exactly_in_other_scopes(scope: str, tmp_path: Path) -> None:
    """An order knows blocks, not how they are written: of one format here, of all of them below."""
    resumes_exactly(written(tmp_path, "parquet"), scope, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["rows", "files"])
def test_resumes_exactly_in_other_scopes_in_every_format(lake: Path, scope: str) -> None:
    resumes_exactly(lake, scope, None)


def test_resumes_with_other_workers_and_worlds(lake: Path) -> None:
    ds = midepoch.from_files(lake, columns=["id"]).shuffle(seed=2, window=2).with_lanes(6)
    whole = [batch["id"].tolist() for batch in ds.loader(6)]
    loaders = [ds.loader(3, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    first = [next(iterators[rank])["id"].tolist() for _ in range(3) for rank in range(2)]
    state = loaders[1].state_dict()
    rest: list[int] = []
    for rank in range(3):
        loader = ds.loader(2, num_workers=2 * (rank == 0), rank=rank, world_size=3)
        loader.load_state_dict(json.loads(json.dumps(state)))
        rest += sum((batch["id"].tolist() for batch in loader), [])
    assert sorted(sum(first, []) + rest) == list(range(50))
    assert sorted(sum(first, [])) == sorted(sum(whole[:3], []))


@pytest.mark.parametrize("moments", MOMENTS, ids=["some", "all"])
@pytest.mark.parametrize("kind", ["parquet", "orc", "jsonl", "csv"])
def test_filters(kind: str, moments: list[int] | None, tmp_path: Path, small_blocks: None) -> None:
    for i in range(3):
        WRITERS[kind](tmp_path / f"{i}.{kind}", rows(20 * i, 20 * i + 20))
    wanted = [row for row in rows(0, 60).to_pylist() if row["id"] > 15 and row["maybe"] is not None]
    for filters in ([("id", ">", 15), ("maybe", "!=", -1)], (pc.field("id") > 15) & pc.field("maybe").is_valid()):
        ds = midepoch.from_files(tmp_path, filters=filters)
        assert list(ds) == wanted
        assert [row["text"] for row in ds.select_columns(["text"])] == [row["text"] for row in wanted]
        assert len(ds.select_columns(["text"])) == len(wanted)
    some = lambda: midepoch.from_files(tmp_path, filters=[("id", ">", 15)]).shuffle(seed=1, window=2)  # noqa: E731
    assert_resumes_exactly(some, steps=moments, tail=moments and 8)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_filter_that_leaves_nothing_leaves_an_empty_dataset(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"a.{kind}"
    WRITERS[kind](path, rows(0, 50))
    for _ in range(2):  # made, then read
        caplog.clear()
        ds = midepoch.from_files(path, filters=[("id", ">", 99)])
        assert "the dataset is empty: the filter leaves no row" in caplog.text
        assert len(ds) == len(list(ds)) == len(ds.shuffle(seed=1).loader(4)) == 0
        assert ds.column_names == COLUMNS
        assert list(ds.shuffle(seed=1).loader(4, num_workers=1)) == []
        assert list(ds.filter(pc.field("id") > 1).loader(4)) == []


def test_a_filter_is_part_of_the_state(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(0, 40))
    state = midepoch.from_files(tmp_path, filters=[("id", "<", 20)]).loader(5).state_dict()
    with pytest.raises(midepoch.CheckpointMismatchError, match="data"):
        midepoch.from_files(tmp_path, filters=[("id", ">=", 20)]).loader(5).load_state_dict(state)


def test_excluded_row_groups_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midepoch.sources.formats.parquet import ParquetFormat

    write_parquet(tmp_path / "a.parquet", rows(0, 70))
    read: list[int] = []
    decode = ParquetFormat.decode
    monkeypatch.setattr(
        ParquetFormat,
        "decode",
        lambda self, store, block, *rest: (read.append(block.offset), decode(self, store, block, *rest))[1],
    )
    ds = midepoch.from_files(tmp_path, filters=[("id", ">=", 50)])
    assert [row["id"] for row in ds] == list(range(50, 70))
    assert set(read) == {7, 8, 9}


def test_hive_partitions(tmp_path: Path) -> None:
    for year in (2023, 2024):
        for lang in ("de", "en gb"):
            folder = tmp_path / f"year={year}" / f"lang={lang.replace(' ', '%20')}"
            folder.mkdir(parents=True)
            write_parquet(folder / "a.parquet", rows(0, 10))
    ds = midepoch.from_files(tmp_path, partitioning="hive")
    assert ds.schema.names == [*COLUMNS, "year", "lang"]
    assert [(row["year"], row["lang"]) for row in ds][::10] == [
        (2023, "de"),
        (2023, "en gb"),
        (2024, "de"),
        (2024, "en gb"),
    ]
    some = midepoch.from_files(tmp_path, partitioning="hive", filters=[("year", "=", 2024), ("id", "<", 3)])
    assert [(row["year"], row["id"]) for row in some] == [(2024, i) for _ in range(2) for i in range(3)]
    assert next(iter(ds.loader(4)))["year"].tolist() == [2023] * 4
    assert [row["lang"] for row in midepoch.from_files(tmp_path, partitioning="hive", columns=["lang"])][9:11] == [
        "de",
        "en gb",
    ]


def test_hive_partitions_are_the_same_for_a_folder_a_list_a_glob_and_a_file(tmp_path: Path) -> None:
    root = tmp_path / "exp=7" / "lake"
    files = [root / f"year={year}" / "lang=de" / "part" / "a.parquet" for year in (2023, 2024)]
    for file in files:
        file.parent.mkdir(parents=True)
        write_parquet(file, rows(0, 2))
    expected = list(midepoch.from_files(root, partitioning="hive"))
    assert [(row["year"], row["lang"]) for row in expected] == [(2023, "de")] * 2 + [(2024, "de")] * 2
    assert list(expected[0]) == [*COLUMNS, "year", "lang"]
    years = [root / "year=2023", root / "year=2024" / "lang=de"]
    for paths in (files, years, root / "**" / "*.parquet", root / "year=202*" / "lang=de" / "part" / "*.parquet"):
        assert list(midepoch.from_files(paths, partitioning="hive")) == expected
    for one in (files[1], *years[1:], root / "year=2024" / "lang=de" / "part" / "*.parquet", root / "year=2024" / "**"):
        assert list(midepoch.from_files(one, partitioning="hive")) == expected[2:]
    plain = tmp_path / "plain.parquet"
    write_parquet(plain, rows(0, 2))
    assert midepoch.from_files([plain], partitioning="hive").column_names == COLUMNS


def test_added_and_missing_columns_are_null(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(0, 5).select(["id"]))
    write_parquet(tmp_path / "b.parquet", rows(5, 10).select(["text", "id"]))
    ds = midepoch.from_files(tmp_path)
    assert [row["text"] for row in ds][:5] == [None] * 5
    assert [row["id"] for row in ds.shuffle(seed=1)] != list(range(10))
    assert sorted(row["id"] for row in ds) == list(range(10))
    write_arrow(tmp_path / "x.arrow", rows(0, 5).select(["id"]), 2)
    write_arrow(tmp_path / "y.arrow", rows(5, 10).select(["text", "id"]), 2)
    arrow = [midepoch.from_files(tmp_path, format="arrow") for _ in range(2)]
    assert [list(each) for each in arrow] == [list(ds)] * 2


def test_types_that_clash_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1, 2]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": ["a", "b"]}))
    with pytest.raises(FormatError, match="'x' is int64 in .*a.parquet but string in .*b.parquet"):
        midepoch.from_files(tmp_path)


JOINED = [
    (pa.string(), pa.large_string(), pa.large_string(), ["a", None]),
    (pa.string(), pa.string_view(), pa.large_string(), ["a", None]),
    (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), pa.large_string(), ["a", None]),
    (pa.int32(), pa.int64(), pa.int64(), [1, None]),
    (pa.float32(), pa.float64(), pa.float64(), [1.5, None]),
    (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.int64()), [[1], [2, None], None]),
    (pa.list_(pa.field("element", pa.int32())), pa.list_(pa.int32()), pa.list_(pa.int32()), [[1], None]),
    (pa.list_(pa.float32(), 2), pa.list_(pa.float32(), 2), pa.list_(pa.float32(), 2), [[1.0, 2.0], [3.0, 4.0]]),
]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize(("first", "second", "common", "values"), JOINED, ids=str)
def test_types_are_joined_as_pyarrow_promotes_them(
    tmp_path: Path, form: str, first: pa.DataType, second: pa.DataType, common: pa.DataType, values: list[Any]
) -> None:
    for name, kind in (("a", first), ("b", second)):
        table = pa.table({"x": pa.array(values, kind if not pa.types.is_dictionary(kind) else kind.value_type)})
        table = table.cast(pa.schema({"x": kind}))
        path = tmp_path / f"{name}.{form}"
        write_parquet(path, table) if form == "parquet" else write_arrow(path, table, 2)
    for order in (["a", "b"], ["b", "a"]):
        ds = midepoch.from_files([tmp_path / f"{name}.{form}" for name in order])
        assert ds.pipeline.source.schema.field("x").type == common
        assert [row["x"] for row in ds] == values * 2
        assert sorted(str(row["x"]) for row in ds.shuffle(seed=1)) == sorted(map(str, values * 2))
        batches = [batch["x"] for batch in ds.with_format("numpy").loader(1)]
        assert len({each.dtype for each in batches if each[0] is not None}) == 1  # there is no array of a null list


def test_structs_have_the_fields_of_all_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"s": [{"n": 1, "in": [{"k": 1}]}, {"n": 2, "in": []}]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"s": [{"more": 7, "n": 3, "in": [{"k": 2, "l": "x"}]}]}))
    ds = midepoch.from_files(tmp_path)
    assert [row["s"] for row in ds] == [
        {"n": 1, "in": [{"k": 1, "l": None}], "more": None},
        {"n": 2, "in": [], "more": None},
        {"n": 3, "in": [{"k": 2, "l": "x"}], "more": 7},
    ]
    numbers = [batch["s"]["more"] for batch in ds.with_format("numpy").loader(1)]
    assert [each.dtype for each in numbers] == [np.dtype("float64")] * 3  # null in one file, so float in all batches


def test_a_folder_that_looks_like_a_glob(tmp_path: Path) -> None:
    for number, folder in enumerate(("run[1]", "run1", "what?", "st*r/run[1]")):
        (tmp_path / folder).mkdir(parents=True)
        write_parquet(tmp_path / folder / "a.parquet", pa.table({"id": [number]}))
    for number, paths in enumerate(
        (["run[1]", "run[1]/*.parquet", "run[1]/a.parquet"], [], ["what?"], ["st*r/run[1]"])
    ):
        for path in paths:
            assert [row["id"] for row in midepoch.from_files(tmp_path / path)] == [number]
    shutil.rmtree(tmp_path / "run[1]")
    assert [row["id"] for row in midepoch.from_files(tmp_path / "run[1]/*.parquet")] == [1]


def test_types_of_text_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2020-01-01\n2,2020-01-02\n")
    (tmp_path / "b.csv").write_text("x,y\n1.5,never\n")
    assert list(midepoch.from_files(tmp_path)) == [
        {"x": 1.0, "y": "2020-01-01"},
        {"x": 2.0, "y": "2020-01-02"},
        {"x": 1.5, "y": "never"},
    ]
    (tmp_path / "a.jsonl").write_text('{"x": 1, "when": "2020-01-01 00:00:00"}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 2.5, "when": "soon", "more": {"a": [1]}}\n')
    assert list(midepoch.from_files(tmp_path, format="jsonl")) == [
        {"x": 1.0, "when": "2020-01-01 00:00:00", "more": None},
        {"x": 2.5, "when": "soon", "more": {"a": [1]}},
    ]


def test_listing(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "a/_tmp/3.parquet", ".hidden/4.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_parquet(tmp_path / name, rows(int(name[-9]), int(name[-9]) + 1))
    ids = [row["id"] for row in midepoch.from_files(tmp_path)]
    assert ids == [1, 2]
    assert [row["id"] for row in midepoch.from_files(tmp_path / "**" / "*.parquet")] == ids
    assert [row["id"] for row in midepoch.from_files(f"{tmp_path}/?/[0-9].parquet")] == ids
    assert [row["id"] for row in midepoch.from_files([tmp_path / "b", tmp_path / "a"])] == [2, 1]
    (tmp_path / "a" / "x.csv").write_text("id\n7\n")
    with pytest.raises(FormatError, match="different formats: parquet .* csv .*format=….*concat"):
        midepoch.from_files(tmp_path)
    assert [row["id"] for row in midepoch.from_files(tmp_path, format="csv")] == [7]


def test_files_without_a_suffix(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0000", rows(0, 3))
    assert [row["id"] for row in midepoch.from_files(tmp_path / "part-0000")] == [0, 1, 2]
    assert [row["id"] for row in midepoch.from_files(tmp_path, format="parquet")] == [0, 1, 2]


def test_a_second_open_reads_no_data_file(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midepoch.storage.stores import Store

    midepoch.from_files(lake)
    monkeypatch.setattr(Store, "open", lambda *_: pytest.fail("a data file was opened"))
    assert len(midepoch.from_files(lake)) == 50
    monkeypatch.setattr("midepoch.sources.files.files_below", lambda *_: pytest.fail("the files were listed"))
    monkeypatch.setattr("midepoch.sources.files.file_at", lambda *_: pytest.fail("the files were listed"))
    assert len(midepoch.from_files(lake, validate=False)) == 50


def test_a_changed_file_is_indexed_again_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, rows(0, 20))
    ds = midepoch.from_files(path)
    state = ds.loader(4).state_dict()
    write_parquet(path, rows(100, 120))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataChangedError, match="a.parquet has changed since it was indexed"):
        list(ds)
    again = midepoch.from_files(path)
    assert [row["id"] for row in again] == list(range(100, 120))
    with pytest.raises(midepoch.CheckpointMismatchError, match="data"):
        again.loader(4).load_state_dict(state)


def test_moved_files_still_resume(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(2):
        write_parquet(tmp_path / "a" / f"{i}.parquet", rows(20 * i, 20 * i + 20))
    loader = midepoch.from_files(tmp_path / "a").shuffle(seed=1).loader(8)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), [batch["id"].tolist() for batch in batches]
    (tmp_path / "a").rename(tmp_path / "b")
    moved = midepoch.from_files(tmp_path / "b").shuffle(seed=1).loader(8)
    moved.load_state_dict(state)
    assert [batch["id"].tolist() for batch in moved] == expected


def test_datasets_pickle(lake: Path) -> None:
    ds = midepoch.from_files(lake, filters=[("id", ">", 10)] if "orc" not in str(list(lake.iterdir())) else None)
    data = pickle.dumps(ds.shuffle(seed=3))
    assert list(pickle.loads(data)) == list(ds.shuffle(seed=3))
    assert len(data) < 4096


def test_bad_arguments(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(0, 5))
    for arguments, error, text in (
        ({"format": "xml"}, ValueError, "format must be one of 'arrow', 'parquet'"),
        ({"columns": ["nope"]}, ColumnError, "nope"),
        ({"filters": [("nope", ">", 1)]}, ColumnError, "nope"),
        ({"filters": "id > 3"}, ValueError, "filters must be"),
        ({"partitioning": "dir"}, ValueError, "partitioning"),
        ({"cache_bytes": 0}, ValueError, "cache_bytes"),
        ({"storage_options": {"key": "x"}}, ValueError, "local path"),
        ({"filters": {"id": 1}}, ValueError, r"filters must be .*got \{'id': 1\}.*Write .*\[\(\"label\""),
        ({"filters": lambda row: True}, ValueError, "it is a function"),
        ({"filters": [("id", "~", 1)]}, ValueError, "not a valid operator"),
    ):
        with pytest.raises(error, match=text):
            next(iter(midepoch.from_files(tmp_path, **arguments).loader(2)))  # type: ignore[arg-type]
    for name, content, text in (
        ("cut.parquet", (tmp_path / "a.parquet").read_bytes()[:-20], "truncated"),
        ("empty.parquet", b"", "empty or truncated"),
        ("foreign.parquet", b"x" * 100, "not a complete Parquet file"),
        ("empty.csv", b"", "the file is empty"),
        ("bad.jsonl", b'{"a": 1}\n{"a": ', "cannot be read"),
        ("array.json", b"[1, 2]", "element 0 of the array .* is not an object"),
        ("ragged.csv", b"a,b\n1,2\n3\n", "cannot be read"),
        ("bad.orc", b"ORC" + b"x" * 50, "not a complete ORC file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=text):
            midepoch.from_files(tmp_path / name)
