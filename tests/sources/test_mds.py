"""MDS shards of MosaicML Streaming: the values of its own reader, in place, by their manifest."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import midepoch
from midepoch.errors import (
    CheckpointMismatchError,
    CorruptBlockError,
    DataChangedError,
    DataNotFoundError,
    FormatError,
    MidepochError,
)
from midepoch.sources.formats import records
from midepoch.testing import assert_resumes_exactly
from midepoch.transforms.media import images
from s3 import Server, storage_options
from shard_files import FIXTURES, assert_equal, overwrite, write_litdata, write_mds
from web import WebServer

COLUMNS = {"id": "int", "text": "str", "tokens": "ndarray:int32", "data": "bytes"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 400)


def rows(count: int = 120) -> list[dict[str, Any]]:
    return [
        {"id": i, "text": f"é{i}", "tokens": list(range(i, i + 1 + i % 5)), "data": bytes([i % 256]) * (i % 4)}
        for i in range(count)
    ]


def written(folder: Path, **options: Any) -> Path:
    write_mds(folder, COLUMNS, rows(), **options)
    return folder


def in_order(ds: midepoch.Dataset) -> list[dict[str, Any]]:
    return [{name: row[name] for name in COLUMNS} for row in ds]


def check_golden(folder: Path, expected: list[Any]) -> None:
    ds = midepoch.from_files(folder)
    found = list(ds)
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert list(row) == list(wanted["dict"])
        for name, value in row.items():
            stored = {"json": "json", "pkl": "pickle", "str_int": "int"}.get(name, "")
            assert_equal(value, wanted["dict"][name], ds.schema.field(name).type, stored)


@pytest.mark.parametrize("case", sorted(path.name for path in (FIXTURES / "mds").iterdir()))
def test_values_are_those_of_its_own_reader(case: str) -> None:
    folder = FIXTURES / "mds" / case
    check_golden(folder, json.loads((folder / "expected.json").read_text()))


def test_values_are_those_of_the_installed_package(tmp_path: Path) -> None:
    """With other data than the fixtures, where mosaicml-streaming is installed."""
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import shard_writers as writers

        many = [writers.mds_row(i) for i in range(100, 140)]
        for compression in (None, *writers.COMPRESSIONS.values()):
            folder = tmp_path / str(compression)
            writers.write_mds(folder, writers.ALL_MDS, iter(many), compression=compression, size_limit=30_000)
            shutil.copytree(folder, tmp_path / "copy")
            expected = json.loads(json.dumps([writers.described(row) for row in writers.read_mds(tmp_path / "copy")]))
            shutil.rmtree(tmp_path / "copy")
            check_golden(folder, expected)


def test_images_and_arrays_are_decoded_and_stacked() -> None:
    ds = midepoch.from_files(FIXTURES / "mds/all")
    for column in ("pil", "jpeg", "png"):
        images = next(iter(ds.select_columns([column]).decode(column, size=(4, 4)).with_format("numpy").loader(12)))
        assert images[column].shape == (12, 3, 4, 4)
    batch = next(iter(ds.select_columns(["matrix", "tokens", "float16"]).with_format("numpy").loader(12)))
    assert (batch["matrix"].shape, batch["matrix"].dtype) == ((12, 2, 3), np.float32)
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((12, 4), np.uint16)
    assert batch["float16"].dtype == np.float16


MODES = [
    "1",
    "L",
    "P",
    "RGB",
    "RGBA",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "LA",
    "PA",
    "RGBX",
    "RGBa",
    "La",
    "I;16",
    "I;16L",
    "I;16B",
    "I;16N",
]


@pytest.mark.parametrize("mode", MODES)
def test_raw_images_of_every_mode_are_decoded(mode: str, tmp_path: Path) -> None:
    size = len(Image.new(mode, (6, 5)).tobytes())
    image = Image.frombytes(mode, (6, 5), bytes(range(size)))  # without a palette, as streaming reads it
    head = np.array([*image.size, len(mode)], "<u4").tobytes()
    write_mds(tmp_path, {"pil": "pil"}, [{"pil": head + mode.encode() + image.tobytes()}])
    ds = midepoch.from_files(tmp_path)
    for wanted in ("RGB", "L"):
        found = ds.decode("pil", mode=wanted, layout="HWC").with_format("numpy")[0]["pil"]
        if mode in images._DEEP:
            assert np.array_equal(found[:, :, 0], np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8)
        else:
            direct = image.convert({"LAB": "RGB", "La": "LA"}.get(mode, mode))  # which Pillow converts to no others
            assert np.array_equal(found.squeeze(), np.asarray(direct.convert(wanted)))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_exact_resume_with_workers_and_ranks(compression: str | None, tmp_path: Path) -> None:
    folder = written(tmp_path / "mds", shard=25, compression=compression)

    def loader(workers: int = 0) -> Any:
        ds = midepoch.from_files(folder).shuffle(seed=3, window=4).with_format("python")
        return ds.loader(16, num_workers=workers)

    assert_resumes_exactly(loader, epochs=1, tail=4)
    assert_resumes_exactly(loader, epochs=1, steps=[3], resume_with=[lambda: loader(2)])
    ds = midepoch.from_files(folder).shuffle(seed=3)
    for scope in ("files", "rows"):
        assert sorted(row["id"] for row in midepoch.from_files(folder).shuffle(seed=1, scope=scope)) == list(range(120))
    parts = [batch["id"] for rank in range(3) for batch in ds.with_format("python").loader(8, rank=rank, world_size=3)]
    assert sorted(sum(parts, [])) == list(range(120))


def test_a_manifest_a_split_and_a_list_of_folders(tmp_path: Path) -> None:
    for part, start in (("train", 0), ("val", 60)):
        write_mds(tmp_path / part, COLUMNS, rows()[start : start + 60])
    first, second = (midepoch.from_files(tmp_path / part) for part in ("train", "val"))
    assert in_order(first) + in_order(second) == rows()
    assert in_order(midepoch.from_files(tmp_path / "train/index.json")) == rows()[:60]
    assert in_order(midepoch.from_files([tmp_path / "train", tmp_path / "val"])) == rows()
    assert in_order(midepoch.from_files(tmp_path / "train", format="mds", columns=[*COLUMNS])) == rows()[:60]
    with pytest.raises(FormatError, match=r"contains 2 datasets with an index.json: .*/train, .*/val. Choose one"):
        midepoch.from_files(tmp_path)
    shutil.rmtree(tmp_path / "val")
    assert in_order(midepoch.from_files(tmp_path)) == rows()[:60]
    with pytest.raises(FormatError, match="describes mds data, format='litdata' was given"):
        midepoch.from_files(tmp_path / "train", format="litdata")
    (tmp_path / "train/index.json").unlink()
    with pytest.raises(DataNotFoundError, match="index.json"):
        midepoch.from_files(tmp_path / "train", format="mds")
    with pytest.raises(DataNotFoundError, match="pass the folder that has it"):
        midepoch.from_files(tmp_path / "train")


@pytest.mark.parametrize("pattern", ["*/index.json", "*/*", "{a,b}", "{a,b}/", "{a,b}/index.json", "{a,b}/*"])
def test_globs_and_braces_of_manifests_are_their_data(pattern: str, tmp_path: Path) -> None:
    """A manifest is JSON itself: it must never be read as rows."""
    for part, start in (("a", 0), ("b", 60)):
        write_mds(tmp_path / part, COLUMNS, rows()[start : start + 60])
    assert in_order(midepoch.from_files(f"{tmp_path}/{pattern}")) == rows()
    shutil.rmtree(tmp_path / "b")
    write_litdata(tmp_path / "b", [{"id": 1}])
    with pytest.raises(
        FormatError, match=r"/a \(mds\), .*/b \(litdata\). Choose one of them by its folder, or open each"
    ):
        midepoch.from_files(tmp_path)
    with pytest.raises(FormatError, match=r"different formats: mds \(.*a/index.json\), litdata \(.*b/index.json"):
        midepoch.from_files(f"{tmp_path}/{pattern}")


def test_many_manifests_in_braces(tmp_path: Path) -> None:
    for number in range(20):
        write_mds(tmp_path / f"{number:02d}", COLUMNS, rows()[number : number + 1])
    assert in_order(midepoch.from_files(f"{tmp_path}/{{00..19}}/index.json")) == rows(20)


def test_other_json_files_called_index_are_data(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert list(midepoch.from_files(tmp_path)) == [{"a": 1}, {"a": 2}]
    (tmp_path / "index.json").write_text('{"shards": 1}\n')
    assert list(midepoch.from_files(tmp_path)) == [{"shards": 1}]


@pytest.mark.parametrize("contents", ["", "not JSON", "[1]", '{"a": 1}'])
def test_damaged_manifests_beside_shards_are_not_data(contents: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "mds")
    (folder / "index.json").write_text(contents)
    for form in (None, "mds"):
        with pytest.raises(FormatError, match=r"index.json.* not a manifest.* Copy or download it again"):
            midepoch.from_files(folder, format=form)


def test_plain_compressed_and_both_are_the_same_data(tmp_path: Path) -> None:
    """A state resumes with whichever of the two files a machine has."""
    folders = [written(tmp_path / keep, compression="gz", keep=keep) for keep in ("raw", "zip", "both")]
    loaders = [midepoch.from_files(folder).shuffle(seed=1).loader(10) for folder in folders]
    state = None
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        next(iter(loader))
        state = loader.state_dict()
    raw = tmp_path / "both/shard.00001.mds"
    raw.write_bytes(raw.read_bytes()[:100])  # as after a crash of a decompression
    assert in_order(midepoch.from_files(tmp_path / "both", force_reindex=True)) == rows()


def test_a_second_opening_looks_at_the_manifest_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "mds")
    state = midepoch.from_files(folder).loader(4).state_dict()
    shutil.move(folder / "shard.00001.mds", tmp_path / "elsewhere")
    ds = midepoch.from_files(folder)
    with pytest.raises(DataNotFoundError, match=r"shard.00001.mds does not exist"):
        list(ds)
    with pytest.raises(DataNotFoundError, match=r"shard.00001.mds does not exist, but .*index.json names it. Copy"):
        midepoch.from_files(folder, force_reindex=True)
    shutil.move(tmp_path / "elsewhere", folder / "shard.00001.mds")
    assert in_order(midepoch.from_files(folder)) == rows()
    os.utime(folder / "shard.00001.mds", ns=(1, 1))
    with pytest.raises(DataChangedError, match=r"shard.00001.mds has changed since it was indexed"):
        list(midepoch.from_files(folder))
    moved = shutil.move(folder, tmp_path / "moved")
    midepoch.from_files(moved).loader(4).load_state_dict(state)
    changed = [{**row, "id": row["id"] + 1} for row in rows()]
    write_mds(tmp_path / "moved", COLUMNS, changed)  # the same sizes: only the values differ
    assert in_order(midepoch.from_files(moved)) == changed
    with pytest.raises(CheckpointMismatchError):
        midepoch.from_files(moved).loader(4).load_state_dict(state)


def test_in_an_object_store(s3_server: Server, tmp_path: Path) -> None:
    written(s3_server.folder / "mdsbucket/data/train")
    written(s3_server.folder / "mdsbucket/data/packed", compression="bz2")
    options = {"storage_options": storage_options(s3_server.endpoint), "index_dir": tmp_path}
    for path in ("train", "train/index.json", "packed/"):
        assert in_order(midepoch.from_files(f"s3://mdsbucket/data/{path}", **options)) == rows()
    with pytest.raises(FormatError, match="contains 2 datasets"):
        midepoch.from_files("s3://mdsbucket/data", **options)


def test_on_a_web_server(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    files = {f"mds/{path.name}": path.read_bytes() for path in written(tmp_path / "mds").iterdir()}
    with WebServer(files, "me", "password", "signature") as server:
        address = f"http://me:password@{server.host}/mds/index.json"
        assert in_order(midepoch.from_files(address, index_dir=tmp_path)) == rows()


def edited(folder: Path, **fields: Any) -> None:
    """Change fields of the second shard in the manifest."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1].update(fields)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "tar"}, "the entry of shard 1 is invalid: .*'tar' is not one of mds, json"),
        ({"format": "csv", "raw_meta": {"bytes": 1}}, "the encoding 'bytes' is not one of str, int, float"),
        ({"samples": 49}, "shard.00001.mds: it has 50 samples, its index.json says 49"),
        ({"column_encodings": ["bytes", "int", "str", "tensor"]}, "the encoding 'tensor' is not one of MDS"),
        ({"column_encodings": ["bytes", "int"]}, "the entry of shard 1 is invalid"),
        ({"raw_data": None}, "the entry of shard 1 is invalid"),
        ({"raw_data": {"basename": "../x.mds", "bytes": 1}}, "'../x.mds', which is not below its folder"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 1}}, "shard.00000.mds has .* bytes, .* says 1"),
    ],
)
def test_a_manifest_that_does_not_match(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "mds")
    edited(folder, **fields)
    with pytest.raises(FormatError, match=message):
        midepoch.from_files(folder)


def test_damage_names_shard_sample_and_column(tmp_path: Path) -> None:
    folder = written(tmp_path / "mds")
    shard = folder / "shard.00001.mds"
    data = shard.read_bytes()
    offsets = np.frombuffer(data, np.uint32, 51, 4)
    ds = midepoch.from_files(folder)
    start = int(offsets[17])
    head = np.frombuffer(data, np.uint32, 3, start)  # the sizes of data, text and tokens
    text = start + 12 + int(head[0]) + 8
    for at, damage, message in (
        (start, b"\xff", "shard.00001.mds: sample 17: its values have"),
        (text, b"\xff", "shard.00001.mds: sample 17, column 'text': its text is not UTF-8"),
        (text + int(head[1]), b"\x08", "shard.00001.mds: sample 17, column 'tokens': its array has 2 dimensions"),
        (text + int(head[1]) + 1, b"\x09", "sample 17, column 'tokens': an array of shape"),
    ):
        overwrite(shard, at, damage)
        with pytest.raises(CorruptBlockError, match=message) as caught:
            list(ds)
        assert "These are rows" in str(caught.value)
        overwrite(shard, 0, data)
    overwrite(shard, text, b"\xff")
    skipping = [row["id"] for row in midepoch.from_files(folder, on_error="skip")]
    assert 67 not in skipping
    assert len(skipping) > 100
    overwrite(shard, 8, b"\xff\xff\xff\xff")
    with pytest.raises(FormatError, match=r"shard.00001.mds: the offset of sample \d is damaged"):
        midepoch.from_files(folder, force_reindex=True)


def flips(data: bytes, count: int) -> Iterator[tuple[int, bytes]]:
    draw = np.random.default_rng(1)
    for _ in range(count):
        at = int(draw.integers(0, len(data)))
        yield at, bytes([data[at] ^ 1 << int(draw.integers(0, 8))])


def test_arrays_of_another_type_are_refused_and_never_rounded(tmp_path: Path) -> None:
    """``ndarray`` allows each sample its own dtype. A column has one."""
    columns = {"id": "int", "x": "ndarray:float32"}
    write_mds(tmp_path, columns, [{"id": i, "x": [i + 0.1] * 30} for i in range(40)])
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["column_encodings"] = ["int", "ndarray"]
    shard = tmp_path / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    offsets = np.frombuffer(bytes(data), np.uint32, 41, 4)
    for number, start in enumerate(
        offsets[:-1].tolist()
    ):  # a byte for the dtype: its place is that of the id's last byte
        data[start + 4 : start + 12] = data[start + 4 : start + 11] + bytes([34 if number < 20 else 33])
        size = int.from_bytes(data[start : start + 4], "little")
        data[start : start + 4] = (size + 1).to_bytes(4, "little")
    index["shards"][0]["column_sizes"] = [7, None]
    index["shards"][0]["column_encodings"] = ["bytes", "ndarray"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    shard.write_bytes(data)
    with pytest.raises(
        CorruptBlockError, match=r"shard.00000.mds: sample \d+, column 'x': its array is .*int32.*float"
    ):
        list(midepoch.from_files(tmp_path))


@pytest.mark.parametrize("value", [b"1.7", b"null", b'"1"', b"true"])
def test_json_values_of_another_type_are_refused_and_never_converted(value: bytes, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "mds/json", tmp_path / "json"))
    ds = midepoch.from_files(folder)
    overwrite(folder / "shard.00000.json", 0, b'{"id":' + value.rjust(4) + b",")
    with pytest.raises(CorruptBlockError, match=r"shard.00000.json: sample 0, column 'id': it is .*, expected int"):
        list(ds)


def test_damaged_lines_of_text_shards(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "mds/tsv", tmp_path / "tsv"))
    ds = midepoch.from_files(folder)
    shard = folder / "shard.00001.tsv"
    overwrite(shard, shard.read_bytes().index(b"\n") + 1, b"x")  # after the names of the columns
    with pytest.raises(CorruptBlockError, match=r"shard.00001.tsv: sample 0, column 'id': it is 'x', expected int"):
        list(ds)
    (folder / "shard.00001.tsv.meta").unlink()
    with pytest.raises(DataNotFoundError, match=r"shard.00001.tsv.meta does not exist, but .*index.json names it"):
        midepoch.from_files(folder, force_reindex=True)


@pytest.mark.parametrize("compression", [None, "zstd", "bz2"])
def test_flipped_and_missing_bytes(compression: str | None, tmp_path: Path) -> None:
    """A clear error that names the shard, or values that differ in the flipped sample alone."""
    folder = written(tmp_path / "mds", compression=compression)
    shard = next(folder.glob("shard.00001*"))
    data, refused, expected = shard.read_bytes(), 0, list(midepoch.from_files(folder))
    for at, damage in flips(data, 16):
        overwrite(shard, at, damage)
        try:
            found = list(midepoch.from_files(folder, force_reindex=True))
        except MidepochError as problem:
            refused += 1
            named = shard.name in str(problem)
        else:
            different = sum(a != b for a, b in zip(found, expected, strict=True))
            named = different <= 1 or compression is not None
        assert named
        overwrite(shard, at, data[at : at + 1])
    assert refused
    for size in (0, 3, 100, len(data) // 2, len(data) - 1):
        shard.write_bytes(data[:size])
        with pytest.raises(FormatError, match=f"{shard.name} has {size} bytes, .* says {len(data)}"):
            midepoch.from_files(folder, force_reindex=True)


def test_types_of_other_shards_are_joined_and_filters_apply(tmp_path: Path) -> None:
    for part, columns in (("a", {"id": "int", "text": "str"}), ("b", {"id": "int"})):
        write_mds(tmp_path / part, columns, rows(30))
    ds = midepoch.from_files([tmp_path / "a", tmp_path / "b"])
    assert ds.schema == pa.schema({"id": pa.int64(), "text": pa.string()})
    assert [row["text"] for row in ds][28:32] == ["é28", "é29", None, None]
    assert [row["id"] for row in midepoch.from_files(tmp_path / "a", filters=[("id", ">", 26)])] == [27, 28, 29]
