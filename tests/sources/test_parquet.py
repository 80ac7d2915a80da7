"""Parquet: what a footer tells, and footers that are damaged."""

from __future__ import annotations

import base64
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

import midepoch
from midepoch.errors import FormatError
from midepoch.sources.formats import parquet
from midepoch.sources.formats.parquet import column_chunks, sound

TABLE = pa.table(
    {
        "id": range(200),
        "flag": [i % 2 == 0 for i in range(200)],
        "text": [None if i % 9 == 0 else f"row {i} " + "é" * (i % 7) for i in range(200)],
        "long": ["x" * 300 for _ in range(200)],
        "list": [[i] * (i % 4) for i in range(200)],
        "maybe": [None if i % 5 == 0 else i / 3 for i in range(200)],
        "struct": [{"a": i, "b": None if i % 3 else str(i)} for i in range(200)],
        "fixed": pa.array([struct.pack("<q", i) for i in range(200)], pa.binary(8)),
        "null": pa.nulls(200),
    }
)


def footer_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - struct.unpack("<I", data[-8:-4])[0] : -8]


@pytest.mark.parametrize("statistics", [True, False, ["id", "text"]])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_chunks_are_those_of_pyarrow(tmp_path: Path, statistics: bool | list[str], version: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=70, write_statistics=statistics, version=version)
    footer, metadata = footer_of(path), pq.read_metadata(path)
    found = column_chunks(footer)
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    assert len(found) == metadata.num_row_groups
    for number, chunks in enumerate(found):
        expected = [metadata.row_group(number).column(i).statistics for i in range(metadata.num_columns)]
        assert [chunk.nulls for chunk in chunks] == [each and each.null_count for each in expected]
        assert all(sound(footer, chunk, column) for chunk, column in zip(chunks, columns, strict=True))


MUTATE = """
import struct, sys
import midepoch
whole = open(sys.argv[1], "rb").read()
start = len(whole) - 8 - struct.unpack("<I", whole[-8:-4])[0]
first = whole.index(struct.pack("<q", 99), start)  # the bounds of the first chunk's values are near
for bit in range(8 * (first - 60), 8 * (first + 90), 13):
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    open(sys.argv[2], "wb").write(damaged)
    for filters in (None, [("id", ">", 1000)]):
        try:
            for row in midepoch.from_files(sys.argv[2], filters=filters, force_reindex=True):
                pass
        except midepoch.MidepochError:
            pass
"""


def test_a_flipped_bit_in_statistics_never_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE.select(["id", "maybe"]).slice(0, 100), path)
    arguments = [sys.executable, "-c", MUTATE, str(path), str(tmp_path / "damaged.parquet")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


SHORT_BOUND = """
import sys
import midepoch
for filters in ([("id", ">", 1000)], [("id", ">=", 0)]):
    try:
        list(midepoch.from_files(sys.argv[1], filters=filters))
    except midepoch.MidepochError as problem:
        assert sys.argv[1] in str(problem), problem
assert len(list(midepoch.from_files(sys.argv[1], columns=["maybe"]))) == 100
"""


def test_a_bound_that_is_too_short_never_ends_the_process(tmp_path: Path) -> None:
    """The footer is whole: only its largest value has 4 bytes where a value has 8."""
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE.select(["id", "maybe"]).slice(0, 100), path)
    data, footer = path.read_bytes(), footer_of(path)
    bound = footer.index(b"\x28\x08" + struct.pack("<q", 99))
    cut = footer[: bound + 1] + b"\x04" + footer[bound + 2 : bound + 6] + footer[bound + 10 :]
    path.write_bytes(data[: -8 - len(footer)] + cut + struct.pack("<I", len(cut)) + b"PAR1")
    done = subprocess.run([sys.executable, "-c", SHORT_BOUND, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class Keys(pe.KmsClient):
    def __init__(self, _configuration: pe.KmsConnectionConfig) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key_bytes: bytes, _master_key: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, _master_key: str) -> bytes:
        return base64.b64decode(wrapped_key)


def test_encrypted_columns_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    configuration = pe.EncryptionConfiguration(footer_key="f", column_keys={"k": ["maybe"]}, plaintext_footer=True)
    factory = pe.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), configuration)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE, row_group_size=50)
    assert [row["id"] for row in midepoch.from_files(path, columns=["id"])] == list(range(200))
    found = midepoch.from_files(path, columns=["text"], filters=[("id", ">=", 150)])
    assert [row["text"] for row in found] == TABLE["text"].to_pylist()[150:]
    for on_error in ("raise", "skip"):
        with pytest.raises(FormatError, match=r"'maybe' is encrypted.*columns="):
            list(midepoch.from_files(path, on_error=on_error))
        with pytest.raises(FormatError, match="'maybe' is encrypted"):
            midepoch.from_files(path, columns=["id"], filters=[("maybe", ">", 3.0)], on_error=on_error)


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """Counts calls, of functions in C and of generators too, in all threads: no clock is asked."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_opening_filtering_and_reading_are_linear_in_columns(tmp_path: Path) -> None:
    def cost(columns: int) -> int:
        path = tmp_path / f"{columns}.parquet"
        pq.write_table(pa.table({f"column {i}": range(4) for i in range(columns)}), path, row_group_size=2)
        with counted_calls() as calls:
            list(midepoch.from_files(path))
            list(midepoch.from_files(path, filters=[("column 7", ">", 0)]))
            return calls()

    cost(10)  # imports
    small, large = cost(100), cost(800)
    assert large < 10 * small


def test_a_row_group_with_more_text_than_small_offsets_can_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_BYTES", 9_000)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 2_000)
    texts = [None if i % 7 == 0 else f"{i} " * 30 for i in range(200)]
    table = pa.table(
        {
            "id": range(200),
            "text": texts,
            "bytes": [text and text.encode() for text in texts],
            "list": [[text] * (i % 3) for i, text in enumerate(texts)],
            "struct": [{"t": text, "n": i} for i, text in enumerate(texts)],
            "category": pa.array(texts).dictionary_encode(),
            "small": [str(i) for i in range(200)],
        }
    )
    for name, statistics in (("a", True), ("b", False)):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=100, use_dictionary=statistics)
        ds = midepoch.from_files(tmp_path / f"{name}.parquet")
        kinds = {field.name: str(field.type) for field in ds.pipeline.source.schema}
        assert kinds["text"] == kinds["category"] == "large_string"
        assert kinds["bytes"] == "large_binary"
        assert "large_string" in kinds["list"]
        assert "large_string" in kinds["struct"]
        assert kinds["small"] == "string"
        assert list(ds) == table.to_pylist()
        assert list(ds.select_columns(["list", "id"])) == table.select(["list", "id"]).to_pylist()
    pq.write_table(table.slice(0, 10), tmp_path / "c.parquet")
    assert list(midepoch.from_files(tmp_path)) == [*table.to_pylist(), *table.to_pylist(), *table.to_pylist()[:10]]


def test_one_huge_row_group_is_read_by_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(100_000)}), tmp_path / "a.parquet", row_group_size=1 << 20)
    ds = midepoch.from_files(tmp_path, cache_bytes=1)
    assert ds[77_777]["x"] == 77_777
    loader = ds.loader(1000)
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    again = ds.loader(1000)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))["x"].tolist() == list(range(60_000, 61_000))


@pytest.mark.parametrize("workers", [0, 1])
def test_uuids_do_not_need_the_arrow_schema(workers: int, tmp_path: Path) -> None:
    keys = [UUID(int=i) for i in range(6)]
    column = pa.array([key.bytes for key in keys[:5]] + [None], pa.uuid())
    lists = pa.array([[key.bytes] for key in keys], pa.list_(pa.binary(16))).cast(pa.list_(pa.uuid()))
    inner = pa.StructArray.from_arrays([column], names=["key"])
    table = pa.table({"id": range(6), "key": column, "lists": lists, "inner": inner, "raw": [b"0" * 16] * 6})
    found = []
    for name, store_schema in (("a", True), ("b", False)):
        pq.write_table(table, tmp_path / f"{name}.parquet", store_schema=store_schema, row_group_size=4)
        ds = midepoch.from_files(tmp_path / f"{name}.parquet").with_format("python")
        found.append(list(ds.loader(4, num_workers=workers)))
        for filters in ([("key", "==", keys[4].bytes)], [("id", "==", 4)]):
            assert list(midepoch.from_files(tmp_path / f"{name}.parquet", filters=filters)) == [ds[4]]
    assert found[0] == found[1]
    assert found[1][1]["key"] == [keys[4], None]
    assert found[1][1]["lists"] == [[keys[4]], [keys[5]]]
    assert found[1][1]["inner"] == [{"key": keys[4]}, {"key": None}]
    assert len(midepoch.from_files(tmp_path)) == 12


@pytest.mark.parametrize("store_schema", [True, False])
def test_rows_are_chosen_and_sorted_by_uuids(store_schema: bool, tmp_path: Path) -> None:
    keys = [UUID(int=i) for i in (3, 1, 2)]
    column = pa.array([key.bytes for key in keys] + [None], pa.uuid())
    pq.write_table(pa.table({"id": range(4), "key": column}), tmp_path / "a.parquet", store_schema=store_schema)
    for filters in (
        [("key", "==", keys[1])],
        [("key", "in", {keys[1]})],
        [("key", "in", [keys[1].bytes])],
        pc.field("key") == keys[1].bytes,
    ):
        assert [row["id"] for row in midepoch.from_files(tmp_path, filters=filters)] == [1]
    ds = midepoch.from_files(tmp_path)
    assert [row["id"] for row in ds.filter(pc.field("key") == keys[1].bytes)] == [1]
    assert [row["id"] for row in ds.filter(pc.field("key").is_null())] == [3]
    assert [row["id"] for row in ds.sort("key")] == [1, 2, 0, 3]
    assert len(list(ds.take(3).balanced("key", num_samples=6, seed=1))) == 6
