"""Locks are waited for with a word and a limit: a process that is stopped holds up nobody indefinitely."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_arrow
from midepoch.read import cache
from midepoch.read.cache import BlockCache, DiskShelf
from midepoch.sources import CacheSpec
from midepoch.storage import cache_files
from midepoch.storage.cache_files import LockFile, locked

ROWS = 500
HOLDERS = {
    "parquet": """
from midepoch.sources.lake import open_lake
import midepoch.open.files
midepoch.open.files.open_lake = lambda *a, **k: open_lake(*a, **{**k, "progress": pause})
midepoch.from_files(path, index_dir=folder)
""",
    "arrow": """
from midepoch.sources.lake import open_lake
import midepoch.open.files
midepoch.open.files.open_lake = lambda *a, **k: open_lake(*a, **{**k, "progress": pause})
midepoch.from_files(path, index_dir=folder)
""",
    "block": """
from midepoch.read.cache import BlockCache, DiskShelf
from midepoch.sources import CacheSpec
import pyarrow as pa
made = BlockCache(DiskShelf(CacheSpec(folder, 1 << 30), "k", lambda _: 0.0))
with made._held(1, wait=True):
    made.get(0, lambda: (pause(), pa.table({"x": [7]}))[1])
""",
    "lock": """
from pathlib import Path
from midepoch.storage.cache_files import LockFile
lock = LockFile(Path(folder) / "lock")
lock.acquire(5, "it", wait=True)
pause()
""",
}
START = """
import sys
import midepoch
from midepoch.storage import cache_files
cache_files._BEAT_SECONDS = 0.02
_, path, folder = sys.argv
paused = []
def pause(*_):
    if not paused:
        paused.append(1)
        print("holds", flush=True)
        sys.stdin.readline()
"""

Held = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(cache_files, "LIMIT_SECONDS", 0.4)
    monkeypatch.setattr(cache, "_PATIENCE", 0.4)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    table = pa.table({"id": np.arange(ROWS)})
    paths = {"parquet": tmp_path / "a.parquet", "arrow": tmp_path / "a.arrow"}
    pq.write_table(table, paths["parquet"], row_group_size=100)
    write_arrow(paths["arrow"], table, 100)
    return paths


@pytest.fixture
def held(data: dict[str, Path], tmp_path: Path) -> Iterator[Held]:
    """Starts a process that holds a lock until it reads a line."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "cache").mkdir()

    def start(what: str) -> subprocess.Popen[str]:
        arguments = [str(data.get(what, "")), str(tmp_path / "cache")]
        process = subprocess.Popen(
            [sys.executable, "-c", START + HOLDERS[what], *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_stopped_index_builder_is_named_and_then_not_waited_for(
    kind: str, short: None, held: Held, data: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = held(kind)
    holder.send_signal(signal.SIGSTOP)
    ds = midepoch.from_files(data[kind], index_dir=tmp_path / "cache")
    assert [row["id"] for row in ds] == list(range(ROWS))
    lines = [record.getMessage() for record in caplog.records]
    name = f"process {holder.pid} on host {socket.gethostname()} (since 2"
    assert len(lines) == 2 and all(name in line and str(tmp_path / "cache") in line for line in lines)
    assert lines[0].startswith("waiting for") and "does the work itself" in lines[1]
    index = ds.pipeline.source.index
    assert index.path is not None
    written = os.stat(index.path)
    finish(holder)
    after = os.stat(index.path)
    assert (after.st_ino, after.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    caplog.clear()
    assert [row["id"] for row in midepoch.from_files(data[kind], index_dir=tmp_path / "cache")] == list(range(ROWS))
    assert not caplog.records and not list((tmp_path / "cache").glob(".*.tmp"))


class Beats:
    """Clock of a waiting process that moves by 0.1 s per sign of life of the holder, up to 1.2 s."""

    strftime = staticmethod(time.strftime)

    def __init__(self, folder: Path) -> None:
        self._folder, self._note, self._now = folder, b"", 0.0
        self.holder_ended, self.enough = threading.Event(), threading.Event()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        while not self.holder_ended.wait(0.002):
            (lock,) = self._folder.glob(".*.lock")
            if (note := lock.read_bytes()) != self._note:
                self._note, self._now = note, min(1.2, self._now + 0.1)
                break
        if self._now == 1.2:
            self.enough.set()


def test_a_builder_that_lives_is_waited_for_however_long_it_takes(
    short: None,
    held: Held,
    data: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = held("parquet")
    clock = Beats(tmp_path / "cache")
    monkeypatch.setattr(cache_files, "time", clock)
    opened: list[midepoch.Dataset] = []
    waiting = threading.Thread(
        target=lambda: opened.append(midepoch.from_files(data["parquet"], index_dir=tmp_path / "cache"))
    )
    waiting.start()
    assert clock.enough.wait(60) and waiting.is_alive()
    finish(holder)
    clock.holder_ended.set()
    waiting.join(60)
    assert len(opened[0]) == ROWS
    assert ["waiting for" in record.getMessage() for record in caplog.records] == [True]


def test_blocks_of_a_stopped_process_are_made_again_after_one_wait(
    short: None, held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = held("block")
    holder.send_signal(signal.SIGSTOP)
    shelf = DiskShelf(CacheSpec(str(tmp_path / "cache"), 1 << 30), "k", lambda _: 0.0)
    blocks = BlockCache(shelf)
    assert blocks.get(0, lambda: pa.table({"x": [7]})).to_pydict() == {"x": [7]}
    assert blocks.get(1, lambda: pa.table({"x": [8]})).to_pydict() == {"x": [8]}
    assert len(caplog.records) == 2 and all(f"process {holder.pid} " in each.getMessage() for each in caplog.records)
    finish(holder)
    assert [shelf.open(block).to_pydict() for block in (0, 1)] == [{"x": [7]}, {"x": [8]}]  # type: ignore[union-attr]


def test_a_lock_that_is_not_waited_for_is_taken_from_a_stopped_process_too(
    short: None, held: Held, tmp_path: Path
) -> None:
    held("lock").send_signal(signal.SIGSTOP)
    lock = LockFile(tmp_path / "cache" / "lock")
    assert not lock.acquire(5, "it", wait=False)
    assert lock.acquire(6, "another", wait=False)
    time.sleep(0.5)
    assert lock.acquire(5, "it", wait=False)


def test_a_process_that_ends_leaves_no_lock(short: None, held: Held, tmp_path: Path) -> None:
    holder = held("lock")
    lock = LockFile(tmp_path / "cache" / "lock")
    assert not lock.acquire(5, "it", wait=False)
    holder.kill()
    holder.wait()
    assert lock.acquire(5, "it", wait=False)


def test_a_lock_is_not_inherited_by_a_forked_child(tmp_path: Path) -> None:
    """A pool of ``datasets`` outlives a killed parent: what it inherited must not block the next run."""
    code = (
        "import os, sys, time; from pathlib import Path; from midepoch.storage.cache_files import locked\n"
        "with locked(Path(sys.argv[1]), 'it'):\n"
        "    if os.fork() == 0: time.sleep(600); os._exit(0)\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    target = tmp_path / "x"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        waiter = "import sys; from pathlib import Path; from midepoch.storage.cache_files import locked\n"
        waiter += "with locked(Path(sys.argv[1]), 'it'): print('free')"
        done = subprocess.run(
            [sys.executable, "-c", waiter, str(target)], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.strip() == "free"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    with locked(target, "it") as place:
        assert place.keep(lambda: target.write_bytes(b"kept"))


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "valuable").write_text("x" * 1000)
    (tmp_path / "lock").symlink_to("valuable")
    with pytest.raises(OSError, match="symbolic links"):
        LockFile(tmp_path / "lock")
    assert (tmp_path / "valuable").read_text() == "x" * 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_locks_and_folders_of_another_user_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "lock").touch()
    os.chown(shared / "lock", 54321, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        LockFile(shared / "lock")
    planted = shared / f"key-{os.getuid()}"
    planted.mkdir(mode=0o777)
    os.chown(planted, 54321, -1)
    blocks = BlockCache.in_folder(CacheSpec(str(shared), 1 << 20), "key", lambda _: 0.0, 1 << 20)
    assert blocks.get(0, lambda: pa.table({"x": [1]})).num_rows == 1
    assert "belongs to another user" in caplog.text
    assert not list(planted.iterdir())
