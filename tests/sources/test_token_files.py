"""Flat files of tokens: sequences of any length, mapped or fetched."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

import midepoch
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.formats import tokens as tokens_format
from midepoch.testing import assert_resumes_exactly
from s3 import Server, storage_options


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_format, "BLOCK_BYTES", 200)


def sequences(ds: midepoch.Dataset) -> list[list[int]]:
    return [row["input_ids"] for row in ds]


def expected(values: np.ndarray, length: int) -> list[list[int]]:
    return values.ravel()[: values.size // length * length].reshape(-1, length).tolist()


@pytest.mark.parametrize("dtype", tokens_format.DTYPES)
def test_sequences_of_every_type_and_length(dtype: str, tmp_path: Path) -> None:
    values = np.arange(1003).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    values.tofile(tmp_path / "b.bin")
    np.save(tmp_path / "c.npy", values[:1000].reshape(10, 100))
    for length in (1, 7, 250, 1003):
        assert sequences(midepoch.from_tokens(tmp_path / "a.npy", length)) == expected(values, length)
        assert sequences(midepoch.from_tokens(tmp_path / "b.bin", length, dtype=dtype)) == expected(values, length)
    assert sequences(midepoch.from_tokens(tmp_path / "c.npy", 30)) == expected(values[:1000], 30)


def test_headers_of_llm_c_are_left_out(tmp_path: Path) -> None:
    for magic, dtype in ((20240520, np.uint16), (20240801, np.uint32)):
        values = np.arange(500, dtype=dtype)
        header = np.zeros(256, np.int32)
        header[:3] = magic, 1, len(values)
        (tmp_path / f"{magic}.bin").write_bytes(header.tobytes() + values.tobytes())
        assert sequences(midepoch.from_tokens(tmp_path / f"{magic}.bin", 100)) == expected(values, 100)


def test_files_follow_each_other_without_sequences_across_them(tmp_path: Path) -> None:
    parts = [np.arange(start, start + 25, dtype=np.uint16) for start in (0, 100, 200)]
    for number, part in enumerate(parts):
        part.tofile(tmp_path / f"{number}.bin")
    (tmp_path / "0.bin.json").write_text("{}")
    ds = midepoch.from_tokens(tmp_path, 10, dtype=np.uint16)
    assert sequences(ds) == [row for part in parts for row in expected(part, 10)]
    assert sequences(midepoch.from_tokens(f"{tmp_path}/[12].bin", 10, dtype="uint16")) == sequences(ds)[2:]


def test_batches_are_tensors_of_the_type_that_is_asked_for(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    ds = midepoch.from_tokens(tmp_path / "a.bin", 50, dtype="uint16")
    batch = next(iter(ds.cast({"input_ids": "int64"}).loader(4)))["input_ids"]
    assert batch.dtype == torch.int64 and batch.tolist() == expected(np.arange(200), 50)


def test_resumes_exactly_and_in_an_object_store(tmp_path: Path, s3_server: Server) -> None:
    bucket = Path(tempfile.mkdtemp(prefix="bucket-", dir=s3_server.folder))
    for number in range(3):
        np.save(bucket / f"{number}.npy", np.arange(number * 1000, number * 1000 + 505, dtype=np.uint32))
    local = midepoch.from_tokens(bucket, 20)
    remote = midepoch.from_tokens(f"s3://{bucket.name}/*.npy", 20, storage_options=storage_options(s3_server.endpoint))
    for scope in ("rows", "window", "files"):
        first, second = (ds.shuffle(seed=1, scope=scope, window=2) for ds in (local, remote))
        assert sequences(first) == sequences(second)
    assert_resumes_exactly(lambda: local.shuffle(seed=2).loader(7, num_workers=1), steps=[0, 3, 10, 11], tail=2)
    loader = remote.shuffle(seed=2).loader(7)
    batches = iter(loader)
    next(batches)
    other = local.shuffle(seed=2).loader(7)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other))["input_ids"].tolist() == next(batches)["input_ids"].tolist()


def test_a_glob_leaves_out_files_beside_the_tokens(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "0.ds")
    np.arange(20, dtype=np.uint64).tofile(tmp_path / "0.ds.index")  # as datatrove does
    found = midepoch.from_tokens(f"{tmp_path}/*", np.int64(10), dtype="uint16")
    assert [row["input_ids"][0] for row in found] == [0, 10]
    assert len(midepoch.from_tokens(f"{tmp_path}/*.index", 10, dtype="uint64")) == 2


def test_another_length_or_type_is_other_data(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    loader = midepoch.from_tokens(tmp_path / "a.bin", 10, dtype="uint16").loader(2)
    next(iter(loader))
    for length, dtype in ((20, "uint16"), (5, "uint32"), (10, "int16")):
        with pytest.raises(midepoch.CheckpointMismatchError):
            midepoch.from_tokens(tmp_path / "a.bin", length, dtype=dtype).loader(2).load_state_dict(loader.state_dict())


def test_mistakes_are_named(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    np.save(tmp_path / "whole.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-1])
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': '<u2'")
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "negative.npy").write_bytes((tmp_path / "whole.npy").read_bytes().replace(b"(100,)", b"(-10,)"))
    cases = [
        ("raw.bin", {}, FormatError, "raw.bin is a raw file of tokens, without their type"),
        ("raw.bin", {"dtype": "uint32"}, FormatError, "18 bytes, not a multiple of the 4"),
        ("raw.bin", {"dtype": "float32"}, ValueError, "dtype must be one of"),
        ("floats.npy", {}, FormatError, "contains <f8, tokens are expected"),
        ("whole.npy", {"dtype": "uint32"}, FormatError, "contains uint16 by its header"),
        ("cut.npy", {}, FormatError, "its header promises"),
        ("bad.npy", {}, FormatError, "its NumPy header cannot be read"),
        ("short.npy", {}, FormatError, "its NumPy header cannot be read"),
        ("negative.npy", {}, FormatError, "has the shape"),
        ("raw.bin", {"dtype": ">u2"}, ValueError, "dtype must be one of"),
        ("none.bin", {}, DataNotFoundError, "does not exist"),
    ]
    for name, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            midepoch.from_tokens(tmp_path / name, 3, **arguments)
    for length in (0, True, "3", 1 << 31):
        with pytest.raises(ValueError, match="sequence_length must be"):
            midepoch.from_tokens(tmp_path / "raw.bin", length, dtype="uint16")
    with pytest.raises(DataNotFoundError, match="whole.npy: no file has 101 tokens"):
        midepoch.from_tokens(tmp_path / "whole.npy", 101)
    with pytest.raises(FormatError, match="from_tokens"):
        midepoch.from_files(tmp_path / "whole.npy")
    with pytest.raises(TypeError, match="sequence_length"):
        midepoch.from_tokens(tmp_path / "whole.npy", block_size=3)
