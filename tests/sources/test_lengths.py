"""Row lengths are those of the values, in every layout and format."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import orc

import midepoch
from data import write_arrow
from midepoch.errors import ColumnError, CorruptBlockError
from midepoch.sources import Source
from midepoch.sources import lengths as length_module
from midepoch.sources.lake import open_index
from midepoch.sources.lengths import lengths_of
from row_lengths import VALUES, everything, expected, sidecars, source_of

LISTS: list[Any] = [[1] * n for n in (3, 0, 1, 300, 2)] + [None, [7]]


COLUMNS = {
    "string": pa.array(VALUES),
    "large_string": pa.array(VALUES, pa.large_string()),
    "binary": pa.array(VALUES, pa.binary()),
    "large_binary": pa.array(VALUES, pa.large_binary()),
    "string_view": pa.array(VALUES, pa.string_view()),
    "binary_view": pa.array(VALUES, pa.binary_view()),
    "dictionary": pa.array(VALUES).dictionary_encode(),
    "list": pa.array(LISTS, pa.list_(pa.int32())),
    "large_list": pa.array(LISTS, pa.large_list(pa.int16())),
    "list_view": pa.array(LISTS, pa.list_view(pa.int32())),
    "large_list_view": pa.array(LISTS, pa.large_list_view(pa.int32())),
    "nested": pa.array([[["a", "b"], []], None, [], [None, ["c"], []]], pa.list_(pa.list_(pa.string()))),
    "structs": pa.array([[{"a": 1}], None, [{"a": 2}, {"a": 3}]], pa.list_(pa.struct({"a": pa.int64()}))),
    "map": pa.array([[("a", 1), ("b", 2)], None, []], pa.map_(pa.string(), pa.int64())),
    "fixed with nulls": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
}


@pytest.mark.parametrize("file_format", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_every_layout_of_mapped_files(name: str, file_format: bool, tmp_path: Path) -> None:
    column = COLUMNS[name]
    table = pa.table({"n": range(len(column)), name: column, "t": ["other"] * len(column)})
    path = write_arrow(tmp_path / "a.arrow", table, 3, file_format=file_format)
    source = Source(open_index([path], index_dir=tmp_path))  # also of encoded files, which from_files would decode
    assert source.access is None
    assert everything(lengths_of(source, name)) == expected(column.to_pylist())


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_record_batches(codec: str, tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    table = pa.table({"n": range(len(LISTS)), "ids": pa.array(LISTS, pa.list_(pa.int32()))})
    path = write_arrow(tmp_path / "a.arrow", table, 3, options=options)
    mapped, decoded = Source(open_index([path], index_dir=tmp_path / "1")), source_of(path, tmp_path / "2")
    assert (mapped.access is None, decoded.access is None) == (True, False)
    for source in (mapped, decoded):
        assert everything(lengths_of(source, "ids")) == expected(LISTS)


@pytest.mark.parametrize("suffix", ["parquet", "orc", "jsonl", "csv"])
def test_formats_that_are_decoded(suffix: str, tmp_path: Path) -> None:
    values = ["", "a", "ée", "word " * 60] * 40
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"n": range(len(values)), "text": values, "ids": [[i] * (i % 7) for i in range(len(values))]})
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=33)
    elif suffix == "orc":
        orc.write_table(table, path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path.write_text("n,text\n" + "".join(f'{i},"{value}"\n' for i, value in enumerate(values)))
    source = source_of(path, tmp_path / "ix")
    assert everything(lengths_of(source, "text")) == expected(values)
    if suffix != "csv":
        assert everything(lengths_of(source, "ids")) == [i % 7 for i in range(len(values))]


def test_rows_that_pass_a_filter(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(40), "text": ["x" * n for n in range(40)]}), path, row_group_size=7)
    for low in (30, 10):
        source = source_of(path, tmp_path / "ix", filters=[("n", ">=", low), ("n", "<", low + 10)])
        assert everything(lengths_of(source, "text")) == [*range(low, low + 10)]


def test_several_files(tmp_path: Path) -> None:
    paths = [write_arrow(tmp_path / f"{i}.arrow", pa.table({"t": ["x" * i] * (i + 2)}), 2) for i in range(3)]
    source = Source(open_index(paths, index_dir=tmp_path / "ix"))
    assert everything(lengths_of(source, "t")) == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    other = Source(open_index(paths[::-1], index_dir=tmp_path / "ix"))
    assert everything(lengths_of(other, "t")) == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert len(sidecars(tmp_path / "ix")) == 2


@given(
    lengths=st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), max_size=40),
    block=st.integers(1, 9),
    run=st.integers(1, 14),
)
def test_any_lengths_in_any_blocks_and_runs(
    lengths: list[int], block: int, run: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lengths")
    path = write_arrow(folder / "a.arrow", pa.table({"t": pa.array(["x" * n for n in lengths], pa.string())}), block)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(length_module, "_RUN", run)
        patched.setattr(length_module, "_COPY", 3)
        source = Source(open_index([path], index_dir=folder))
        made = lengths_of(source, "t")
    assert everything(made) == everything(lengths_of(source, "t")) == lengths
    width = next(width for width in (1, 2, 4) if max(lengths, default=0) < 1 << 8 * width)
    (sidecar,) = sidecars(folder)
    assert sidecar.stat().st_size == 4096 + width * len(lengths)


def test_chosen_rows_in_any_order(docs: midepoch.Dataset) -> None:
    lengths = lengths_of(docs.pipeline.source, "tokens")
    rows = np.array([77, 0, 5, 77, 299])
    values = docs["tokens"][:]
    assert lengths.of(rows).tolist() == [0 if values[row] is None else len(values[row]) for row in rows]
    with pytest.raises(IndexError):
        lengths.of(np.array([300]))


def test_constant_lengths_need_no_file(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([[1, 2, 3]] * 9, pa.list_(pa.int8(), 3)), "b": pa.array([b"ab"] * 9, pa.binary(2))})
    source = source_of(write_arrow(tmp_path / "a.arrow", table, 4), tmp_path / "ix")
    for column, length in (("a", 3), ("b", 2)):
        lengths = lengths_of(source, column)
        assert everything(lengths) == everything(pickle.loads(pickle.dumps(lengths))) == [length] * 9
    assert not sidecars(tmp_path / "ix")


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.struct({"a": pa.string()}), pa.decimal128(5), pa.null()])
def test_columns_without_a_length(kind: pa.DataType, tmp_path: Path) -> None:
    source = source_of(write_arrow(tmp_path / "a.arrow", pa.table({"x": pa.nulls(3, kind)}), 2), tmp_path / "ix")
    with pytest.raises(ColumnError, match=r"'x' contains .*, whose values have no length. Name a column of lists"):
        lengths_of(source, "x")
    with pytest.raises(ColumnError, match="no column 'y'. There are: x"):
        lengths_of(source, "y")


def damaged_offsets(path: Path, block: int, ends: list[int]) -> None:
    """Overwrite the offsets of a record batch of one list column without nulls."""
    source = Source(open_index([path]))
    batch_at = int(source.offsets[block])
    with pa.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer()
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer.slice(batch_at)), source.schema)
        at = batch.column(0).buffers()[1].address - buffer.address
        dtype = np.int64 if pa.types.is_large_list(batch.schema.field(0).type) else np.int32
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.array(ends, dtype).tobytes())


BAD_ENDS = {
    "negative": [-5, 0, 1, 3],
    "decreasing": [0, 3, 1, 3],
    "past the end": [0, 1, 2, 99_999],
    "wrapping around": [0, 2**31 - 1, -(2**31), 3],
}


@pytest.mark.parametrize("ends", BAD_ENDS.values(), ids=BAD_ENDS)
@pytest.mark.parametrize("large", [False, True])
def test_damaged_offsets(ends: list[int], large: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = pa.large_list(pa.int32()) if large else pa.list_(pa.int32())
    path = write_arrow(tmp_path / "a.arrow", pa.table({"ids": pa.array([[1]] * 12, kind)}), 3)
    damaged_offsets(path, 2, ends)
    source = Source(open_index([path], index_dir=tmp_path / "ix"))
    with pytest.raises(CorruptBlockError, match=r"record batch at byte \d+ of .*a\.arrow \(rows 6 to 8 of the data\)"):
        lengths_of(source, "ids")
    lengths = lengths_of(source, "ids", skip_corrupt=True)
    assert everything(lengths) == [1] * 6 + [0] * 3 + [1] * 3
    assert lengths.unreadable == 3
    assert "the lengths of 3 rows are 0" in caplog.text
    with pytest.raises(CorruptBlockError):  # the file with zeros is there, and is not used
        lengths_of(source, "ids")
    assert everything(lengths_of(source, "ids", skip_corrupt=True)) == [1] * 6 + [0] * 3 + [1] * 3


def test_damaged_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"t": [f"{n:09}" for n in range(90)]})
    pq.write_table(table, path, row_group_size=30, compression="gzip", use_dictionary=False)
    metadata = pq.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as file:
        file.seek(metadata.data_page_offset)
        file.write(b"\xff" * metadata.total_compressed_size)
    with pytest.raises(CorruptBlockError, match="rows 30 to 59 of the data"):
        lengths_of(source_of(path, tmp_path / "ix"), "t")
    ds = midepoch.from_files(path, index_dir=tmp_path / "ix", on_error="skip")
    assert ds.lengths("t").tolist() == [9] * 30 + [0] * 30 + [9] * 30
