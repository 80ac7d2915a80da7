"""Listing files: sorted, each once, through links."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import numbered, write_arrow
from midepoch.errors import DataNotFoundError, FormatError


def test_listing_does_not_depend_on_the_order_of_a_folder(tmp_path: Path) -> None:
    found = []
    for order in (("m", "b", "a"), ("a", "b", "m")):
        root = tmp_path / "".join(order)
        root.mkdir()
        for name in order:
            if name == "a":
                (root / "a").symlink_to(root / "m", target_is_directory=True)
            else:
                (root / name).mkdir()
        for name in ("m", "b"):
            pq.write_table(pa.table({"x": [1]}), root / name / "x.parquet")
        found.append(
            [entry.path.removeprefix(str(root)) for entry in midepoch.from_files(root).pipeline.leaf.source.files]
        )
    assert found[0] == found[1] == ["/b/x.parquet", "/m/x.parquet"]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "real" / "b.arrow", numbered(5, 9), 2)
    write_arrow(tmp_path / "data" / "a.arrow", numbered(0, 5), 2)
    (tmp_path / "data" / "more").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "up").symlink_to(tmp_path / "data")  # leads back: each folder is read once
    assert [row["id"] for row in midepoch.from_files(tmp_path / "data")] == list(range(9))


def test_a_folder_with_several_splits_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opened(folder: str, *names: str) -> str:
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"x": [1]}), path)
        caplog.clear()
        midepoch.from_files(tmp_path / folder)
        return caplog.text

    warning = (
        "contains the splits train, test, and all of them are read as one dataset. For one split, pass its files: "
    )
    assert f"{warning}{tmp_path}/files/train*.parquet" in opened(
        "files", "a.parquet", "test.parquet", "train-0.parquet"
    )
    assert f"{warning}{tmp_path}/folders/train" in opened("folders", "a/1.parquet", "test/1.parquet", "train/1.parquet")
    assert not opened("one", "train-0.parquet", "train-1.parquet", "tests.parquet", "validated/0.parquet")


@pytest.mark.parametrize(
    ("names", "noun"),
    [
        (("zarr.json", "c/0/0"), "a Zarr store"),
        (("x/zarr.json", "x/c/0"), "a Zarr store"),
        ((".zgroup", ".zattrs", "x/.zarray", "x/0.json"), "a Zarr store"),
        ((".hoodie/hoodie.properties", "2024/a.json"), "a Hudi table"),
        (("dataset_info.json", "features.json", "a-train.tfrecord-00000-of-00001"), "a TensorFlow dataset"),
    ],
)
def test_folders_of_other_formats_are_refused_by_name(tmp_path: Path, names: tuple[str, ...], noun: str) -> None:
    """Their JSON files would be rows."""
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"a": 1}')
    remedy = r"cannot be read in place\. (Open|Write) .*, or list the files one by one"
    for given in (tmp_path, tmp_path / "data", tmp_path / "data/**/*.json"):
        with pytest.raises(FormatError, match=rf"data(/x)?,? (is )?{noun}, which {remedy}"):
            midepoch.from_files(given)
    files = [tmp_path / "data" / name for name in names if name.endswith(".json")]
    assert len(midepoch.from_files(files)) == len(files)


def test_a_glob_reads_files_beside_a_folder_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    for name in ("x.zarr/zarr.json", "a.json"):
        (tmp_path / name).write_text('{"a": 1}')
    assert len(midepoch.from_files(tmp_path / "*.json")) == 1
    with pytest.raises(FormatError, match=r"contains .*x\.zarr, a Zarr store"):
        midepoch.from_files(tmp_path / "**/*.json")


@pytest.mark.parametrize("place", ["file", "folder", "glob", "working directory", "saved", "cache_dir"])
def test_a_name_that_is_not_utf8_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(FormatError, match=r"caf\\udce9.*': the name of the file is not UTF-8\. Rename it"):
        if place == "saved":
            midepoch.load_from_disk(folder)
        elif place == "cache_dir":
            midepoch.from_files(tmp_path / "b.csv", cache_dir=folder)
        elif place == "working directory":
            monkeypatch.chdir(folder)
            midepoch.from_files("a.csv")
        else:
            midepoch.from_files({"file": folder / "a.csv", "folder": tmp_path, "glob": f"{tmp_path}/*/a.csv"}[place])


@pytest.mark.parametrize("name", ["d{a,b}", "d{0..3}", "x[1]", "s*r", "q?k", "[!a]", "n!m", "{a", "b{a,b}[1]*?"])
def test_an_existing_name_is_taken_literally(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / f"in {name}"
    folder.mkdir(parents=True)
    for other in ("da", "db", "d0", "x1", "str", "qak", "b"):  # which the name would mean as a pattern
        (tmp_path / other).mkdir()
        (tmp_path / other / "1.csv").write_text("n\n9\n")
    for number, file in enumerate(("1.csv", "2.csv", f"3 {name}.csv"), 1):
        (folder / file).write_text(f"n\n{number}\n")
    for path, numbers in {
        "": [1, 2, 3], "1.csv": [1], f"3 {name}.csv": [3], "*.csv": [1, 2, 3], "{2,1}.csv": [2, 1], "[12].csv": [1, 2],
    }.items():  # fmt: skip
        for _ in range(2):  # the second time by the listing of the first
            assert [row["n"] for row in midepoch.from_files(folder / path)] == numbers
    assert len(midepoch.from_files(tmp_path / name)) == 3


def test_braces_of_no_existing_name_are_expanded(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.csv").write_text(f"n\n{number}\n")
    for path in ("{b,a}", "{b,a}/1.csv", "{b,a}/*.csv"):
        assert [row["n"] for row in midepoch.from_files(tmp_path / path)] == [1, 0]


NOT_READ = {
    "a.tfrecord": "TFRecord files are not read. Read the records .* midepoch.from_generator",
    "a.tfrecords.gz": "TFRecord files are not read",
    "a.tfrecord-00000-of-00002": "TFRecord files are not read",
    "a.array_record-00000-of-00002": "ArrayRecord files are not read. Call midepoch.from_map_style",
    "a.vortex": "Vortex files are not read. Call midepoch.from_arrow",
    "a.h5": "HDF5 files are not read. Read the rows with h5py",
    "a.hdf5": "HDF5 files are not read",
    "a.npz": r"NumPy archive files are not read. Call midepoch.from_dict\(dict\(numpy.load\(path\)\)\)",
    "a.safetensors": r"safetensors files are not read. Call midepoch.from_dict\(safetensors.numpy.load_file",
    "a.avro": r"Avro files are not read. Call midepoch.from_pandas\(polars.read_avro\(path\)\)",
    "a.ZIP": r"ZIP files are not read. Extract the files, or pass the address zip://\*\*::path",
}


@pytest.mark.parametrize("name", list(NOT_READ))
def test_a_format_that_is_not_read_is_named_with_the_way_to_its_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(b"a record of some kind")
    for path in (f"data/{name}", "data/*"):
        with pytest.raises(FormatError, match=f"{name}: {NOT_READ[name]}"):
            midepoch.from_files(tmp_path / path)
    with pytest.raises(DataNotFoundError, match=f"it contains only .*{NOT_READ[name]}"):
        midepoch.from_files(tmp_path / "data")
    with pytest.raises(ValueError, match=NOT_READ[name]):
        midepoch.from_files(tmp_path / "data", format=name.split(".")[1].partition("-")[0])


@pytest.mark.parametrize("name", [name for name in NOT_READ if "-0" not in name])  # TensorFlow datasets are refused
def test_files_that_are_not_read_are_named_beside_others(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that describes them is not silently the data."""
    (tmp_path / "info.json").write_text('{"a": 1}')
    (tmp_path / name).write_bytes(b"a record of some kind")
    for _ in range(2):  # also with the index of the first time
        caplog.clear()
        assert len(midepoch.from_files(tmp_path)) == 1
        assert re.search(rf"only files like info.json are read \(1 in all\). {NOT_READ[name]}", caplog.text)
    caplog.clear()
    midepoch.from_files(tmp_path, format="json")
    assert not caplog.text


def test_the_ways_to_rows_of_formats_that_are_not_read(tmp_path: Path) -> None:
    columns = {"x": np.arange(6).reshape(3, 2), "y": np.arange(3)}
    rows = [{"x": [0, 1], "y": 0}, {"x": [2, 3], "y": 1}, {"x": [4, 5], "y": 2}]
    np.savez(tmp_path / "a.npz", **columns)
    assert list(midepoch.from_dict(dict(np.load(tmp_path / "a.npz")))) == rows
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/a.jsonl", "\n".join(map(json.dumps, rows)))
    assert list(midepoch.from_files(f"zip://**::{tmp_path}/a.zip")) == rows
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.numpy

        safetensors.numpy.save_file(columns, tmp_path / "a.safetensors")
        assert list(midepoch.from_dict(safetensors.numpy.load_file(tmp_path / "a.safetensors"))) == rows
    if importlib.util.find_spec("polars") is not None:
        import polars

        polars.DataFrame(rows).write_avro(tmp_path / "a.avro")
        assert list(midepoch.from_pandas(polars.read_avro(tmp_path / "a.avro"))) == rows
