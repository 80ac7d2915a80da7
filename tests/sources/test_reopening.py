"""Data that is opened again: the index is used, unless the files differ."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import media_files
import midepoch
from data import calls_of, write_arrow
from midepoch.errors import DataError, DataNotFoundError, FormatError
from midepoch.sources import files, index, lake
from shard_files import write_litdata, write_mds
from token_files import write_megatron

Open = Callable[[], midepoch.Dataset]


def write(path: Path, ids: range) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(ids)})
    write_arrow(path, table, 4) if path.suffix == ".arrow" else pq.write_table(table, path)
    return path


def ids(ds: midepoch.Dataset) -> list[int]:
    return [row["id"] for row in ds]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write(tmp_path / "data" / f"part-{number}.parquet", range(10 * number, 10 * number + 10))
    return tmp_path / "data"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose index was built."""
    found: list[str] = []
    build = lake._build

    def counted(request: lake.Request, report: Any) -> Any:
        found.append(request.paths[0])
        return build(request, report)

    monkeypatch.setattr(lake, "_build", counted)
    return found


def saved() -> Path:
    return next(Path(os.environ["MIDEPOCH_CACHE"]).glob("*.midepoch-index"))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def ways(folder: Path) -> dict[str, Open]:
    files = sorted(map(str, folder.glob("part-*")))
    return {
        "folder": lambda: midepoch.from_files(folder),
        "glob": lambda: midepoch.from_files(f"{folder}/part-*"),
        "deep glob": lambda: midepoch.from_files(f"{folder.parent}/**/part-*"),
        "list": lambda: midepoch.from_files(files),
        "braces": lambda: midepoch.from_files(f"{folder}/part-{{0..2}}{Path(files[0]).suffix}"),
        "filter": lambda: midepoch.from_files(folder, filters=[("id", ">=", 5)]),
        "format": lambda: midepoch.from_files(folder, format=Path(files[0]).suffix[1:]),
    }


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("way", ["folder", "glob", "deep glob", "list", "braces", "filter", "format"])
def test_an_index_is_built_again_only_if_the_listing_differs(
    tmp_path: Path, built: list[str], way: str, suffix: str
) -> None:
    folder = tmp_path / "data"
    paths = [write(folder / f"part-{i}{suffix}", range(10 * i, 10 * i + 10)) for i in range(3)]
    open_ = ways(folder)[way]
    first = open_()
    assert len(built) == 1
    again = open_()
    assert len(built) == 1
    assert ids(again) == ids(first)
    assert again.pipeline.leaf.source.fingerprint == first.pipeline.leaf.source.fingerprint
    stat = paths[1].stat()
    write(paths[1], range(50, 60))  # of the same size, at another time
    assert ids(open_())[-20:] == [*range(50, 60), *range(20, 30)]
    assert len(built) == 2
    write(paths[1], range(500, 700))
    os.utime(paths[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of another size, at the same time
    assert set(range(500, 700)) <= set(ids(open_()))
    assert len(built) == 3
    open_()
    assert len(built) == 3


def test_opening_again_takes_few_calls_for_each_file(tmp_path: Path) -> None:
    """Five to list a file and to find its suffix: everything else is compared as columns."""
    calls = []
    for count in (100, 300):
        folder = tmp_path / str(count)
        first = write(folder / "0.parquet", range(2))
        for number in range(1, count):
            shutil.copyfile(first, folder / f"{number}.parquet")
        midepoch.from_files(folder)
        calls.append(calls_of(lambda folder=folder: midepoch.from_files(folder)))  # type: ignore[misc]
    assert calls[1] - calls[0] < 5.5 * 200


def test_new_removed_and_renamed_files_are_seen(folder: Path, tmp_path: Path, built: list[str]) -> None:
    linked = write(tmp_path / "elsewhere" / "x.parquet", range(100, 110)).parent
    (folder / "linked").symlink_to(linked)
    open_: Open = lambda: midepoch.from_files(folder)  # noqa: E731
    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: None, 40),
        (lambda: write(folder / "part-3.parquet", range(5)), 45),
        (lambda: write(folder / "deep" / "part.parquet", range(6)), 51),
        (lambda: write(linked / "y.parquet", range(7)), 58),
        (lambda: (folder / "part-0.parquet").unlink(), 48),
    ]
    for number, (change, rows) in enumerate(changes, 1):
        change()
        for _ in range(2):
            assert len(open_()) == rows
            assert len(built) == number
    (folder / "README.md").write_text("it is no data")
    assert len(open_()) == 48
    assert len(built) == len(changes)
    (folder / "part-1.parquet").rename(folder / "part-9.parquet")
    assert ids(open_())[-10:] == list(range(10, 20))


def test_data_that_is_back_is_not_that_of_the_index(folder: Path, built: list[str]) -> None:
    """The data of the last but one opening is back, with the same times, but the index is not of that data."""
    midepoch.from_files(folder)
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    write(folder / "part-1.parquet", range(70, 80))
    assert 70 in ids(midepoch.from_files(folder))
    shutil.copy2(kept / "part-1.parquet", folder / "part-1.parquet")
    assert ids(midepoch.from_files(folder)) == list(range(30))
    assert len(built) == 3


@pytest.mark.parametrize("damage", ["empty", "no arrow", "missing"])
def test_an_index_that_cannot_be_used_is_replaced(folder: Path, built: list[str], damage: str) -> None:
    midepoch.from_files(folder)
    path = saved()
    {
        "empty": lambda: path.write_bytes(b""),
        "no arrow": lambda: path.write_bytes(b"\xff{"),
        "missing": path.unlink,
    }[damage]()
    for _ in range(2):
        assert ids(midepoch.from_files(folder)) == list(range(30))
    assert len(built) == 2


def test_warnings_are_repeated_until_their_reason_is_gone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder / "train" / "a.parquet", range(3))
    write(folder / "test" / "a.parquet", range(3))
    for number in range(1, 4):
        midepoch.from_files(folder)
        assert sum("contains the splits" in message for message in caplog.messages) == number
    shutil.rmtree(folder / "test")
    caplog.clear()
    midepoch.from_files(folder)
    assert not caplog.messages


def test_skipped_lines_are_named_by_every_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": \n{"id": 2}\n')
    for number in range(1, 4):
        assert ids(midepoch.from_files(tmp_path / "a.jsonl", on_error="skip")) == [1, 2]
        assert sum("skipped 1 line" in message for message in caplog.messages) == number


@pytest.mark.parametrize("kept", [0, 300, 12_000])
def test_a_cut_split_is_named_by_every_opening(kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also with ``on_error="skip"``, a split that was asked for is not left out without a word."""
    rows = datasets.Dataset.from_dict({"id": list(range(3000))})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path, max_shard_size="1GB")
    (cut,) = tmp_path.glob("test/*.arrow")
    os.truncate(cut, kept)
    for number in range(1, 4):
        ds = midepoch.load_from_disk(tmp_path, "train+test", on_error="skip")
        assert sum(f"{cut} is damaged: " in message for message in caplog.messages) == number
        empty = sum("split 'test' has no row" in message for message in caplog.messages)
        assert empty == (number if len(ds) == 3000 else 0)
    with pytest.raises(DataError, match=cut.name):
        midepoch.load_from_disk(tmp_path, "train+test")


def test_manifests_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "mds", {"id": "int"}, [{"id": i} for i in range(20)], shard=5)
    assert ids(midepoch.from_files(tmp_path / "mds")) == list(range(20))
    monkeypatch.setattr(files, "files_below", lambda *_: pytest.fail("the folder was listed"))
    assert ids(midepoch.from_files(tmp_path / "mds")) == list(range(20))
    write_mds(tmp_path / "mds", {"id": "int"}, [{"id": i} for i in range(40)], shard=5)
    assert ids(midepoch.from_files(tmp_path / "mds")) == list(range(40))


def test_what_is_outside_of_the_folder_is_seen(tmp_path: Path) -> None:
    """The log of a table in a folder above, as it is made by CONVERT TO DELTA, and a manifest beside named files."""
    part = write(tmp_path / "table" / "p=1" / "a.parquet", range(3)).parent
    tokens = tmp_path / "tokens" / "chunk-0-0.bin"
    tokens.parent.mkdir()
    np.arange(64, dtype=np.uint16).tofile(tokens)
    ways: list[Open] = [
        lambda: midepoch.from_files(part),
        lambda: midepoch.from_files(f"{part}/*.parquet"),
        lambda: midepoch.from_tokens(tokens, 8, dtype="uint16"),
    ]
    for open_ in [*ways, *ways]:
        open_()
    log = tmp_path / "table" / "_delta_log"
    log.mkdir()
    (log / f"{0:020d}.json").write_text("{}")
    write_litdata(tokens.parent, [{"id": 1}])
    np.arange(64, dtype=np.uint16).tofile(tokens)
    for open_ in ways:
        with pytest.raises(FormatError):
            open_()


def test_a_manifest_beside_a_named_file_may_change(tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "chunk-0-0.bin")
    (tmp_path / "index.json").write_text("{}")  # as it is being written
    for _ in range(2):
        assert len(midepoch.from_tokens(tmp_path / "chunk-0-0.bin", 8, dtype="uint16")) == 8
    (tmp_path / "index.json").write_text('{"chunks": [{"filename": "chunk-0-0.bin"}]}')
    with pytest.raises(FormatError, match="is a chunk of LitData"):
        midepoch.from_tokens(tmp_path / "chunk-0-0.bin", 8, dtype="uint16")


def test_a_file_and_its_folder(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "a.parquet", range(3))
    several: list[Any] = [[one, one.parent], [one, f"{one.parent}/*"], f"{one.parent}/{{a.parquet,*.parquet}}"]
    for paths in [*several, *several]:
        assert len(midepoch.from_files(paths)) == 6
    write(one.with_name("b.parquet"), range(2))
    for paths in several:
        assert len(midepoch.from_files(paths)) == 8


def test_names_with_braces_and_brackets(tmp_path: Path) -> None:
    """A path may mean another file after a file or a folder of that very name appeared."""
    write(tmp_path / "a1.parquet", range(1)), write(tmp_path / "a2.parquet", range(2))
    write(tmp_path / "run1" / "x.parquet", range(4))
    for path, rows in (("a{1,2}.parquet", 3), ("run[1]/*.parquet", 4)):
        for _ in range(2):
            assert len(midepoch.from_files(tmp_path / path)) == rows
    write(tmp_path / "a{1,2}.parquet", range(7))
    assert len(midepoch.from_files(tmp_path / "a{1,2}.parquet")) == 7
    (tmp_path / "run[1]").mkdir()
    with pytest.raises(DataNotFoundError):
        midepoch.from_files(tmp_path / "run[1]" / "*.parquet")
    write(tmp_path / "run[1]" / "x.parquet", range(5))
    for _ in range(2):
        assert len(midepoch.from_files(tmp_path / "run[1]" / "*.parquet")) == 5


def test_links_to_themselves_and_odd_times(folder: Path, tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", {"id": "int"}, [{"id": 1}])
    for place in (folder, tmp_path / "mds"):
        (place / "loop").symlink_to("loop")
    os.utime((folder / "README.md").touch() or folder / "README.md", ns=(0, 1 << 63))
    for _ in range(2):
        assert ids(midepoch.from_files(tmp_path / "mds")) == [1]
        assert len(midepoch.from_files(f"{folder}/part-*")) == 30


def test_media_and_tokens_are_indexed_once(tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture) -> None:
    media_files.write(tmp_path / "images", ["a/1.png", "b/2.png"])
    np.save(tmp_path / "tokens.npy", np.arange(32, dtype=np.uint16))
    for _ in range(2):
        assert len(midepoch.from_files(tmp_path / "images")) == 2
        assert len(midepoch.from_tokens(tmp_path / "tokens.npy", 8)) == 4
    assert len(built) == 2
    (tmp_path / "images" / "metadata.csv").write_text("file_name,text\na/1.png,x\nb/2.png,y\n")
    media_files.write(tmp_path / "images", ["c/3.png"])
    with caplog.at_level(logging.WARNING):
        assert midepoch.from_files(tmp_path / "images").column_names != ["image", "label"]


def test_no_validation_and_a_forced_index(folder: Path, built: list[str]) -> None:
    midepoch.from_files(folder, validate=False)
    midepoch.from_files(folder, validate=False)
    midepoch.from_files(folder)
    assert len(built) == 1
    midepoch.from_files(folder, force_reindex=True)
    assert len(built) == 2
    midepoch.from_files(folder)
    assert len(built) == 2


def test_the_index_may_be_beside_the_data(folder: Path, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for index_dir in (folder / "index", ".other", folder):
        for _ in range(3):
            assert len(midepoch.from_files(folder, index_dir=index_dir)) == 30
    assert len(built) == 3
    write(folder / "index" / "new.parquet", range(5))
    assert len(midepoch.from_files(folder, index_dir=folder / "index")) == 35


def test_prefixes_are_indexed_once(tmp_path: Path, built: list[str]) -> None:
    prefixes = [write_megatron(tmp_path / name, [[[1, 2]]] * 3) for name in "ab"]
    for _ in range(3):
        assert len(midepoch.from_megatron(prefixes)) == 6
        assert len(midepoch.from_megatron(tmp_path)) == 6
        assert len(built) == 2
    write_megatron(tmp_path / "b", [[[1, 2]]] * 5)
    assert len(midepoch.from_megatron(prefixes)) == len(midepoch.from_megatron(tmp_path)) == 8


def test_a_folder_that_cannot_be_written_needs_no_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "atomic_write", full)
    for _ in range(2):
        assert len(midepoch.from_files(folder)) == 30
