from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from data import numbered, scan, write_arrow
from midepoch.errors import CheckpointMismatchError, FormatError
from midepoch.sources.formats.arrow_ipc import BatchReader


@pytest.mark.parametrize("file_format", [False, True])
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_finds_what_pyarrow_finds(tmp_path: Path, file_format: bool, codec: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 103), 10, file_format=file_format, options=options)
    found = scan(path)
    assert found.rows == [10] * 10 + [3]
    assert found.schema.equals(numbered(0, 1).schema)
    mapped = pa.memory_map(str(path)).read_buffer()
    for offset, rows in zip(found.offsets, found.rows, strict=True):
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(mapped.slice(offset)), found.schema)
        assert batch.num_rows == rows


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20))
@settings(max_examples=50)
def test_any_blocks(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("scan") / "a.arrow"
    schema = pa.schema({"x": pa.int64(), "s": pa.string()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for size in sizes:
            writer.write_batch(pa.record_batch([pa.array(range(size)), pa.array(["a"] * size)], schema=schema))
    assert scan(path).rows == [size for size in sizes if size]  # empty blocks are passed over


def test_columns_with_nulls_are_noted(tmp_path: Path) -> None:
    table = pa.table(
        {
            "whole": [1, 2, 3],
            "holes": [1, None, 3],
            "nested": pa.array([{"a": 1}, {"a": None}, {"a": 2}]),
            "lists": pa.array([[1], None, [2]]),
            "last": pa.array(["a", "b", None]),
        }
    )
    found = scan(write_arrow(tmp_path / "a.arrow", table, 2)).nullable
    assert found == {("holes",), ("lists",), ("last",), ("nested", "a")}


def test_stream_without_end_marker(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 10), 5)
    path.write_bytes(path.read_bytes()[:-8])
    assert scan(path).rows == [5, 5]


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_truncated(tmp_path: Path, cut: float) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 1000), 100)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(FormatError, match="probably truncated"):
        scan(path)
    kept = scan(path, skip_damage=True)
    assert not kept.complete
    assert kept.rows == [100] * len(kept.rows)
    assert 0 < len(kept.rows) < 10


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1" + b"x" * 100, b"FEA1" + b"x" * 100, b"id,text\n1,a\n", b"\x00" * 64, b"{}", np.arange(99).tobytes()],
)
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="a.arrow"):
        scan(path)


@given(where=st.integers(0, 3000), value=st.integers(0, 255))
@settings(max_examples=300)
def test_a_flipped_byte_never_crashes(tmp_path_factory: pytest.TempPathFactory, where: int, value: int) -> None:
    path = write_arrow(tmp_path_factory.mktemp("flip") / "a.arrow", numbered(0, 40), 10)
    data = bytearray(path.read_bytes())
    data[where % len(data)] = value
    path.write_bytes(data)
    try:
        scan(path)
    except FormatError:
        pass


def test_fingerprint_is_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    a = write_arrow(tmp_path / "a.arrow", numbered(0, 100), 10)
    moved = write_arrow(tmp_path / "other" / "b.arrow", numbered(0, 100), 10)
    changed = write_arrow(tmp_path / "c.arrow", numbered(1, 101), 10)
    reblocked = write_arrow(tmp_path / "d.arrow", numbered(0, 100), 20)
    assert scan(a).fingerprint == scan(moved).fingerprint
    assert len({scan(path).fingerprint for path in (a, changed, reblocked)}) == 3


def overwrite(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


@pytest.mark.parametrize("file_format", [False, True])
def test_zero_bytes_are_not_the_end(tmp_path: Path, file_format: bool) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 1000), 100, file_format=file_format)
    overwrite(path, scan(path).offsets[3], bytes(64))
    with pytest.raises(FormatError, match="zero bytes where a message should begin"):
        scan(path)
    kept = scan(path, skip_damage=True)
    assert not kept.complete
    assert kept.rows == [100] * (9 if file_format else 3)  # a footer says where the others are


def test_a_download_that_stopped_in_a_preallocated_file(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 1000), 100)
    end = scan(path).offsets[5]
    overwrite(path, end, bytes(path.stat().st_size - end))
    with pytest.raises(FormatError, match="probably truncated"):
        scan(path)
    assert scan(path, skip_damage=True).rows == [100] * 5


@pytest.mark.parametrize("file_format", [False, True])
def test_zeros_anywhere_in_headers_never_lose_rows(tmp_path: Path, file_format: bool) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 40), 10, file_format=file_format)
    whole, offsets = path.read_bytes(), scan(path).offsets
    starts = range(offsets[2], offsets[2] + 8 + struct.unpack_from("<I", whole, offsets[2] + 4)[0], 8)
    if file_format:
        starts = [
            *starts,
            *range(len(whole) - 10 - struct.unpack_from("<I", whole, len(whole) - 10)[0], len(whole), 4),
        ]
    for start in starts:
        overwrite(path, start, bytes(min(8, len(whole) - start)))
        try:
            assert scan(path).rows == [10] * 4, start
        except FormatError:
            pass
        path.write_bytes(whole)


def test_streams_that_were_joined_are_refused(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 10), 5)
    stream = path.read_bytes()
    for joined in (stream + stream, stream[:-8] + stream, stream + bytes(1 << 17) + stream):
        path.write_bytes(joined)
        with pytest.raises(FormatError, match="as if files had been concatenated"):
            scan(path)
    path.write_bytes(stream + bytes(100))  # padded
    assert scan(path).rows == [5, 5]


def test_streams_without_continuation_markers_end_with_four_zero_bytes(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4, use_legacy_format=True)
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 10), 5, options=options)
    assert path.read_bytes()[:4] != b"\xff\xff\xff\xff"
    assert scan(path).rows == [5, 5]
    overwrite(path, scan(path).offsets[1], bytes(32))
    with pytest.raises(FormatError, match="zero bytes"):
        scan(path)


def as_polars_writes(path: Path) -> None:
    """Take the length before the schema away: since 1.44 Polars writes none."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<I", data, 12)
    data[8 : 16 + length] = data[16 : 16 + length] + bytes(8)
    path.write_bytes(data)


def encoded(values: list[str | None], kind: pa.DataType, ordered: bool = False) -> pa.DictionaryArray:
    words = sorted({value for value in values if value is not None})
    indices = [None if value is None else words.index(value) for value in values]
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.uint32()), pa.array(words, kind), ordered=ordered)


class Label(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.dictionary(pa.uint32(), pa.string()), "midepoch.tests.label")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Label:
        return cls()


def categories(count: int) -> pa.Table:
    words = [["a", "bc", None, "d"][i % 4] for i in range(count)]
    views, plain = encoded(words, pa.string_view()), encoded(words, pa.string())
    return pa.table(
        {
            "id": pa.array(range(count)),
            "view": views,
            "struct": pa.StructArray.from_arrays([views, pa.array(range(count))], names=["c", "n"]),
            "list": pa.LargeListArray.from_arrays(pa.array(range(count + 1), pa.int64()), views),
            "extension": pa.ExtensionArray.from_storage(Label(), plain),
        }
    )


@pytest.mark.parametrize("file_format", [False, True])
@pytest.mark.parametrize("mapped", [True, False])
def test_categories_are_read_wherever_they_are(tmp_path: Path, file_format: bool, mapped: bool) -> None:
    table = categories(50)
    expected = [{**row, "extension": row["view"]} for row in table.to_pylist()]
    path = write_arrow(tmp_path / "a.arrow", table, 20, file_format=file_format)
    if file_format:
        as_polars_writes(path)
    pa.register_extension_type(Label())
    try:
        ds = midepoch.from_files(path, filters=None if mapped else [("id", ">=", 0)])
        assert list(ds) == expected
        shuffled = [row for batch in ds.shuffle(seed=3).with_format("arrow").loader(16) for row in batch.to_pylist()]
        assert sorted(shuffled, key=lambda row: row["id"]) == expected
    finally:
        pa.unregister_extension_type("midepoch.tests.label")


def test_files_of_polars_itself(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    words = ["a", "bc", None, "d"] * 50
    frame = pl.DataFrame({"id": range(200), "text": words, "list": [[i] * (i % 3) for i in range(200)]})
    frame = frame.with_columns(
        category=pl.col("text").cast(pl.Categorical), enum=pl.col("text").cast(pl.Enum(["d", "bc", "a"]))
    ).with_columns(struct=pl.struct("category", "id"))
    for codec in ("uncompressed", "lz4", "zstd"):
        frame.write_ipc(tmp_path / f"{codec}.arrow", compression=codec, record_batch_size=60)
        assert list(midepoch.from_files(tmp_path / f"{codec}.arrow")) == frame.to_dicts()
    frame.write_ipc_stream(tmp_path / "stream.arrow")
    assert list(midepoch.from_files(tmp_path / "stream.arrow")) == frame.to_dicts()


@pytest.mark.parametrize("deltas", [False, True])
def test_each_dictionary_message_is_read_once(tmp_path: Path, deltas: bool) -> None:
    """In any order of batches, also where each has dictionaries of its own, or adds to those before it."""
    path = tmp_path / "a.arrow"
    count = 40
    words = [
        [f"word {i}" for i in (range(10 * b + 10) if deltas else range(10 * b, 10 * b + 10))] for b in range(count)
    ]
    constant = pa.array([f"constant {i}" for i in range(500)])
    schema = pa.schema({"w": pa.dictionary(pa.int32(), pa.string()), "c": pa.dictionary(pa.int32(), pa.string())})
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema, options=options) as writer:
        for own in words:
            numbers = pa.array(range(len(own)), pa.int32())
            columns = [pa.DictionaryArray.from_arrays(numbers, values) for values in (pa.array(own), constant)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    found, data = scan(path), path.read_bytes()
    bodies = 0

    def read(size: int, at: int) -> bytes:
        nonlocal bodies
        bodies += size if size != 4096 else 0
        return data[at : at + size]

    reader = BatchReader(read, len(data))
    order = np.random.default_rng(1).permutation(count).tolist()
    for number in [*range(count), *order]:
        batch = reader.read(found.offsets[number], None, found.dictionaries)
        assert batch.column("w").to_pylist() == words[number]
    assert bodies < 2.2 * len(data)


def test_columns_of_one_name_and_dictionaries_in_unions_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(FormatError, match="several columns are named 'a'"):
        midepoch.from_files(write_arrow(tmp_path / "a.arrow", twice, 1))
    inner = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["x"]).dictionary_encode()])
    with pytest.raises(FormatError, match="dictionary-encoded values inside"):
        midepoch.from_files(write_arrow(tmp_path / "b.arrow", pa.table({"s": inner}), 1))


def test_joined_streams_and_files_without_a_footer_are_refused(tmp_path: Path) -> None:
    stream = write_arrow(tmp_path / "a.arrow", numbered(0, 9), 3).read_bytes()
    (tmp_path / "joined.arrow").write_bytes(stream + stream)
    with pytest.raises(FormatError, match="as if files had been concatenated"):
        midepoch.from_files(tmp_path / "joined.arrow")
    whole = write_arrow(tmp_path / "b.arrow", numbered(0, 9), 3, file_format=True).read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[:-6])
    with pytest.raises(FormatError, match="footer is missing"):
        midepoch.from_files(tmp_path / "cut.arrow")


def test_a_changed_middle_column_is_other_data(tmp_path: Path) -> None:
    def make(name: str, value: int) -> midepoch.Dataset:
        table = pa.table({"id": range(20_000), "label": [value] * 20_000, "text": ["x" * 40] * 20_000})
        return midepoch.from_files(write_arrow(tmp_path / name, table, 1000))

    with pytest.raises(CheckpointMismatchError, match="data"):
        make("b.arrow", 1).load_state_dict(make("a.arrow", 0).state_dict())
