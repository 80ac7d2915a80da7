"""LitData's chunks: the values of its own reader, in place, by their manifest."""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError, MidepochError
from midepoch.sources.formats import records
from midepoch.testing import assert_resumes_exactly
from s3 import Server, storage_options
from shard_files import FIXTURES, assert_equal, overwrite, with_offsets, write_litdata

CASES = sorted(path.name for path in (FIXTURES / "litdata").iterdir())
STORED = {"nested": "json", "mixed": "json", "words": "json", "any": "json", "pickled": "pickle"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 400)


def rows(count: int = 120) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"é{i}", "tokens": list(range(i, i + i % 5))} for i in range(count)]


def written(folder: Path) -> Path:
    write_litdata(folder, rows())
    return folder


def copied(case: str, folder: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "litdata" / case, folder / case))


def columns_of(sample: Any) -> dict[str, Any]:
    """Return a sample as columns: a dict, numbered items, or one item."""
    if isinstance(sample, dict) and "dict" in sample:
        return dict(sample["dict"])
    if isinstance(sample, dict) and "list" in sample:
        return {str(number): each for number, each in enumerate(sample["list"])}
    return {"item": sample}


def check_golden(folder: Path, expected: list[Any], block_size: int | None = None) -> None:
    ds = midepoch.from_files(folder) if block_size is None else midepoch.from_tokens(folder, block_size)
    found = list(ds)
    assert len(found) == len(expected)
    for row, sample in zip(found, expected, strict=True):
        wanted = columns_of(sample)
        if list(row) == ["input_ids"]:
            wanted = {"input_ids": wanted["item"]}
        assert list(row) == list(wanted)
        for name, value in row.items():
            assert_equal(value, wanted[name], ds.schema.field(name).type, STORED.get(name, ""))


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_its_own_reader(case: str) -> None:
    folder = FIXTURES / "litdata" / case
    check_golden(folder, json.loads((folder / "expected.json").read_text()), 16 if case == "tokens" else None)
    if case == "tokens":
        check_golden(folder, json.loads((folder / "documents.json").read_text()))


def test_values_are_those_of_the_installed_package(tmp_path: Path) -> None:
    if importlib.util.find_spec("litdata") is None:
        pytest.skip("litdata is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import shard_writers as writers

        for name, (items, options) in writers.litdata_cases().items():
            folder = tmp_path / name
            block = 11 if name == "tokens" else None
            writers.write_litdata(folder, items[::-1], **{**options, "chunk_size": 60 if block else 7})
            shutil.copytree(folder, tmp_path / "copy")
            read = writers.read_litdata(tmp_path / "copy", block)
            shutil.rmtree(tmp_path / "copy")
            check_golden(folder, json.loads(json.dumps([writers.described(sample) for sample in read])), block)


def test_media_are_decoded() -> None:
    ds = midepoch.from_files(FIXTURES / "litdata/leaves")
    for column in ("pil", "jpeg", "image"):
        images = next(iter(ds.select_columns([column]).decode(column, size=(4, 4)).with_format("numpy").loader(12)))
        assert images[column].shape == (12, 3, 4, 4)


@pytest.mark.parametrize("case", ["plain", "batch", "rows", "tokens"])
def test_exact_resume(case: str) -> None:
    def make() -> Any:
        folder = FIXTURES / "litdata" / case
        ds = midepoch.from_tokens(folder, 8) if case == "tokens" else midepoch.from_files(folder)
        return ds.shuffle(seed=3).with_format("python").loader(4)

    assert_resumes_exactly(make, epochs=1)


def test_workers_ranks_and_an_object_store(s3_server: Server, tmp_path: Path) -> None:
    written(s3_server.folder / "litbucket/data")
    options = {"storage_options": storage_options(s3_server.endpoint), "index_dir": tmp_path}
    remote = midepoch.from_files("s3://litbucket/data/", **options)
    assert list(remote) == rows()
    ds = midepoch.from_files(s3_server.folder / "litbucket/data").shuffle(seed=1).with_format("python")
    alone, shared = ([batch["id"] for batch in ds.loader(8, num_workers=workers)] for workers in (0, 2))
    assert alone == shared
    parts = [batch["id"] for rank in range(3) for batch in ds.loader(8, rank=rank, world_size=3)]
    assert sorted(sum(parts, [])) == list(range(120))


def test_parquet_files_of_a_manifest(tmp_path: Path) -> None:
    """As ``index_parquet_dataset`` writes it: the order is that of the manifest."""
    chunks = []
    for number in (1, 0):
        pq.write_table(pa.table({"id": range(10 * number, 10 * number + 10)}), tmp_path / f"{number}.parquet")
        chunks.append({"chunk_bytes": 1, "chunk_size": 10, "filename": f"{number}.parquet", "dim": None})
    config = {"data_format": ["Int64"], "data_spec": None, "item_loader": "ParquetLoader"}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}, sort_keys=True))
    for form in (None, "litdata"):
        ds = midepoch.from_files(tmp_path, format=form)
        assert [row["id"] for row in ds] == [*range(10, 20), *range(10)]
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataNotFoundError, match=r"1.parquet does not exist, but .*index.json names it"):
        midepoch.from_files(tmp_path)


def test_decompressed_chunks_are_found(tmp_path: Path) -> None:
    """LitData's reader replaces chunk-0-0.zstd.bin by chunk-0-0.bin."""
    folder = copied("chunk", tmp_path)
    expected = list(midepoch.from_files(folder))
    packed = folder / "chunk-0-1.zstd.bin"
    with pa.CompressedInputStream(pa.BufferReader(packed.read_bytes()), "zstd") as stream:
        (folder / "chunk-0-1.bin").write_bytes(stream.read())
    packed.unlink()
    with pytest.raises(DataNotFoundError, match=r"chunk-0-1.zstd.bin does not exist. Restore it, .*force_reindex=True"):
        list(midepoch.from_files(folder))
    ds = midepoch.from_files(folder, force_reindex=True)
    assert list(ds) == expected
    assert ds.loader(4).state_dict() == midepoch.from_files(FIXTURES / "litdata/chunk").loader(4).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["config"].update(encryption={"algorithm": "fernet"}), "its chunks are encrypted"),
        (lambda index: index["config"].update(item_loader="TemporalArrayLoader"), "chunks of TemporalArrayLoader"),
        (lambda index: index["config"].update(data_spec=None), "no data_format and data_spec"),
        (lambda index: index["config"].update(data_spec="[1, 2]"), "its data_spec cannot be read"),
        (lambda index: index["config"].update(compression_level="batch"), "do not match its index.json"),
        (lambda index: index["chunks"][1].pop("chunk_size"), "the entry of chunk 1 is invalid"),
        (lambda index: index["chunks"][1].update(chunk_size=49), "chunk-0-1.bin: it has 50 samples, .* says 49"),
        (lambda index: index["chunks"][1].update(chunk_bytes=10**6), "chunk-0-1.bin has .* bytes, .* says 1000000"),
        (lambda index: index["chunks"][1].update(filename="gone.bin"), "gone.bin does not exist, but .* names it"),
        (lambda index: index["chunks"].clear(), "names no chunks"),
        (
            lambda index: index["chunks"].append("x") or index["config"].pop("item_loader"),
            "the entry of chunk 3 is not a dict",
        ),
        (
            lambda index: index["chunks"][1].update(filename=3) or index["config"].update(compression="zstd"),
            "file 3, w",
        ),
    ],
)
def test_manifests_that_cannot_be_read(change: Any, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "chunks")
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises((FormatError, DataNotFoundError), match=message):
        midepoch.from_files(folder)


def test_a_chunk_needs_its_manifest(tmp_path: Path) -> None:
    chunk = written(tmp_path / "chunks") / "chunk-0-0.bin"
    with pytest.raises(FormatError, match=r"chunk-0-0.bin: pass the folder of this file, which has its index.json"):
        midepoch.from_files(chunk, format="litdata")


def test_tokens_need_chunks_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="its chunks have samples, not the tokens of TokensLoader"):
        midepoch.from_tokens(written(tmp_path / "chunks"), 8)
    with pytest.raises(TypeError, match=r"from_tokens\(path, block_size\)"):
        midepoch.from_files(FIXTURES / "litdata/tokens", block_size=8)


@pytest.mark.parametrize("path", ["", "*.bin", "{chunk-0-0,chunk-0-1}.bin"])
@pytest.mark.parametrize("dtype", [None, "uint16"])
def test_headers_of_chunks_are_never_tokens(path: str, dtype: str | None) -> None:
    folder = f"{FIXTURES}/litdata/tokens"
    if not path and dtype is None:
        return
    with pytest.raises(FormatError, match=r"chunk-0-0.bin is a chunk of LitData.*Pass its folder without dtype"):
        midepoch.from_tokens(f"{folder}/{path}", 8, dtype=dtype)


def test_empty_containers_and_chunks(tmp_path: Path) -> None:
    """``{"id": 1, "tags": [], "more": {}}``: the containers have no leaves, and so no bytes."""
    folder = tmp_path / "chunks"
    write_litdata(folder, [{"id": i} for i in range(120)])
    index = json.loads((folder / "index.json").read_text())
    children = [{"type": None, "context": None, "children_spec": []}]
    children += [{"type": f"builtins.{kind}", "context": "[]", "children_spec": []} for kind in ("list", "dict")]
    spec = {"type": "builtins.dict", "context": json.dumps(["id", "tags", "more"]), "children_spec": children}
    index["config"]["data_spec"] = json.dumps([1, spec])
    (folder / "empty.bin").write_bytes(data := with_offsets([]))
    index["chunks"].insert(1, {"chunk_bytes": len(data), "chunk_size": 0, "dim": None, "filename": "empty.bin"})
    (folder / "index.json").write_text(json.dumps(index))
    assert list(midepoch.from_files(folder)) == [{"id": i, "tags": [], "more": {}} for i in range(120)]


def test_damage_names_chunk_sample_and_column(tmp_path: Path) -> None:
    folder = written(tmp_path / "chunks")
    chunk = folder / "chunk-0-1.bin"
    data = chunk.read_bytes()
    start = int(np.frombuffer(data, np.uint32, 51, 4)[17])
    ds = midepoch.from_files(folder)
    for at, damage, message in (
        (start, b"\x07", "chunk-0-1.bin: sample 17: its values have"),
        (start + 20, b"\xff", "chunk-0-1.bin: sample 17, column 'text': its text is not UTF-8"),
    ):
        overwrite(chunk, at, damage)
        with pytest.raises(CorruptBlockError, match=message):
            list(ds)
        overwrite(chunk, 0, data)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rows-zstd", "plain", "leaf")])
def test_flipped_and_missing_bytes(case: str, tmp_path: Path) -> None:
    """A clear error that names the chunk, or as many rows as there were; never a crash."""
    folder = copied(case, tmp_path)
    chunk = sorted(folder.glob("*.bin"))[1]
    data, draw, refused = chunk.read_bytes(), np.random.default_rng(1), 0
    count = len(midepoch.from_files(folder))
    for _ in range(12):
        at = int(draw.integers(0, len(data)))
        overwrite(chunk, at, bytes([data[at] ^ 1 << int(draw.integers(0, 8))]))
        try:
            named = len(list(midepoch.from_files(folder, force_reindex=True))) == count
        except MidepochError as problem:
            refused += 1
            named = chunk.name in str(problem)
        assert named
        overwrite(chunk, at, data[at : at + 1])
    for size in (0, 3, len(data) // 2, len(data) - 1):
        chunk.write_bytes(data[:size])
        with pytest.raises(MidepochError, match=chunk.name):
            list(midepoch.from_files(folder, force_reindex=True))
