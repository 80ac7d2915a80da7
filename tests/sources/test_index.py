from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import midepoch
from data import calls_of, numbered, write_arrow
from midepoch.errors import FormatError
from midepoch.sources import Source
from midepoch.sources import index as index_module
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.arrow_ipc import ArrowFormat
from midepoch.sources.formats.records import footer_parts
from midepoch.sources.index import Index, IndexedFile, IndexedFiles
from midepoch.sources.lake import open_index
from midepoch.storage.stores import Entry, Store
from shard_files import FIXTURES


@pytest.fixture
def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    scanned: list[Path] = []
    real = ArrowFormat.scan

    def counting(form: ArrowFormat, store: Store, entry: Entry, **options: bool) -> Scanned:
        scanned.append(Path(entry.path))
        return real(form, store, entry, **options)

    monkeypatch.setattr(ArrowFormat, "scan", counting)
    return scanned


def opened(paths: list[str], folder: Path, **options: bool) -> Index:
    return open_index([Path(path) for path in paths], index_dir=folder, **options)


def test_second_open_scans_nothing(small_files: list[str], tmp_path: Path, count_scans: list[Path]) -> None:
    first = opened(small_files, tmp_path)
    assert len(count_scans) == 5
    second = opened(small_files, tmp_path)
    assert len(count_scans) == 5
    assert np.array_equal(first.starts, second.starts)
    assert np.array_equal(first.offsets, second.offsets)
    assert list(first.files) == list(second.files)
    assert first.starts[-1] == 37


def test_one_changed_file_is_noticed(tmp_path: Path, count_scans: list[Path]) -> None:
    path = write_arrow(tmp_path / "a.arrow", numbered(200, 210), 5)
    before = Source(opened([str(path)], tmp_path / "ix"))
    size = path.stat().st_size
    write_arrow(path, numbered(100, 110), 5)
    os.utime(path, ns=(0, 10**18))
    assert path.stat().st_size == size  # same size: only the time tells
    after = Source(opened([str(path)], tmp_path / "ix"))
    assert len(count_scans) == 2
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "flipped", "version", "folder"])
def test_unusable_index_is_made_again(
    small_files: list[str], tmp_path: Path, damage: str, count_scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(str(opened(small_files, tmp_path).path))
    data = path.read_bytes()
    if damage == "version":
        monkeypatch.setattr(index_module, "VERSION", 99)
    elif damage == "folder":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(
            {
                "empty": b"",
                "garbage": os.urandom(500),
                "cut": data[:middle],
                "flipped": data.replace((9).to_bytes(8, "little"), (8).to_bytes(8, "little"), 1),
            }[damage]
        )
    again = opened(small_files, tmp_path)
    assert len(count_scans) == 10
    assert again.starts[-1] == 37
    assert len(count_scans) == 10
    opened(small_files, tmp_path)
    assert len(count_scans) == 10  # and it was kept


def test_damage_of_any_byte_is_noticed(tmp_path: Path) -> None:
    """Also of the footers, which are decompressed long after the index was opened."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(6), "text": ["a", "b", None] * 2}), path, row_group_size=2)
    rows = list(midepoch.from_files(path, index_dir=tmp_path / "ix"))
    (index,) = (tmp_path / "ix").glob("*.midepoch-index")
    data = index.read_bytes()
    for at in range(len(data)):
        index.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert index_module.read_index(index) is None, at
    assert list(midepoch.from_files(path, index_dir=tmp_path / "ix")) == rows
    assert index.read_bytes() == data


@pytest.mark.parametrize("more", [{}, {"etag": "e", "partition": (("x", 1),), "broken": 2, "broken_lines": (3, 4)}])
def test_files_are_the_same_in_turn_and_one_by_one(more: dict[str, Any]) -> None:
    files = [IndexedFile(f"{i}.csv", 10 * i, 100 + i, i, 1, "f", **more) for i in range(5)]
    columns = IndexedFiles.of(files)
    assert list(columns) == [columns[i] for i in range(5)] == files
    assert columns[1:3] == tuple(columns.part(1, 3)) == tuple(files[1:3])
    assert all(type(value) is int for value in columns[2][1:5])


def test_files_take_few_calls_each() -> None:
    columns = IndexedFiles.of(IndexedFile(f"{i}.csv", 1, 2, 3, 4, "f") for i in range(1000))
    assert calls_of(lambda: list(columns)) < 3500


def test_force(small_files: list[str], tmp_path: Path, count_scans: list[Path]) -> None:
    opened(small_files, tmp_path)
    opened(small_files, tmp_path, force=True)
    assert len(count_scans) == 10


def test_folder_that_cannot_be_written(small_files: list[str], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert opened(small_files, blocked).starts[-1] == 37
    assert opened(small_files, blocked).path is None


def test_moved_data_has_the_same_fingerprint(small_files: list[str], tmp_path: Path) -> None:
    moved = [shutil.copy(path, tmp_path / f"{99 - i}.arrow") for i, path in enumerate(small_files)]
    here = Source(opened(small_files, tmp_path / "ix"))
    there = Source(opened(moved, tmp_path / "ix"))
    assert here.fingerprint == there.fingerprint
    swapped = Source(opened(moved[::-1], tmp_path / "ix"))
    assert swapped.fingerprint != here.fingerprint


def test_different_schemas_are_refused(tmp_path: Path) -> None:
    a = write_arrow(tmp_path / "a.arrow", numbered(0, 5), 5)
    b = write_arrow(tmp_path / "b.arrow", numbered(0, 5).drop_columns(["score"]), 5)
    with pytest.raises(FormatError, match="'score' is double in .*a.arrow but missing in .*b.arrow"):
        opened([str(a), str(b)], tmp_path / "ix")


def test_pickles_to_a_path(make_files: Callable[..., list[str]], tmp_path: Path) -> None:
    index = opened(make_files([4000], block=2), tmp_path)
    data = pickle.dumps(index)
    assert len(data) < 400
    assert np.array_equal(pickle.loads(data).starts, index.starts)


def _open_and_count(paths: list[str], folder: Path, queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put(int(opened(paths, folder).starts[-1]))


def test_many_processes_at_once(make_files: Callable[..., list[str]], tmp_path: Path) -> None:
    paths = make_files([500] * 6, block=3)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_open_and_count, args=(paths, tmp_path, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=60) for _ in processes] == [3000] * 4
    for process in processes:
        process.join()
    names = [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    assert len(names) == 1
    assert not names[0].endswith(".tmp")


def test_killed_builder_leaves_nothing_to_trip_over(make_files: Callable[..., list[str]], tmp_path: Path) -> None:
    """kill -9 at many moments of a build; the next open just works, and sweeps up."""
    paths = make_files([2000] * 4, block=1)
    script = (
        "import sys; from pathlib import Path; from midepoch.sources.lake import open_index\n"
        "print('ready', flush=True)\n"
        "while True: open_index([Path(p) for p in sys.argv[2:]], index_dir=Path(sys.argv[1]), force=True)\n"
    )
    for delay in np.linspace(0.0, 0.25, 6):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), *paths], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(delay))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert opened(paths, tmp_path).starts[-1] == 8000
    opened(paths, tmp_path, force=True)
    assert not list(tmp_path.glob(".*.tmp"))


def test_two_that_index_again_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), path)
    first = midepoch.from_files(path, force_reindex=True)
    second = midepoch.from_files(path, force_reindex=True)
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "b.parquet")
    midepoch.from_files(tmp_path)
    assert list(second) == list(first) == [{"x": 1}, {"x": 2}]


KILLED = """
import os, signal, sys
import midepoch
from midepoch.sources import index
index.atomic_write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
midepoch.from_files(sys.argv[1], index_dir=sys.argv[2], force_reindex=True)
"""


def test_killed_while_indexing_again(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.parquet", tmp_path / "ix"
    pq.write_table(pa.table({"x": [1, 2]}), path)
    midepoch.from_files(path, index_dir=folder)
    pq.write_table(pa.table({"x": [5, 6, 7]}), path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(folder)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert [row["x"] for row in midepoch.from_files(path, index_dir=folder)] == [5, 6, 7]
    assert hasattr(index_module, "atomic_write")


def ids(batches: Any, name: str = "id") -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


def test_an_index_that_was_left_over_decides_nothing(tmp_path: Path) -> None:
    """The folder once held Parquet: what is mapped without that index is mapped with it, and in the same order."""
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"id": range(12)}), folder / "a.parquet")
    midepoch.from_files(folder, index_dir=tmp_path / "old")
    (folder / "a.parquet").unlink()
    write_arrow(folder / "a.arrow", pa.table({"id": range(12)}), 3)
    found = [
        ids(midepoch.from_files(folder, index_dir=tmp_path / name).shuffle(seed=1).loader(2, rank=0, world_size=2))
        for name in ("old", "new")
    ]
    assert found[0] == found[1]
    assert len(midepoch.from_files(folder, index_dir=tmp_path / "old", validate=False)) == 12


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("mds/all", "beside bytes codec encodings hashes kinds names packed samples sizes text"),
        ("litdata/plain", "arrow beside block bytes codec dim kinds layout leaves level packed samples spec"),
        ("litdata/batch", "arrow beside block bytes codec dim frames kinds layout leaves level packed samples spec"),
        ("litdata/rows", "arrow batches beside block bytes codec dim layout leaves level packed samples spec"),
    ],
)
def test_the_layout_of_footers_belongs_to_the_version(case: str, names: str, tmp_path: Path) -> None:
    """An index of another layout must not be read: to change these names, raise ``VERSION``."""
    midepoch.from_files(FIXTURES / case, index_dir=tmp_path)
    index = index_module.read_index(next(tmp_path.glob("*.midepoch-index")))
    assert index is not None
    assert (index_module.VERSION, sorted(footer_parts(index.footer(1))[0])) == (14, names.split())
