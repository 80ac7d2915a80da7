"""Tar shards in place: rows, resume, ranges that are read, damage."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from midepoch.errors import DataChangedError, DataNotFoundError, FormatError
from midepoch.sources import files as source_files
from midepoch.sources.formats import tar_shards
from midepoch.testing import assert_resumes_exactly
from proxy import Proxy
from s3 import Server, storage_options
from tar_files import add, samples, write_tar

ROWS = 60


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_shards, "BLOCK_BYTES", 12_000)


@pytest.fixture(params=["tar", "tar.gz", "tgz", "tar.bz2"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """60 rows in three shards."""
    mode = {"tar": "w", "tar.bz2": "w:bz2"}.get(request.param, "w:gz")
    for number in range(3):
        write_tar(tmp_path / f"shard-{number:06d}.{request.param}", samples(20, 20 * number), mode=mode)
    return tmp_path


def keys(rows: Any) -> list[int]:
    return [int(row["__key__"]) for row in rows]


def test_rows_columns_and_resume(shards: Path) -> None:
    ds = midepoch.from_files(shards)
    assert ds.schema == pa.schema({"__key__": pa.string(), "jpg": pa.binary(), "cls": pa.binary()})
    files = dict(samples(ROWS))
    for number, row in enumerate(ds):
        assert row == {
            "__key__": f"{number:06d}",
            "jpg": files[f"{number:06d}.jpg"],
            "cls": str(number).encode(),
        }
    assert number == ROWS - 1
    assert ds[41]["cls"] == b"41"
    make = lambda: midepoch.from_files(shards).shuffle(seed=1).loader(7, num_workers=0)  # noqa: E731
    assert assert_resumes_exactly(make, epochs=1, steps=[0, 1, 4, 8, 9]) > 4
    with_filter = midepoch.from_files(shards, filters=[("__key__", ">=", "000055")], columns=["cls"])
    assert [row["cls"] for row in with_filter] == [b"55", b"56", b"57", b"58", b"59"]


def test_workers_and_ranks(shards: Path) -> None:
    ds = midepoch.from_files(shards).shuffle(seed=3)
    alone = [batch["__key__"] for batch in ds.loader(8, num_workers=0)]
    if shards.joinpath("shard-000000.tar").exists():  # processes take seconds: once
        assert [batch["__key__"] for batch in ds.loader(8, num_workers=2)] == alone
    seen = []
    loaders = [ds.loader(4, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        seen += [key for loader in loaders for key in next(loader)["__key__"]]
    for rank in range(3):
        resumed = ds.loader(2, rank=rank, world_size=3, last_batch="uneven")
        resumed.load_state_dict(loaders[0].state_dict())
        seen += [key for batch in resumed for key in batch["__key__"]]
    assert sorted(map(int, seen)) == list(range(ROWS))


def test_braces_globs_and_format(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"s-{number:03d}.tar", samples(1, number)) for number in range(20)]
    paths[3].rename(tmp_path / "other")
    assert keys(midepoch.from_files(f"{tmp_path}/s-{{017..019}}.tar")) == [17, 18, 19]
    assert keys(midepoch.from_files(f"{tmp_path}/s-{{019..004}}.tar"))[:2] == [19, 18]
    assert keys(midepoch.from_files(f"{tmp_path}/s-{{00,01}}[12].tar")) == [1, 2, 11, 12]
    with pytest.raises(DataNotFoundError, match=r"s-003\.tar' does not exist"):
        midepoch.from_files(f"{tmp_path}/s-{{000..019}}.tar")
    assert keys(midepoch.from_files(tmp_path / "other", format="webdataset")) == [3]
    literal = write_tar(tmp_path / "{1..2}.tar", samples(1))
    assert keys(midepoch.from_files(literal)) == [0]


def test_large_files_are_read_into_their_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {i: bytes([i]) * 100_000 for i in (0, 2, 3)}
    files = [(f"{i}.{name}", value) for i in range(5) for name, value in (("cls", b"%d" % i), ("jpg", values.get(i)))]
    files += [("4.jpg", b""), ("5.npy", b"small")]
    write_tar(tmp_path / "a.tar", [(name, value) for name, value in files if value is not None])
    monkeypatch.setattr(tar_shards, "BLOCK_BYTES", 8 << 20)
    monkeypatch.setattr(tar_shards, "_gathered", None)
    rows = midepoch.from_files(tmp_path, columns=["jpg"])
    assert [row["jpg"] for row in rows] == [values.get(i, b"" if i == 4 else None) for i in range(6)]


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """It takes 0.4 s in each worker."""
    write_tar(tmp_path / "a.tar", [*samples(3), ("9.txt", b"alone")])
    midepoch.from_files(tmp_path / "a.tar", index_dir=tmp_path)
    script = "import sys, midepoch; ds = midepoch.from_files(sys.argv[1], index_dir=sys.argv[2]); print(len(list(ds)))"
    command = [sys.executable, "-c", f"{script}; sys.exit('pandas' in sys.modules)", tmp_path / "a.tar", tmp_path]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "4\n"


def test_columns_of_different_shards_are_united(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.txt", b"1"), ("b.txt", b""), ("b.json", b"{}")])
    write_tar(tmp_path / "1.tar", [("c.CLS", b"7"), ("d.", b"no extension"), ("d\udce9.txt", b"latin")], form="gnu")
    ds = midepoch.from_files(tmp_path)
    assert ds.schema.names == ["__key__", "txt", "json", "cls", ""]
    empty = dict.fromkeys(ds.schema.names)
    assert list(ds) == [
        {**empty, "__key__": "a", "txt": b"1"},
        {**empty, "__key__": "b", "txt": b"", "json": b"{}"},
        {**empty, "__key__": "c", "cls": b"7"},
        {**empty, "__key__": "d", "": b"no extension"},
        {**empty, "__key__": "d\\xe9", "txt": b"latin"},
    ]


def header_with(name: str, data: bytes, change: Callable[[bytearray], None]) -> bytes:
    """A member with a changed header and the checksum for it."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    change(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data + bytes(-len(data) % 512)


def test_numbers_in_base_256_and_signed_checksums(tmp_path: Path) -> None:
    def large(block: bytearray) -> None:
        block[124:136] = b"\x80" + (5).to_bytes(11, "big")

    def absurd(block: bytearray) -> None:
        block[124:136] = b"\x80" + (1 << 80).to_bytes(11, "big")

    (tmp_path / "b.tar").write_bytes(header_with("a.txt", b"", absurd))
    with pytest.raises(FormatError, match="the size is not a number in the header at byte 0"):
        midepoch.from_files(tmp_path / "b.tar")
    signed = bytearray(header_with("né.txt", b"12345", lambda block: None))
    total = sum(byte - 256 if byte > 127 else byte for byte in signed[:148] + signed[156:512]) + 256
    signed[148:156] = b"%06o\0 " % total
    (tmp_path / "a.tar").write_bytes(header_with("a.txt", b"12345", large) + bytes(signed) + bytes(1024))
    assert [(row["__key__"], row["txt"]) for row in midepoch.from_files(tmp_path / "a.tar")] == [
        ("a", b"12345"),
        ("né", b"12345"),
    ]


def test_values_of_more_than_2_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In effect: the limit of 32-bit offsets is lowered."""
    monkeypatch.setattr(tar_shards, "LARGEST", 1000)
    write_tar(tmp_path / "0.tar", samples(3, size=900))
    write_tar(tmp_path / "1.tar", samples(3, 3, size=1500))
    ds = midepoch.from_files(tmp_path)
    assert ds.schema.types == [pa.string(), pa.large_binary(), pa.binary()]
    files = dict(samples(3, size=900) + samples(3, 3, size=1500))
    assert [row["jpg"] for row in ds] == [data for name, data in files.items() if name.endswith("jpg")]


def test_wide_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive rows of more than 1 MB are views of a block, even if there are few."""
    monkeypatch.setattr(tar_shards, "BLOCK_BYTES", 1_000_000)
    files = dict(samples(7, size=400_000))
    write_tar(tmp_path / "a.tar", files.items())
    ds = midepoch.from_files(tmp_path)
    assert all(row["jpg"] == files[row["__key__"] + ".jpg"] for row in ds)
    assert keys(ds) == list(range(7))
    for order in (ds, ds.shuffle(seed=1), ds.slice(1, 6)):
        for batch in order.loader(3, drop_last=False):
            assert batch["jpg"] == [files[key + ".jpg"] for key in batch["__key__"]]
    assert_resumes_exactly(lambda: ds.loader(2), epochs=1, steps=[0, 1, 3])


def test_fingerprint_depends_on_contents_alone(tmp_path: Path) -> None:
    first = write_tar(tmp_path / "a.tar", samples(5, size=3000), form="pax")
    moved = write_tar(tmp_path / "elsewhere.tar.gz", samples(5, size=3000), mode="w:gz")
    other = write_tar(tmp_path / "c.tar", [*samples(5, size=3000)[:-1], ("000004.cls", b"5")])
    state = midepoch.from_files(first).loader(2).state_dict()
    midepoch.from_files(moved).loader(2).load_state_dict(state)
    with pytest.raises(midepoch.MidepochError):
        midepoch.from_files(other).loader(2).load_state_dict(state)
    ds = midepoch.from_files(first)
    write_tar(first, samples(6))
    with pytest.raises(DataChangedError):
        list(ds)


def test_names_with_dots_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_shards, "_MOST_COLUMNS", 20)
    write_tar(tmp_path / "a.tar", [(f"frame.{number:04d}.jpg", b"") for number in range(30)])
    with pytest.raises(FormatError, match=r"more than 20 different extensions, the last is '0021\.jpg'"):
        midepoch.from_files(tmp_path)


# Damage


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / f"damaged-{len(data)}-{hash(data)}.tar"
        path.write_bytes(data)
        return path

    return write


def whole(tmp_path: Path, count: int = 8) -> bytes:
    return write_tar(tmp_path / "whole.tar", samples(count)).read_bytes()


def test_truncation(tmp_path: Path, damaged: Callable[[bytes], Path], caplog: pytest.LogCaptureFixture) -> None:
    data = whole(tmp_path)
    start = data.index(b"000005.jpg")
    in_contents = damaged(data[: start + 900])
    with pytest.raises(
        FormatError, match=rf"{in_contents.name}: damaged in sample '000005': a file in it ends at byte"
    ):
        midepoch.from_files(in_contents)
    assert keys(midepoch.from_files(in_contents, on_error="skip")) == [0, 1, 2, 3, 4]
    in_header = damaged(data[: data.index(b"000005.cls") + 100])
    with pytest.raises(FormatError, match="damaged after sample '000005': the archive ends in a header"):
        midepoch.from_files(in_header)
    assert keys(midepoch.from_files(in_header, on_error="skip")) == [0, 1, 2, 3, 4]
    in_padding = damaged(data[: start - 1])  # refused by tarfile, too
    (packed := in_padding.with_suffix(".tar.gz")).write_bytes(gzip.compress(data[: start - 1]))
    for path in (in_padding, packed):
        with pytest.raises(
            FormatError, match=rf"after sample '000004': the archive ends before byte {start}, in the pad"
        ):
            midepoch.from_files(path)
        assert keys(midepoch.from_files(path, on_error="skip")) == [0, 1, 2, 3]
    caplog.clear()
    between = damaged(data[:start])  # as webdataset, which does not notice
    assert keys(midepoch.from_files(between)) == [0, 1, 2, 3, 4]
    assert "has no end mark" in caplog.text
    for size in (0, 100, 512):
        with pytest.raises(FormatError, match=f"damaged-{size}-"):
            midepoch.from_files(damaged(data[:size]))


def test_damaged_headers(tmp_path: Path, damaged: Callable[[bytes], Path], caplog: pytest.LogCaptureFixture) -> None:
    data = bytearray(whole(tmp_path))
    data[data.index(b"000003.cls") + 3] ^= 1
    path = damaged(bytes(data))
    with pytest.raises(FormatError, match="damaged after sample '000003': the checksum is wrong in the header at byte"):
        midepoch.from_files(path)
    assert keys(midepoch.from_files(path, on_error="skip")) == [0, 1, 2, 5, 6, 7]  # 4 might lack the file as well
    assert "skipped 2 damaged samples: '000003', '000004'" in caplog.text
    data[data.index(b"000006.jpg") + 124] = ord("x")  # the size too: the next header is searched for
    path = damaged(bytes(data))
    assert keys(midepoch.from_files(path, on_error="skip")) == [0, 1, 2, 7]
    data[: len(data)] = b"not a tar archive at all" * (len(data) // 24) + bytes(len(data) % 24)
    with pytest.raises(FormatError, match="damaged at its beginning: the checksum is wrong"):
        midepoch.from_files(damaged(bytes(data)))
    both = [damaged(bytes(data)), tmp_path / "whole.tar"]
    assert keys(midepoch.from_files(both, on_error="skip")) == list(range(8))


def test_an_archive_in_an_archive_is_not_searched(tmp_path: Path, damaged: Callable[[bytes], Path]) -> None:
    inner = write_tar(tmp_path / "inner.tar", samples(3)).read_bytes()
    files = [("a.txt", b"1"), ("b.tar", inner), ("b.txt", b"2"), ("c.txt", b"3"), ("d.txt", b"4")]
    data = bytearray(write_tar(tmp_path / "outer.tar", files).read_bytes())
    data[data.index(b"b.tar")] ^= 1
    rows = midepoch.from_files(damaged(bytes(data)), on_error="skip")
    assert [row["__key__"] for row in rows] == ["c", "d"]


def test_damaged_compression(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(whole(tmp_path, 300), 1)[:-200])
    with pytest.raises(FormatError, match="damaged after sample '.*': its compressed data is truncated or damaged"):
        midepoch.from_files(path)
    found = keys(midepoch.from_files(path, on_error="skip"))
    assert found == list(range(len(found))) and len(found) > 100
    (tmp_path / "b.tar").write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match=r"Rename it to \.tar\.gz"):
        midepoch.from_files(tmp_path / "b.tar")


def test_links_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "a.txt", b"1")
        add(archive, "b.txt", kind=tarfile.LNKTYPE, linkname="a.txt")
    assert len(midepoch.from_files(tmp_path)) == 1
    assert "ignored 1 link" in caplog.text


# In a store


@pytest.fixture
def bucket(s3_server: Server) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tar-", dir=s3_server.folder))
    yield folder
    shutil.rmtree(folder)


def test_in_a_store(bucket: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "_FEW", 2)
    for number in range(3):
        write_tar(bucket / f"s-{number:02d}.tar", samples(20, 20 * number))
    address = f"s3://{bucket.name}/s-{{00..02}}.tar"
    options = {"storage_options": storage_options(proxy.endpoint), "cache_dir": tmp_path / "cache"}
    files = dict(samples(ROWS))
    rows = list(midepoch.from_files(address, **options))
    assert keys(rows) == list(range(ROWS))
    assert all(row["jpg"] == files[row["__key__"] + ".jpg"] for row in rows)
    make = lambda: midepoch.from_files(address, **options).shuffle(seed=1).loader(8)  # noqa: E731
    assert assert_resumes_exactly(make, epochs=1, steps=[3], tail=3)


def test_contents_of_large_files_are_not_fetched_by_the_index(bucket: Path, proxy: Proxy, tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files += [(f"{number}.mp4", bytes(2_000_000)), (f"{number}.json", b'{"number": %d}' % number)]
    path = write_tar(bucket / "videos.tar", files)
    options = {"storage_options": storage_options(proxy.endpoint), "cache_dir": tmp_path / "cache"}
    proxy.reset()
    ds = midepoch.from_files(f"s3://{bucket.name}/videos.tar", columns=["json"], **options)
    assert [row["json"] for row in ds] == [b'{"number": %d}' % number for number in range(3)]
    assert proxy.bytes_sent() < path.stat().st_size / 5
