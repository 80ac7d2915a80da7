"""Folders of images and sounds: the rows of ``datasets``' folders, in place, resumed exactly."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from media_files import image, raw, write
from midepoch.errors import CheckpointMismatchError, DataChangedError, DataNotFoundError, FetchError, FormatError
from midepoch.sources.formats import media
from midepoch.testing import assert_resumes_exactly
from midepoch.transforms import batch as batches

LABELLED = [f"{'bZa'[i % 3]}/{i}{'-x' * (i % 2)}.png" for i in range(9)] + ["a b/ü.PNG"]
DESCRIBED = ["sub/0.png", "sub/1.png", "2.png", "unnamed.png"]
LINES = [
    {"n": i, "file_name": name, "text": f"é {name}", "tags": [1] * i}
    for i, name in enumerate(["2.png", "sub/1.png", "./sub/0.png", "2.png"])
]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


PAIRS = [{"left_file_name": f"{i}.png", "right_file_name": f"{i + 1}.png"} for i in (2, 0)]
LISTS = [{"file_names": [f"{j}.png" for j in range(i)], "n": i} for i in (2, 1, 3)]
FOLDERS: dict[str, tuple[list[str], dict[str, bytes]]] = {
    "labels": (LABELLED, {"a/notes.md": b"x", "b/.hidden.png": b"x"}),
    "flat": (["0.png", "1.JPG", "10.png"], {}),
    "labels below": (["x/a/1.png", "y/a/2.png", "x/b/1.png"], {}),
    "uneven": (["x/a/1.png", "y/2.png"], {}),
    "one label": (["x/1.png", "x/2.png"], {}),
    "jsonl": (DESCRIBED, {"metadata.jsonl": jsonl(LINES)}),
    "parquet": (DESCRIBED, {"metadata.parquet": parquet(LINES)}),
    "csv": (DESCRIBED, {"metadata.csv": b"file_name,score,text\n2.png,1.5,x\nsub/0.png,2.5,y\n"}),
    "pairs": ([f"{i}.png" for i in range(4)], {"metadata.jsonl": jsonl(PAIRS)}),
    "lists": ([f"{i}.png" for i in range(4)], {"metadata.jsonl": jsonl(LISTS)}),
}


def folder(root: Path, case: str) -> Path:
    names, others = FOLDERS[case]
    write(root, names)
    for name, data in others.items():
        (root / name).write_bytes(data)
    return root


def contents(value: Any) -> Any:
    """A value with the bytes of files in place of files."""
    if isinstance(value, list):
        return [contents(each) for each in value]
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["bytes"] or Path(value["path"]).read_bytes()
    return value


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of datasets
@pytest.mark.parametrize("case", list(FOLDERS))
def test_rows_are_those_of_datasets(case: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "data", case)
    theirs = datasets.load_dataset("imagefolder", data_dir=str(root), split="train")
    ours = midepoch.from_files(root)
    assert str(ours.features) == str(theirs.features).replace("large_string", "string")
    assert ours.column_names == theirs.column_names
    expected = theirs.with_format("arrow")[:].to_pylist()
    found = raw(ours)
    assert [{name: contents(value) for name, value in row.items()} for row in found] == [
        {name: contents(value) for name, value in row.items()} for row in expected
    ]
    assert len(ours) == len(theirs)
    del theirs
    gc.collect()  # while its warnings are ignored


def test_sounds_are_those_of_datasets(tmp_path: Path) -> None:
    root = write(tmp_path / "data", ["low/1.wav", "high/2.wav", "low/3.wav"])
    (root / "low/notes.txt").write_text("x")
    theirs = datasets.load_dataset("audiofolder", data_dir=str(root), split="train", streaming=True)
    ours = midepoch.from_files(root)
    assert ours.features == theirs.features
    names = ours.features["label"].names
    found = [{"audio": str(root / row["audio"]["path"]), "label": names[row["label"]]} for row in raw(ours)]
    assert found == [row for _, row in theirs._ex_iterable]  # before encoding, which needs torchcodec
    assert [row["audio"]["bytes"] for row in raw(ours)] == [Path(row["audio"]).read_bytes() for row in found]
    assert [row["audio"].shape for row in ours.decode("audio")] == [(1, 21), (1, 20), (1, 22)]


def test_lists_of_files_may_be_empty_or_null(tmp_path: Path) -> None:
    root = write(tmp_path / "data", ["0.png", "1.png"])
    names = [["0.png"], [], None, ["1.png", "0.png"]]
    (root / "metadata.jsonl").write_bytes(
        jsonl([{"file_names": each, "file_name": "1.png" if each else None} for each in names])
    )
    found = raw(midepoch.from_files(root))
    assert [contents(row["images"]) for row in found] == [[image(0)], [], None, [image(1), image(0)]]
    assert [contents(row["image"]) for row in found] == [image(1), None, None, image(1)]


def test_files_are_named_relative_to_the_folder(tmp_path: Path) -> None:
    root = write(tmp_path / "data", LABELLED)
    expected = sorted(LABELLED)
    assert [row["image"]["path"] for row in raw(midepoch.from_files(root))] == expected
    assert [row["image"]["path"] for row in raw(midepoch.from_files(f"{root}/*/*"))] == expected
    files = [root / name for name in LABELLED]
    listed = raw(midepoch.from_files(files))
    assert [row["image"]["path"] for row in listed] == LABELLED
    assert [row["label"] for row in listed] == [["Z", "a", "a b", "b"].index(name.split("/")[0]) for name in LABELLED]
    folders = midepoch.from_files([root / "b", root / "a"])
    assert [row["image"]["path"] for row in raw(folders)][:2] == ["0.png", "3-x.png"]
    assert folders.features["label"].names == ["a", "b"]
    assert raw(midepoch.from_files(root / "a b" / "ü.PNG"))[0]["image"] == {"bytes": image(9), "path": "ü.PNG"}


def test_images_are_decoded_and_resume_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "BLOCK_FILES", 4)
    root = write(tmp_path / "data", [f"{'ab'[i % 2]}/{i:02}.png" for i in range(22)])
    ds = midepoch.from_files(root)
    assert len(ds.pipeline.source.offsets) == 7
    decoded = ds.decode("image", size=4).shuffle(seed=2, window=2)
    assert decoded[0]["image"].shape == (3, 4, 4)
    loaders = [lambda n=n: decoded.loader(5, num_workers=n) for n in (0, 2)]
    assert_resumes_exactly(loaders[0], resume_with=loaders[1:], steps=[0, 2, 4, 5, 6, 9], tail=3)

    def numbered(row: dict[str, Any]) -> dict[str, Any]:
        return {"mean": float(row["image"].float().mean()), "label": row["label"]}

    mapped = ds.decode("image", size=4).map(numbered).loader(4, num_workers=2, worker_type="process")
    means = np.concatenate([batch["mean"].numpy() for batch in mapped])
    assert len(set(means.tolist())) == 22


def test_blocks_are_groups_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "data", [f"{i}.png" for i in range(9)])
    (root / "4.png").write_bytes(b"x" * 1000)
    monkeypatch.setattr(media, "BLOCK_FILES", 4)
    monkeypatch.setattr(media, "BLOCK_BYTES", 600)
    ds = midepoch.from_files(root)
    sizes = [(root / f"{i}.png").stat().st_size for i in range(9)]
    starts = ds.pipeline.source.layout.block_starts.tolist()
    for first, stop in pairwise(starts):
        assert stop - first <= 4
        assert stop - first == 1 or sum(sizes[first:stop]) <= 600
    assert (4, 5) in pairwise(starts)
    assert [row["image"]["bytes"] for row in raw(ds)] == [(root / f"{i}.png").read_bytes() for i in range(9)]


def test_no_file_is_read_for_other_columns(tmp_path: Path) -> None:
    root = folder(tmp_path / "labels", "labels")
    labels, images = midepoch.from_files(root, columns=["label"]), midepoch.from_files(root)
    filtered = midepoch.from_files(root, filters=[("label", "==", 1)])
    described = midepoch.from_files(folder(tmp_path / "described", "jsonl"))
    assert [row["image"]["path"] for row in raw(filtered)] == ["a/2.png", "a/5-x.png", "a/8.png"]
    shutil.rmtree(root / "a")
    shutil.rmtree(tmp_path / "described")
    assert [row["label"] for row in labels] == [0, 0, 0, 2, 1, 1, 1, 3, 3, 3]
    assert [row["text"] for row in described.remove_columns("image")] == [line["text"] for line in LINES]
    with pytest.raises(DataNotFoundError, match=r"a/2\.png was removed after the dataset was opened"):
        raw(images)


def test_a_filter_keeps_the_blocks_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "BLOCK_FILES", 2)
    root = write(tmp_path / "data", LABELLED)
    ds = midepoch.from_files(root, filters=[("label", "in", [1, 3])])
    names = [name for name in sorted(LABELLED) if name.startswith(("a/", "b/"))]
    assert [row["image"] for row in raw(ds)] == [{"bytes": (root / name).read_bytes(), "path": name} for name in names]
    assert 4 <= len(ds.pipeline.source.offsets) < 6


def test_datasets_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    batches._formatter.cache_clear()  # another test may have decoded a column of this name and schema
    ds = midepoch.from_files(write(tmp_path / "data", LABELLED))
    assert next(ds.decode("image", size=4).loader(10))["image"].shape == (10, 3, 4, 4)
    with pytest.raises(midepoch.MidepochError, match=r"column 'image' needs decoding, by ds\.decode\('image', …\)"):
        ds[0]
    with pytest.raises(TypeError, match=r"from_files.*drop_labels.*remove_columns"):
        midepoch.from_files(tmp_path, drop_labels=True)  # type: ignore[call-arg]


def test_changes_are_noticed(tmp_path: Path) -> None:
    root = write(tmp_path / "data", LABELLED)
    ds = midepoch.from_files(root)
    loader = ds.decode("image", size=2).loader(3)
    next(loader)
    state = loader.state_dict()
    os.utime(root / "a/2.png", ns=(1, 1))
    with pytest.raises(DataChangedError, match=r"a/2\.png has changed since it was indexed \(its modification time"):
        raw(ds)
    midepoch.from_files(root).decode("image", size=2).loader(3).load_state_dict(state)  # names and sizes are the same
    (root / "a/2.png").write_bytes(image(2) + b"\0")
    with pytest.raises(DataChangedError, match=r"a/2\.png has changed since it was indexed \(it has \d+ bytes"):
        raw(ds)
    for change in (lambda: None, lambda: (root / "b/0.png").rename(root / "b/00.png"), (root / "b/00.png").unlink):
        change()
        with pytest.raises(CheckpointMismatchError):
            midepoch.from_files(root).decode("image", size=2).loader(3).load_state_dict(state)
    assert len(midepoch.from_files(root)) == 9
    assert len(midepoch.from_files(root, validate=False)) == 9


@pytest.mark.parametrize("case", ["labels", "jsonl"])
def test_a_moved_folder_resumes(case: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "data", case)
    loader = midepoch.from_files(root).decode("image", size=2).shuffle(seed=1).loader(2)
    next(loader)
    state, expected = loader.state_dict(), next(loader)["image"]
    (tmp_path / "else").mkdir()
    moved = shutil.move(root, tmp_path / "else" / "where")
    loader = midepoch.from_files(moved).decode("image", size=2).shuffle(seed=1).loader(2)
    loader.load_state_dict(state)
    assert (next(loader)["image"] == expected).all()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            [{"file_name": "2.png"}, {"file_name": "no.png"}],
            r"metadata\.jsonl: row 1 .* names the file 'no\.png', which",
        ),
        ([{"file_name": "../out.png"}], r"row 0 .* names the file '\.\./out\.png'\. Names must be relative"),
        ([{"file_name": "/etc/passwd"}], "Names must be relative"),
        ([{"file_name": "file:///etc/passwd"}], "Names must be relative"),
        ([{"name": "2.png"}], r"no column file_name .* Its columns are name \(string\)\. Add it"),
        ([{"file_name": 2}], r"no column file_name with names of files as text.* file_name \(int64\)"),
        ([{"file_name": "2.png", "image": 1}], r"\(file_name, image\) become the column 'image'"),
        ([{"file_name": "2.png", "image_file_name": "2.png"}], "become the column 'image'"),
    ],
)
def test_metadata_that_names_no_file(metadata: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    root = write(tmp_path / "data", DESCRIBED)
    (root / "metadata.jsonl").write_bytes(jsonl(metadata))
    (tmp_path / "out.png").write_bytes(image(0))
    with pytest.raises(FormatError, match=message):
        midepoch.from_files(root)


def test_rows_without_their_file_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path / "data", DESCRIBED)
    (root / "metadata.jsonl").write_bytes(jsonl([{"file_name": name} for name in ("2.png", "no.png", "sub/1.png")]))
    with caplog.at_level(logging.WARNING, "midepoch"):
        ds = midepoch.from_files(root, on_error="skip")
    assert [row["image"]["path"] for row in raw(ds)] == ["2.png", "sub/1.png"]
    assert "skipped 1 rows whose files do not exist: no.png" in caplog.text
    (root / "metadata.csv").write_text("file_name\n2.png\n")
    with pytest.raises(FormatError, match=r"metadata files in several formats: \.csv, \.jsonl"):
        midepoch.from_files(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    root = write(tmp_path / "data", LABELLED)
    (root / "a/2.png").chmod(0)
    with pytest.raises(FetchError, match=r"a/2\.png cannot be read: access is denied"):
        raw(midepoch.from_files(root))
    assert sum(1 for _ in midepoch.from_files(root, on_error="skip").decode("image", size=2)) == 9


def test_a_file_that_cannot_be_read_loses_no_other_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path / "data", LABELLED)
    (root / "b/3-x.png").write_bytes(b"no image")
    ds = midepoch.from_files(root, on_error="skip")
    (root / "a/2.png").unlink()
    kept = [i for i, name in enumerate(sorted(LABELLED)) if name not in ("a/2.png", "b/3-x.png")]
    pixels = [row["image"] for row in midepoch.from_files(root, format="image", on_error="skip").decode("image")]
    with caplog.at_level(logging.WARNING, "midepoch"):
        found = list(ds.decode("image"))
    assert len(found) == len(kept) == len(pixels)
    assert all((row["image"] == expected).all() for row, expected in zip(found, pixels, strict=True))
    assert "a/2.png was removed" in caplog.text
    assert len(list(ds)) == len(kept)  # decoded by datasets


def test_what_a_folder_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixed = write(tmp_path / "mixed", ["a.png", "b.wav"])
    with pytest.raises(FormatError, match=r"mixed contains image and audio files\. Choose one kind with format=…"):
        midepoch.from_files(mixed)
    assert midepoch.from_files(mixed, format="audiofolder").column_names == ["audio"]
    with pytest.raises(FormatError, match="the files have different formats: image .*, audio "):
        midepoch.from_files(f"{mixed}/*")
    (mixed / "labels.csv").write_text("n\n1\n")
    with caplog.at_level(logging.WARNING, "midepoch"):
        assert midepoch.from_files(mixed).column_names == ["n"]
    assert (
        "mixed contains 1 image file, which is not read, because tables are read instead (the first is labels.csv)"
        in caplog.text
    )
    assert "mixed contains 1 audio file, which is not read, because tables are read instead" in caplog.text
    write(mixed, ["a.png", "c.png"])
    with caplog.at_level(logging.WARNING, "midepoch"):
        assert midepoch.from_files(mixed).column_names == ["n"]
    assert "mixed contains 2 image files, which are not read, because tables are read instead" in caplog.text
    with pytest.raises(ValueError, match="partitioning='hive' is for tables"):
        midepoch.from_files(mixed, format="image", partitioning="hive")
    described = folder(tmp_path / "described", "jsonl")
    assert midepoch.from_files(f"{described}/sub/*.png").column_names == ["image"]
    assert midepoch.from_files(f"{described}/**").column_names == ["n", "image", "text", "tags"]
    assert midepoch.from_files(described, format="jsonl").column_names == ["n", "file_name", "text", "tags"]


def test_metadata_marks_media_even_beside_other_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path / "photos", ["0.png", "1.png"])
    (root / "metadata.csv").write_text("file_name,n\n1.png,5\n")
    (root / "labels.csv").write_text("n\n1\n")
    (root / "index.json").write_text('{"version": 1}')
    with caplog.at_level(logging.WARNING, "midepoch"):
        ds = midepoch.from_files(root)
    assert ds.column_names == ["image", "n"] and len(ds) == 1
    assert "Its other tables (2, the first is index.json) are not read" in caplog.text


def test_metadata_without_rows(tmp_path: Path) -> None:
    root = write(tmp_path / "photos", ["0.png"])
    (root / "metadata.csv").write_text("file_name,n\n")
    with pytest.raises(DataNotFoundError, match="there are no rows in .*photos"):
        midepoch.from_files(root)


def test_a_folder_of_media_is_not_called_a_file(tmp_path: Path) -> None:
    ds = midepoch.from_files(write(tmp_path / "photos", ["0.png", "1.png"]))
    assert repr(ds) == "Dataset(2 rows; 1 folder; columns: image)"
    assert "2 in 1 folder" in ds._repr_html_()


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(image(0))
    with pytest.raises(FormatError, match=r"udcff\.png': the name of the file is not UTF-8\. Rename it"):
        midepoch.from_files(tmp_path)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    for name, data in (("a/0.png", image(0)), ("b/1.png", b"not an image")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    ds = midepoch.from_files(tmp_path)
    with pytest.raises(midepoch.CorruptBlockError, match=r"row 1 of .*\(b/1\.png\)"):
        list(ds)
    with pytest.raises(midepoch.MapError, match=r"\(b/1\.png\)"):
        list(ds.decode("image").loader(2))
