"""load_dataset, load_from_disk and from_files, against what ``datasets`` itself gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import midepoch
from data import numbered, write_arrow
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources import Source

PLAIN = ["id", "text", "score"]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(3):
        pq.write_table(numbered(i * 10, i * 10 + 10).select(PLAIN), folder / f"train-{i}.parquet")
    pq.write_table(numbered(100, 115).select(PLAIN), folder / "test-0.parquet")
    return folder


def arguments(parquet: Path) -> dict[str, Any]:
    files = {"train": f"{parquet}/train-*.parquet", "test": f"{parquet}/test-*.parquet"}
    return {"data_files": files, "cache_dir": str(parquet.parent / "cache")}


SPLITS = [
    "train",
    "test",
    "train[5:]",
    "train[:10%]",
    "train[-20%:]",
    "train[10:20]+test",
    "test[3:5]+train[:2]+test[:1]",
    "all",
]


@pytest.mark.parametrize("split", SPLITS)
def test_load_dataset_splits(parquet: Path, split: str) -> None:
    ours = midepoch.load_dataset("parquet", split=split, **arguments(parquet))
    theirs = datasets.load_dataset("parquet", split=split, **arguments(parquet))
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    assert ours.features == theirs.features


def test_slices_share_one_index(parquet: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ix"
    for split in ("train", "train[:50%]", "train[3:7]"):
        midepoch.load_dataset("parquet", split=split, index_dir=folder, **arguments(parquet))
    assert len(list(folder.glob("*.midepoch-index"))) == 1


SECOND_LOAD = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "socket.connect") else None)
import midepoch
before = len(opened)
ds = midepoch.load_dataset("parquet", split="train", index_dir=sys.argv[2], **json.loads(sys.argv[1]))
length = len(ds.shuffle(seed=1).take(5))
touched = [name for name in opened[before:] if name.endswith((".arrow", ".parquet"))]
print(json.dumps({"rows": len(ds), "touched": touched, "modules": [m for m in ("datasets", "torch", "pandas") if m in sys.modules]}))
"""


def test_second_load_asks_nobody(parquet: Path, tmp_path: Path) -> None:
    """It imports neither datasets nor torch, opens no data file, and makes no connection."""
    index_dir = str(tmp_path / "ix")
    midepoch.load_dataset("parquet", split="train", index_dir=index_dir, **arguments(parquet))
    command = [sys.executable, "-c", SECOND_LOAD, json.dumps(arguments(parquet)), index_dir]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert found == {"rows": 30, "touched": [], "modules": []}


def test_changed_local_files_are_noticed(parquet: Path) -> None:
    assert len(midepoch.load_dataset("parquet", split="train", **arguments(parquet))) == 30
    pq.write_table(numbered(30, 40).select(PLAIN), parquet / "train-3.parquet")
    assert len(midepoch.load_dataset("parquet", split="train", **arguments(parquet))) == 40
    pq.write_table(numbered(500, 505).select(PLAIN), parquet / "train-3.parquet")
    assert midepoch.load_dataset("parquet", split="train", **arguments(parquet))[34]["id"] == 504


def test_lost_cache_is_made_again(parquet: Path) -> None:
    midepoch.load_dataset("parquet", split="train", **arguments(parquet))
    shutil.rmtree(parquet.parent / "cache")
    assert len(list(midepoch.load_dataset("parquet", split="train", **arguments(parquet)))) == 30


def test_key_covers_what_changes_the_data(tmp_path: Path) -> None:
    from midepoch.sources.splits import HubRequest as Request

    requests = [
        Request("parquet"),
        Request("parquet", name="a"),
        Request("parquet", data_dir="x"),
        Request("parquet", data_dir="y"),
        Request("parquet", data_files="a.parquet"),
        Request("parquet", data_files={"train": "a.parquet"}),
        Request("parquet", revision="main"),
        Request("parquet", kwargs={"columns": ["a"]}),
        Request("parquet", kwargs={"cache_dir": "b"}),
        Request("csv"),
    ]
    assert len({request.key for request in requests}) == len(requests)
    assert Request("a/b", kwargs={"token": "secret", "num_proc": 2}).key == Request("a/b").key


def test_data_dir_decides(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 50)):
        (tmp_path / name).mkdir()
        pq.write_table(numbered(start, start + 5).select(PLAIN), tmp_path / name / "x.parquet")
    loaded = [
        midepoch.load_dataset("parquet", split="train", data_dir=str(tmp_path / name), cache_dir=str(tmp_path / "c"))
        for name in ("a", "b")
    ]
    assert [ds[0]["id"] for ds in loaded] == [0, 50]


def test_no_secret_is_written(parquet: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ix"
    midepoch.load_dataset("parquet", split="train", index_dir=folder, token="hf_secret123", **arguments(parquet))
    assert all(b"hf_secret123" not in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_other_formats(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_text("id,text\n1,a\n2,b\n" if kind == "csv" else '{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n')
    ds = midepoch.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    assert list(ds) == [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]


def test_load_from_disk(tmp_path: Path) -> None:
    train = datasets.Dataset(numbered(0, 50).select(PLAIN))
    train.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict({"train": train, "test": train.select(range(7))}).save_to_disk(str(tmp_path / "dict"))
    assert list(midepoch.load_from_disk(tmp_path / "one")) == list(train)
    assert list(midepoch.load_from_disk(tmp_path / "one", split="train[:10%]")) == list(train.select(range(5)))
    assert len(midepoch.load_from_disk(tmp_path / "dict", split="test")) == 7
    assert len(midepoch.load_from_disk(tmp_path / "dict", split="train[40:]+test")) == 17
    with pytest.raises(ValueError, match="train, test"):
        midepoch.load_from_disk(tmp_path / "dict")
    with pytest.raises(DataNotFoundError, match="no split 'valid'.*train, test"):
        midepoch.load_from_disk(tmp_path / "dict", split="valid")
    for name in ("one", "dict"):
        with pytest.raises(FormatError, match=rf"written by save_to_disk.*load_from_disk\('{tmp_path / name}'\)"):
            midepoch.from_files(tmp_path / name)


def test_from_files_takes_file_list_glob_and_folder(small_files: list[str]) -> None:
    folder = str(Path(small_files[0]).parent)
    everything = list(range(37))
    for paths in (small_files, folder, f"{folder}/*.arrow", f"{folder}/**/part-*.arrow", Path(folder)):
        assert [row["id"] for row in midepoch.from_files(paths)] == everything
    assert [row["id"] for row in midepoch.from_files(small_files[0])] == everything[:9]
    assert next(iter(midepoch.from_files(small_files[::-1])))["id"] == 30  # a list keeps its order


def test_hidden_and_marker_files_are_passed_over(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", numbered(0, 3), 3)
    for name in (".hidden.arrow", "_SUCCESS", ".a.arrow.crc"):
        (tmp_path / name).write_bytes(b"not arrow")
    assert len(midepoch.from_files(tmp_path)) == 3
    assert len(midepoch.from_files(f"{tmp_path}/*")) == 3


def test_index_may_lie_beside_the_data(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", numbered(0, 3), 3)
    for _ in range(3):
        assert len(midepoch.from_files(tmp_path, index_dir=tmp_path)) == 3


def test_missing_and_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_text("x")
    for path, text in (
        ("gone.arrow", "does not exist"),
        ("gone/*.arrow", "no file matches"),
        ("empty", "it is empty"),
        ("other", "it contains only .md"),
    ):
        with pytest.raises(DataNotFoundError, match=text):
            midepoch.from_files(tmp_path / path)
    with pytest.raises(DataNotFoundError, match="list of paths is empty"):
        midepoch.from_files([])
    with pytest.raises(DataNotFoundError, match="neither state.json"):
        midepoch.load_from_disk(tmp_path / "other")
    with pytest.raises(DataNotFoundError, match="does not exist"):
        midepoch.load_from_disk(tmp_path / "gone")
    with pytest.raises(DataNotFoundError):
        midepoch.load_dataset("parquet", data_files=str(tmp_path / "gone.parquet"), split="train")


def test_what_is_no_path_is_an_error_that_names_what_to_call(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"a": [1]})
    for given in (data, [data], data.to_iterable_dataset(), datasets.DatasetDict({"train": data})):
        with pytest.raises(TypeError, match=r"got a (datasets\.|list).*midepoch.(from_hf|from_map_style)\("):
            midepoch.from_files(given)
    with pytest.raises(TypeError, match=r"got a list. Call midepoch.from_map_style\("):
        midepoch.from_files([1, 2])
    for other in (None, 5, b"a.parquet", {"train": "a.parquet"}, [b"a"], data.data.table):
        with pytest.raises(TypeError, match="expected paths of files"):
            midepoch.from_files(other)
    with pytest.raises(TypeError, match="got a datasets"):
        midepoch.load_from_disk(data)
    with pytest.raises(TypeError, match="got a datasets"):
        midepoch.load_dataset(data, split="train", index_dir=tmp_path)


def test_zero_rows(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(0, 0), 5)
    with pytest.raises(DataNotFoundError, match="no rows"):
        midepoch.from_files(path)


def test_compressed_and_dictionary_encoded(tmp_path: Path) -> None:
    table = numbered(0, 60).append_column("kind", pa.array(["a", "b", None] * 20).dictionary_encode())
    for name, options in {
        "zstd": pa.ipc.IpcWriteOptions(compression="zstd"),
        "plain": pa.ipc.IpcWriteOptions(),
        "unified": pa.ipc.IpcWriteOptions(unify_dictionaries=True),
    }.items():
        for file_format in (False, True):
            path = write_arrow(
                tmp_path / f"{name}{file_format}.arrow", table, 7, file_format=file_format, options=options
            )
            ds = midepoch.from_files(path)
            assert list(ds) == table.to_pylist()
            rows = list(ds.shuffle(seed=1))
            assert sorted(rows, key=lambda row: row["id"]) == table.to_pylist()


def test_features_give_what_datasets_gives(tmp_path: Path) -> None:
    from PIL import Image

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "matrix": datasets.Array2D((2, 3), "float32"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "tags": [datasets.Value("string")],
            "pair": {"a": datasets.Value("int32"), "b": datasets.Value("string")},
        }
    )
    rows = {
        "image": [Image.new("RGB", (3, 2), (i, 2 * i, 0)) for i in range(6)],
        "matrix": [np.arange(6).reshape(2, 3) + i for i in range(6)],
        "label": [0, 1, 0, 1, 0, 1],
        "tags": [["x"] * i for i in range(6)],
        "pair": [{"a": i, "b": str(i)} for i in range(6)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "d"))
    theirs = datasets.load_from_disk(str(tmp_path / "d"))
    ours = midepoch.load_from_disk(tmp_path / "d")
    assert ours.features == theirs.features
    assert ours.features["label"].names == ["no", "yes"]
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(np.asarray(a.pop("image")), np.asarray(b.pop("image")))
        assert a == b
    for kind in ("numpy", "torch"):
        a, b = ours.with_format(kind)[1:4], theirs.with_format(kind)[1:4]
        for name in ("image", "matrix", "label"):
            assert np.array_equal(np.asarray(a[name]), np.asarray(b[name]))
            assert np.asarray(a[name]).dtype == np.asarray(b[name]).dtype
    shuffled = {row["label"]: row["pair"] for row in ours.rename_columns({"image": "picture"}).shuffle(seed=1)}
    assert shuffled.keys() == {0, 1}


def test_originals_are_never_written_to(small_files: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    shutil.copytree(Path(small_files[0]).parent, folder)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    for path in folder.iterdir():
        path.chmod(0o444)
    ds = midepoch.from_files(folder)
    for batch in ds.shuffle(seed=1).loader(5):
        batch["id"] += 1  # what is handed out is the user's
        batch["tokens"].zero_()
    assert [row["id"] for row in ds] == list(range(37))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_file_that_changes_under_a_dataset(make_files: Callable[..., list[str]]) -> None:
    (path,) = make_files([20])
    ds = midepoch.from_files(path)
    os.truncate(path, 100)
    with pytest.raises(midepoch.errors.DataChangedError, match="it has 100 bytes and had"):
        list(ds)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "dictionary"])
def test_arrow_files_that_have_to_be_decoded_are_decoded_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """As blocks of Parquet are: shuffled in windows and kept in the cache, not decompressed again for every row."""
    table = numbered(0, 3000)
    if codec == "dictionary":
        table, codec = table.set_column(1, "text", table["text"].dictionary_encode()), "uncompressed"
    feather.write_feather(table, str(tmp_path / "a.feather"), compression=codec, chunksize=100)
    fetched: list[int] = []
    fetch = Source.fetch
    monkeypatch.setattr(Source, "fetch", lambda self, n, columns: (fetched.append(n), fetch(self, n, columns))[1])
    ds = midepoch.from_files(tmp_path / "a.feather", index_dir=tmp_path / "ix").shuffle(seed=1)
    assert ds.pipeline.source.fetched and ds.pipeline.order.shuffle.scope == "window"
    rows = list(ds)
    assert sorted(row["id"] for row in rows) == list(range(3000))
    assert all(row["text"].startswith(f"row {row['id']} ") for row in rows)
    assert sorted(fetched) == list(range(30))
    write_arrow(tmp_path / "b.arrow", numbered(0, 3000), 100)
    assert not midepoch.from_files(tmp_path / "b.arrow", index_dir=tmp_path / "ix").pipeline.source.fetched


def test_windows_of_a_shuffle_fit_into_the_cache(tmp_path: Path) -> None:
    pq.write_table(numbered(0, 20_000), tmp_path / "a.parquet", row_group_size=200)
    opened = [
        midepoch.from_files(tmp_path / "a.parquet", index_dir=tmp_path / "ix", **options).shuffle(seed=1)
        for options in ({}, {"cache_bytes": 100_000})
    ]
    large, small = (ds.pipeline.order.shuffle.window for ds in opened)
    source = opened[1].pipeline.source
    assert large == source.window > small >= 2
    assert small * 200 * source.bytes_per_row <= 0.4 * 100_000


def test_errors_name_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_bytes(b"")
    (tmp_path / "notes.md").write_text("hello")
    for path, text in (
        ("gone.parquet", "does not exist.* The folder .* exists and contains notes.md, there.parquet"),
        ("deep/er/gone.parquet", "The folder .* exists and contains"),
        ("*.orc", "no file matches.* contains notes.md"),
    ):
        with pytest.raises(midepoch.DataNotFoundError, match=text):
            midepoch.from_files(tmp_path / path)
    with pytest.raises(FormatError, match="neither its name nor its first bytes.*format=…: 'arrow', 'parquet'"):
        midepoch.from_files(tmp_path / "notes.md")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "there.parquet")
    with pytest.raises(midepoch.StateError, match="Pass the dict that state_dict"):
        midepoch.from_files(tmp_path / "there.parquet").loader(1).load_state_dict({"model": 1, "data": {}})
    with pytest.raises(midepoch.MidepochError, match="s3://, gs:// and az:// are read natively"):
        midepoch.from_files("blah://x/y")
