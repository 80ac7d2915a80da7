"""Decoded blocks on disk: private, bounded over all who use the folder, never trusted, quiet on a full disk."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_parquet
from forks import forked
from midepoch.errors import CheckpointMismatchError
from midepoch.read import cache
from midepoch.read.cache import BlockCache, DiskShelf
from midepoch.sources import CacheSpec

BLOCKS, ROWS = 12, 50


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    path = tmp_path / "lake" / "a.parquet"
    path.parent.mkdir()
    write_parquet(path, np.arange(BLOCKS * ROWS), ROWS)
    path.chmod(0o600)
    return path


def table(value: int, size: int = 1000) -> pa.Table:
    return pa.table({"x": np.full(size, value)})


def block_cache(folder: Path, key: str = "k", limit: int = 1 << 30) -> BlockCache:
    return BlockCache(DiskShelf(CacheSpec(str(folder), limit), key, lambda _: 0.0))


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_all_that_is_cached_is_for_its_owner_alone(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "above" / "cache"))
    text = lake.with_name("b.jsonl.gz")
    pa.output_stream(str(text), compression="gzip").write(b'{"id": 1}\n' * 100)
    for path in (lake, text):
        ds = midepoch.from_files(path).shuffle(seed=1).with_format("numpy")
        for batch in ds.map(dict).loader(10, num_workers=2):
            assert len(batch["id"])
    found = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert {path.suffix for path in found} >= {".block", ".midepoch-index", ".lock"}
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_the_user_made_keeps_its_rights_and_widens_none(lake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(0o777)
    ds = midepoch.from_files(lake, cache_dir=folder, index_dir=folder)
    assert len(list(ds)) == BLOCKS * ROWS
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {0o700, 0o600}


def test_the_bound_holds_over_hosts_that_never_return(tmp_path: Path) -> None:
    limit = 100_000
    for host in range(6):
        left = tmp_path / f"host-{host}-0123abcd" / "key"  # as an earlier version named them
        left.mkdir(parents=True)
        (left / "0.block").write_bytes(bytes(limit // 2))
        os.utime(left / "0.block", (host, host))
        block_cache(tmp_path, f"data-{host}", limit).get(0, lambda: table(1, 3000))
    assert sum(path.stat().st_size for path in blocks_in(tmp_path)) <= limit


HOST = """
import sys, socket
socket.gethostname = lambda: sys.argv[1]
import midepoch
ds = midepoch.from_files(sys.argv[2], cache_dir=sys.argv[3], index_dir=sys.argv[3])
print(sum(batch["id"].sum() for batch in ds.with_format("numpy").loader(10)))
"""


def test_hosts_that_share_a_folder_have_one_cache(lake: Path, tmp_path: Path, python: str) -> None:
    sizes = []
    for host in ("a", "b", "c"):
        command = [python, "-c", HOST, host, str(lake), str(tmp_path / "c")]
        assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == sum(
            range(BLOCKS * ROWS)
        )
        sizes.append(len(blocks_in(tmp_path / "c")))
    assert sizes == [BLOCKS] * 3


def test_a_reader_tidies_its_own_folder_and_once_an_hour_all_others(tmp_path: Path) -> None:
    for key in ("own", "other", "empty"):
        block_cache(tmp_path, key).get(0, lambda: table(7))
    own, other, empty = (next(tmp_path.glob(f"{key}-*")) for key in ("own", "other", "empty"))
    next(empty.glob("*.block")).unlink()
    os.utime(empty / cache.LOCK, (0, 0))  # unused since 1970
    left = [folder / ".0.block.elsewhere.1.00000000.tmp" for folder in (own, other)]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    block_cache(tmp_path, "own")
    assert [path.exists() for path in (*left, empty)] == [False, True, True]
    os.utime(next(tmp_path.glob(f"{cache.TIDIED}*")), (0, 0))
    block_cache(tmp_path, "own")
    assert [path.exists() for path in (*left, empty)] == [False, False, False]


def test_a_block_on_a_network_file_system_is_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped page of a file that another machine removes would end the process."""
    monkeypatch.setattr(cache, "is_network", lambda _: True)
    blocks = block_cache(tmp_path)
    blocks.get(0, lambda: table(7))
    batch = blocks.get(0, lambda: table(8))
    (path,) = blocks_in(tmp_path)
    os.truncate(path, 0)
    assert batch.column(0).to_pylist() == [7] * 1000
    path.unlink()
    assert blocks.get(0, lambda: table(8)).column(0)[0].as_py() == 8


def test_a_full_disk_is_said_once(lake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ds = midepoch.from_files(lake, cache_dir=tmp_path / "c")
    assert ds.pipeline.source.fetch(0, ["id"]).num_rows == ROWS

    def read() -> bool:

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write fails
        rows = [int(each) for batch in ds.with_format("numpy").loader(10) for each in batch["id"]]
        lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        return rows == list(range(BLOCKS * ROWS)) and len(lines) == 1 and str(tmp_path / "c") in lines[0]

    assert forked(read) == 0


@pytest.mark.parametrize("make", ["file", "full"])
def test_an_index_that_cannot_be_kept_is_said_once_with_the_folder_and_the_reason(
    make: str, lake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "i"
    if make == "file":
        folder.write_text("no folder")

    def read() -> bool:
        if make == "full":
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        for _ in range(2):
            assert len(midepoch.from_files(lake, index_dir=folder)) == BLOCKS * ROWS
        lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        reason = "File exists" if make == "file" else "File too large"
        return len(lines) == 1 and f"the index cannot be saved in {folder} ({reason})" in lines[0]

    assert forked(read) == 0


def damaged(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """The content of a block with one small damage."""
    data, place = bytearray(content), draw.randrange(len(content))
    kind = draw.choice(["bit", "byte", "cut", "zeros", "swapped", "appended", "moved"])
    if kind == "bit":
        data[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[place] = (data[place] + draw.randrange(1, 256)) % 256
    elif kind == "cut":
        del data[place:]
    elif kind == "zeros":
        start = place // 512 * 512
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "swapped":
        data[:] = other
    elif kind == "appended":
        data += draw.randbytes(draw.randrange(1, 100))
    else:
        data[place : place + 64] = data[place : place + 64][::-1]
    return bytes(data)


def test_no_damage_to_cached_blocks_delivers_a_wrong_row(lake: Path, tmp_path: Path) -> None:
    draw, expected = random.Random(15), list(range(BLOCKS * ROWS))
    folder = tmp_path / "c"

    def read() -> list[int]:
        ds = midepoch.from_files(lake, cache_dir=folder, index_dir=tmp_path / "i").with_format("numpy")
        return [int(each) for batch in ds.loader(25) for each in batch["id"]]

    assert read() == expected
    for _ in range(250 // BLOCKS + 1):
        paths = blocks_in(folder)
        contents = [path.read_bytes() for path in paths]
        for number, path in enumerate(paths):
            path.write_bytes(damaged(contents[number], contents[number - 1], draw))
        assert read() == expected


def test_a_block_that_is_written_to_while_it_is_mapped_is_noticed(lake: Path, tmp_path: Path) -> None:
    ds = midepoch.from_files(lake, cache_dir=tmp_path / "c").with_format("numpy")
    assert len(list(ds.loader(25)))
    batches = iter(ds.loader(5))
    next(batches)
    for path in blocks_in(tmp_path / "c"):
        content = bytearray(path.read_bytes())
        content[-200:] = bytes(200)
        with path.open("r+b") as file:
            file.write(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midepoch.read.fetched.CHECK_SECONDS", 0.0)
        with pytest.raises(midepoch.DataChangedError, match="was written to while it was in use"):
            list(batches)
    assert [int(each) for batch in ds.loader(25) for each in batch["id"]] == list(range(BLOCKS * ROWS))


def test_a_rewritten_file_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """Same footer, same size, other values."""
    path, values = tmp_path / "a.parquet", list(range(100))

    def write() -> midepoch.Dataset:
        pq.write_table(pa.table({"x": values}), path, compression="none", use_dictionary=False, row_group_size=50)
        return midepoch.from_files(path, cache_dir=tmp_path / "c")

    ds = write()
    assert [row["x"] for row in ds] == values
    state = ds.state_dict()
    values[10:40] = values[10:40][::-1]
    ds = write()
    assert [row["x"] for row in ds] == values
    with pytest.raises(CheckpointMismatchError):
        ds.load_state_dict(state)
