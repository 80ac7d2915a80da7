"""Decoded blocks: kept within a budget, shared, read ahead in order, and never trusted to be there."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.read.cache import BlockCache, DiskShelf, MemoryShelf
from midepoch.sources import CacheSpec, Source

BLOCKS, ROWS = 30, 100


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    table = pa.table({"id": np.arange(BLOCKS * ROWS), "wide": np.random.default_rng(0).random(BLOCKS * ROWS)})
    pq.write_table(table, folder / "a.parquet", row_group_size=ROWS)
    return folder


def ids(batches: Any) -> list[int]:
    return sum((batch["id"].tolist() for batch in batches), [])


def stored(folder: Path) -> list[Path]:
    return list(folder.rglob("*.block"))


def count_fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    fetched: list[int] = []
    fetch = Source.fetch
    monkeypatch.setattr(
        Source, "fetch", lambda self, block, columns: (fetched.append(block), fetch(self, block, columns))[1]
    )
    return fetched


def table(value: int, size: int = 1000) -> pa.Table:
    return pa.table({"x": np.full(size, value)})


@pytest.mark.parametrize("in_folder", [True, False])
def test_each_block_is_decoded_once_an_epoch(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_folder: bool
) -> None:
    fetched = count_fetches(monkeypatch)
    ds = midepoch.from_files(lake, cache_dir=tmp_path / "c" if in_folder else None, cache_bytes=20_000)
    for _ in range(2):
        assert sorted(ids(ds.shuffle(seed=1, window=3).loader(16))) == list(range(BLOCKS * ROWS))
    assert all(fetched.count(block) <= 2 for block in range(BLOCKS))
    if in_folder:
        assert sum(path.stat().st_size for path in stored(tmp_path / "c")) <= 25_000


def test_a_large_cache_serves_the_next_run(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = count_fetches(monkeypatch)
    for _ in range(2):
        ids(midepoch.from_files(lake, cache_dir=tmp_path / "c").shuffle(seed=1).loader(16))
    assert sorted(fetched) == list(range(BLOCKS))


def test_data_that_fits_into_a_window_is_shuffled_as_a_whole(tmp_path: Path) -> None:
    """Blocks of a few KB, as of many small files: every tenth of the epoch has rows of nearly all of them."""
    blocks, rows = 150, 40
    pq.write_table(pa.table({"id": np.arange(blocks * rows)}), tmp_path / "a.parquet", row_group_size=rows)
    order = np.array(ids(midepoch.from_files(tmp_path).shuffle(seed=1).loader(16)))
    counts = [np.bincount(tenth // rows, minlength=blocks) for tenth in np.split(order, 10)]
    assert sorted(order.tolist()) == list(range(blocks * rows))
    assert min(np.count_nonzero(each) for each in counts) > 0.95 * blocks
    limited = midepoch.from_files(tmp_path, cache_bytes=20_000, cache_dir=tmp_path / "cache")  # not all of them fit
    assert 2 <= limited.pipeline.base.source.window_in_cache < 64


def test_a_window_larger_than_the_cache_is_still_right(lake: Path, tmp_path: Path) -> None:
    for arguments in ({"cache_bytes": 1}, {"cache_bytes": 1, "cache_dir": tmp_path / "c"}):
        ds = midepoch.from_files(lake, **arguments).take(800).shuffle(seed=1, window=4)  # type: ignore[arg-type]
        assert sorted(ids(ds.loader(50))) == list(range(800))
        assert sorted(row["id"] for row in ds) == list(range(800))


def test_the_block_needed_last_goes_first() -> None:
    next_use = {0: 5.0, 1: float("inf"), 2: 1.0, 3: 2.0}
    kept = BlockCache(MemoryShelf(3 * 8000 + 100, lambda block: next_use[block]))
    made: list[int] = []

    def get(block: int) -> pa.RecordBatch:
        return kept.get(block, lambda: (made.append(block), table(block))[1])

    for block in (0, 1, 2, 3):
        assert get(block).column(0)[0].as_py() == block
    assert made == [0, 1, 2, 3]
    for block in (0, 2, 3):
        get(block)
    assert made == [0, 1, 2, 3]  # of the first three, 1 is needed last
    get(1)
    assert made[4:] == [1]
    get(0)
    assert made[5:] == [0]


def test_threads_and_processes_make_a_block_once(tmp_path: Path) -> None:
    caches = [BlockCache(DiskShelf(CacheSpec(str(tmp_path), 1 << 30), "k", lambda _: 0.0)) for _ in range(2)]
    made: list[int] = []

    def slow() -> pa.Table:
        made.append(1)
        time.sleep(0.2)
        return table(7)

    threads = [threading.Thread(target=lambda: caches[0].get(7, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert caches[1].get(7, slow).num_rows == 1000
    assert len(made) == 1


def test_a_damaged_or_lost_block_is_made_again(lake: Path, tmp_path: Path) -> None:
    expected = list(range(BLOCKS * ROWS))
    ds = midepoch.from_files(lake, cache_dir=tmp_path / "c")
    assert ids(ds.loader(50)) == expected
    paths = stored(tmp_path / "c")
    for number, path in enumerate(paths):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.write_bytes(path.read_bytes()[:100])
    assert ids(midepoch.from_files(lake, cache_dir=tmp_path / "c").loader(50)) == expected
    batches = iter(ds.loader(50))
    found = next(batches)["id"].tolist()
    for path in stored(tmp_path / "c"):
        path.unlink()
    assert found + ids(batches) == expected


def test_a_folder_that_cannot_be_used_is_done_without(
    lake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    ds = midepoch.from_files(lake, cache_dir=tmp_path / "file" / "c")
    assert ids(ds.loader(50)) == list(range(BLOCKS * ROWS))
    assert "cannot be cached" in caplog.text
    caplog.clear()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskShelf, "_write", full)
    assert ids(midepoch.from_files(lake, cache_dir=tmp_path / "c").loader(50)) == list(range(BLOCKS * ROWS))
    assert "No space left" in caplog.text


READER = """
import sys, midepoch
ds = midepoch.from_files(sys.argv[1], cache_dir=sys.argv[2], cache_bytes=30_000).shuffle(seed=1, window=3).with_format("numpy")
print("ready", flush=True)
while True:
    for batch in ds.loader(16, num_workers=2):
        pass
"""


def test_killed_readers_leave_nothing_that_matters(lake: Path, tmp_path: Path) -> None:
    """Two runs share a cache and are killed again and again; a third reads from it, rightly, and sweeps up."""
    cache = tmp_path / "c"
    for pause in (0.2, 0.5):
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(lake), str(cache)], stdout=subprocess.PIPE, start_new_session=True
            )
            for _ in range(2)
        ]
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()
        time.sleep(pause)
        for reader in readers:
            os.killpg(reader.pid, signal.SIGKILL)  # the session holds only it and its workers
            reader.wait()
            assert reader.stdout is not None
            reader.stdout.close()
    ds = midepoch.from_files(lake, cache_dir=cache, cache_bytes=30_000)
    assert sorted(ids(ds.shuffle(seed=1, window=3).loader(16, num_workers=2))) == list(range(BLOCKS * ROWS))
    assert not list(cache.rglob(".*.tmp"))


def test_threads_and_files_go_with_the_reader(lake: Path, tmp_path: Path) -> None:
    before, others = len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def left() -> list[str]:
        return [t.name for t in set(threading.enumerate()) - others if t.name.startswith("midepoch")]

    for _ in range(5):
        ds = midepoch.from_files(lake, cache_dir=tmp_path / "c").shuffle(seed=1)
        ids(ds.loader(50))
        next(iter(ds.loader(50)))
        next(iter(ds))
        del ds
    gc.collect()
    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def damages(paths: list[Path]) -> list[tuple[str, bytes]]:
    """Ways in which the first of these cached blocks may be wrong."""
    good = paths[0].read_bytes()
    batch = pa.ipc.open_stream(pa.py_buffer(good[64:])).read_next_batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.slice(0, 10))
    fewer = sink.getvalue().to_pybytes()
    found = [
        ("another block", paths[1].read_bytes()),
        ("fewer rows", good[:64] + fewer),
        ("fewer rows, bare", fewer),
        ("empty", b""),
        ("cut", good[: len(good) // 2]),
        ("longer", good + b"\0" * 64),
        ("zeros", bytes(len(good))),
    ]
    for place in range(0, len(good), max(1, len(good) // 60)):
        flipped = bytearray(good)
        flipped[place] ^= 0x10
        found.append((f"bit of byte {place}", bytes(flipped)))
    return found


def test_a_cached_block_that_is_not_what_it_should_be_is_made_again(tmp_path: Path) -> None:
    folder, made = tmp_path / "c", []
    spec = CacheSpec(str(folder), 1 << 30, True)
    texts = [pa.table({"x": [f"{i} of block {block}" for i in range(100)]}) for block in range(2)]
    cache = BlockCache(DiskShelf(spec, "key", lambda _: 0.0))
    for block in range(2):
        cache.get(block, lambda block=block: texts[block])
    paths = sorted(stored(folder))
    for name, content in damages(paths):
        good = paths[0].read_bytes()
        paths[0].write_bytes(content)
        found = BlockCache(DiskShelf(spec, "key", lambda _: 0.0)).get(0, lambda: (made.append(0), texts[0])[1])
        if len(made) != 1:  # bytes of padding are in no row, but the header's own padding is free
            assert name in {f"bit of byte {place}" for place in range(44, 64)}, name
        assert found.to_pydict() == texts[0].to_pydict(), name
        assert paths[0].read_bytes()[:44] == good[:44], name
        made.clear()


def test_runs_that_cut_a_file_differently_share_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": {i}, "text": "row {i}"}}\n' for i in range(3000)))
    for block_bytes in (4_000, 9_000, 4_000, 100_000):
        monkeypatch.setattr("midepoch.sources.formats.lines.BLOCK_BYTES", block_bytes)
        monkeypatch.setattr("midepoch.sources.formats.lines._READ", 1000)
        index_dir = tmp_path / f"index-{block_bytes}"
        ds = midepoch.from_files(path, cache_dir=tmp_path / "c", index_dir=index_dir)
        assert len(ds.pipeline.source.layout.block_starts) > 2 or block_bytes == 100_000
        assert ids(ds.loader(64)) == list(range(3000))
