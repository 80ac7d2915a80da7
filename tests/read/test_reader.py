"""Whatever the layout and the rows asked for, the reader gives what ``Table.take`` gives."""

from __future__ import annotations

import decimal
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from characters import ENCODABLE
from data import numbered, write_arrow, write_parquet
from forks import forked
from midepoch.errors import CorruptBlockError, DataChangedError
from midepoch.read import Reader
from midepoch.sources import Source
from midepoch.sources.lake import open_index

PAUSE = 0.0004
"""Seconds between two checks of one mapped file."""
small = st.integers(-100, 100)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): small,
    pa.int32(): small,
    pa.int64(): st.integers(-(2**62), 2**62),
    pa.uint16(): st.integers(0, 60_000),
    pa.float32(): st.floats(-1e3, 1e3, width=32),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(ENCODABLE, max_size=8),
    pa.large_string(): st.text(ENCODABLE, max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.integers(0, 10**12),
    pa.decimal128(9, 2): st.integers(-(10**6), 10**6).map(lambda n: decimal.Decimal(n) / 100),
    pa.list_(pa.int32()): st.lists(small, max_size=5),
    pa.large_list(pa.float64()): st.lists(st.floats(-9, 9), max_size=5),
    pa.list_(pa.int16(), 3): st.lists(small, min_size=3, max_size=3),
    pa.list_(pa.string()): st.lists(st.text(ENCODABLE, max_size=3), max_size=3),
    pa.list_(pa.list_(pa.int8())): st.lists(st.lists(small, max_size=2), max_size=2),
    pa.struct({"a": pa.int32(), "b": pa.string()}): st.fixed_dictionaries(
        {"a": small, "b": st.text(ENCODABLE, max_size=3)}
    ),
    pa.null(): st.none(),
    pa.string_view(): st.text(ENCODABLE, max_size=20),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(1, 40))
    columns = {}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(VALUES)))
        values = VALUES[kind] if draw(st.booleans()) else st.none() | VALUES[kind]
        columns[f"c{number}"] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(columns)


def reader_of(path: Path, columns: list[str] | None = None, **options: bool) -> Reader:
    return Reader(Source(open_index([path], index_dir=path.parent / "ix")), columns, **options)


def plain(table: pa.Table) -> pa.Table:
    """As read: string views stay, nothing else differs."""
    return table.combine_chunks()


@given(tables(), st.integers(1, 12), st.sampled_from([None, "zstd"]), st.data())
@settings(max_examples=120)
def test_reads_what_pyarrow_takes(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, block: int, codec: str | None, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("read") / "a.arrow"
    write_arrow(path, table, block, options=pa.ipc.IpcWriteOptions(compression=codec))
    reader = reader_of(path)
    for _ in range(3):
        rows = data.draw(
            st.lists(st.integers(0, table.num_rows - 1), max_size=40)
            | st.integers(0, table.num_rows - 1).map(lambda a: list(range(a, table.num_rows)))
        )
        found = reader.read(np.array(rows, dtype=np.int64))
        found.batch.validate(full=True)
        assert found.kept is None
        assert found.batch.to_pylist() == [table.slice(row, 1).to_pylist()[0] for row in rows]
        assert found.batch.schema.equals(table.schema)


def test_only_the_columns_asked_for(small_files: list[str]) -> None:
    reader = Reader(Source(open_index([Path(path) for path in small_files])), ["score", "id"])
    found = reader.read(np.array([36, 0, 20])).batch
    assert found.to_pydict() == {"score": [18.0, 0.0, 10.0], "id": [36, 0, 20]}


def test_many_files_at_once(make_files: Callable[..., list[str]]) -> None:
    paths = make_files([3] * 50, block=2)
    reader = Reader(Source(open_index([Path(path) for path in paths])))
    rows = np.random.default_rng(0).permutation(150)
    found = reader.read(rows).batch
    assert found.to_pylist() == pa.concat_tables([numbered(int(row), int(row) + 1) for row in rows]).to_pylist()


def test_empty_request(small_files: list[str]) -> None:
    reader = Reader(Source(open_index([Path(path) for path in small_files])))
    assert reader.read(np.array([], dtype=np.int64)).batch.num_rows == 0


def test_gathered_memory_is_owned_and_slices_are_not(small_files: list[str]) -> None:
    reader = Reader(Source(open_index([Path(path) for path in small_files])))
    assert reader.read(np.array([5, 1, 30])).owned
    assert not reader.read(np.array([4, 5, 6])).owned


def damage(path: Path, block: int) -> None:
    """Let a string of a block end outside its data, leaving size and time of the file as they are."""
    mapped = pa.memory_map(str(path)).read_buffer()
    index = open_index([path], index_dir=path.parent / "ix")
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(mapped.slice(int(index.offsets[block]))), index.schema)
    at = batch.column("text").buffers()[1].address - mapped.address + 4
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[at : at + 4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_damaged_block(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(100, 130), 10)
    damage(path, 1)
    with pytest.raises(CorruptBlockError, match="block 1"):
        reader_of(path).read(np.array([12, 3]))
    reader = reader_of(path, skip_corrupt=True)
    for rows in (np.array([25, 12, 3, 19, 11]), np.arange(30)):
        found = reader.read(rows)
        assert found.kept is not None
        assert found.batch["id"].to_pylist() == [row + 100 for row in rows if not 10 <= row < 20]
        assert found.kept.tolist() == [not 10 <= row < 20 for row in rows]


def test_mappings_are_bounded(make_files: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were not used for longest are released: the kernel allows a process 65,530 mappings by default."""
    monkeypatch.setattr("midepoch.read.blocks.MOST_MAPPINGS", 0)  # the least per reader: 64
    paths = make_files([5] * 300, block=2)
    source = Source(open_index([Path(path) for path in paths]))
    reader, numbers = Reader(source), Reader(source, ["id"])
    folder = str(Path(paths[0]).parent)
    kept = []
    rows = np.random.default_rng(0).permutation(1500)
    for i in range(0, 1500, 10):
        located = numbers.locate(rows[i : i + 10])
        assert located is not None
        kept = [*kept[-2:], (located["id"], rows[i : i + 10])]  # used later, when its files may be released
        found = reader.read(rows[i : i + 10]).batch
        assert found.column("id").to_pylist() == rows[i : i + 10].tolist()
        mapped = {line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line}
        assert len(mapped) <= 2 * (64 + 10) + 3 * 10
        for earlier, wanted in kept:
            assert earlier.array(0, 10).tolist() == wanted.tolist()


@pytest.mark.parametrize("damage", ["truncated", "rewritten"])
def test_a_file_changed_in_place_is_noticed_before_it_is_read(tmp_path: Path, damage: str) -> None:
    """Reading a page that is no longer in the file is a fatal signal: sizes are compared first."""
    path = tmp_path / "a.arrow"
    write_arrow(path, numbered(10_000, 30_000), 1000)
    reader = reader_of(path)
    assert reader.read(np.array([19_999, 3, 7])).batch.column("id").to_pylist() == [29_999, 10_003, 10_007]
    before = path.read_bytes()
    if damage == "truncated":
        os.truncate(path, 4096)
    else:
        write_arrow(tmp_path / "b.arrow", numbered(30_000, 50_000), 1000)
        other = (tmp_path / "b.arrow").read_bytes()
        assert len(other) == len(before)
        with path.open("r+b") as file:
            file.write(other)
    time.sleep(100 * PAUSE)
    with pytest.raises(DataChangedError, match="a.arrow"):
        reader.read(np.array([19_998, 3, 7]))


@pytest.mark.parametrize("columns", [["id"], ["id", "tokens"], ["id", "text"]])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("restore_time", [False, True])
def test_no_row_of_a_file_rewritten_during_an_epoch_is_delivered(
    tmp_path: Path, columns: list[str], shuffled: bool, restore_time: bool
) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(10_000, 30_000).select(columns), 100)
    other = write_arrow(tmp_path / "b.arrow", numbered(30_000, 50_000).select(columns), 100).read_bytes()
    ds = midepoch.from_files(path).with_format("numpy")
    rows = iter((ds.shuffle(seed=1) if shuffled else ds).loader(50))
    assert next(rows)["id"].max() < 30_000
    stat = path.stat()
    assert len(other) == stat.st_size
    with path.open("r+b") as file:
        file.write(other)
    if restore_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    time.sleep(100 * PAUSE)
    with pytest.raises(DataChangedError, match="a.arrow has changed since it was indexed"):
        next(rows)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("columns", [["id"], ["id", "text"]])
def test_an_epoch_does_not_end_after_a_file_was_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str], workers: int
) -> None:
    """Even if the rest of it is shorter than the pause between two checks, which is long for many files."""
    monkeypatch.setattr("midepoch.read.blocks._CHECK_PAUSE", 1e9)
    monkeypatch.setattr("midepoch.read.blocks._LONGEST_PAUSE", 1e9)
    path = write_arrow(tmp_path / "a.arrow", numbered(10_000, 30_000).select(columns), 20_000)
    other = write_arrow(tmp_path / "b.arrow", numbered(30_000, 50_000).select(columns), 20_000).read_bytes()
    loader = midepoch.from_files(path).with_format("numpy").shuffle(seed=1).loader(50, num_workers=workers)
    rows = iter(loader)
    for _ in range(5):  # the first check is over
        next(rows)
    with path.open("r+b") as file:
        file.write(other)
    with pytest.raises(DataChangedError, match="a.arrow has changed since it was indexed"):
        list(rows)
    loader.close()


def test_a_file_replaced_by_renaming_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, numbered(0, 100), 10)
    reader = reader_of(path)
    reader.read(np.array([0, 50]))
    write_arrow(tmp_path / "b.arrow", numbered(500, 520), 10)
    os.replace(tmp_path / "b.arrow", path)
    assert reader.read(np.array([7, 3, 51])).batch.column("id").to_pylist() == [7, 3, 51]
    os.utime(path)
    assert reader.read(np.array([7, 3, 51])).batch.column("id").to_pylist() == [7, 3, 51]


@pytest.mark.parametrize("skip", [False, True])
def test_a_shortage_of_the_machine_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: bool) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, numbered(0, 100), 10)
    reader = reader_of(path, skip_corrupt=skip)
    real, failures = pa.memory_map, [2]

    def short(*arguments: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments)

    monkeypatch.setattr(pa, "memory_map", short)
    monkeypatch.setattr("midepoch.storage.damage.PAUSES", (0.0, 0.0))
    assert reader.read(np.array([7, 3, 51])).batch.column("id").to_pylist() == [7, 3, 51]
    failures[0] = 100
    with pytest.raises(OSError, match="Too many open files"):
        reader_of(path, skip_corrupt=skip).read(np.array([7, 3, 51]))


def test_a_fork_reads_on_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet", row_group_size=100)
    ds = midepoch.from_files(tmp_path)
    assert ds[0]["x"] == 0
    rows = iter(ds)
    next(rows)
    for _ in range(3):
        read = lambda: ds[9_999]["x"] == 9_999 and [row["x"] for row in ds.take(500)] == list(range(500))  # noqa: E731
        assert forked(read) == 0
    assert next(rows)["x"] == 1


def test_rows_are_read_by_several_threads(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", range(20_000), 1000)
    ds = midepoch.from_files(tmp_path / "a.parquet", cache_bytes=20_000)  # of which a few blocks are kept at a time
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 20_000, 8).tolist() for _ in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert [found["id"] for found in pool.map(ds.__getitem__, asked)] == asked

        def asks(row: dict[str, Any]) -> dict[str, Any]:  # another thread, and waits for it
            return {"next": pool.submit(ds.__getitem__, row["id"] + 1).result(60)["id"]}

        assert ds.map(asks)[7]["next"] == 8
