"""Samples of tar shards are those of the ``webdataset`` package: the same rows, values and order."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import midepoch
from midepoch.errors import FormatError
from midepoch.sources.formats import tar_shards
from midepoch.sources.names import spelled_out
from tar_files import samples, write_random, write_tar

wds = pytest.importorskip("webdataset")
pytestmark = [  # it leaves its files open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def expected(*paths: Path) -> list[dict[str, Any]]:
    """Samples by webdataset, without the columns for the place of a shard."""
    dataset = wds.WebDataset(list(map(str, paths)), shardshuffle=False, empty_check=False)
    return [{k: v for k, v in row.items() if k not in ("__url__", "__local_path__")} for row in dataset]


def found(*paths: Path, **options: Any) -> list[dict[str, Any]]:
    rows = midepoch.from_files(list(paths), **options)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def outcome(read: Any, *paths: Path) -> Any:
    try:
        return read(*paths)
    except (ValueError, FormatError) as problem:
        return "duplicate" if re.search("duplicate|several files", str(problem)) else problem


@pytest.mark.parametrize("large", [tar_shards.LARGE, 1])
def test_random_archives(large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_shards, "LARGE", large)
    paths = [tmp_path / f"{seed:02d}.tar" for seed in range(30)]
    for seed, path in enumerate(paths):
        write_random(path, seed)
    healthy = []
    for path in paths:
        theirs = outcome(expected, path)
        if theirs == []:
            with pytest.raises(midepoch.DataNotFoundError, match="no rows"):
                found(path)
        else:
            assert outcome(found, path) == theirs, path
        if theirs != "duplicate":
            healthy.append(path)
    assert len(healthy) > 20
    assert found(*healthy) == expected(*healthy)  # a sample does not extend into the next shard


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2"])
def test_compressed(mode: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / f"a.tar.{mode[2:]}", samples(40), mode=mode)
    assert found(path) == expected(path)


SPARSE = {
    "gnu": ["--format=gnu"],
    "0.0": ["--format=pax", "--sparse-version=0.0"],
    "0.1": ["--format=pax", "--sparse-version=0.1"],
    "1.0": ["--format=pax", "--sparse-version=1.0"],
}


@pytest.mark.parametrize("version", SPARSE)
def test_sparse_members(version: str, tmp_path: Path) -> None:
    program = shutil.which("tar")
    about = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else ""
    if "GNU tar" not in about:
        pytest.skip("needs GNU tar")
    for number in range(3):
        with (tmp_path / f"{number}.bin").open("wb") as file:
            for piece in range(12 if number == 1 else 2):  # 12 pieces: the map takes a block of its own
                file.seek(piece * 200_000)
                file.write(bytes([piece + 1]) * 5000)
        (tmp_path / f"{number}.cls").write_text(str(number))
    names = [f"{number}.{extension}" for number in range(3) for extension in ("bin", "cls")]
    path = tmp_path / "a.tar"
    subprocess.run([program, "-S", *SPARSE[version], "-cf", path, "-C", tmp_path, *names], check=True)
    assert path.stat().st_size < 300_000  # the holes are not in the archive
    assert found(path) == expected(path)


def test_duplicates_are_refused_or_left_out_as_by_webdataset(tmp_path: Path) -> None:
    files = [("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"3"), ("a.txt", b"4"), ("c.__key__", b"5"), ("d.txt", b"6")]
    path = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(FormatError, match=r"a\.tar: sample 'a' has several files with the extension 'TXT'"):
        found(path)
    theirs = list(wds.WebDataset(str(path), shardshuffle=False, handler=wds.ignore_and_continue))
    theirs = [{k: v for k, v in row.items() if k not in ("__url__", "__local_path__")} for row in theirs]
    assert found(path, on_error="skip") == [row for row in theirs if len(row) > 1]


def test_samples_marked_as_bad(tmp_path: Path) -> None:
    files = [("a.txt", b"1"), ("a.__bad__", b"yes"), ("b.txt", b"2"), ("b.__bad__", b""), ("c.txt", b"3")]
    path = write_tar(tmp_path / "a.tar", files)
    assert found(path) == expected(path)
    assert [row["__key__"] for row in found(path)] == ["b", "c"]


def test_an_archive_ends_at_the_first_block_of_zeros(tmp_path: Path) -> None:
    data = write_tar(tmp_path / "a.tar", samples(3)).read_bytes()
    (tmp_path / "twice.tar").write_bytes(data + data)
    stop = data.rindex(b"2" + bytes(511)) + 512  # the contents of the last file
    (tmp_path / "junk.tar").write_bytes(data[:stop] + bytes(512) + b"\xff" * 5000)
    for name in ("twice.tar", "junk.tar"):
        assert found(tmp_path / name) == expected(tmp_path / name)
        assert len(found(tmp_path / name)) == 3


@pytest.mark.parametrize(
    "path",
    ["a-{000..003}.tar", "s3://b/{train,val}/{1..3}.tar", "x{a}y", "{a,{b,c}d}e", "{3..1}", "{01..10..3}", "{a..e..2}",
     "{a{1,2}}", "{}", "a{,b}c", "{-01..02}", "{10..1..4}", "{007..007}", "{1..x}"],
)  # fmt: skip
def test_braces(path: str) -> None:
    braceexpand = pytest.importorskip("braceexpand")
    assert (spelled_out(path) or [path]) == list(braceexpand.braceexpand(path))
