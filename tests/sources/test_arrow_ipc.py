from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import numbered, write_arrow
from midepoch.errors import FormatError
from midepoch.sources.arrow_ipc import scan


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
