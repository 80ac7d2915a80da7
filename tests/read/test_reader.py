"""Whatever the layout and the rows asked for, the reader gives what ``Table.take`` gives."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import numbered, write_arrow
from midepoch.errors import CorruptBlockError
from midepoch.read import Reader
from midepoch.sources import Source
from midepoch.sources.index import open_index

small = st.integers(-100, 100)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): small,
    pa.int32(): small,
    pa.int64(): st.integers(-(2**62), 2**62),
    pa.uint16(): st.integers(0, 60_000),
    pa.float32(): st.floats(-1e3, 1e3, width=32),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=8),
    pa.large_string(): st.text(max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.integers(0, 10**12),
    pa.decimal128(9, 2): st.integers(-(10**6), 10**6).map(lambda n: decimal.Decimal(n) / 100),
    pa.list_(pa.int32()): st.lists(small, max_size=5),
    pa.large_list(pa.float64()): st.lists(st.floats(-9, 9), max_size=5),
    pa.list_(pa.int16(), 3): st.lists(small, min_size=3, max_size=3),
    pa.list_(pa.string()): st.lists(st.text(max_size=3), max_size=3),
    pa.list_(pa.list_(pa.int8())): st.lists(st.lists(small, max_size=2), max_size=2),
    pa.struct({"a": pa.int32(), "b": pa.string()}): st.fixed_dictionaries({"a": small, "b": st.text(max_size=3)}),
    pa.null(): st.none(),
    pa.string_view(): st.text(max_size=20),
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
    return Reader(Source((open_index([path], index_dir=path.parent / "ix"),)), columns, **options)


def plain(table: pa.Table) -> pa.Table:
    """As read: string views stay, nothing else differs."""
    return table.combine_chunks()


@given(tables(), st.integers(1, 12), st.sampled_from([None, "zstd"]), st.data())
@settings(max_examples=300)
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
    reader = Reader(Source((open_index([Path(path) for path in small_files]),)), ["score", "id"])
    found = reader.read(np.array([36, 0, 20])).batch
    assert found.to_pydict() == {"score": [18.0, 0.0, 10.0], "id": [36, 0, 20]}


def test_many_files_at_once(make_files: Callable[..., list[str]]) -> None:
    paths = make_files([3] * 50, block=2)
    reader = Reader(Source((open_index([Path(path) for path in paths]),)))
    rows = np.random.default_rng(0).permutation(150)
    found = reader.read(rows).batch
    assert found.to_pylist() == pa.concat_tables([numbered(int(row), int(row) + 1) for row in rows]).to_pylist()


def test_empty_request(small_files: list[str]) -> None:
    reader = Reader(Source((open_index([Path(path) for path in small_files]),)))
    assert reader.read(np.array([], dtype=np.int64)).batch.num_rows == 0


def test_gathered_memory_is_owned_and_slices_are_not(small_files: list[str]) -> None:
    reader = Reader(Source((open_index([Path(path) for path in small_files]),)))
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
